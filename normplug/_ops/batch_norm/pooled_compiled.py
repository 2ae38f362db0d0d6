"""`pool_gpu` as operators of `torch.library`, for compilers: see `batch_norm_library`."""

from __future__ import annotations

from typing import Any, Sequence  # noqa: UP035 - what torch 2.6 knows

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplug._ops.aten import Pool
from normplug._ops.batch_norm import compiled as batch_norm_library
from normplug._ops.library import differentiable, fake, operator
from normplug.reference import accumulator_dtype


def _pool(settings: Sequence[int]) -> Pool:
    """A `Pool` from its numbers in a row, as an operator takes them."""
    kh, kw, sh, sw, ph, pw, ceil_mode = settings
    return Pool((kh, kw), (sh, sw), (ph, pw), bool(ceil_mode))


@operator("batch_norm_max_pool_forward")
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    target_variance: float,
    pool: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, stats (mean and rstd of the channels, (2 * C,)), peaks and places."""
    from normplug._ops.batch_norm import pooled as gpu

    x = x.contiguous(memory_format=torch.channels_last)
    plan = gpu.plan_of(
        x, weight, bias, running_mean, False, training, 0.0, eps, target_variance, _pool(pool)
    )
    y, stats, peaks, places = plan.forward(
        x, weight, bias, (running_mean, running_var, None), keep=True
    )
    assert peaks is not None
    assert places is not None
    return y, stats, peaks, places


@fake(_forward)
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    target_variance: float,
    pool: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, c, height, width = x.shape
    shape = (n, c, *_pool(pool).size(height, width))
    y, peaks, places = (
        torch.empty(shape, dtype=dtype, device=x.device, memory_format=torch.channels_last)
        for dtype in (x.dtype, x.dtype, torch.uint8)
    )
    return y, x.new_empty(2 * c, dtype=accumulator_dtype(x.dtype)), peaks, places


@operator("batch_norm_max_pool_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    peaks: Tensor,
    places: Tensor,
    training: bool,
    eps: float,
    target_variance: float,
    pool: Sequence[int],
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias; empty where not needed."""
    from normplug._ops.batch_norm import pooled as gpu

    x = x.contiguous(memory_format=torch.channels_last)
    running = None if training else stats
    plan = gpu.plan_of(
        x, weight, bias, running, False, training, 0.0, eps, target_variance, _pool(pool)
    )
    needs = (needs_x, needs_weight, needs_bias)
    gradients = plan.backward(dy, x, weight, bias, stats, peaks, places, needs)
    dx, dweight, dbias = (x.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight, dbias


@fake(_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    stats: Tensor,
    peaks: Tensor,
    places: Tensor,
    training: bool,
    eps: float,
    target_variance: float,
    pool: Sequence[int],
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    like = (x.contiguous(memory_format=torch.channels_last), weight, bias)
    dx, dweight, dbias = (
        torch.empty_like(t) if need and t is not None else x.new_empty(0)
        for t, need in zip(like, (needs_x, needs_weight, needs_bias), strict=True)
    )
    return dx, dweight, dbias


class _BatchNormPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, weight, bias, _, _, *ctx.options = inputs
        y, stats, peaks, places = _forward(*inputs)
        ctx.save_for_backward(x, weight, bias, stats, peaks, places)
        ctx.mark_non_differentiable(stats, peaks, places)
        return y, stats, peaks, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:3]
        gradients = _backward(dy, *ctx.saved_tensors, *ctx.options, *needs)
        asked = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        return (*asked, None, None, None, None, None, None)


_differentiable = differentiable("batch_norm_max_pool", _forward, _BatchNormPool)


def batch_norm_max_pool(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    pool: Pool,
) -> Tensor:
    """`functional._batch_norm_max_pool` after its checks, as an operator."""
    evaluating = (None, None) if training else (running_mean, running_var)
    numbers = [*pool.kernel, *pool.stride, *pool.padding, int(pool.ceil_mode)]
    y, stats, *_ = _differentiable(
        x, weight, bias, *evaluating, training, eps, target_variance, numbers
    )
    if training and running_mean is not None and running_var is not None:
        batch_norm_library.move_running(
            x, stats, running_mean, running_var, num_batches_tracked, momentum, eps
        )
    return y
