"""What is done at the source against tools that would drop a target variance without a word."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

# Functions that build another layer from a BatchNorm's attributes, and know nothing of a target
# variance: name of the code that reads, its module, what a user calls.
_REBUILDERS: dict[tuple[str, str], str] = {
    ("convert_sync_batchnorm", "torch.nn.modules.batchnorm"): "torch's convert_sync_batchnorm",
    ("fuse_conv_bn_eval", "torch.nn.utils.fusion"): "torch's fuse_conv_bn_eval",
    ("fuse_linear_bn_eval", "torch.nn.utils.fusion"): "torch's fuse_linear_bn_eval",
    ("__init__", "torch.utils.mkldnn"): "torch's to_mkldnn",
    ("convert_sync_batchnorm", "timm.layers.norm_act"): "timm's convert_sync_batchnorm",
    ("convert_splitbn_model", "timm.layers.split_batchnorm"): "timm's convert_splitbn_model",
    ("freeze_batch_norm_2d", "timm.layers.norm_act"): "timm's freeze_batch_norm_2d",
}
_NAMES = frozenset(name for name, _ in _REBUILDERS)


def refuse_rebuilder(layer: Any) -> None:
    """Refuse one of those tools; to be called where such a tool reads an attribute of `layer`.

    None of them can be told of the target variance, and none asks more of a layer than attributes,
    so who reads is all there is to go by.

    Raises:
        RuntimeError: where the reader is one of them, and the layer's target variance is not 1.
    """
    frame = sys._getframe(2)
    # A layer under construction has no target variance yet.
    if frame.f_code.co_name not in _NAMES or vars(layer).get("target_variance", 1.0) == 1.0:
        return
    tool = _REBUILDERS.get((frame.f_code.co_name, frame.f_globals.get("__name__", "")))
    if tool is not None:
        raise RuntimeError(
            f"normplug: {tool} would drop the target variance of a {type(layer).__name__} in mode "
            f"{layer.mode}. Use it before normplug.swap(model), or normplug.unswap(model) first."
        )


def tell_opacus(ours: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Have Opacus judge normplug's layers as it judges torch's, where it is in use.

    Its validator goes by exact type, so that a BatchNorm of another class counts as private.

    Args:
        ours: the normplug class of each torch class.
    """
    opacus = sys.modules.get("opacus.validators")
    if opacus is not None:
        known = opacus.ModuleValidator.VALIDATORS
        for stock, cls in ours.items():
            if stock in known:
                known.setdefault(cls, known[stock])
