"""GroupNorm by normplug's own kernels: one launch forward and one backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from normplug import _activations
from normplug._kernels.device import LONGEST_AXIS, processors
from normplug._kernels.group_norm import launches, schedule
from normplug._layouts import dense, lies_like
from normplug._ops import likely
from normplug._ops.plans import KernelRoute, Needs, Plan
from normplug._ops.program import NOTHING, SLOT, Program, Result, named
from normplug._ops.spec import GroupNormSpec, Tensors
from normplug.reference import accumulator_dtype


class GroupNormPlan(Plan):
    """The launches of a GroupNorm, with an activation. State: stats.

    stats: mean and rstd of the groups of all samples, (2 * N * groups,).
    """

    spec: GroupNormSpec
    state = ("stats",)

    def __init__(self, t: Tensors, spec: GroupNormSpec) -> None:
        super().__init__(t, spec)
        x, weight, bias = t.x, t.weight, t.bias
        dtypes = (each.dtype for each in (x, weight, bias) if each is not None)
        self.acc = accumulator_dtype(*dtypes)
        self._output_dtype = spec.output_dtype(x.dtype)
        self._flags = launches.Flags(
            weight=weight is not None, bias=bias is not None, activation=spec.activation
        )
        self._groups = x.shape[0] * spec.groups
        widest = max(x.dtype.itemsize, self._output_dtype.itemsize)
        self._shape = (
            x.shape[0],
            spec.groups,
            x.shape[1] // spec.groups,
            math.prod(x.shape[2:]),
            not x.is_contiguous(),
            8 if self.acc.itemsize == 8 else widest,
        )
        self._machine = processors(x.device)

    @classmethod
    def refusal(cls, t: Tensors, spec: GroupNormSpec) -> str | None:
        """Why the kernels cannot run a call; None if they can."""
        why = super().refusal(t, spec)
        if why is not None:
            return why
        n, c = t.x.shape[:2]
        channels = c // spec.groups
        if max(channels * math.prod(t.x.shape[2:]), n * spec.groups) > LONGEST_AXIS:
            return "a group has nearly 2^31 values or more, or there are as many groups"
        return None

    @classmethod
    def laid_out(cls, t: Tensors, spec: GroupNormSpec) -> tuple[Tensors, GroupNormSpec]:
        """The call with x dense."""
        x = dense(t.x)
        return (t if x is t.x else t._replace(x=x)), spec

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        """The program of y: one launch."""
        x, spec = t.x, self.spec
        geometry = schedule.group_norm_forward(*self._shape, self._machine)
        launch = launches.forward_launch(
            geometry, self.acc, self._flags, spec.eps, spec.target_variance
        )
        return Program(
            named(t),
            empties={
                "y": (x.shape, x.stride(), self._output_dtype),
                "stats": ((2 * self._groups,), (1,), self.acc),
            },
            launches=[(launch, {})],
            results=[Result(SLOT["y"])],
            saved=("x", "nothing", "weight", "bias", "nothing", "stats"),
            scratch=launches.forward_scratch(geometry),
        )

    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of the gradients: one launch."""
        assert dy is not None
        x = saved["x"]
        wanted = (needs[0], needs[2], needs[3])
        names = ("x", "weight", "bias")
        found = [(n, want) for n, want in zip(names, wanted, strict=True) if n in saved]
        dx, dweight, dbias = (
            Result(SLOT[f"d{name}"]) if want else NOTHING
            for name, want in zip(names, wanted, strict=True)
        )
        results = [dx, NOTHING, dweight, dbias, NOTHING]
        if not any(wanted):
            return Program(saved, empties={}, launches=[], results=results)
        geometry = schedule.group_norm_backward(*self._shape, self._machine)
        launch = launches.backward_launch(
            geometry, self.acc, self._flags, wanted, self.spec.target_variance
        )
        return Program(
            {**saved, "dy": dy},
            copies={} if lies_like(dy, x) else {"dy": x.stride()},
            empties={
                f"d{n}": (saved[n].shape, saved[n].stride(), saved[n].dtype)
                for n, want in found
                if want
            },
            launches=[(launch, {})],
            results=results,
            scratch=launches.backward_scratch(geometry, wanted),
        )

    def likely_plans(self, t: Tensors, call: likely.Call) -> Iterator[tuple[Plan, Tensors]]:
        """Plans for a layer that is called as `call`, each with its tensors, if t came first."""
        spec = self.spec._replace(activation=call.operations.activation, **dict(call.fields))
        for x in likely.images(t.x, *call.shape):
            weight, bias = (likely.vector(v, call.shape) for v in (t.weight, t.bias))
            other = Tensors(x, None, weight, bias)
            yield GroupNormPlan(other, spec), other

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, _, weight, bias, _, _ = saved
        acc, spec = self.acc, self.spec
        vector = (1, -1, *[1] * (x.dim() - 2))
        y = F.group_norm(x.to(acc), spec.groups, None, None, spec.eps)
        y = y * math.sqrt(spec.target_variance)
        if weight is not None:
            y = y * weight.to(acc).reshape(vector)
        if bias is not None:
            y = y + bias.to(acc).reshape(vector)
        y = _activations.apply(spec.activation, y)
        return (x, None, weight, bias, None), y, dy.to(acc)


KERNELS = KernelRoute(GroupNormPlan)
