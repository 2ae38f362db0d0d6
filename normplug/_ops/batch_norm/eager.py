"""BatchNorm over normplug's own kernels: one launch forward and one backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches, schedule
from normplug._kernels.device import processors
from normplug._kernels.launch import COOPERATIVE, Launch, Workspace
from normplug._layouts import dense, laid_out_like
from normplug._ops.batch_norm import aten
from normplug._ops.plans import Gradients, KernelRoute, Plan
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._torch import current_raw_stream
from normplug.reference import accumulator_dtype


class BatchNormPlan(Plan):
    """The launches of a BatchNorm, with residual and activation. State: stats, and relu's signs.

    stats: mean and rstd of the channels, (2 * C,).
    """

    spec: BatchNormSpec

    def __init__(self, t: Tensors, spec: BatchNormSpec) -> None:
        super().__init__(t, spec)
        x = t.x
        self._dtype, self._channels = x.dtype, x.shape[1]
        self._running_dtype = None if t.running_mean is None else t.running_mean.dtype
        self._shape = shape_of(x)
        moves = spec.training and t.running_mean is not None
        self._flags = launches.Flags(
            training=spec.training,
            weight=t.weight is not None,
            bias=t.bias is not None,
            residual=t.residual is not None,
            activation=spec.activation,
            running=t.running_mean is not None,
            cumulative=moves and spec.momentum is None,
            tracked=moves and t.tracked is not None and spec.momentum is not None,
        )
        geometry = schedule.geometry(*self._shape, 1, *machine_of(x))
        self._forward = launches.forward_launch(
            geometry, x.dtype, self._flags, spec.momentum or 0.0, spec.eps, spec.target_variance
        )
        self._forward_scratch = launches.scratch(geometry)
        self._mask_bytes = schedule.mask_bytes(*self._shape) if self._flags.bits else 0
        # The backward of all but relu needs all of the input to the activation.
        self._reads_residual = self._flags.residual and spec.activation not in (None, "relu")
        self._keeps_residual = self._reads_residual or spec.keeps_residual
        self.is_recomputable = self._keeps_residual or not self._flags.residual
        self._recompute: Launch | None = None
        self._backward: dict[tuple[bool, ...], Launch] = {}
        self._backward_scratch = (0, 0)
        self._machine = machine_of(x)

    @classmethod
    def refusal(cls, t: Tensors, spec: BatchNormSpec) -> str | None:
        """Why the kernels cannot carry out a call; None where they can."""
        if t.residual is not None and t.residual.dtype != t.x.dtype:
            return f"the input is {t.x.dtype} and the residual {t.residual.dtype}"
        running = (t.running_mean, t.running_var)
        if len({r.dtype for r in running if r is not None}) > 1:
            return "running_mean and running_var differ in dtype"
        why = super().refusal(t, spec)
        if why is None and t.x.shape[0] * math.prod(t.x.shape[2:]) >= 2**31:
            why = "a channel has 2^31 values or more"
        return why

    @classmethod
    def laid_out(cls, t: Tensors, spec: BatchNormSpec) -> tuple[Tensors, BatchNormSpec]:
        """The call with x dense, and the residual laid out as x."""
        x, residual = dense(t.x), t.residual
        if residual is not None and residual.stride() != x.stride():
            residual = laid_out_like(residual, x)
        if x is t.x and residual is t.residual:
            return t, spec
        if residual is not t.residual:  # nobody else keeps the copy
            spec = spec._replace(keeps_residual=False)
        return t._replace(x=x, residual=residual), spec

    def forward(self, t: Tensors, needs: Sequence[bool]) -> tuple[Tensor, tuple[Any, ...]]:
        """y, and what to save."""
        x, residual, weight, bias, _, running_mean, running_var, tracked = t
        if self._flags.cumulative and tracked is not None:
            tracked.add_(1)
        y = torch.empty_like(x)
        stats = x.new_empty(2 * self._channels, dtype=self.acc)
        bits = None
        if self._mask_bytes:
            bits = x.new_empty(self._mask_bytes, dtype=torch.uint8)
        stream, work = self._workspace(self._forward_scratch)
        # What a call does not have, the kernel does not touch: any tensor stands in.
        self._forward(
            stream,
            x,
            x if residual is None else residual,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats if running_mean is None else running_mean,
            stats if running_var is None else running_var,
            work.counters if tracked is None else tracked,
            y,
            x if bits is None else bits,
            stats,
            work.partial,
            work.counters,
        )
        kept = residual if self._keeps_residual else None
        return y, (x, kept, weight, bias, None, stats, bits)

    def recomputed(self, saved: Sequence[Any]) -> Tensor:
        """The output y again, normalised by the statistics that the forward found."""
        x, residual, weight, bias, _, stats, _ = saved
        y = torch.empty_like(x)
        if self._recompute is None:
            flags = launches.Flags(
                training=False,
                given=True,
                weight=self._flags.weight,
                bias=self._flags.bias,
                residual=self._flags.residual,
                activation=self._flags.activation,
            )
            geometry = schedule.geometry(*self._shape, 1, *self._machine)
            self._recompute = launches.forward_launch(
                geometry, self._dtype, flags, 0.0, self.spec.eps, self.spec.target_variance
            )
        stream, work = self._workspace((0, 0))
        beside = x if residual is None else residual
        vectors = (stats if weight is None else weight, stats if bias is None else bias)
        self._recompute(
            stream, x, beside, *vectors, stats, stats, work.counters, y, x, stats, work.partial,
            work.counters,
        )  # fmt: skip
        return y

    def backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients that `needs` names."""
        x, residual, weight, bias, _, stats, bits = saved
        if dy.stride() != x.stride():
            dy = laid_out_like(dy, x)
        through, dresidual = needs[1], None
        if through:
            if self.spec.activation is None:
                through, dresidual = False, dy
            else:
                dresidual = torch.empty_like(x)
        wanted = (needs[0], needs[2], needs[3], through)
        if not any(wanted):
            return None, dresidual, None, None, None
        dx = torch.empty_like(x) if needs[0] else None
        dweight = torch.empty_like(weight) if needs[2] and weight is not None else None
        dbias = torch.empty_like(bias) if needs[3] and bias is not None else None
        launch = self._backward.get(wanted)
        if launch is None:
            launch = self._set_up_backward(wanted)
        stream, work = self._workspace(self._backward_scratch)
        launch(
            stream,
            dy,
            x,
            x if residual is None else residual,
            x if bits is None else bits,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats,
            x if dx is None else dx,
            x if dresidual is None else dresidual,
            stats if dweight is None else dweight,
            stats if dbias is None else dbias,
            work.partial,
            work.counters,
        )
        return dx, dresidual, dweight, dbias, None

    def _set_up_backward(self, wanted: tuple[bool, bool, bool, bool]) -> Launch:
        geometry = schedule.geometry(*self._shape, 2, *self._machine)
        self._backward_scratch = launches.scratch(geometry)
        launch = launches.backward_launch(
            geometry, self._dtype, self._flags, wanted, self.spec.target_variance
        )
        self._backward[wanted] = launch
        return launch

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, residual, weight, bias, _, stats, bits = saved
        spec, activation = self.spec, self.spec.activation
        if bits is not None:
            # relu's signs as ones and zeros: the residual's gradient from a dy of ones.
            needs = (False, True, False, False)
            detached = (x.detach(), *saved[1:])
            _, signs, *_ = self.backward(detached, torch.ones_like(x), None, needs)
            assert signs is not None
            dy, activation = dy * signs, None
        if self._flags.residual and not self._reads_residual:
            # No value of the gradients depends on it.
            residual = torch.zeros_like(x).requires_grad_()
        mean, var = constants_of(stats, spec, self._running_dtype)
        t = Tensors(x, residual, weight, bias, None, mean, var)
        plain = BatchNormSpec(spec.training, 0.0, spec.eps, spec.target_variance, activation)
        return (x, residual, weight, bias, None), aten.batch_norm(t, plain), dy


KERNELS = KernelRoute(BatchNormPlan)


def shape_of(x: Tensor) -> tuple[int, int, int, bool, int]:
    """A dense x as the schedule sees it: n, c, values a plane, channels_last, bytes a value."""
    planes = math.prod(x.shape[2:])
    return x.shape[0], x.shape[1], planes, not x.is_contiguous(), x.element_size()


def machine_of(x: Tensor) -> tuple[int, bool]:
    """The number of multiprocessors, and whether they can wait for one another."""
    return processors(x.device), COOPERATIVE and x.is_cuda


def constants_of(
    stats: Tensor, spec: BatchNormSpec, dtype: torch.dtype | None
) -> tuple[Tensor | None, Tensor | None]:
    """The running statistics that a forward in evaluation had; None in training."""
    if spec.training:
        return None, None
    mean, rstd = stats.chunk(2)
    var = rstd.pow(-2) - spec.eps
    return (mean, var) if dtype is None else (mean.to(dtype), var.to(dtype))


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """`functional.channel_stats`, in one read."""
    x = dense(x.detach())
    geometry = schedule.geometry(*shape_of(x), 1, *machine_of(x))
    flags = launches.Flags(weight=False, bias=False, normalize=False, variance=True)
    launch = launches.forward_launch(geometry, x.dtype, flags, 0.0, 0.0, 1.0)
    c = x.shape[1]
    stats = x.new_empty(2 * c, dtype=accumulator_dtype(x.dtype))
    with torch.cuda.device_of(x):
        stream = current_raw_stream(x.device.index) if x.is_cuda else 0
        work = Workspace(x.device, stats.dtype, *launches.scratch(geometry))
        # What a call does not have, the kernel does not touch.
        running = (stats, stats, work.counters)
        launch(stream, x, x, stats, stats, *running, x, x, stats, work.partial, work.counters)
    return stats[:c], stats[c:]
