"""Messages between processes for a norm over their joined batch: one gather, one sum.

All processes must send messages of equal sizes in the same order, whatever route each takes:

- forward, (2 * C + 1,): mean and biased variance of each channel, and the number of values in one;
- backward, (2 * C,): sum(dz), then sum(dz * (x - mean)), where dz is the gradient of the norm's
  output.

Both are in the accumulator dtype. An empty batch sends zeros.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

NO_SECOND_DERIVATIVE = (
    "normplug.SyncBatchNorm: over several processes its gradient cannot be differentiated again. "
    "Leave create_graph=True out, or train without sync=True."
)

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
