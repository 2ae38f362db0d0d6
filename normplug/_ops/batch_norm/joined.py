"""BatchNorm over the joined batch of several processes, by normplug's own kernels.

Forward: a launch for the statistics of the process's batch, one gather, a launch that merges the
statistics of all and updates the running ones, and a launch that normalises, with residual and
activation. Backward: a launch for the two sums and the gradients of weight and bias, one sum over
the processes, and a launch for the gradients of input and residual. The host never waits.

A process with an empty batch sends zeros, and merges as the others do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normplug import _activations, _checks
from normplug._kernels.batch_norm import launches, schedule
from normplug._kernels.launch import Launch
from normplug._layouts import laid_out_like, readable
from normplug._ops.batch_norm import messages
from normplug._ops.batch_norm.eager import (
    BatchNormPlan,
    machine_of,
    shape_of,
    statistics_program,
)
from normplug._ops.plans import (
    BLANKS,
    BasePlan,
    run_backward,
    unwrapped,
)
from normplug._ops.program import RUNNING, SLOT, Layout, Program, Result, layout_of, named
from normplug._ops.recompute import Recomputable
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._ops.statistics import variance_of
from normplug._torch import applier, current_device_index

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_Y, _STATS, _MESSAGE, _DY = (SLOT[name] for name in ("y", "stats", "message", "dy"))
# The gradients of a backward's launch, and the tensors that they are shaped like.
_GRADIENTS = {"dx": "x", "dweight": "weight", "dbias": "bias", "dresidual": "x"}
_DX, _DWEIGHT, _DBIAS, _DRESIDUAL = (SLOT[name] for name in _GRADIENTS)


class JoinedPlan(BasePlan):
    """The programs for calls that differ only in their tensors' values and their group.

    State: stats and bits. stats, (2 * C + 1,): mean and rstd of each channel of the joined batch,
    and the number of values per channel. bits: as in `BatchNormPlan`. The slot `message` holds the
    messages gathered from all processes or, in a backward, the sums.
    """

    spec: BatchNormSpec
    state = ("stats", "bits")

    def __init__(self, t: Tensors, spec: BatchNormSpec, processes: int) -> None:
        ready, spec = BatchNormPlan.laid_out(t, spec)
        super().__init__(ready, spec)
        x = ready.x
        self._copies = ready is not t
        self._processes, self._channels = processes, x.shape[1]
        self._is_empty = x.numel() == 0
        self._has_residual = t.residual is not None
        reads_input = _activations.backward_reads_input(spec.activation)
        self._reads_residual = self._has_residual and reads_input
        self.keeps_residual = self._reads_residual or spec.keeps_residual
        self.is_recomputable = self.keeps_residual or not self._has_residual
        self._shape, self._machine = shape_of(x), machine_of(x)
        self._flags = partial(
            launches.Flags,
            weight=t.weight is not None,
            bias=t.bias is not None,
            residual=self._has_residual,
            activation=spec.activation,
            joined=True,
        )
        # It stands for stats and for messages: programs need only their dtype.
        self._vector = torch.empty(0, dtype=self.acc, device="meta")
        self._statistics = None if self._is_empty else statistics_program(x, joined=True)
        self._merge = self._merge_program(ready)
        inputs = ready._replace(running_mean=None, running_var=None, tracked=None)
        self._normalise = self.recompute_program({**named(inputs), "stats": self._vector})

    @classmethod
    def refusal(cls, t: Tensors, spec: BatchNormSpec) -> str | None:
        """Why the kernels cannot run a call; None if they can."""
        if t.x.numel() == 0:  # the kernels do not read it
            t = t._replace(x=t.x.new_empty(1, *t.x.shape[1:2]))
        return BatchNormPlan.refusal(t, spec)

    def _merge_program(self, t: Tensors) -> Program:
        """The program that merges the statistics of all processes, and updates the running ones."""
        spec, c, running = self.spec, self._channels, t.running_mean is not None
        flags = launches.Flags(
            running=running,
            cumulative=running and spec.momentum is None,
            tracked=running and t.tracked is not None,
        )
        launch = launches.merge_launch(
            self._processes, c, t.x.dtype, flags, spec.momentum or 0.0, spec.eps
        )
        return Program(
            {**named(t), "message": self._vector},
            empties={"stats": ((2 * c + 1,), (1,), self.acc)},
            launches=[(launch, {"parts": "message"})],
            updates=RUNNING,
        )

    def recompute_program(self, saved: Mapping[str, Tensor]) -> Program:
        """The program of y, given stats. It rewrites bits, if they are given, with equal values."""
        x, spec = saved["x"], self.spec
        empties: dict[str, Layout] = {"y": layout_of(x)}
        steps: list[tuple[Launch, dict[str, str]]] = []
        if not self._is_empty:
            flags = self._flags(training=False, given=True)
            geometry = schedule.geometry(*self._shape, 1, *self._machine)
            numbers = (0.0, spec.eps, spec.target_variance)
            steps.append((launches.forward_launch(geometry, x.dtype, flags, *numbers), {}))
            if flags.bits and "bits" not in saved:
                empties["bits"] = ((schedule.mask_bytes(*self._shape),), (1,), torch.uint8)
        kept = "residual" if self.keeps_residual else "nothing"
        return Program(
            saved,
            empties=empties,
            launches=steps,
            results=[Result(_Y)],
            saved=("x", kept, "weight", "bias", "nothing", *self.state),
        )

    def _backward_program(
        self, saved: dict[str, Tensor], dy: Tensor, wanted: tuple[bool, bool, bool, bool]
    ) -> Program:
        """The program of dx, dweight, dbias and dresidual, as `wanted` selects.

        Without dx, it also computes this process's sums. With dx, it is given those of all.
        """
        x, joined = saved["x"], wanted[0]
        given = {**saved, "dy": dy}
        empties: dict[str, Layout] = {
            name: layout_of(saved[like])
            for (name, like), want in zip(_GRADIENTS.items(), wanted, strict=True)
            if want
        }
        geometry = schedule.geometry(*self._shape, 2, *self._machine)
        launch = launches.backward_launch(
            geometry, x.dtype, self._flags(given=joined), wanted, self.spec.target_variance
        )
        if joined:
            given["message"], renamed, scratch = self._vector, "partial", (0, 0)
        else:
            empties["message"] = ((2 * self._channels,), (1,), self.acc)
            renamed, scratch = "dx", launches.scratch(geometry)
        return Program(
            given,
            empties=empties,
            launches=[(launch, {renamed: "message"})],
            scratch=scratch,
        )

    def run(self, t: Tensors, group: Any) -> tuple[Tensor, Tensor]:
        """Compute y, recorded for autograd if gradients are enabled, and stats."""
        if self.gpu is not None and self.gpu != current_device_index():
            with torch.cuda.device(self.gpu):
                return self.run(t, group)
        if self._copies:
            t, _ = BatchNormPlan.laid_out(t, self.spec)
        if not torch.is_grad_enabled():
            y, stats, _ = self.forward(t, group)
            return y, stats
        t = unwrapped(t)
        found: list[Tensor] = []
        return _apply(t.x, t.residual, t.weight, t.bias, (self, t, group, found)), found[0]

    def moments(self, stats: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of the joined batch."""
        mean, rstd, _ = stats.tensor_split((self._channels, 2 * self._channels))
        return mean, variance_of(rstd, self.spec.eps)

    def forward(self, t: Tensors, group: Any) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Compute y, stats, and the tensors to save."""
        slots: list[Any] = [*t, *BLANKS]
        if self._statistics is None:
            own = t.x.new_zeros(2 * self._channels + 1, dtype=self.acc)
        else:
            self._statistics.run(slots, self.device, self.workspace)
            own = slots[_STATS]
        slots[_MESSAGE] = messages.gather(own, self._processes, group)
        self._merge.run(slots, self.device, self.workspace)
        stats = slots[_STATS]
        if self.gpu is None and stats[-1] == 1:
            raise _checks.one_joined_value(self._processes)
        self._normalise.run(slots, self.device, self.workspace)
        return slots[_Y], stats, tuple([slots[slot] for slot in self._normalise.saved])

    def backward(
        self, saved: Sequence[Any], dy: Tensor, group: Any, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients of x, residual, weight and bias that `needs` selects."""
        x, _, weight, bias, _, stats, _ = saved
        if self._is_empty:
            if needs[0]:
                messages.add(stats.new_zeros(2 * self._channels), group)
            dx, dresidual, dweight, dbias = (
                torch.zeros_like(of) if need and of is not None else None
                for need, of in zip(needs, (x, x, weight, bias), strict=True)
            )
            return dx, dresidual, dweight, dbias
        if dy.stride() != x.stride():
            dy = laid_out_like(dy, x)
        slots = self._slots(saved)
        slots[_DY] = dy
        # Without an activation, dy is the residual's gradient. Otherwise it is written with dx or,
        # if that is not needed, with the sums.
        through = needs[1] and self.spec.activation is not None
        self._run_backward((False, *needs[2:], through and not needs[0]), saved, slots)
        if needs[0]:
            messages.add(slots[_MESSAGE], group)
            self._run_backward((True, False, False, through), saved, slots)
        dresidual = dy if needs[1] and not through else slots[_DRESIDUAL]
        return slots[_DX], dresidual, slots[_DWEIGHT], slots[_DBIAS]

    def _run_backward(
        self, wanted: tuple[bool, ...], saved: Sequence[Any], slots: list[Any]
    ) -> None:
        program = self._made_once(wanted, self._backward_program, saved, slots[_DY], wanted)
        program.run(slots, self.device, self.workspace)

    def composed_backward(self, *_: Any) -> Gradients:
        """Refuse a backward that is to be differentiated again."""
        raise NotImplementedError(messages.NO_SECOND_DERIVATIVE)


class _JoinedNorm(Recomputable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        call: tuple[JoinedPlan, Tensors, Any, list[Tensor]],
    ) -> Tensor:
        plan, t, group, found = call
        y, stats, saved = plan.forward(t, group)
        found.append(stats)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.group = plan, group
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return run_backward(ctx, readable(dy), ctx.group)


_apply = applier(_JoinedNorm)
