"""Norm layers as modules: the torch classes with a target variance.

They subclass `torch.nn`'s own and keep the names of parameters and buffers. So checkpoints load,
parameter groups stay the same, and `isinstance(module, nn.BatchNorm2d)` still holds. They add only
plain attributes and buffers, so assigning `__class__` converts a stock layer and converts it back
(see `normplug._convert`). `base` lists what a norm declares.
"""

from normplug.modules.base import TargetVarianceNorm
from normplug.modules.batch_norm import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
)
from normplug.modules.group_norm import GroupNorm
from normplug.modules.instance_norm import (
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LazyInstanceNorm1d,
    LazyInstanceNorm2d,
    LazyInstanceNorm3d,
)
from normplug.modules.layer_norm import LayerNorm
from normplug.modules.rms_norm import RMSNorm
from normplug.modules.sync_batch_norm import LazySyncBatchNorm, SyncBatchNorm

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "LazySyncBatchNorm",
    "RMSNorm",
    "SyncBatchNorm",
    "TargetVarianceNorm",
]
