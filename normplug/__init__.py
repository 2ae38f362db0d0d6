"""Norm layers with a target variance: swap them into any PyTorch model with one line."""

from normplug import functional
from normplug._fuse.fuse import fuse, fusions, unfuse
from normplug._swap.check import check
from normplug._swap.depth import by_depth
from normplug._swap.plan import plan
from normplug._swap.swap import set_mode, swap, swapped, unswap
from normplug.modes import NormMode, target_variance
from normplug.modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
    SyncBatchNorm,
)

__version__ = "0.2.0"

__all__ = [
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "NormMode",
    "RMSNorm",
    "SyncBatchNorm",
    "by_depth",
    "check",
    "functional",
    "fuse",
    "fusions",
    "plan",
    "set_mode",
    "swap",
    "swapped",
    "target_variance",
    "unfuse",
    "unswap",
]
