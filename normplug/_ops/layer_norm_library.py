"""LayerNorm's kernels as operators of `torch.library`, for compilers: opaque, with gradients.

As `batch_norm_library`, whose remarks hold here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplug._ops import aten
from normplug._ops.operators import differentiable, fake, operator
from normplug.reference import accumulator_dtype


def _accumulator(*tensors: Tensor | None) -> torch.dtype:
    return accumulator_dtype(*(t.dtype for t in tensors if t is not None))


def _rows(x: Tensor, row_dims: int) -> int:
    return math.prod(x.shape[: x.dim() - row_dims])


@operator("layer_norm_forward")
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    row_dims: int,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y, and stats: mean and rstd of the rows, (2 * rows,)."""
    from normplug._ops import layer_norm_gpu as gpu

    plan, x, _ = gpu.plan_of(
        x, row_dims, None, weight, bias, input_bias, None, False, 0.0, eps, target_variance, out
    )
    y, _, stats = plan.forward(x, None, weight, bias, input_bias, None, None, None, keep=True)
    return y, stats


@fake(_forward)
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    row_dims: int,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    stats = x.new_empty(2 * _rows(x, row_dims), dtype=_accumulator(x, weight, bias, input_bias))
    return x.new_empty(x.shape, dtype=out), stats


@operator("add_layer_norm_forward")
def _forward_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_dims: int,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the total, and stats."""
    from normplug._ops import layer_norm_gpu as gpu

    plan, x, beside = gpu.plan_of(
        x, row_dims, residual, weight, bias, None, None, False, 0.0, eps, target_variance, out
    )
    y, total, stats = plan.forward(x, beside, weight, bias, None, None, None, None, keep=True)
    assert total is not None
    return y, total, stats


@fake(_forward_add)
def _(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    row_dims: int,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty(2 * _rows(x, row_dims), dtype=_accumulator(x, residual, weight, bias))
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return x.new_empty(x.shape, dtype=out), total, stats


@operator("layer_norm_backward")
def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    stats: Tensor,
    row_dims: int,
    target_variance: float,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_input_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x (the total, where there was one), weight, bias and input_bias."""
    from normplug._ops import layer_norm_gpu as gpu

    plan, x, _ = gpu.plan_of(
        x, row_dims, None, weight, bias, input_bias, None, False, 0.0, 0.0, target_variance,
        dy.dtype,
    )  # fmt: skip
    needs = (needs_x, needs_weight, needs_bias, needs_input_bias)
    gradients = plan.backward(dy, dtotal, x, weight, input_bias, stats, needs)
    dx, dweight, dbias, dinput_bias = (x.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight, dbias, dinput_bias


@fake(_backward)
def _(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    stats: Tensor,
    row_dims: int,
    target_variance: float,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_input_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from normplug._ops import layer_norm_gpu as gpu

    vectors = (weight, bias, input_bias)
    needs = (needs_weight, needs_bias, needs_input_bias)
    dweight, dbias, dinput_bias = (
        t.new_empty(t.shape) if need and t is not None else x.new_empty(0)
        for t, need in zip(vectors, needs, strict=True)
    )
    if not needs_x:
        return x.new_empty(0), dweight, dbias, dinput_bias
    rows, width = _rows(x, row_dims), math.prod(x.shape[x.dim() - row_dims :])
    spacing = gpu.row_spacing(x.shape, x.stride(), row_dims)
    dx = torch.empty_like(x) if gpu.lies_dense(spacing, rows, width) else x.new_empty(x.shape)
    return dx, dweight, dbias, dinput_bias


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, row_dims, _, target_variance, _ = inputs
        y, stats = _forward(*inputs)
        ctx.save_for_backward(*tensors, stats)
        ctx.options = (row_dims, target_variance)
        ctx.mark_non_differentiable(stats)
        return y, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:4]
        gradients = _backward(dy, None, *ctx.saved_tensors, *ctx.options, *needs)
        asked = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*asked, None, None, None, None)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, residual, weight, bias, row_dims, _, target_variance, _ = inputs
        y, total, stats = _forward_add(*inputs)
        ctx.save_for_backward(total, weight, bias, stats)
        ctx.options = (row_dims, target_variance)
        ctx.dtypes = (x.dtype, residual.dtype)
        if any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(stats)
        else:
            ctx.mark_non_differentiable(total, stats)
        return y, total, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        total, weight, bias, stats = ctx.saved_tensors
        for_x, for_residual, for_weight, for_bias = ctx.needs_input_grad[:4]
        needs = (for_x or for_residual, for_weight, for_bias, False)
        through, dweight, dbias, _ = _backward(
            dy, dtotal, total, weight, bias, None, stats, *ctx.options, *needs
        )
        # Two gradients of one operator, of which compilers want that they do not share memory.
        dx = through.to(ctx.dtypes[0]) if for_x else None
        dresidual = through.to(ctx.dtypes[1]) if for_residual else None
        asked = (dx, dresidual, dweight if for_weight else None, dbias if for_bias else None)
        return (*asked, None, None, None, None)


_differentiable = differentiable("layer_norm", _forward, _LayerNorm)
_differentiable_add = differentiable("add_layer_norm", _forward_add, _AddLayerNorm)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    normalized_shape: tuple[int, ...],
    momentum: float | None,
    eps: float,
    target_variance: float,
    low_autocast: bool,
) -> Tensor:
    """`functional.layer_norm` after its checks, as an operator."""
    out = aten.output_dtype(x, x.dtype, low_autocast)
    y, stats = _differentiable(
        x, weight, bias, input_bias, len(normalized_shape), eps, target_variance, out
    )
    _move(running_mean, running_var, num_batches_tracked, momentum, stats, eps)
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    normalized_shape: tuple[int, ...],
    momentum: float | None,
    eps: float,
    target_variance: float,
    low_autocast: bool,
) -> tuple[Tensor, Tensor]:
    """`functional.add_layer_norm` after its checks, as an operator."""
    out = aten.output_dtype(x, torch.promote_types(x.dtype, residual.dtype), low_autocast)
    y, total, stats = _differentiable_add(
        x, residual, weight, bias, len(normalized_shape), eps, target_variance, out
    )
    _move(running_mean, running_var, num_batches_tracked, momentum, stats, eps)
    return y, total


def _move(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    stats: Tensor,
    eps: float,
) -> None:
    """Move the running statistics, where there are any, towards the rows'."""
    if running_mean is None or running_var is None:
        return
    step = aten.count_batch(running_mean, num_batches_tracked, momentum)
    with torch.no_grad():
        mean, rstd = stats.chunk(2)
        var = (rstd.pow(-2).mean() - eps).clamp_min(0)
        running_mean.lerp_(mean.mean().to(running_mean.dtype), step)
        running_var.lerp_(var.to(running_var.dtype), step)
