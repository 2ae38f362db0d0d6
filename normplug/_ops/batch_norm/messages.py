"""Messages between processes for a norm over their joined batch: one gather, one sum.

All processes must send messages of equal sizes in the same order, whatever route each takes:

- forward, (2 * C + 1,): mean and biased variance of each channel, and the number of values in one;
- backward, (2 * C,): sum(dz), then sum(dz * (x - mean)), where dz is the gradient of the norm's
  output.

Both are in the accumulator dtype. An empty batch sends zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normplug.reference import channel_dims, per_channel

# torch 2.14 deprecated the second for the first; a build without distributed has neither.
_all_gather = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


def gather(own: Tensor, processes: int, group: Any) -> Tensor:
    """The messages of all processes, (processes * N,), in the order of the ranks."""
    gathered = own.new_empty(processes * own.shape[0])
    assert _all_gather is not None
    _all_gather(gathered, own, group)
    return gathered


def add(values: Tensor, group: Any) -> None:
    """Replace `values` by their sum over all processes, in place."""
    dist.all_reduce(values, group=group)


def total(values: Tensor, group: Any) -> Tensor:
    """The sum over all processes, as a new tensor."""
    result = values.clone()
    add(result, group)
    return result


class Sum(torch.autograd.Function):
    """The sum over all processes. So is its gradient, since every process uses the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        """As `total`."""
        ctx.group = group
        return total(values, group)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        """The sum of the gradients."""
        return Sum.apply(dtotal, ctx.group), None


def differentiable_statistics(
    x: Tensor, n: Tensor, eps: float, group: Any
) -> tuple[Tensor, Tensor]:
    """Mean and rstd of the joined batch as functions of x, for second derivatives.

    n: how many values a channel has in the joined batch, in the accumulator dtype.
    """
    dims = channel_dims(x)
    x = x.to(n.dtype)
    mean = Sum.apply(x.sum(dims), group) / n
    var = Sum.apply((x - per_channel(mean, x)).square().sum(dims), group) / n
    return mean, torch.rsqrt(var + eps)
