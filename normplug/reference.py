"""Each formula of normplug in plain torch, forward and backward by hand: the oracle and the text.

Letters: tv is the target variance, n the number of values that share a mean (all of a channel for
BatchNorm, all of a row for LayerNorm, all of a sample's group of channels for GroupNorm, all of a
sample's channel for InstanceNorm), mean() the mean over those n values.

    var  = mean((x - mean(x))^2)                      divided by n, not by n - 1
    xhat = (x - mean) * rstd                          rstd = 1 / sqrt(var + eps)
    y    = weight * sqrt(tv) * xhat + bias            so that var(y) = tv where weight is 1

With dy given and g = dy * weight * sqrt(tv):

    dx      = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dweight = sqrt(tv) * sum(dy * xhat)
    dbias   = sum(dy)

Where the statistics are constants (BatchNorm in eval mode, and InstanceNorm that has running
statistics) dx = rstd * g.

RMSNorm does not centre: mean(x) is replaced by 0, and mean(g) in dx by 0. So tv is its target
*second moment*: mean(y^2) = tv where weight is 1, which is the variance of y only if its mean is 0.

Sources: Ioffe and Szegedy 2015 (arXiv:1502.03167) for BatchNorm, Ba et al. 2016 (arXiv:1607.06450)
for LayerNorm, Zhang and Sennrich 2019 (arXiv:1910.07467) for RMSNorm, Wu and He 2018
(arXiv:1803.08494) for GroupNorm, Ulyanov et al. 2016 (arXiv:1607.08022) for InstanceNorm; the
factor sqrt(tv) is normplug's own.

Any device and floating dtype. The arithmetic is in float64 for float64 input and in float32 for
every other; results are rounded once, to the dtype of `x`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Normalized(NamedTuple):
    """A norm's output with the statistics that made it."""

    y: Tensor
    mean: Tensor
    var: Tensor


class Rescaled(NamedTuple):
    """The output of a norm that does not centre, with the second moment that made it."""

    y: Tensor
    moment: Tensor


class Gradients(NamedTuple):
    """The gradients of a norm's inputs."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def accumulator_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The dtype sums are carried in: float64 where one of `dtypes` is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


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
        mean: (C,), given together with `var` in eval mode; None takes the batch's own.
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
        normalized_shape: the trailing dimensions that make a row.
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
        normalized_shape: the trailing dimensions that make a row.
        weight: `normalized_shape`, or None for a factor of one, whatever `weight_offset` is.
        eps: added to the second moment, before the root; None for the machine epsilon of the dtype
            that the arithmetic is in.
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
    """The eps of an RMSNorm of input of this dtype: as given, or the accumulator's epsilon.

    As in `torch.nn.functional.rms_norm` since torch 2.7; before, it was that of half input itself.
    """
    return torch.finfo(accumulator_dtype(dtype)).eps if eps is None else eps


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
) -> Normalized:
    """Normalise each group of adjacent channels of each sample of `x`, over them and space.

    Args:
        x: (N, C) or (N, C, *space).
        groups: how many groups the C channels make.
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
    """Normalise each channel of each sample of `x` over space: its groups are its channels.

    With running statistics in eval mode, (C,) `mean` and `var`, it is `batch_norm`. The other
    arguments and the result are those of `group_norm`; so is the backward.
    """
    options = {"eps": eps, "target_variance": target_variance}
    if mean is not None and var is not None:
        return batch_norm(x, weight, bias, mean=mean, var=var, **options)
    return group_norm(x, x.shape[1], weight, bias, **options)


def activation(pre: Tensor, name: str | None) -> Tensor:
    """relu: max(z, 0).  relu6: min(max(z, 0), 6).  hardswish: z * relu6(z + 3) / 6.

    silu: z * sigmoid(z).  gelu: z * Phi(z), exact.  None: z.
    """
    if name is None:
        return pre
    if name == "relu":
        return pre.clamp_min(0)
    if name == "silu":
        return pre * torch.sigmoid(pre)
    if name == "relu6":
        return pre.clamp(0, 6)
    if name == "hardswish":
        return pre * (pre + 3).clamp(0, 6) / 6
    return pre * _normal_cdf(pre)


def activation_backward(dy: Tensor, pre: Tensor, name: str | None) -> Tensor:
    """The gradient of `activation` at `pre`; where relu and relu6 bend it is 0, as in torch."""
    if name is None:
        return dy
    if name == "relu":
        return dy * (pre > 0)
    if name == "silu":
        gate = torch.sigmoid(pre)
        return dy * gate * (1 + pre * (1 - gate))
    if name == "relu6":
        return dy * ((pre > 0) & (pre < 6))
    if name == "hardswish":
        slope = torch.where(pre < 3, pre / 3 + 0.5, 1.0)
        return dy * torch.where(pre > -3, slope, 0.0)
    density = torch.exp(-0.5 * pre * pre) / math.sqrt(2 * math.pi)
    return dy * (_normal_cdf(pre) + pre * density)


def running_average(running: Tensor, value: Tensor, momentum: float | None, count: int) -> Tensor:
    """The next moving average: exponential, or over all `count` batches where momentum is None.

    running_next = (1 - m) * running + m * value        m = momentum, or 1 / count
    """
    m = 1.0 / count if momentum is None else momentum
    return (1.0 - m) * running + m * value


def channel_dims(x: Tensor) -> tuple[int, ...]:
    """Batch and space: the dimensions over which a channel is normalised."""
    return (0, *range(2, x.dim()))


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """(C,) values, shaped to broadcast over `x`."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))


def _by_group(x: Tensor, groups: int) -> tuple[int, int, int]:
    return x.shape[0], groups, math.prod(x.shape[1:]) // groups


def _row_dims(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))
