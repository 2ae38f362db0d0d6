"""LayerNorm and RMSNorm: each row, over the trailing dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normplug.reference.numerics import Gradients, Normalized, Rescaled, accumulator_dtype


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
) -> Normalized:
    """Normalise each row of `x` over its trailing `normalized_shape`.

    Args:
        x: (*rows, *normalized_shape).
        normalized_shape: the trailing dimensions that form a row.
        weight: `normalized_shape`, or None for ones.
        bias: `normalized_shape`, or None for zeros.
        eps: added to the variance, before the root.
        target_variance: the variance of each output row where `weight` is 1.

    Returns:
        y in the dtype of `x`; mean and biased variance, (*rows), in the accumulator's dtype.
    """
    dims = _row_dims(normalized_shape)
    x_acc = x.to(accumulator_dtype(x.dtype))
    var, mean = torch.var_mean(x_acc, dim=dims, correction=0, keepdim=True)
    y = (x_acc - mean) * torch.rsqrt(var + eps) * math.sqrt(target_variance)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    rows = x.shape[: x.dim() - len(dims)]
    return Normalized(y.to(x.dtype), mean.reshape(rows), var.reshape(rows))


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
) -> Gradients:
    """The gradients of `layer_norm`.

    Args:
        dy: gradient of y, shaped like `x`.
        x: the forward's input.
        normalized_shape: as in the forward.
        weight: the forward's weight, or None for ones.
        eps: as in the forward.
        target_variance: as in the forward.

    Returns:
        dx in the dtype of `x`; dweight and dbias, `normalized_shape`, in the accumulator's dtype.
    """
    acc, dims = accumulator_dtype(x.dtype), _row_dims(normalized_shape)
    rows = tuple(range(x.dim() - len(dims)))
    var, mean = torch.var_mean(x.to(acc), dim=dims, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + eps)
    xhat = (x.to(acc) - mean) * rstd
    dy, scale = dy.to(acc), math.sqrt(target_variance)
    g = dy * scale if weight is None else dy * scale * weight.to(acc)
    dx = rstd * (g - g.mean(dims, keepdim=True) - xhat * (g * xhat).mean(dims, keepdim=True))
    if not rows:
        return Gradients(dx.to(x.dtype), dy * xhat * scale, dy)
    return Gradients(dx.to(x.dtype), (dy * xhat).sum(rows) * scale, dy.sum(rows))


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    target_variance: float = 1.0,
    weight_offset: float = 0.0,
) -> Rescaled:
    """Divide each row of `x` by its root mean square over the trailing `normalized_shape`.

        y = (weight + weight_offset) * sqrt(tv) * x / sqrt(mean(x^2) + eps)

    Args:
        x: (*rows, *normalized_shape).
        normalized_shape: the trailing dimensions that form a row.
        weight: `normalized_shape`, or None for a factor of one, whatever `weight_offset` is.
        eps: added to the second moment, before the root; None for the machine epsilon of the
            accumulator's dtype.
        target_variance: the second moment of each output row where the factor is 1.
        weight_offset: added to `weight`.

    Returns:
        y in the dtype of `x`; the second moment mean(x^2), (*rows), in the accumulator's dtype.
    """
    dims = _row_dims(normalized_shape)
    x_acc = x.to(accumulator_dtype(x.dtype))
    moment = x_acc.square().mean(dims, keepdim=True)
    y = x_acc * torch.rsqrt(moment + rms_eps(x.dtype, eps)) * math.sqrt(target_variance)
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    return Rescaled(y.to(x.dtype), moment.reshape(x.shape[: x.dim() - len(dims)]))


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    *,
    eps: float | None = None,
    target_variance: float = 1.0,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The gradients of `rms_norm`.

    Args:
        dy: gradient of y, shaped like `x`.
        x: the forward's input.
        normalized_shape: as in the forward.
        weight: the forward's weight, or None for a factor of one.
        eps: as in the forward.
        target_variance: as in the forward.
        weight_offset: as in the forward.

    Returns:
        dx in the dtype of `x`; dweight, `normalized_shape`, in the accumulator's dtype.
    """
    acc, dims = accumulator_dtype(x.dtype), _row_dims(normalized_shape)
    rows = tuple(range(x.dim() - len(dims)))
    moment = x.to(acc).square().mean(dims, keepdim=True)
    rstd = torch.rsqrt(moment + rms_eps(x.dtype, eps))
    xhat = x.to(acc) * rstd
    dy, scale = dy.to(acc), math.sqrt(target_variance)
    g = dy * scale if weight is None else dy * scale * (weight.to(acc) + weight_offset)
    dx = rstd * (g - xhat * (g * xhat).mean(dims, keepdim=True))
    dweight = dy * xhat * scale
    return dx.to(x.dtype), dweight.sum(rows) if rows else dweight


def rms_eps(dtype: torch.dtype, eps: float | None) -> float:
    """The eps of an RMSNorm for input of this dtype: as given, or the accumulator's epsilon.

    As in `torch.nn.functional.rms_norm` since torch 2.7; before, half input had its own epsilon.
    """
    return torch.finfo(accumulator_dtype(dtype)).eps if eps is None else eps


def _row_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))
