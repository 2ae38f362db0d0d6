"""Norm layers as modules: the torch classes with a target variance.

They subclass `torch.nn`'s own and keep the names of parameters and buffers. So checkpoints load,
parameter groups stay the same, and `isinstance(module, nn.BatchNorm2d)` still holds. They add only
plain attributes and buffers, so assigning `__class__` converts a stock layer and converts it back
(see `normplug._convert`). `base` lists what a norm declares.
"""

import sys

from normplug.modules.base import TargetVarianceNorm
from normplug.modules.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    SyncBatchNorm,
)
from normplug.modules.group_norm import (
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
)
from normplug.modules.row_norms import LayerNorm, RMSNorm

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d",
    "InstanceNorm3d", "LayerNorm", "RMSNorm", "SyncBatchNorm", "TargetVarianceNorm",
]  # fmt: skip

# Pickles name classes by the files that once had them.
for _earlier, _now in (
    ("eps", "base"),
    ("instance_norm", "group_norm"),
    ("layer_norm", "row_norms"),
    ("rms_norm", "row_norms"),
    ("sync_batch_norm", "batch_norm"),
):
    sys.modules[f"{__name__}.{_earlier}"] = sys.modules[f"{__name__}.{_now}"]
