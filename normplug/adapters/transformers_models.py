"""The norms of `transformers`: RMSNorms, and LayerNorms that take channels first or last.

`rms_norms` recognises the RMSNorms by what they compute. Each model has its own LayerNorm class,
whose `forward` permutes and calls `super().forward` for the norm. So an adapted class derives from
the model's class, with normplug's LayerNorm as its next base. It is made when `swap` finds a layer
of that model. The model's module is imported by then, and those of other models need not be.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import fx, nn

from normplug.adapters import rms_norms
from normplug.modules import LayerNorm, TargetVarianceNorm

_MODELS = {
    "ConvNextLayerNorm": "convnext",
    "ConvNextV2LayerNorm": "convnextv2",
    "DINOv3ConvNextLayerNorm": "dinov3_convnext",
    "DeepseekOcr2SamLayerNorm": "deepseek_ocr2",
    "DeepseekVLHybridLayerNorm": "deepseek_vl_hybrid",
    "EdgeTamLayerNorm": "edgetam",
    "EdgeTamVideoLayerNorm": "edgetam_video",
    "GotOcr2LayerNorm": "got_ocr2",
    "LwDetrLayerNorm": "lw_detr",
    "PPFormulaNetLayerNorm": "pp_formulanet",
    "RfDetrLayerNorm": "rf_detr",
    "SLANeXtLayerNorm": "slanext",
    "Sam2LayerNorm": "sam2",
    "Sam2VideoLayerNorm": "sam2_video",
    "Sam3TrackerLayerNorm": "sam3_tracker",
    "Sam3TrackerVideoLayerNorm": "sam3_tracker_video",
    "SamHQLayerNorm": "sam_hq",
    "SamLayerNorm": "sam",
    "SegGptLayerNorm": "seggpt",
    "UnlimitedOcrSamLayerNorm": "unlimited_ocr",
}


def adapt(cls: type[nn.Module]) -> type[TargetVarianceNorm] | str | None:
    """The normplug class of a norm of `transformers`; None or the reason if it stays."""
    if issubclass(cls, (nn.LayerNorm, nn.GroupNorm)):
        return _adapt_layer_norm(cls)
    return rms_norms.adapt(cls)


def _adapt_layer_norm(cls: type[nn.Module]) -> type[LayerNorm] | None:
    name = cls.__name__
    if cls.__module__ != _module_of(name) or not issubclass(cls, nn.LayerNorm):
        return None
    ours = globals().get(name)
    if ours is None or cls not in ours.__bases__:
        doc = f"`{cls.__module__}.{name}` that normalises to a target variance."
        ours = type(name, (_OneNode, cls, LayerNorm), {"__module__": __name__, "__doc__": doc})
        if not _is_known(ours):
            return None
        globals()[name] = ours
    return ours


def __getattr__(name: str) -> Any:
    """Make a class on first use. Pickle looks it up by its name in this module."""
    if name in _MODELS and _adapt_layer_norm(
        getattr(importlib.import_module(_module_of(name)), name)
    ):
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _module_of(name: str) -> str:
    model = _MODELS.get(name)
    return f"transformers.models.{model}.modeling_{model}"


class _OneNode:
    """Makes the whole layer, including its permutations, one node for torch.fx."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], fx.Proxy):
            return self._as_leaf(args[0])  # type: ignore[attr-defined]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


@torch.no_grad()
def _is_known(ours: Any) -> bool:
    """Whether the forward in this version of the library is a LayerNorm over the channels."""
    generator = torch.Generator("cpu").manual_seed(0)
    images = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float32, device="cpu")
    try:
        for data_format, dim in (("channels_first", 1), ("channels_last", -1)):
            layer = ours(4, data_format=data_format, mode=0.25, device="cpu").float().eval()
            layer.weight.copy_(images[0, :, 0, 0])
            expected = layer._expected(images.movedim(1, -1), False).movedim(-1, dim)
            with torch.autocast("cpu", enabled=False):
                if not torch.allclose(layer(images.movedim(1, dim)), expected, atol=1e-5):
                    return False
        return True
    except Exception:  # a constructor without these arguments, or a forward that takes others
        return False
