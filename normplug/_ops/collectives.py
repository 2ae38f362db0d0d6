"""The norm of a batch that several processes join by collectives, one in each direction.

The kernels exchange statistics where they can: see `exchange`. This module is for other groups.

Forward, an all-gather collects n_r, mean_r and var_r of each process r. With w_r = n_r / sum n_r:

    mean = sum_r w_r * mean_r        var = sum_r w_r * (var_r + (mean_r - mean)^2)

All processes add the same numbers in the order of the ranks, so they get the same bits. A process
without data takes part with n_r = 0. Source of the merge: Chan, Golub and LeVeque 1983,
doi:10.1080/00031305.1983.10483115.

Backward, an all-reduce sums sum(dy) and sum(dy * (x - mean)) over the processes; the rest is the
formula of `normplug.reference` with the n of the joined batch. The gradients of weight and bias
stay sums over the process's own batch, which DDP averages, as in `torch.nn.SyncBatchNorm`.

On CUDA, normplug's kernel computes the statistics of a process, and the kernels of
`torch.nn.SyncBatchNorm` merge and apply them. The function around these would make the host wait
for the GPU, and takes no empty 16-bit batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normplug import _checks
from normplug._layouts import dense, laid_out_like
from normplug._ops import exchange, torch_way
from normplug._ops.spec import Tensors
from normplug.reference import accumulator_dtype, channel_dims, per_channel

# torch 2.14 deprecated the second name; a build without distributed has neither.
_all_gather: Any = getattr(
    dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None)
)

# The number of values of an empty batch: PyTorch's kernel divides by it.
_NEARLY_0 = 1e-30

# x -> mean and biased variance of its channels.
Statistics = Callable[[Tensor], tuple[Tensor, Tensor]]
# mean, rstd, unbiased variance, and n
Moments = tuple[Tensor, Tensor, Tensor, Tensor]


def batch_norm(t: Tensors, spec: Any, statistics: Statistics) -> Tensor:
    """The norm of the batches that a `BatchNormSpec` joins, without residual and activation.

    Args:
        t: the tensors of the call.
        spec: its other arguments.
        statistics: computes mean and biased variance of each channel of x, without gradients.

    Raises:
        ValueError: on the CPU, one value per channel in the joined batch. On other devices the host
            would have to wait for the GPU, so y is `bias` instead.
    """
    group = exchange.joins[spec.join].group
    acc = accumulator_dtype(t.x.dtype)
    weight, shift = (None if v is None else v.to(acc) for v in (t.weight, t.bias))
    shape = (t.x.shape[1],)
    scale = torch_way.scaled(weight, spec.target_variance, shape, acc, t.x.device)
    mean, rstd, unbiased, n = moments(t.x.detach(), spec, statistics)
    kernels = _may_run_kernels(t.x)
    y: Tensor = _Joined.apply(t.x, scale, shift, mean, rstd, n, group, kernels)
    if n.device.type == "cpu" and not torch.compiler.is_compiling() and n == 1:
        whole = f"the joined batch of {dist.get_world_size(group)} processes"
        raise _checks.one_value("SyncBatchNorm", whole)
    if t.running_mean is not None:
        update_running(t, spec, mean, unbiased, n)
    return y


def moments(x: Tensor, spec: Any, statistics: Statistics) -> Moments:
    """The moments of the batches of x that a `BatchNormSpec` joins, without gradients."""
    group = exchange.joins[spec.join].group
    message = _message(x, statistics)
    gathered = _gathered(message, group)
    if _may_run_kernels(x):
        return _merged_by_kernel(x, message, gathered, spec.eps)
    return _merged(gathered, spec.eps)


def update_running(
    t: Tensors, spec: Any, mean: Tensor, unbiased: Tensor, n: Tensor
) -> None:
    """Update the running statistics of a `BatchNormSpec` by the moments of the joined batch.

    A batch of one value per channel has no variance: it updates nothing and is not counted. If this
    process alone has more, nobody needs to look.
    """
    counts = None if t.x.numel() > t.x.shape[1] else n > 1
    torch_way.update_running(t, spec.momentum, mean, unbiased, counts=counts)


def _may_run_kernels(x: Tensor) -> bool:
    """Whether PyTorch's kernels for SyncBatchNorm may run; a compiler fuses operations instead."""
    return x.is_cuda and not torch.compiler.is_compiling()


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor,
        rstd: Tensor,
        n: Tensor,
        group: Any,
        kernels: bool,
    ) -> Tensor:
        """y, from the mean, the rstd and the number of values per channel of the joined batch.

        kernels: whether to run PyTorch's kernels for SyncBatchNorm.
        """
        x = dense(x) if kernels else x
        if x.numel() == 0:
            y = torch.empty_like(x)
        elif kernels:
            # They take an eps, and do not read it.
            y = torch.batch_norm_elemt(x, scale, shift, mean, rstd, 0.0)
        else:
            slope = rstd if scale is None else rstd * scale
            var = torch.ones_like(rstd)
            y = torch.batch_norm(x, slope, shift, mean, var, False, 0.0, 0.0, False)
        ctx.group, ctx.kernels = group, kernels
        ctx.save_for_backward(x, scale, mean, rstd, n)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(exchange.NO_SECOND_DERIVATIVE)
        x, scale, mean, rstd, n = ctx.saved_tensors
        kernels = ctx.kernels and x.numel() > 0
        if kernels:
            dy = laid_out_like(dy, x)
            # The kernel for contiguous tensors rounds each product to the dtype of x.
            dtype = mean.dtype if x.is_contiguous() else x.dtype
            values = (dy.to(dtype), x.to(dtype))
            which = (True, False, False)  # the sums, not the gradients of scale and shift
            sums: Any = torch.batch_norm_backward_reduce(
                *values, mean, rstd, None, *which
            )
            sum_dy, sum_dy_centred = sums[:2]
        else:
            wide_dy = dy.to(mean.dtype)
            centred = x.to(mean.dtype) - per_channel(mean, x)
            sum_dy = wide_dy.sum(channel_dims(x))
            sum_dy_centred = (wide_dy * centred).sum(channel_dims(x))
        dx = None
        if ctx.needs_input_grad[0]:
            total = torch.cat([sum_dy, sum_dy_centred])
            dist.all_reduce(total, group=ctx.group)
            if kernels:
                count = n.to(torch.int32).view(1)
                last = (scale, *total.chunk(2), count)
                dx = torch.batch_norm_backward_elemt(dy, x, mean, rstd, *last)
            else:
                mean_dy, mean_dy_centred = (total / n.clamp(min=1)).chunk(2)
                through = per_channel(mean_dy_centred * rstd * rstd, x)
                dx = wide_dy - per_channel(mean_dy, x) - centred * through
                slope = rstd if scale is None else rstd * scale
                dx = (dx * per_channel(slope, x)).to(x.dtype)
        dscale = sum_dy_centred * rstd if ctx.needs_input_grad[1] else None
        dshift = sum_dy if ctx.needs_input_grad[2] else None
        return dx, dscale, dshift, None, None, None, None, None


def _message(x: Tensor, statistics: Statistics) -> Tensor:
    """What a process tells the others: mean, biased variance and number of its values."""
    c = x.shape[1]
    if x.numel() == 0:
        message = x.new_zeros(2 * c + 1, dtype=accumulator_dtype(x.dtype))
        message[-1:] = _NEARLY_0
        return message
    mean, var = statistics(x)
    # A count above 2^24 is rounded in float32, a relative error of 1e-7 in a weight.
    return torch.cat([mean, var, mean.new_full((1,), x.numel() // c)])


def _merged(gathered: Tensor, eps: float) -> Moments:
    """The moments of the joined batch, from the messages of all processes."""
    means, variances, counts = _parts(gathered)
    n = counts.sum()
    weights = counts / n.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    unbiased = var * (n / (n - 1).clamp(min=1))
    return mean, torch.rsqrt(var + eps), unbiased, n


def _merged_by_kernel(
    x: Tensor, message: Tensor, gathered: Tensor, eps: float
) -> Moments:
    """The same by PyTorch's kernel. The message, which has been sent, is its workspace."""
    means, variances, counts = _parts(gathered)
    mean, unbiased = message[:-1].chunk(2)
    # With a momentum of 1, running statistics become those of the batch.
    _, rstd = torch.batch_norm_gather_stats_with_counts(
        x, means, torch.rsqrt(variances + eps), mean, unbiased, 1.0, eps, counts.view(-1)
    )
    if x.numel() == 0:
        rstd = rstd.nan_to_num()  # where all processes are without data
    return mean, rstd, unbiased, counts.sum()


def _parts(gathered: Tensor) -> tuple[Tensor, ...]:
    """Means, variances and numbers of values of all processes, from their messages."""
    c = gathered.shape[1] // 2
    return gathered.split([c, c, 1], dim=1)


def _gathered(message: Tensor, group: Any) -> Tensor:
    """The vectors of all processes, as rows."""
    gathered = message.new_empty(dist.get_world_size(group), message.shape[0])
    _all_gather(gathered.view(-1), message, group)
    return gathered
