"""The launches of a BatchNorm by normplug's kernels, and of the statistics alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from normplug._activations import backward_reads_input
from normplug._kernels import processors
from normplug._kernels.batch_norm import launches, schedule
from normplug._kernels.launch import COOPERATIVE
from normplug._layouts import lies_like
from normplug._ops import peers, stock
from normplug._ops.plans import RUNNING, Needs, Plan, Program, gradients_of, named, needed
from normplug._ops.spec import Tensors


class BatchNormPlan(Plan):
    """The launches of a BatchNorm, with residual and activation: one per direction.

    State: stats, mean and rstd of the channels, (2 * C,); and bits, relu's mask, saved if there is
    a residual.
    """

    spec: Any  # a `batch_norm.BatchNormSpec`, which imports this module
    state: ClassVar[tuple[str, ...]] = ("stats", "bits")

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, peers = t.x, spec.peers
        self._channels = x.shape[1]
        self._shape = shape_of(x)
        updates = spec.training and t.running_mean is not None
        self._flags = launches.Flags(
            training=spec.training,
            weight=t.weight is not None,
            bias=t.bias is not None,
            residual=t.residual is not None,
            activation=spec.activation,
            running=t.running_mean is not None,
            cumulative=updates and spec.momentum is None,
            tracked=updates and t.tracked is not None and spec.momentum is not None,
            safe=spec.safe and updates,
            constant=spec.constant and spec.pool is None,
            **({} if peers is None else {"world": peers.world, "peers": peers.table}),
        )
        self.mark = 0 if peers is None else peers.mark
        self._mask_bytes = schedule.mask_bytes(*self._shape) if self._flags.bits else 0
        self._reads_residual = self._flags.residual and backward_reads_input(spec.activation)
        self._keeps_residual = self._reads_residual or spec.keeps_residual
        # Of constants, dx needs no x, if relu's mask replaces it.
        self._keeps_x = not (self._flags.constant and spec.activation in (None, "relu"))
        self._layout = x.shape, x.stride(), x.dtype
        self.is_recomputable = self._keeps_residual or not self._flags.residual
        self.is_recomputable &= x.numel() > 0 and spec.pool is None and self._keeps_x
        self._machine = machine_of(x, peers is None)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x, spec = t.x, self.spec
        geometry = schedule.geometry(*self._shape, 1, *self._machine)
        launch = launches.forward_launch(
            geometry, x.dtype, self._flags, spec.momentum or 0.0, spec.eps, spec.target_variance
        )
        empties = {
            "y": (x.shape, x.stride(), x.dtype),
            "stats": ((2 * self._channels + (spec.peers is not None),), (1,), self.acc),
        }
        if self._mask_bytes:
            empties["bits"] = ((self._mask_bytes,), (1,), torch.uint8)
        kept = "residual" if self._keeps_residual else "nothing"
        return Program(
            named(t),
            empties=empties,
            launches=[(launch, {})],
            saved=(
                "x" if self._keeps_x else "nothing",
                kept,
                "weight",
                "bias",
                "nothing",
                "stats",
                "bits",
            ),  # fmt: skip
            updates=RUNNING if spec.training else (),
            counts=self._flags.cumulative,
            scratch=launches.scratch(geometry),
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        """The program that recomputes y, normalised by the saved statistics."""
        x, spec = saved["x"], self.spec
        flags = replace(
            self._flags, training=False, given=True, running=False, cumulative=False, tracked=False,
            world=1, peers=0,
        )  # fmt: skip
        geometry = schedule.geometry(*self._shape, 1, *self._machine)
        numbers = (0.0, spec.eps, spec.target_variance)
        launch = launches.forward_launch(geometry, x.dtype, flags, *numbers)
        return Program(
            saved,
            empties={"y": (x.shape, x.stride(), x.dtype)},
            launches=[(launch, {})],
        )

    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        x, plain = self._stand_in("meta"), self.spec.activation is None
        assert dy is not None
        copies = {} if lies_like(dy, x) else {"dy": x.stride()}
        # Without an activation, dy is the residual's gradient.
        through = needs[1] and not plain
        wanted = (needs[0], needs[2], needs[3], through)
        empties = gradients_of({**saved, "x": x}, wanted[:3])
        if through:
            empties["dresidual"] = (x.shape, x.stride(), x.dtype)
        slots = ("dx", "dy" if plain else "dresidual", "dweight", "dbias", "nothing")
        results = needed(slots, needs)
        if not any(wanted):
            return Program(saved, copies=copies, empties={}, launches=[], results=results)
        geometry = schedule.geometry(*self._shape, 2, *self._machine)
        launch = launches.backward_launch(
            geometry, x.dtype, self._flags, wanted, self.spec.target_variance
        )
        return Program(
            {**saved, "dy": dy},
            copies=copies,
            empties=empties,
            launches=[(launch, {})],
            results=results,
            scratch=launches.scratch(geometry),
        )

    def _stand_in(self, device: Any) -> Tensor:
        """A tensor with the layout of x."""
        shape, stride, dtype = self._layout
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, Any, Tensor]:
        x, residual, weight, bias, _, stats, *_ = saved
        spec, mean, var = self.spec, None, None
        if x is None:  # the gradients do not depend on its values
            x = self._stand_in(self.device).zero_().requires_grad_()
        if spec.peers is not None:
            raise NotImplementedError(peers.NO_SECOND_DERIVATIVE)
        if self._flags.bits:
            # relu's mask as ones and zeros: the residual's gradient for a dy of ones.
            needs = (False, True, False, False, False)
            detached = (x.detach(), *saved[1:])
            _, mask, *_ = self.backward(detached, torch.ones_like(x), None, needs)
            assert mask is not None
            dy, spec = dy * mask, spec._replace(activation=None)
        if self._flags.residual and not self._reads_residual:
            # The gradients do not depend on its values.
            residual = torch.zeros_like(x).requires_grad_()
        if not spec.training:
            mean, rstd = stats.chunk(2)
            var = stock.variance_of(rstd, spec.eps)
        return Tensors(x, residual, weight, bias, None, mean, var), spec, dy


def shape_of(x: Tensor) -> tuple[int, int, int, bool, int]:
    """A dense x as the schedule sees it: n, c, values per plane, channels_last, bytes per value."""
    planes = math.prod(x.shape[2:])
    return x.shape[0], x.shape[1], planes, not x.is_contiguous(), x.element_size()


def machine_of(x: Tensor, alone: bool = True) -> tuple[int, bool]:
    """The number of multiprocessors, and whether cooperative launches may be used.

    alone: whether the call exchanges nothing with other processes. A cooperative launch needs all
        multiprocessors at once. While it waited for a peer, NCCL's kernels could not start on this
        GPU, and NCCL's kernels on the peer's GPU would keep its launch from starting.
    """
    return processors(x.device), COOPERATIVE and x.is_cuda and alone


class StatisticsPlan(Plan):
    """The launch of `channel_stats` for a dense x; y: the channels' means, then their variances."""

    state = ()

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x = t.x
        geometry = schedule.geometry(*shape_of(x), 1, *machine_of(x))
        flags = launches.Flags(weight=False, bias=False, normalize=False, variance=True)
        launch = launches.forward_launch(geometry, x.dtype, flags, 0.0, 0.0, 1.0)
        return Program(
            named(t),
            empties={"y": ((2 * x.shape[1],), (1,), self.acc)},
            launches=[(launch, {"stats": "y", "y": "x"})],
            scratch=launches.scratch(geometry),
        )
