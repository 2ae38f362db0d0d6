"""LayerNorm's kernels as operators of `torch.library`, for compilers: opaque, with gradients.

As `batch_norm_library`, but for the running statistics, which the operators move: the mean over all
rows of what a kernel finds in each would take a compiler kernels of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normplug._ops import aten
from normplug._ops.library import differentiable, fake, operator
from normplug.reference import accumulator_dtype

_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def _accumulator(*tensors: Tensor | None) -> torch.dtype:
    return accumulator_dtype(*(t.dtype for t in tensors if t is not None))


def _rows(x: Tensor, row_dims: int) -> int:
    return math.prod(x.shape[: x.dim() - row_dims])


@operator("layer_norm_forward", changes=_RUNNING)
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    row_dims: int,
    momentum: float | None,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """y, and stats: mean and rstd of the rows, (2 * rows,)."""
    from normplug._ops.layer_norm import eager as gpu

    running = (running_mean, running_var, num_batches_tracked)
    plan, x, _ = gpu.plan_of(
        x, row_dims, None, weight, bias, input_bias, *running, momentum, eps, target_variance, out
    )
    y, _, stats = plan.forward(x, None, weight, bias, input_bias, *running, keep=True)
    return y, stats


@fake(_forward)
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    row_dims: int,
    momentum: float | None,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor]:
    stats = x.new_empty(2 * _rows(x, row_dims), dtype=_accumulator(x, weight, bias, input_bias))
    return x.new_empty(x.shape, dtype=out), stats


@operator("add_layer_norm_forward", changes=_RUNNING)
def _forward_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    row_dims: int,
    momentum: float | None,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the total, and stats."""
    from normplug._ops.layer_norm import eager as gpu

    running = (running_mean, running_var, num_batches_tracked)
    plan, x, beside = gpu.plan_of(
        x, row_dims, residual, weight, bias, None, *running, momentum, eps, target_variance, out
    )
    y, total, stats = plan.forward(x, beside, weight, bias, None, *running, keep=True)
    assert total is not None
    return y, total, stats


@fake(_forward_add)
def _(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    row_dims: int,
    momentum: float | None,
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
    from normplug._ops.layer_norm import eager as gpu

    plan, x, _ = gpu.plan_of(
        x, row_dims, None, weight, bias, input_bias, None, None, None, 0.0, 0.0, target_variance,
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
    from normplug._ops.layer_norm import eager as gpu

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
        *tensors, row_dims, _, _, target_variance, _ = inputs
        y, stats = _forward(*inputs)
        ctx.save_for_backward(*tensors[:4], stats)
        ctx.options = (row_dims, target_variance)
        ctx.mark_non_differentiable(stats)
        return y, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[:4]
        gradients = _backward(dy, None, *ctx.saved_tensors, *ctx.options, *needs)
        asked = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*asked, *[None] * 8)


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, residual, weight, bias, *_, row_dims, _, _, target_variance, _ = inputs
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
        return (*asked, *[None] * 8)


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
    shape, row_dims = x.shape, len(normalized_shape)
    if _are_images(row_dims, x):
        x = x.flatten(0, -1 - row_dims)
    running = (running_mean, running_var, num_batches_tracked)
    y, _ = _differentiable(
        x, weight, bias, input_bias, *running, row_dims, momentum, eps, target_variance, out
    )
    return y.view(shape)


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
    shape, row_dims = x.shape, len(normalized_shape)
    if _are_images(row_dims, x, residual):
        x, residual = x.flatten(0, -1 - row_dims), residual.flatten(0, -1 - row_dims)
    running = (running_mean, running_var, num_batches_tracked)
    y, total, _ = _differentiable_add(
        x, residual, weight, bias, *running, row_dims, momentum, eps, target_variance, out
    )
    return y.view(shape), total.view(shape)


def _are_images(row_dims: int, *tensors: Tensor) -> bool:
    """Whether these are rows in a grid, (N, H, W, C) or more, that follow each other.

    Such a tensor goes to the operator as a matrix. With four dimensions Inductor would lay it out
    as images with channels at dimension 1 where it keeps it for the backward, and copy it besides.
    """
    return all(t.dim() > row_dims + 2 and t.is_contiguous() for t in tensors)
