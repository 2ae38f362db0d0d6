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
from normplug._ops import cache, eligible, statistics
from normplug._ops.batch_norm import checks, messages, peers, route
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug._ops.statistics import variance_of
from normplug.reference import accumulator_dtype, channel_dims, per_channel

# Returns the mean and biased variance of the joined batch.
Moments = Callable[[], tuple[Tensor, Tensor]]


def group_to_join(group: Any) -> Any:
    """`group`, or all processes if it is None; None if there is no other process to join."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    if not torch.compiler.is_compiling() and peers.is_known(group):
        return group
    return group if dist.get_world_size(group) > 1 else None


def batch_norm(
    t: Tensors, spec: BatchNormSpec, backend: str, group: Any, measured: bool = False
) -> tuple[Tensor, Moments | None]:
    """`functional.batch_norm` in training, over the batches of all processes of `group`.

    Args:
        t: the tensors of the call.
        spec: its other arguments.
        backend: "auto", "triton" or "torch".
        group: the processes.
        measured: whether the second result is needed.

    Returns:
        y, and a function that returns the (C,) mean and biased variance of the joined batch; it
        may be None if not `measured`.

    Raises:
        ValueError: mismatched shapes; an unknown activation or backend; on the CPU, one value per
            channel in the joined batch. On other devices the host would have to wait to find out,
            so y is `bias` (plus `residual`) instead.
        TypeError: tensors that are not floating point.
    """
    checks.check(_CALLER, t, spec, joined=True)
    if (found := _in_kernels(t, spec, backend, group, measured)) is not None:
        return found
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


def _in_kernels(
    t: Tensors, spec: BatchNormSpec, backend: str, group: Any, measured: bool
) -> tuple[Tensor, Moments | None] | None:
    """As `batch_norm`, by kernels that exchange the statistics themselves; None if they cannot."""
    asked = eligible.is_asked_for(_checks.backend(_CALLER, backend), t.x)
    if not asked or eligible.refusal_now() is not None:
        return None
    compiling = eligible.is_compiling()
    others = (peers.number_of if compiling else peers.of)(group, t.x.device)
    if not others:
        return None
    numbers = (spec.training, spec.momentum, spec.eps, spec.target_variance, spec.activation)
    ours = BatchNormSpec(*numbers, spec.pool, spec.keeps_residual, others)
    if route.kernels(ours).refusal(t, ours) is not None:
        pool = spec.pool
        found = pool and _in_kernels(t, spec.without_pool(), backend, group, measured)
        return (pool(found[0]), found[1]) if pool and found else None
    if compiling:
        from normplug._ops.batch_norm.compiled import COMPILED

        y, stats = COMPILED.joined(t, spec, others)
    elif measured:
        plan, ready = route.kernels(ours).plan_of(t, ours)
        y, (stats, *_) = plan.run_with_state(ready)
    else:
        return functional.carry_out(_CALLER, t, ours, backend), None
    channels = t.x.shape[1]
    var = variance_of(stats[channels : 2 * channels], spec.eps)
    return y, lambda: (stats[:channels], var)


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
        step = statistics.count_batch(t.running_mean, t.tracked, spec.momentum, counts=n > 1)
        unbiased = var * (n / (n - 1).clamp(min=1))
        statistics.update(t.running_mean, t.running_var, mean, unbiased, step)
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
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(messages.NO_SECOND_DERIVATIVE)
        n, dims = n.clamp(min=1), channel_dims(x)
        dy = torch.zeros_like(x) if dy is None else dy
        g = dy.to(mean.dtype)
        centred = x.to(mean.dtype) - per_channel(mean, x)
        sums = torch.cat([g.sum(dims), (g * centred).sum(dims)])
        sum_dy, sum_dy_centred = sums.chunk(2)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = (sum_dy_centred * rstd * ctx.scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_dy.to(ctx.bias_dtype)
        if ctx.needs_input_grad[0]:
            sums = sums.clone()
            messages.add(sums, ctx.group)
            mean_dy, mean_dy_centred = (sums / n).chunk(2)
            scale = rstd * ctx.scale if weight is None else rstd * ctx.scale * weight.to(rstd.dtype)
            slope = mean_dy_centred * rstd * rstd
            dx = g - per_channel(mean_dy, x) - centred * per_channel(slope, x)
            dx = (dx * per_channel(scale, x)).to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


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
