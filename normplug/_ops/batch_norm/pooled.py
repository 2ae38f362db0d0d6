"""BatchNorm, relu and max pooling over normplug's own kernels, for channels_last.

As in `batch_norm_gpu`, a call's shape, layout and flags name a `_Plan`. A call is two launches
forward (statistics, then the rest) and two backward (sums by channel, then dx); where statistics
are constants, one forward. Second derivatives go through torch's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches as kernels
from normplug._kernels.batch_norm import pool_launches as pool_kernels
from normplug._kernels.batch_norm import schedule, windows
from normplug._kernels.device import MOST_PLACES, processors
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._ops import aten
from normplug._ops import eligible as gpu
from normplug._ops.aten import Pool
from normplug._ops.batch_norm import eager as batch_norm_gpu
from normplug.reference import accumulator_dtype

# Mean, variance and count of batches.
_Running: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Key(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight: torch.dtype | None
    bias: torch.dtype | None
    running: torch.dtype | None
    tracked: bool
    training: bool
    momentum: float | None
    eps: float
    target_variance: float
    pool: Pool


class _Plan:
    """All that calls of one shape, layout and flags have in common."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.acc = accumulator_dtype(key.dtype)
        self._n, self._c, height, width = key.shape
        self._size = (height, width)
        self._pooled = key.pool.size(*self._size)
        self.output_shape = (self._n, self._c, *self._pooled)
        self._machine = (
            processors(key.device), COOPERATIVE and key.device.type == "cuda"
        )  # fmt: skip
        self._workspaces = gpu.Workspaces(key.device, self.acc)
        self._statistics: Launch | None = None
        self._statistics_scratch = self._sums_scratch = (0, 0)
        if key.training:
            self._set_up_statistics()
        self._forward = {keep: self._set_up_forward(keep) for keep in (True, False)}
        self._sums: dict[tuple[bool, bool], Launch] = {}
        down, right = key.pool.stride
        rows, columns = self._n * -(-height // down), -(-width // right)
        self._backward = pool_kernels.backward_launch(
            schedule.pixels(rows, columns, self._c, key.dtype.itemsize), key.dtype, key.pool[:3],
            self._size, self._pooled, key.training, key.weight is not None, key.target_variance,
        )  # fmt: skip

    def _columns(self, pixels: tuple[int, int], tensors: int) -> schedule.Geometry:
        sizes = (self._n, self._c, math.prod(pixels), True, self.key.dtype.itemsize, tensors)
        return schedule.geometry(*sizes, *self._machine)

    def _set_up_statistics(self) -> None:
        key, geometry = self.key, self._columns(self._size, 1)
        cumulative = key.momentum is None and key.running is not None
        flags = kernels.Flags(
            weight=False,
            bias=False,
            running=key.running is not None,
            cumulative=cumulative,
            tracked=key.tracked and key.momentum is not None,
            normalize=False,
        )
        self._cumulative = cumulative
        self._statistics = kernels.forward_launch(
            geometry, key.dtype, flags, key.momentum or 0.0, key.eps, key.target_variance
        )
        self._statistics_scratch = kernels.scratch(geometry)

    def _set_up_forward(self, keep: bool) -> Launch:
        key, (height, width) = self.key, self._pooled
        return pool_kernels.forward_launch(
            schedule.pixels(self._n * height, width, self._c, key.dtype.itemsize), key.dtype,
            key.pool[:3], self._size, self._pooled, key.training, key.weight is not None,
            key.bias is not None, keep, key.eps, key.target_variance,
        )  # fmt: skip

    def _set_up_sums(self, needs: tuple[bool, bool]) -> Launch:
        key, geometry = self.key, self._columns(self._pooled, 2)
        flags = kernels.Flags(
            training=key.training,
            weight=key.weight is not None,
            bias=key.bias is not None,
            activation="relu",
        )
        self._sums_scratch = kernels.scratch(geometry)
        launch = kernels.backward_launch(
            geometry, key.dtype, flags, (False, *needs, False), key.target_variance
        )
        self._sums[needs] = launch
        return launch

    def run(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        tracked: Tensor | None,
    ) -> Tensor:
        """y, with what its gradients need."""
        if gpu.elsewhere(x):
            with torch.cuda.device_of(x):
                return self.run(x, running_mean, running_var, weight, bias, tracked)
        rest = (running_mean, running_var, tracked)
        if torch.is_grad_enabled():
            return _apply(gpu.alive(x), weight, bias, (self, rest))
        return self.forward(x, weight, bias, rest, keep=False)[0]

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: _Running,
        keep: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """y; the channels' mean and rstd in one tensor; with `keep`, the peaks and their places."""
        running_mean, running_var, tracked = running
        stats = x.new_empty(2 * self._c, dtype=self.acc)
        y = self._empty(x, x.dtype)
        peaks = self._empty(x, x.dtype) if keep else None
        places = self._empty(x, torch.uint8) if keep else None
        # What a call does not have, the kernels do not touch: any tensor stands in.
        mean = stats if running_mean is None else running_mean
        var = stats if running_var is None else running_var
        stream, work = self._workspaces.get(self._statistics_scratch)
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
        return y, stats, peaks, places

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: Tensor,
        peaks: Tensor,
        places: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight and bias that `needs` names."""
        dy = dy.contiguous(memory_format=torch.channels_last)
        through = needs[0] and self.key.training
        summed = (needs[1] or through, needs[2] or through)
        dweight = stats.new_empty(self._c) if summed[0] else None
        dbias = stats.new_empty(self._c) if summed[1] else None
        if summed[0] or summed[1]:
            launch = self._sums.get(summed) or self._set_up_sums(summed)
            stream, work = self._workspaces.get(self._sums_scratch)
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
            stream, _ = self._workspaces.get((0, 0))
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
        return dx, _stored_as(dweight, weight, needs[1]), _stored_as(dbias, bias, needs[2])

    def _empty(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        shape, last = self.output_shape, torch.channels_last
        return torch.empty(shape, dtype=dtype, device=x.device, memory_format=last)


def _stored_as(gradient: Tensor | None, of: Tensor | None, needed: bool) -> Tensor | None:
    return gradient.to(of.dtype) if needed and gradient is not None and of is not None else None


_plans = gpu.Plans[_Key, _Plan](_Plan)


def plan_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    tracked: bool,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    pool: Pool,
) -> _Plan:
    """The plan of a call."""
    key = _Key(
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None if running_mean is None else running_mean.dtype,
        tracked,
        training,
        momentum,
        eps,
        target_variance,
        pool,
    )
    return _plans[key]


class _BatchNormPool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rest: tuple[_Plan, _Running],
    ) -> Tensor:
        plan, running = rest
        keep = any(ctx.needs_input_grad)
        y, stats, peaks, places = plan.forward(x, weight, bias, running, keep)
        ctx.save_for_backward(x, weight, bias, stats, peaks, places)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, stats, peaks, places = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():
            return (*_composed_backward(dy, x, weight, bias, stats, ctx.plan.key, needs), None)
        gradients = gpu.on_device_of(
            x, ctx.plan.backward, dy, x, weight, bias, stats, peaks, places, needs
        )
        return (*gradients, None)


_apply = gpu.applier(_BatchNormPool)


def batch_norm_max_pool(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    num_batches_tracked: Tensor | None,
    *settings: Any,
) -> Tensor:
    """`functional._batch_norm_max_pool` after its checks; settings are those of `plan_of`."""
    tensors = (x, running_mean, running_var, weight, bias, num_batches_tracked)
    return straight(batch_norm_max_pool, tensors, settings)(*tensors)


def straight(route: Any, tensors: Sequence[Tensor | None], settings: tuple[Any, ...]) -> Any:
    """The plan's own `run`."""
    x, running_mean, _, weight, bias, count = tensors
    assert x is not None
    tracked = count is not None and running_mean is not None
    return plan_of(x, weight, bias, running_mean, tracked, *settings).run


def refusal(
    x: Tensor, tracked: Tensor | None, vectors: tuple[Tensor | None, ...], pool: Pool
) -> str | None:
    """Why the kernels cannot take these tensors; `vectors` starts with the running statistics."""
    if x.dim() != 4 or x.is_contiguous() or not batch_norm_gpu.is_innermost(x.shape, x.stride()):
        return "the input is not channels_last"
    n, c, *size = x.shape
    if not pool.is_proper() or math.prod(pool.kernel) > windows.MOST_PLACES:
        return "max-pool windows must have 1 to 255 elements and valid padding"
    pooled = pool.size(*size)
    if min(pooled) < 1:
        return "the output is empty"
    if max(n * math.prod(pooled), size[1] * c, pooled[1] * c) > MOST_PLACES:
        return "an axis is too long"
    return batch_norm_gpu.refusal(x, None, tracked, vectors)


def _composed_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    key: _Key,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients as torch operations, which autograd can differentiate again."""
    mean = var = None
    if not key.training:
        mean, var = batch_norm_gpu.running_of(stats, key.eps, key.running)
    y = aten.batch_norm_max_pool(
        x, mean, var, weight, bias, None, key.training, 0.0, key.eps, key.target_variance, key.pool
    )
    inputs = (x, weight, bias)
    asked = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    got = iter(torch.autograd.grad(y, asked, dy, create_graph=True))
    return tuple(
        next(got) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)
    )
