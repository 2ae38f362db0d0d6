"""Update the running statistics of a GroupNorm or an InstanceNorm, by torch operations."""

from __future__ import annotations

from torch import Tensor

from normplug._ops import statistics
from normplug._ops.spec import GroupNormSpec, Tensors


def update_running(t: Tensors, spec: GroupNormSpec, mean: Tensor, var: Tensor) -> None:
    """Update a call's running statistics, which must not be None, by those of its groups.

    An InstanceNorm's are updated as torch does: by each channel's mean and *unbiased* variance,
    averaged over the samples. A GroupNorm's are scalars that are only watched: they are updated by
    the mean and biased variance, averaged over all groups.

    Args:
        t: the call's tensors.
        spec: the call's non-tensor arguments.
        mean: of the groups, (N, groups), without gradients.
        var: biased, likewise.
    """
    if spec.instance:
        values = t.x.numel() // mean.numel()
        mean, var = mean.mean(0), var.mean(0) * (values / (values - 1))
    else:
        mean, var = mean.mean(), var.mean()
    statistics.update(t, spec.momentum, mean, var)


def moments(t: Tensors, spec: GroupNormSpec, stats: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of the groups, each (N, groups), from the kernels' stats.

    stats: mean, then rstd, of the groups, (2 * N * groups,).
    """
    mean, rstd = stats.detach().view(2, t.x.shape[0], spec.groups)
    return mean, statistics.variance_of(rstd, spec.eps)
