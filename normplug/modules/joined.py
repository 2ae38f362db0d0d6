"""BatchNorm over the joined batch of a group of processes: one message forward, one backward.

Where the kernels can run it, `normplug._ops.batch_norm.joined` does; otherwise the torch operations
here do. Both send the same messages (`normplug._ops.batch_norm.messages`).

Forward, one all-gather collects n_r, mean_r and var_r of each process r. With w_r = n_r / sum n_r:

    mean = sum_r w_r * mean_r        var = sum_r w_r * (var_r + (mean_r - mean)^2)

which is Chan's merge. All processes add the same numbers in the order of the ranks, and so get the
same bits. A process without data takes part with n_r = 0.

Backward, one all-reduce sums sum(dy) and sum(dy * (x - mean)) over the processes; the rest is the
formula of `normplug.reference` with the n of the joined batch. The gradients of weight and bias
stay sums over the process's own batch, which DDP averages, as in `torch.nn.SyncBatchNorm`.

Source of the merge: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normplug import _activations, _checks, functional
from normplug._layouts import dense, is_channels_last, laid_out_like
from normplug._ops import cache, statistics
from normplug._ops.batch_norm import checks, messages, route
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._torch import dispatch_modes
from normplug.reference import accumulator_dtype, channel_dims, per_channel

# Returns the mean and biased variance of the joined batch.
Moments = Callable[[], tuple[Tensor, Tensor]]


def group_to_join(group: Any) -> Any:
    """`group`, or all processes if it is None; None if there is no other process to join."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def batch_norm(t: Tensors, spec: BatchNormSpec, backend: str, group: Any) -> tuple[Tensor, Moments]:
    """`functional.batch_norm` in training, over the batches of all processes of `group`.

    Max pooling, if `spec` has one, is a separate call after it.

    Returns:
        y, and a function that returns the (C,) mean and biased variance of the joined batch.

    Raises:
        ValueError: mismatched shapes; an unknown activation or backend; on the CPU, one value per
            channel in the joined batch. On other devices the host would have to wait to find out,
            so y is `bias` (plus `residual`) instead.
        TypeError: tensors that are not floating point.
    """
    pool = spec.pool
    if pool is not None:
        y, moments = batch_norm(t, spec.without_pool(), backend, group)
        return pool(y), moments
    eager = getattr(t.x, "is_cuda", False) and not torch.compiler.is_compiling()
    processes = group.size()
    plan = None
    if eager:
        plan = cache.find(cache.key_of(t, spec, (backend, processes)))
    if plan is None:
        checks.check(_CALLER, t, spec, joined=True)
        plan = route.joined(_CALLER, backend, t, spec, processes)
    if plan is not None:
        y, stats = plan.run(t, group)
        return y, lambda: plan.moments(stats)
    y, mean, var = _by_torch(t, spec, backend, group)
    if t.residual is not None:
        y = y + t.residual
    y = _activations.apply(spec.activation, y)
    return y, lambda: (mean, var)


_CALLER = "SyncBatchNorm"


def _by_torch(
    t: Tensors, spec: BatchNormSpec, backend: str, group: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm without residual and activation; mean and biased variance of the joined batch."""
    y, mean, var, n = _SyncBatchNorm.apply(
        t.x, t.weight, t.bias, spec.eps, spec.target_variance, backend, group
    )
    if n.device.type == "cpu" and not torch.compiler.is_compiling() and n == 1:
        raise _checks.one_joined_value(dist.get_world_size(group))
    if t.running_mean is not None and t.running_var is not None:
        # A batch of one value per channel has no variance: it updates nothing and is not counted.
        unbiased = var * (n / (n - 1).clamp(min=1))
        statistics.update(t, spec.momentum, mean, unbiased, counts=n > 1)
    return y, mean, var


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        target_variance: float,
        backend: str,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """y; mean, biased variance and number of values per channel of the joined batch."""
        acc = accumulator_dtype(x.dtype)
        mean, var, n = _joined_statistics(x, group)
        y = functional.batch_norm(
            x,
            mean,
            var,
            None if weight is None else weight.to(acc),
            None if bias is None else bias.to(acc),
            eps=eps,
            mode=target_variance,
            backend=backend,
        )
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), n)
        ctx.eps, ctx.scale, ctx.group = eps, math.sqrt(target_variance), group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, n)
        ctx.set_materialize_grads(False)
        return y, mean, var, n

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, mean, rstd, n = ctx.saved_tensors
        n = n.clamp(min=1)
        if dy is None:
            dy = torch.zeros_like(x)
        # For a second derivative, recompute the statistics from x, in torch operations only.
        twice = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if twice:
            mean, rstd = messages.differentiable_statistics(x, n, ctx.eps, ctx.group)
        fused = _has_kernels(x) and not twice
        if fused:
            x = dense(x)
            dy = laid_out_like(dy, x)
        sums = _own_sums(dy, x, mean, rstd, fused)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            add = messages.Sum.apply if twice else messages.total
            means = add(sums, ctx.group) / n
            scale = torch.full_like(rstd, ctx.scale)
            if weight is not None:
                scale = weight.to(rstd.dtype) * scale
            dx = _input_gradient(dy, x, mean, rstd, scale, means, fused)
        sum_dy, sum_dy_centred = sums.chunk(2)
        if ctx.needs_input_grad[1]:
            dweight = (sum_dy_centred * rstd * ctx.scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_dy.to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None, None


def _own_sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, fused: bool) -> Tensor:
    """(2C,): sum(dy), then sum(dy * (x - mean)), over this process's batch."""
    if fused:
        sums = torch.batch_norm_backward_reduce(dy, x, mean, rstd, None, True, False, False)[:2]
        return torch.cat(sums)
    dy, dims = dy.to(mean.dtype), channel_dims(x)
    return torch.cat([dy.sum(dims), (dy * (x.to(mean.dtype) - per_channel(mean, x))).sum(dims)])


def _input_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, scale: Tensor, means: Tensor, fused: bool
) -> Tensor:
    """dx, given the means over the joined batch of dy and dy * (x - mean)."""
    mean_dy, mean_dy_centred = means.chunk(2)
    if fused:
        # The operator divides sums by int32 counts of values. These are means already: divide by 1.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        return torch.batch_norm_backward_elemt(
            dy, x, mean, rstd, scale, mean_dy, mean_dy_centred, one
        )
    centred = x.to(mean.dtype) - per_channel(mean, x)
    slope = per_channel(mean_dy_centred * rstd * rstd, x)
    dx = dy.to(mean.dtype) - per_channel(mean_dy, x) - centred * slope
    return (dx * per_channel(scale * rstd, x)).to(x.dtype)


def _joined_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values per channel of the joined batch."""
    acc, channels = accumulator_dtype(x.dtype), x.shape[1]
    if x.numel() == 0:
        own = x.new_zeros(2 * channels + 1, dtype=acc)
    else:
        # A count above 2^24 is rounded in float32, a relative error of 1e-7 in a weight.
        count = x.new_full((1,), x.numel() // channels, dtype=acc)
        own = torch.cat([*functional.channel_stats(x), count])
    processes = dist.get_world_size(group)
    gathered = messages.gather(own, processes, group)
    means, variances, counts = gathered.view(processes, -1).split([channels, channels, 1], dim=1)
    n = counts.sum()
    weights = counts / n.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return mean, var, n


def _has_kernels(x: Tensor) -> bool:
    """Whether torch's operators for a synchronised backward can take x: only in eager CUDA."""
    tracing = torch.compiler.is_compiling() or dispatch_modes() > 0
    if tracing or not x.is_cuda or x.numel() == 0:
        return False
    # For contiguous half input they round the mean to half: an error of 1e-3 (torch 2.11).
    # They read channels_last of 4 and 5 dimensions only.
    channels_last = x.dim() in (4, 5) and is_channels_last(x.shape, x.stride())
    return channels_last or x.dtype == accumulator_dtype(x.dtype)
