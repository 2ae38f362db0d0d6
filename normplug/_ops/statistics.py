"""Update running statistics by torch operations.

    step    = momentum, or 1 / number of batches if momentum is None
    running = running + step * (value - running)

The kernels do the same in their last step.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_batch(
    running: Tensor, tracked: Tensor | None, momentum: float | None, counts: Tensor | None = None
) -> float | Tensor:
    """Increment `tracked`, and return the step of the update.

    The step is a tensor if momentum is None. torch.nn makes it a float, for which the host has to
    wait for the GPU.

    Args:
        running: a running statistic, for the dtype of the step.
        tracked: num_batches_tracked, incremented in place, or None.
        momentum: a float, or None for a cumulative average, which needs `tracked`.
        counts: a boolean tensor, whether the batch counts. If not, nothing is updated.
    """
    if tracked is not None:
        tracked.add_(1 if counts is None else counts)
    if momentum is not None:
        return momentum if counts is None else counts.to(running.dtype) * momentum
    assert tracked is not None
    if counts is None:
        return tracked.to(running).reciprocal()
    return counts / tracked.to(running).clamp(min=1)


def variance_of(rstd: Tensor, eps: float) -> Tensor:
    """The variance, recovered from rstd = 1 / sqrt(var + eps).

    It has an error of about 1e-7 * (var + eps) in float32. So it is clamped at 0: an error below
    would make a variance near 0 negative.
    """
    return rstd.pow(-2).sub_(eps).clamp_min_(0)


def update(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, step: float | Tensor
) -> None:
    """Update both running statistics in place, by one step towards those of a batch."""
    update_one(running_mean, mean, step)
    update_one(running_var, var, step)


def update_one(running: Tensor, value: Tensor, step: float | Tensor) -> None:
    """Update a running statistic in place, by one step towards a batch's value."""
    if running.dim() == 0 and running.dtype == torch.float64:
        # On the CPU, torch.compile of torch 2.8 to 2.13 drops writes to such a tensor, but not
        # those to a view of it.
        running = running.view(1)
    running.lerp_(value.to(running.dtype), step)
