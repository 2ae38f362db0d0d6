"""Every formula of normplug in plain torch, with the backward derived by hand: the tests' oracle.

Symbols: tv is the target variance, n the number of values that share a mean (all of a channel for
BatchNorm, all of a row for LayerNorm, all of a sample's group of channels for GroupNorm, all of a
sample's channel for InstanceNorm), mean() the mean over those n values.

    var  = mean((x - mean(x))^2)                      divided by n, not by n - 1
    xhat = (x - mean) * rstd                          rstd = 1 / sqrt(var + eps)
    y    = weight * sqrt(tv) * xhat + bias            so that var(y) = tv where weight is 1

With dy given and g = dy * weight * sqrt(tv):

    dx      = rstd * (g - mean(g) - xhat * mean(g * xhat))
    dweight = sqrt(tv) * sum(dy * xhat)
    dbias   = sum(dy)

Where the statistics are constants (BatchNorm in eval mode, and InstanceNorm with running statistics
in eval mode), dx = rstd * g.

RMSNorm does not centre: mean(x) is replaced by 0, and mean(g) in dx by 0. So tv is its target
*second moment*: mean(y^2) = tv where weight is 1, which is the variance of y only if its mean is 0.

Sources: Ioffe and Szegedy 2015 (arXiv:1502.03167) for BatchNorm, Ba et al. 2016 (arXiv:1607.06450)
for LayerNorm, Zhang and Sennrich 2019 (arXiv:1910.07467) for RMSNorm, Wu and He 2018
(arXiv:1803.08494) for GroupNorm, Ulyanov et al. 2016 (arXiv:1607.08022) for InstanceNorm; the
factor sqrt(tv) is normplug's own.

All functions take any device and floating dtype. The arithmetic is in float64 for float64 input and
in float32 for every other; results are rounded once, to the dtype of `x`.

These modules import nothing else of normplug, since all other code is tested against them.
"""

from __future__ import annotations

from normplug.reference.activations import activation, activation_backward
from normplug.reference.batch_norms import batch_norm, batch_norm_backward
from normplug.reference.group_norms import group_norm, group_norm_backward, instance_norm
from normplug.reference.numerics import (
    Gradients,
    Normalized,
    Rescaled,
    accumulator_dtype,
    channel_dims,
    per_channel,
    running_average,
)
from normplug.reference.row_norms import (
    layer_norm,
    layer_norm_backward,
    rms_eps,
    rms_norm,
    rms_norm_backward,
)

__all__ = [
    "accumulator_dtype",
    "activation",
    "activation_backward",
    "batch_norm",
    "batch_norm_backward",
    "channel_dims",
    "group_norm",
    "group_norm_backward",
    "instance_norm",
    "layer_norm",
    "layer_norm_backward",
    "per_channel",
    "rms_eps",
    "rms_norm",
    "rms_norm_backward",
    "running_average",
    "Gradients",
    "Normalized",
    "Rescaled",
]
