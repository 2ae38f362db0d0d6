"""BatchNorm's kernels as operators of `torch.library`, for compilers: opaque, with gradients.

Eager calls do not come here: dispatching an operator costs more than launching a kernel. What a
call does not return is an empty tensor. The running statistics are moved by torch operations beside
the operator, which a compiler fuses, and which leaves the operator without side effects.
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


@operator("batch_norm_forward")
def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    target_variance: float,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, stats (mean and rstd of the channels, (2 * C,)), and relu's signs in bits."""
    from normplug._ops.batch_norm import eager as gpu

    plan, x, residual = gpu.plan_of(
        x, weight, bias, residual, None if training else running_mean, False, training, 0.0, eps,
        target_variance, activation,
    )  # fmt: skip
    y, stats, bits = plan.forward(x, weight, bias, residual, running_mean, running_var, None)
    return y, stats, x.new_empty(0, dtype=torch.uint8) if bits is None else bits


@fake(_forward)
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    eps: float,
    target_variance: float,
    activation: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from normplug._ops.batch_norm import eager as gpu

    x = gpu.dense(x)
    n, c, hw = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    stats = x.new_empty(2 * c, dtype=accumulator_dtype(x.dtype))
    count = 0
    if residual is not None and activation == "relu":
        count = gpu.schedule.mask_bytes(n, c, hw, not x.is_contiguous(), x.element_size())
    return torch.empty_like(x), stats, x.new_empty(count, dtype=torch.uint8)


@operator("batch_norm_backward")
def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stats: Tensor,
    bits: Tensor,
    has_residual: bool,
    training: bool,
    eps: float,
    target_variance: float,
    activation: str | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, bias and residual; empty where not needed."""
    from normplug._ops.batch_norm import eager as gpu

    stand_in = x if has_residual else None
    running = None if training else stats
    plan, x, _ = gpu.plan_of(
        x, weight, bias, stand_in, running, False, training, 0.0, eps, target_variance, activation
    )
    signs = bits if bits.numel() else None
    wanted = (needs_x, needs_weight, needs_bias, needs_residual)
    gradients = plan.backward(dy, x, weight, bias, residual, stats, signs, wanted)
    dx, dweight, dbias, dresidual = (x.new_empty(0) if g is None else g for g in gradients)
    return dx, dweight, dbias, dresidual


@fake(_backward)
def _(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stats: Tensor,
    bits: Tensor,
    has_residual: bool,
    training: bool,
    eps: float,
    target_variance: float,
    activation: str | None,
    needs_x: bool,
    needs_weight: bool,
    needs_bias: bool,
    needs_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from normplug._ops.batch_norm import eager as gpu

    like = (gpu.dense(x), weight, bias, gpu.dense(x))
    needs = (needs_x, needs_weight, needs_bias, needs_residual)
    dx, dweight, dbias, dresidual = (
        torch.empty_like(t) if need and t is not None else x.new_empty(0)
        for t, need in zip(like, needs, strict=True)
    )
    return dx, dweight, dbias, dresidual


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, bias, residual, _, _, *options = inputs
        y, stats, bits = _forward(*inputs)
        kept = residual if options[-1] not in (None, "relu") else None
        ctx.save_for_backward(x, weight, bias, kept, stats, bits)
        ctx.has_residual, ctx.options = residual is not None, options
        ctx.mark_non_differentiable(stats, bits)
        return y, stats, bits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, residual, stats, bits = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:4])
        alias = ctx.has_residual and ctx.options[-1] is None and needs[3]
        if alias:  # the residual's gradient is dy, which an operator must not hand on
            needs[3] = False
        gradients = _backward(
            dy, x, weight, bias, residual, stats, bits, ctx.has_residual, *ctx.options, *needs
        )
        asked = [g if need else None for g, need in zip(gradients, needs, strict=True)]
        if alias:
            asked[3] = dy
        return (*asked, None, None, None, None, None, None)


_differentiable = differentiable("batch_norm", _forward, _BatchNorm)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    activation: str | None,
) -> Tensor:
    """`functional.batch_norm` after its checks, as an operator."""
    evaluating = (None, None) if training else (running_mean, running_var)
    y, stats, _ = _differentiable(
        x, weight, bias, residual, *evaluating, training, eps, target_variance, activation
    )
    if training and running_mean is not None and running_var is not None:
        move_running(x, stats, running_mean, running_var, num_batches_tracked, momentum, eps)
    return y


def move_running(
    x: Tensor,
    stats: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> None:
    """Take the running statistics one step to those of x, of which stats are mean and rstd."""
    step = aten.count_batch(running_mean, num_batches_tracked, momentum)
    n = x.numel() // x.shape[1]
    with torch.no_grad():
        mean, rstd = stats.chunk(2)
        var = (rstd.pow(-2) - eps) * (n / (n - 1))
        running_mean.lerp_(mean.to(running_mean.dtype), step)
        running_var.lerp_(var.to(running_var.dtype), step)
