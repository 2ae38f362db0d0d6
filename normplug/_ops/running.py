"""Update running statistics by torch operations.

    step    = momentum, or 1 / number of batches if momentum is None
    running = running + step * (value - running)

The kernels do the same in their last step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normplug._ops.spec import Tensors


def variance_of(rstd: Tensor, eps: float) -> Tensor:
    """The variance, recovered from rstd = 1 / sqrt(var + eps).

    It has an error of about 1e-7 * (var + eps) in float32. So it is clamped at 0: an error below
    would make a variance near 0 negative.
    """
    return rstd.pow(-2).sub_(eps).clamp_min_(0)


def update(
    t: Tensors,
    momentum: float | None,
    mean: Tensor | None,
    var: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Count a batch, and move a call's running statistics one step towards its values.

    Counting and moving belong together: the recomputation of activation checkpointing ends at the
    last tensor that is saved for the backward, and must not do one without the other.

    Args:
        t: the call's tensors. Its num_batches_tracked is incremented, if it has one.
        momentum: a float, or None for a cumulative average, which needs the counter.
        mean: the value of running_mean; None if there is none.
        var: the value of running_var.
        counts: a boolean tensor, whether the batch counts. If not, nothing is updated.
    """
    running_mean, running_var, tracked = t.running_mean, t.running_var, t.tracked
    assert running_var is not None
    if tracked is not None:
        tracked.add_(1 if counts is None else counts)
    step: float | Tensor
    if momentum is not None:
        step = momentum if counts is None else counts.to(running_var.dtype) * momentum
    else:
        # torch.nn makes it a float, for which the host has to wait for the GPU.
        assert tracked is not None
        step = tracked.to(running_var).clamp(min=1).reciprocal()
        step = step if counts is None else counts * step
    if running_mean is not None and mean is not None:
        _move(running_mean, mean, step)
    _move(running_var, var, step)


def _move(running: Tensor, value: Tensor, step: float | Tensor) -> None:
    if running.dim() == 0 and running.dtype == torch.float64:
        # On the CPU, torch.compile of torch 2.8 to 2.13 drops writes to such a tensor, but not
        # those to a view of it.
        running = running.view(1)
    running.lerp_(value.to(running.dtype), step)
