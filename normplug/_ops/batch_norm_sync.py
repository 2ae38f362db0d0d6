"""BatchNorm over the joined batch of a group of processes.

The kernels exchange the statistics where they can: see `normplug._ops.peers`. Otherwise the torch
operations here send one collective in each direction.

Forward, an all-gather collects n_r, mean_r and var_r of each process r. With w_r = n_r / sum n_r:

    mean = sum_r w_r * mean_r        var = sum_r w_r * (var_r + (mean_r - mean)^2)

This is Chan's merge. All processes add the same numbers in the order of the ranks, so they get the
same bits. A process without data takes part with n_r = 0.

Backward, an all-reduce sums sum(dy) and sum(dy * (x - mean)) over the processes; the rest is the
formula of `normplug.reference` with the n of the joined batch. The gradients of weight and bias
stay sums over the process's own batch, which DDP averages, as in `torch.nn.SyncBatchNorm`.

Source of the merge: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normplug import _checks
from normplug._ops import peers, stock
from normplug._ops.batch_norm import BatchNormSpec, channel_stats
from normplug._ops.call import call
from normplug._ops.spec import Tensors
from normplug.reference import accumulator_dtype, channel_dims, per_channel

_CALLER = "SyncBatchNorm"
# torch 2.14 deprecated the second name; a build without distributed has neither.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


def group_to_join(group: Any) -> Any:
    """`group`, or all processes if it is None; None if there is no other process to join."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def by_collectives(t: Tensors, spec: BatchNormSpec) -> Tensor:
    """The norm of the batches that `spec` joins, without residual and activation.

    Raises:
        ValueError: on the CPU, one value per channel in the joined batch. On other devices the host
            would have to wait for the GPU, so y is `bias` instead.
    """
    group, backend, _ = peers.joins[spec.join]
    numbers = (spec.eps, spec.target_variance)
    y, mean, var, n = _SyncBatchNorm.apply(t.x, t.weight, t.bias, *numbers, backend, group)
    if n.device.type == "cpu" and not torch.compiler.is_compiling() and n == 1:
        whole = f"the joined batch of {dist.get_world_size(group)} processes"
        raise _checks.one_value(_CALLER, whole)
    if t.running_mean is not None and t.running_var is not None:
        # A batch of one value per channel has no variance: it updates nothing and is not counted.
        unbiased = var * (n / (n - 1).clamp(min=1))
        stock.update_running(t, spec.momentum, mean, unbiased, counts=n > 1)
    return y


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
        scale, shift = (None if v is None else v.to(acc) for v in (weight, bias))
        t = Tensors(x, None, scale, shift, None, mean, var)
        y = call(_CALLER, t, BatchNormSpec(False, 0.0, eps, target_variance), backend)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), n)
        ctx.scale, ctx.group = math.sqrt(target_variance), group
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, var, n)
        ctx.set_materialize_grads(False)
        return y, mean, var, n

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias."""
        x, weight, mean, rstd, n = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(peers.NO_SECOND_DERIVATIVE)
        acc, dims = mean.dtype, channel_dims(x)
        dy = torch.zeros_like(x, dtype=acc) if dy is None else dy.to(acc)
        centred = x.to(acc) - per_channel(mean, x)
        sum_dy, sum_dy_centred = dy.sum(dims), (dy * centred).sum(dims)
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            total = torch.cat([sum_dy, sum_dy_centred])
            dist.all_reduce(total, group=ctx.group)
            mean_dy, mean_dy_centred = (total / n.clamp(min=1)).chunk(2)
            scale = rstd * ctx.scale if weight is None else weight.to(acc) * ctx.scale * rstd
            slope = per_channel(mean_dy_centred * rstd * rstd, x)
            dx = dy - per_channel(mean_dy, x) - centred * slope
            dx = (dx * per_channel(scale, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dweight = (sum_dy_centred * rstd * ctx.scale).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sum_dy.to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None, None, None


def _joined_statistics(x: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and number of values per channel of the joined batch."""
    acc, channels = accumulator_dtype(x.dtype), x.shape[1]
    if x.numel() == 0:
        own = x.new_zeros(2 * channels + 1, dtype=acc)
    else:
        # A count above 2^24 is rounded in float32, a relative error of 1e-7 in a weight.
        count = x.new_full((1,), x.numel() // channels, dtype=acc)
        own = torch.cat([*channel_stats(x), count])
    processes = dist.get_world_size(group)
    gathered = own.new_empty(processes * own.shape[0])
    assert _all_gather is not None
    _all_gather(gathered, own, group)
    means, variances, counts = gathered.view(processes, -1).split([channels, channels, 1], dim=1)
    n = counts.sum()
    weights = counts / n.clamp(min=1)
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean).square())).sum(0)
    return mean, var, n
