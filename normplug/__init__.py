"""Norm layers with a target variance: swap them into any PyTorch model with one line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normplug import functional
from normplug._ops.warm_up import warm_up
from normplug._swap.check import check
from normplug._swap.layer_modes import by_depth
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

if TYPE_CHECKING:
    from normplug._fuse.fuse import fuse, fusions, unfuse

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
    "warm_up",
]


def __getattr__(name: str) -> Any:
    """Import `fuse`, `fusions` and `unfuse` on first use, which saves a quarter of import time."""
    if name not in ("fuse", "fusions", "unfuse"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from normplug._fuse import fuse as module

    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
