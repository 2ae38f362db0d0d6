"""The LayerNorms of `transformers` that take channels first or last, one class a model.

Their `forward` permutes and leaves the rest to the class after them, so that the adapted class only
puts normplug's there. It is made when it is first asked for, by a swap or by `pickle`: its model's
module is imported by then, and the others need not be.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import fx, nn

from normplug import _convert
from normplug.modules import LayerNorm

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


class _OneNode:
    """To torch.fx the whole layer is one node, what it does before and after the norm included."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], fx.Proxy):
            return self._as_leaf(args[0])  # type: ignore[attr-defined]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def __getattr__(name: str) -> Any:
    if name in _MODELS:
        model = _MODELS[name]
        module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        theirs = getattr(module, name)
        if _leaves_the_norm_to_torch(theirs):
            doc = f"`{module.__name__}.{name}` that normalises to a target variance."
            ours = type(
                name, (_OneNode, theirs, LayerNorm), {"__module__": __name__, "__doc__": doc}
            )
            globals()[name] = ours
            _convert.register(ours, theirs)
            return ours
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _leaves_the_norm_to_torch(theirs: type[nn.Module]) -> bool:
    """Whether this version's forward calls `super().forward`, and reads no parameter itself."""
    if not issubclass(theirs, nn.LayerNorm):
        return False
    read = set(theirs.forward.__code__.co_names)
    return {"super", "forward"} <= read <= {"super", "forward", "data_format", "permute"}
