"""Norm layers as modules: the torch classes with a target variance.

They subclass `torch.nn`'s own and keep the names of parameters and buffers. So checkpoints load,
parameter groups stay the same, and `isinstance(module, nn.BatchNorm2d)` still holds. They add only
plain attributes and buffers, so assigning `__class__` converts a stock layer and converts it back
(see `normplug._convert`). `base` lists what a norm declares.
"""

from torch import nn

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
from normplug.modules.table import register

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d", "InstanceNorm2d",
    "InstanceNorm3d", "LayerNorm", "RMSNorm", "SyncBatchNorm", "TargetVarianceNorm",
]  # fmt: skip

for _name in __all__:
    if hasattr(nn, _name):
        register(globals()[_name], getattr(nn, _name))
