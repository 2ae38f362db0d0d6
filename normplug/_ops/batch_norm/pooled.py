"""BatchNorm, relu and max pooling over normplug's own kernels, for channels_last.

A call is two launches forward (statistics, then the rest) and two backward (sums by channel, then
dx). Where statistics are constants, the forward is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches, pool_launches, schedule, windows
from normplug._kernels.device import MOST_PLACES
from normplug._kernels.launch import Launch
from normplug._layouts import is_channels_last
from normplug._ops.batch_norm import aten
from normplug._ops.batch_norm.eager import BatchNormPlan, constants_of, machine_of
from normplug._ops.plans import Gradients, KernelRoute, Plan
from normplug._ops.spec import BatchNormSpec, Tensors


class PooledPlan(Plan):
    """The launches of a BatchNorm with relu and max pooling. State: stats, peaks and places.

    stats: mean and rstd of the channels, (2 * C,). peaks: the largest input of each window, and
    places: where in the window it lies, shaped like the output.
    """

    spec: BatchNormSpec

    def __init__(self, t: Tensors, spec: BatchNormSpec) -> None:
        super().__init__(t, spec)
        x, pool = t.x, spec.pool
        assert pool is not None
        self._dtype = x.dtype
        self._n, self._channels, height, width = x.shape
        self._size = (height, width)
        self._pooled = pool.size(height, width)
        self._output_shape = (self._n, self._channels, *self._pooled)
        self._window = (pool.kernel, pool.stride, pool.padding)
        self._machine = machine_of(x)
        self._weight, self._bias = t.weight is not None, t.bias is not None
        self._running_dtype = None if t.running_mean is None else t.running_mean.dtype
        self._cumulative = spec.training and spec.momentum is None and t.running_mean is not None
        self._statistics: Launch | None = None
        self._statistics_scratch = self._sums_scratch = (0, 0)
        if spec.training:
            self._set_up_statistics(t)
        self._forward = {keep: self._set_up_forward(keep) for keep in (True, False)}
        self._sums: dict[tuple[bool, bool], Launch] = {}
        down, right = pool.stride
        rows, columns = self._n * -(-height // down), -(-width // right)
        self._backward = pool_launches.backward_launch(
            schedule.pixels(rows, columns, self._channels, x.dtype.itemsize), x.dtype,
            self._window, self._size, self._pooled, spec.training, self._weight,
            spec.target_variance,
        )  # fmt: skip

    @classmethod
    def refusal(cls, t: Tensors, spec: BatchNormSpec) -> str | None:
        """Why the kernels cannot carry out a call; None where they can."""
        x, pool = t.x, spec.pool
        assert pool is not None
        if x.dim() != 4 or x.is_contiguous() or not is_channels_last(x.shape, x.stride()):
            return "the input is not channels_last"
        n, c, height, width = x.shape
        if not pool.is_proper() or math.prod(pool.kernel) > windows.MOST_PLACES:
            return "max-pool windows must have 1 to 255 elements and valid padding"
        pooled = pool.size(height, width)
        if min(pooled) < 1:
            return "the output is empty"
        if max(n * math.prod(pooled), width * c, pooled[1] * c) > MOST_PLACES:
            return "an axis is too long"
        return BatchNormPlan.refusal(t, spec)

    @classmethod
    def laid_out(cls, t: Tensors, spec: BatchNormSpec) -> tuple[Tensors, BatchNormSpec]:
        """The call in channels_last."""
        x = t.x.contiguous(memory_format=torch.channels_last)
        return (t if x is t.x else t._replace(x=x)), spec

    def _columns(self, size: tuple[int, int], tensors: int) -> schedule.Geometry:
        shape = (self._n, self._channels, math.prod(size), True, self._dtype.itemsize)
        return schedule.geometry(*shape, tensors, *self._machine)

    def _set_up_statistics(self, t: Tensors) -> None:
        spec, running = self.spec, t.running_mean is not None
        geometry = self._columns(self._size, 1)
        flags = launches.Flags(
            weight=False,
            bias=False,
            running=running,
            cumulative=self._cumulative,
            tracked=running and t.tracked is not None and spec.momentum is not None,
            normalize=False,
        )
        self._statistics = launches.forward_launch(
            geometry, self._dtype, flags, spec.momentum or 0.0, spec.eps, spec.target_variance
        )
        self._statistics_scratch = launches.scratch(geometry)

    def _set_up_forward(self, keep: bool) -> Launch:
        spec, (height, width) = self.spec, self._pooled
        return pool_launches.forward_launch(
            schedule.pixels(self._n * height, width, self._channels, self._dtype.itemsize),
            self._dtype, self._window, self._size, self._pooled, spec.training, self._weight,
            self._bias, keep, spec.eps, spec.target_variance,
        )  # fmt: skip

    def _set_up_sums(self, needs: tuple[bool, bool]) -> Launch:
        geometry = self._columns(self._pooled, 2)
        flags = launches.Flags(
            training=self.spec.training, weight=self._weight, bias=self._bias, activation="relu"
        )
        self._sums_scratch = launches.scratch(geometry)
        launch = launches.backward_launch(
            geometry, self._dtype, flags, (False, *needs, False), self.spec.target_variance
        )
        self._sums[needs] = launch
        return launch

    def forward(self, t: Tensors, needs: Sequence[bool]) -> tuple[Tensor, tuple[Any, ...]]:
        """y, and what to save; without peaks and places where no gradient is needed."""
        x, _, weight, bias, _, running_mean, running_var, tracked = t
        keep = any(needs)
        stats = x.new_empty(2 * self._channels, dtype=self.acc)
        y = self._empty(x, x.dtype)
        peaks = self._empty(x, x.dtype) if keep else None
        places = self._empty(x, torch.uint8) if keep else None
        # What a call does not have, the kernels do not touch: any tensor stands in.
        mean = stats if running_mean is None else running_mean
        var = stats if running_var is None else running_var
        stream, work = self._workspace(self._statistics_scratch)
        if self._statistics is not None:
            if self._cumulative and tracked is not None:
                tracked.add_(1)
            count = work.counters if tracked is None else tracked
            self._statistics(
                stream, x, x, stats, stats, mean, var, count, x, x, stats, work.partial,
                work.counters,
            )  # fmt: skip
        self._forward[keep](
            stream,
            x,
            stats if weight is None else weight,
            stats if bias is None else bias,
            mean,
            var,
            y,
            x if peaks is None else peaks,
            x if places is None else places,
            stats,
        )
        return y, (x, None, weight, bias, None, stats, peaks, places)

    def backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients that `needs` names."""
        x, _, weight, bias, _, stats, peaks, places = saved
        dy = dy.contiguous(memory_format=torch.channels_last)
        through = needs[0] and self.spec.training
        summed = (needs[2] or through, needs[3] or through)
        dweight = stats.new_empty(self._channels) if summed[0] else None
        dbias = stats.new_empty(self._channels) if summed[1] else None
        if any(summed):
            launch = self._sums.get(summed) or self._set_up_sums(summed)
            stream, work = self._workspace(self._sums_scratch)
            launch(
                stream,
                dy,
                peaks,
                peaks,
                peaks,
                stats if weight is None else weight,
                stats if bias is None else bias,
                stats,
                peaks,
                peaks,
                stats if dweight is None else dweight,
                stats if dbias is None else dbias,
                work.partial,
                work.counters,
            )
        dx = torch.empty_like(x) if needs[0] else None
        if dx is not None:
            stream, _ = self._workspace((0, 0))
            self._backward(
                stream,
                dy,
                x,
                places,
                stats if weight is None else weight,
                stats,
                stats if dweight is None else dweight,
                stats if dbias is None else dbias,
                dx,
            )
        dweight = _as_gradient_of(weight, dweight, needs[2])
        return dx, None, dweight, _as_gradient_of(bias, dbias, needs[3]), None

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, _, weight, bias, _, stats, *_ = saved
        mean, var = constants_of(stats, self.spec, self._running_dtype)
        t = Tensors(x, None, weight, bias, None, mean, var)
        return (
            (x, None, weight, bias, None),
            aten.batch_norm(t, self.spec._replace(momentum=0.0)),
            dy,
        )

    def _empty(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        shape, last = self._output_shape, torch.channels_last
        return torch.empty(shape, dtype=dtype, device=x.device, memory_format=last)


def _as_gradient_of(
    parameter: Tensor | None, gradient: Tensor | None, needed: bool
) -> Tensor | None:
    if not needed or gradient is None or parameter is None:
        return None
    return gradient.to(parameter.dtype)


KERNELS = KernelRoute(PooledPlan)
