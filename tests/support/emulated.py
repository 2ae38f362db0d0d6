"""PyTorch's CUDA kernels for SyncBatchNorm, by operations that a CPU has.

They take and return what `torch.nn.SyncBatchNorm` passes to them; the formulas are those of
aten/src/ATen/native/cuda/Normalization.cuh.
"""

from contextlib import contextmanager
from unittest.mock import patch

import torch

from normplug._ops import collectives
from normplug.reference import channel_dims, per_channel


def gather_stats(x, means, rstds, running_mean, running_var, momentum, eps, counts):
    """Merge the processes' means and rstds one by one, and move the running statistics."""
    mean = torch.zeros_like(means[0])
    squares = torch.zeros_like(mean)
    n = 0
    for other_mean, rstd, count in zip(means, rstds, counts, strict=True):
        others = ((1 / rstd).square() - eps) * count
        share = 1 / (n + count)
        squares = squares + others + (mean - other_mean).square() * n * count * share
        mean = n * share * mean + count * share * other_mean
        n = int(n + count)  # the kernel's number of values is an integer
    unbiased = squares / mean.new_tensor(n - 1)
    for running, value in ((running_mean, mean), (running_var, unbiased)):
        running.copy_((1 - momentum) * running + momentum * value)
    return mean, torch.rsqrt(squares / mean.new_tensor(n) + eps)


def normalise(x, scale, shift, mean, rstd, eps):
    """The norm of x by statistics that are given."""
    y = (x.to(mean.dtype) - per_channel(mean, x)) * per_channel(rstd, x)
    if scale is not None:
        y = y * per_channel(scale, x)
    if shift is not None:
        y = y + per_channel(shift, x)
    return y.to(x.dtype)


def backward_sums(dy, x, mean, rstd, scale, *wanted):
    """The sums over a process's batch that the gradient of x needs."""
    dy = dy.to(mean.dtype)
    centred = x.to(mean.dtype) - per_channel(mean, x)
    dims = channel_dims(x)
    return dy.sum(dims), (dy * centred).sum(dims), None, None


def backward(dy, x, mean, rstd, scale, sum_dy, sum_dy_centred, counts):
    """The gradient of x, from the sums over all processes."""
    n = counts.sum()
    centred = x.to(mean.dtype) - per_channel(mean, x)
    through = per_channel(sum_dy_centred / n * rstd.square(), x)
    dx = dy.to(mean.dtype) - per_channel(sum_dy / n, x) - centred * through
    slope = rstd if scale is None else rstd * scale
    return (dx * per_channel(slope, x)).to(x.dtype)


@contextmanager
def kernels_of_sync_batch_norm():
    """Let calls on the CPU run these in place of the plain operations."""
    emulated = {
        "batch_norm_gather_stats_with_counts": gather_stats,
        "batch_norm_elemt": normalise,
        "batch_norm_backward_reduce": backward_sums,
        "batch_norm_backward_elemt": backward,
    }
    with (
        patch.multiple(torch, **emulated),
        patch.object(collectives, "_may_run_kernels", lambda x: True),
    ):
        yield
