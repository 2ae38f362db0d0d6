"""GroupNorm and InstanceNorm: each group of channels of each sample, over space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normplug.reference.batch_norms import batch_norm
from normplug.reference.numerics import (
    Gradients,
    Normalized,
    accumulator_dtype,
    channel_dims,
    per_channel,
)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
) -> Normalized:
    """Normalise each group of adjacent channels of each sample of `x`, over channels and space.

    Args:
        x: (N, C) or (N, C, *space).
        groups: the number of groups that the C channels form.
        weight: (C,), or None for ones.
        bias: (C,), or None for zeros.
        eps: added to the variance, before the root.
        target_variance: the variance of each group of the output where `weight` is 1.

    Returns:
        y in the dtype of `x`; mean and biased variance, (N, groups), in the accumulator's dtype.
    """
    rows = x.to(accumulator_dtype(x.dtype)).reshape(_by_group(x, groups))
    var, mean = torch.var_mean(rows, dim=-1, correction=0, keepdim=True)
    y = ((rows - mean) * torch.rsqrt(var + eps) * math.sqrt(target_variance)).reshape(x.shape)
    if weight is not None:
        y = y * per_channel(weight.to(y.dtype), x)
    if bias is not None:
        y = y + per_channel(bias.to(y.dtype), x)
    return Normalized(y.to(x.dtype), mean.squeeze(-1), var.squeeze(-1))


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
) -> Gradients:
    """The gradients of `group_norm`.

    Args:
        dy: gradient of y, shaped like `x`.
        x: the forward's input.
        groups: as in the forward.
        weight: the forward's weight, or None for ones.
        eps: as in the forward.
        target_variance: as in the forward.

    Returns:
        dx in the dtype of `x`; dweight and dbias, (C,), in the accumulator's dtype.
    """
    acc, dims, by_group = accumulator_dtype(x.dtype), channel_dims(x), _by_group(x, groups)
    rows = x.to(acc).reshape(by_group)
    var, mean = torch.var_mean(rows, dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    xhat = (rows - mean) * rstd
    dy, scale = dy.to(acc), math.sqrt(target_variance)
    g = dy * scale if weight is None else dy * scale * per_channel(weight.to(acc), x)
    g = g.reshape(by_group)
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    dweight = (dy * xhat.reshape(x.shape)).sum(dims) * scale
    return Gradients(dx.reshape(x.shape).to(x.dtype), dweight, dy.sum(dims))


def instance_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Normalized:
    """Normalise each channel of each sample of `x` over space: `group_norm` with C groups.

    With running statistics in eval mode, (C,) `mean` and `var`, it is `batch_norm`. The other
    arguments, the result and the backward are those of `group_norm`.
    """
    options = {"eps": eps, "target_variance": target_variance}
    if mean is not None and var is not None:
        return batch_norm(x, weight, bias, mean=mean, var=var, **options)
    return group_norm(x, x.shape[1], weight, bias, **options)


def _by_group(x: Tensor, groups: int) -> tuple[int, int, int]:
    return x.shape[0], groups, math.prod(x.shape[1:]) // groups
