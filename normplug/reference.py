"""Every formula of normplug in plain torch: the oracle of the tests and of `normplug.check`.

Symbols: tv is the target variance, n the number of values that share a mean (all of a channel for
BatchNorm, all of a row for LayerNorm, all of a sample's group of channels for GroupNorm, all of a
sample's channel for InstanceNorm), mean() the mean over those n values.

    var  = mean((x - mean(x))^2)                      divided by n, not by n - 1
    xhat = (x - mean) * rstd                          rstd = 1 / sqrt(var + eps)
    y    = weight * sqrt(tv) * xhat + bias            so that var(y) = tv where weight is 1

The tests take gradients by autograd. With dy given and g = dy * weight * sqrt(tv), they are

    dx      = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dweight = sqrt(tv) * sum(dy * xhat)
    dbias   = sum(dy)

Where the statistics are constants (BatchNorm in eval mode, and InstanceNorm with running statistics
in eval mode), dx = rstd * g.

RMSNorm does not centre: mean(x) is replaced by 0, and mean(g) in dx by 0. So tv is its target
*second moment*: mean(y^2) = tv where weight is 1, which is the variance of y only if its mean is 0.

Sources: Ioffe and Szegedy 2015 (arXiv:1502.03167) for BatchNorm, Ba et al. 2016 (arXiv:1607.06450)
for LayerNorm, Zhang and Sennrich 2019 (arXiv:1910.07467) for RMSNorm, Wu and He 2018
(arXiv:1803.08494) for GroupNorm, Ulyanov et al. 2016 (arXiv:1607.08022) for InstanceNorm;
Peebles and Xie 2022 (arXiv:2212.09748) for the scale and shift of a sample, Dao and Gu 2024
(arXiv:2405.21060) for gates and groups of rows; the factor sqrt(tv) is normplug's own.

Every norm takes these arguments besides its own:

    x                the input
    weight, bias     of the shape that the norm says; None for ones and zeros
    eps              added to the variance, before the root
    target_variance  the variance of the output where the weight is 1

It returns y in the dtype of `x`, and the mean and biased variance that it normalised by, in the
accumulator's dtype. Any device and floating-point dtype works. The arithmetic is in float64 for
float64 input and in float32 for every other; y is rounded once.

This module imports nothing else of normplug, since all other code is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Normalized(NamedTuple):
    """A norm's output, and the statistics that it was normalised by."""

    y: Tensor
    mean: Tensor
    var: Tensor


class Rescaled(NamedTuple):
    """The output of a norm that does not centre, and the second moment used."""

    y: Tensor
    moment: Tensor


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
    """Normalise each channel of `x` over batch and space.

    Shapes: x (N, C) or (N, C, *space); weight, bias and the statistics (C,).

    `mean` and `var` are given together in eval mode; None for the batch's own.
    """
    x_acc = x.to(accumulator_dtype(x.dtype))
    if mean is None or var is None:
        var, mean = torch.var_mean(x_acc, dim=channel_dims(x), correction=0)
    mean, var = mean.to(x_acc.dtype), var.to(x_acc.dtype)
    xhat = (x_acc - per_channel(mean, x)) * per_channel(torch.rsqrt(var + eps), x)
    y = _affine(
        xhat * math.sqrt(target_variance), weight, bias, (-1, *[1] * (x.dim() - 2))
    )
    return Normalized(y.to(x.dtype), mean, var)


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

    Shapes: x (N, C) or (N, C, *space); weight and bias (C,); the statistics (N, groups).

    `groups` is the number of groups that the C channels form.
    """
    by_group = x.shape[0], groups, math.prod(x.shape[1:]) // groups
    rows = x.to(accumulator_dtype(x.dtype)).reshape(by_group)
    y, mean, var = layer_norm(
        rows, by_group[2:], eps=eps, target_variance=target_variance
    )
    y = _affine(y.reshape(x.shape), weight, bias, (-1, *[1] * (x.dim() - 2)))
    return Normalized(y.to(x.dtype), mean, var)


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

    With running statistics in eval mode, (C,) `mean` and `var`, it is `batch_norm`.
    """
    options = {"eps": eps, "target_variance": target_variance}
    if mean is not None and var is not None:
        return batch_norm(x, weight, bias, mean=mean, var=var, **options)
    return group_norm(x, x.shape[1], weight, bias, **options)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    target_variance: float = 1.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Normalized:
    """Normalise each row of `x` over its trailing `normalized_shape`.

    Shapes: x (*rows, *normalized_shape); weight and bias `normalized_shape`; the statistics
    (*rows).

    `scale` and `shift`, which broadcast to x, turn y into y * (1 + scale) + shift; None for zeros.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    x_acc = x.to(accumulator_dtype(x.dtype))
    var, mean = torch.var_mean(x_acc, dim=dims, correction=0, keepdim=True)
    y = (x_acc - mean) * torch.rsqrt(var + eps) * math.sqrt(target_variance)
    y = _adapted(_affine(y, weight, bias, normalized_shape), scale, shift)
    rows = x.shape[: x.dim() - len(dims)]
    return Normalized(y.to(x.dtype), mean.reshape(rows), var.reshape(rows))


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    target_variance: float = 1.0,
    weight_offset: float = 0.0,
    gate: Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Rescaled:
    """Divide each row of `x` by its root mean square over the trailing `normalized_shape`.

        y = (weight + weight_offset) * sqrt(tv) * x / sqrt(mean(x^2) + eps)

    Shapes: x (*rows, *normalized_shape); weight `normalized_shape`; the second moment, which it
    returns as the only statistic, (*rows).

    An eps of None is the machine epsilon of the accumulator's dtype. The target variance is the
    second moment of each output row where the factor, weight + weight_offset, is 1. Without weight
    the factor is 1, whatever `weight_offset` is.

    `gate`, of the shape of x, multiplies y by silu(gate) or, with `gate_first`, x. With a
    `group_size`, a row of one dimension is cut into groups of that many values, each normalised by
    itself; the second moment is then (*rows, groups). `scale` and `shift`: see `layer_norm`.
    """
    dims = tuple(range(-len(normalized_shape), 0))
    x_acc = x.to(accumulator_dtype(x.dtype))
    if gate is not None and gate_first:
        x_acc = x_acc * F.silu(gate.to(x_acc.dtype))
    if group_size is not None:
        x_acc = x_acc.unflatten(-1, (-1, group_size))
    moment = x_acc.square().mean(dims, keepdim=True)
    y = x_acc * torch.rsqrt(moment + rms_eps(x.dtype, eps)) * math.sqrt(target_variance)
    moment = moment.flatten(-len(dims)).squeeze(-1)
    y = y.reshape(x.shape)
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    y = _adapted(y, scale, shift)
    if gate is not None and not gate_first:
        y = y * F.silu(gate.to(y.dtype))
    return Rescaled(y.to(x.dtype), moment)


def rms_eps(dtype: torch.dtype, eps: float | None) -> float:
    """The eps of an RMSNorm for input of this dtype: as given, or the accumulator's epsilon.

    `torch.nn.functional.rms_norm` has this rule since torch 2.7; before, half input had its own.
    """
    return torch.finfo(accumulator_dtype(dtype)).eps if eps is None else eps


def activation(pre: Tensor, name: str | tuple[str, float] | None) -> Tensor:
    """Apply an activation to z = `pre`.

    relu: max(z, 0).  relu6: min(max(z, 0), 6).  hardswish: z * relu6(z + 3) / 6.
    silu: z * sigmoid(z).  gelu: z * Phi(z), exact.  (leaky_relu, slope): z, or slope * z below 0;
    the default slope is 0.01.  None: z.
    """
    if name is None:
        return pre
    if isinstance(name, tuple):
        return F.leaky_relu(pre, name[1])
    return getattr(F, name)(pre)


def accumulator_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The dtype of sums: float64 if any of `dtypes` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def channel_dims(x: Tensor) -> tuple[int, ...]:
    """Batch and space: the dimensions over which a channel is normalised."""
    return (0, *range(2, x.dim()))


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape (C,) values to broadcast over `x`."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _adapted(y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Scale by 1 + scale, and shift."""
    if scale is not None:
        y = y * (1 + scale.to(y.dtype))
    if shift is not None:
        y = y + shift.to(y.dtype)
    return y


def _affine(
    y: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> Tensor:
    """Scale and shift by vectors of this shape."""
    if weight is not None:
        y = y * weight.to(y.dtype).reshape(shape)
    if bias is not None:
        y = y + bias.to(y.dtype).reshape(shape)
    return y
