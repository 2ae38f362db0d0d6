"""Norm layers with a target variance: swap them into any PyTorch model with one line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from normplug import _checks, functional
from normplug._checks import MissingPackage
from normplug._files import __version__ as __version__
from normplug._status import status
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
    from normplug import bench as bench
    from normplug import callbacks as callbacks
    from normplug import compare as compare
    from normplug import lightning as lightning
    from normplug import transformers as transformers
    from normplug._fuse.fuse import fuse, fusions, unfuse
    from normplug._tools.buffers import recalibrate, sync_buffers
    from normplug._tools.doctor import doctor
    from normplug._tools.freezing import freeze, thaw
    from normplug._tools.groups import param_groups
    from normplug._tools.watching import watch

__all__ = [
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d", "InstanceNorm3d", "LayerNorm", "NormMode", "RMSNorm", "SyncBatchNorm",
    "by_depth", "check", "doctor", "freeze", "functional", "fuse", "fusions", "param_groups",
    "plan", "recalibrate", "set_mode", "status", "swap", "swapped", "sync_buffers",
    "target_variance", "thaw", "unfuse", "unswap", "watch",
]  # fmt: skip

# Imported on first use, which saves a quarter of import time: name -> module.
_LATE = {
    "doctor": "_tools.doctor",
    "freeze": "_tools.freezing",
    "fuse": "_fuse.fuse",
    "fusions": "_fuse.fuse",
    "param_groups": "_tools.groups",
    "recalibrate": "_tools.buffers",
    "sync_buffers": "_tools.buffers",
    "thaw": "_tools.freezing",
    "unfuse": "_fuse.fuse",
    "watch": "_tools.watching",
}
# Modules that are imported on first use, because they need packages besides torch.
_LATE_MODULES = ("bench", "callbacks", "compare", "lightning", "transformers")


def __getattr__(name: str) -> Any:
    """Import a name of `_LATE`, or one of `_LATE_MODULES`."""
    if name in _LATE_MODULES:
        try:
            return import_module(f"{__name__}.{name}")
        except MissingPackage as error:
            # `hasattr` and `help` expect an AttributeError.
            raise AttributeError(str(error)) from error
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_LATE[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def warm_up(*arguments: Any, **named: Any) -> None:
    """Do nothing. Deprecated: worker processes compile kernels ahead of time."""
    _checks.warn(
        "normplug.warm_up: deprecated, does nothing. Since version 0.2, worker processes compile "
        "kernels ahead of time. Remove the call.",
        DeprecationWarning,
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LATE_MODULES})
