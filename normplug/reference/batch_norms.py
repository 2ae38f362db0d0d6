"""BatchNorm: each channel over batch and space."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normplug.reference.numerics import (
    Gradients,
    Normalized,
    accumulator_dtype,
    channel_dims,
    per_channel,
)


def batch_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
    mean: Tensor | None = None,
    var: Tensor | None = None,
) -> Normalized:
    """Normalise each channel of `x` (N, C, ...) over batch and space.

    Args:
        x: (N, C) or (N, C, *space).
        weight: (C,), or None for ones.
        bias: (C,), or None for zeros.
        eps: added to the variance, before the root.
        target_variance: the variance of the output where `weight` is 1.
        mean: (C,), given together with `var` in eval mode; None for the batch's own mean.
        var: (C,), see `mean`.

    Returns:
        y in the dtype of `x`; the (C,) mean and biased variance used, in the accumulator's dtype.
    """
    x_acc = x.to(accumulator_dtype(x.dtype))
    if mean is None or var is None:
        var, mean = torch.var_mean(x_acc, dim=channel_dims(x), correction=0)
    mean, var = mean.to(x_acc.dtype), var.to(x_acc.dtype)
    xhat = (x_acc - per_channel(mean, x)) * per_channel(torch.rsqrt(var + eps), x)
    y = xhat * math.sqrt(target_variance)
    if weight is not None:
        y = y * per_channel(weight.to(y.dtype), x)
    if bias is not None:
        y = y + per_channel(bias.to(y.dtype), x)
    return Normalized(y.to(x.dtype), mean, var)


def batch_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
    training: bool = True,
) -> Gradients:
    """The gradients of `batch_norm`, given its `mean` and `var`.

    Args:
        dy: gradient of y, shaped like `x`.
        x: the forward's input.
        weight: the forward's weight, or None for ones.
        mean: (C,), as the forward returned it.
        var: (C,), as the forward returned it.
        eps: as in the forward.
        target_variance: as in the forward.
        training: True where `mean` and `var` came from `x`, False where they are constants.

    Returns:
        dx in the dtype of `x`; dweight and dbias, (C,), in the accumulator's dtype.
    """
    acc = accumulator_dtype(x.dtype)
    dims = channel_dims(x)
    rstd = per_channel(torch.rsqrt(var.to(acc) + eps), x)
    xhat = (x.to(acc) - per_channel(mean.to(acc), x)) * rstd
    dy, scale = dy.to(acc), math.sqrt(target_variance)
    g = dy * scale if weight is None else dy * scale * per_channel(weight.to(acc), x)
    dx = g
    if training:
        dx = g - g.mean(dims, keepdim=True) - xhat * (g * xhat).mean(dims, keepdim=True)
    return Gradients((dx * rstd).to(x.dtype), (dy * xhat).sum(dims) * scale, dy.sum(dims))
