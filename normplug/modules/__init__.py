"""Norm layers as modules: the torch classes with a target variance.

They subclass `torch.nn`'s own, with the same parameter and buffer names, so that checkpoints load,
optimizers group, and every tool that asks `isinstance(module, nn.BatchNorm2d)` still knows them.
Beyond that they add plain attributes only: a stock layer becomes one, and stock again, by
assignment of `__class__` (see `normplug._convert`).
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
from normplug.modules.layer_norm import LAYER_NORM_STATISTICS, LayerNorm
from normplug.modules.sync_batch_norm import LazySyncBatchNorm, SyncBatchNorm

__all__ = [
    "LAYER_NORM_STATISTICS",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazySyncBatchNorm",
    "SyncBatchNorm",
    "TargetVarianceNorm",
]
