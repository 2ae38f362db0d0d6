"""Normplug classes for norms of other libraries, made when `swap` finds or pickle loads a layer.

`_NORMS` has a row for each class; `rms_norms` and `frozen` recognise others by what their forward
computes. `swap` imports no library for this: where there is a layer, its class has been imported.

`swap(autocast_output=...)` sets the output's dtype under autocast for these layers, too, whether or
not timm's fast norm is on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from normplug import _activations
from normplug._torch import GLOBAL_HOOKS, has_hooks
from normplug.adapters import frozen, rms_norms
from normplug.modules import GroupNorm, LayerNorm, TargetVarianceNorm
from normplug.modules.base import name_arguments
from normplug.modules.batch_norm import _BatchNorm, _SyncBatchNorm
from normplug.modules.frozen import FrozenBatchNorm, register
from normplug.modules.row_norms import RowNorm, _RMSNorm


class ChannelsFirst(RowNorm):
    """A norm of rows for input with channels first, (N, C, *): of the channels of each position."""

    def _normalise(self, input: Tensor) -> Tensor:
        # Both results of `movedim` are views: channels_last input is not copied.
        return super()._normalise(input.movedim(1, -1)).movedim(-1, 1)


class Float32(RowNorm):
    """Computes in float32 and returns the input's dtype, with or without autocast."""

    def _normalise(self, input: Tensor) -> Tensor:
        return super()._normalise(input.float()).to(input.dtype)

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super()._affine()
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return weight, bias

    def _autocast(self, x: Tensor) -> None:
        return None


class RowsThenActivation(RowNorm):
    """A norm of rows, then the layer's own dropout and activation."""

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, then apply the layer's own `drop` and `act`."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self.act(self.drop(super().forward(input)))


class FusedActivation(TargetVarianceNorm):
    """Norm and activation as one call if there is no dropout and neither module has hooks."""

    _fused: Callable[..., Tensor]
    _after: ClassVar[tuple[str, ...]] = ("drop", "act")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`, then call the layer's own modules `_after`."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        after = [getattr(self, name) for name in self._after]
        measures = self._probe is not None
        name = None if measures else _activation_of(*after)
        y = self._fused(input, activation=name)
        if measures:
            self._record(input, y)
        for module in after if name is None else ():
            y = module(y)
        return y


class FrozenActivation(FrozenBatchNorm):
    """The base of the frozen classes of BatchNorms with a dropout and an activation."""

    def _finish(self, y: Tensor) -> Tensor:
        return self.act(self.drop(y))  # type: ignore[operator]


def _activation_of(*modules: nn.Module) -> _activations.ActivationLike:
    """The one activation that all the modules together compute; None if they must be called."""
    *others, act = modules
    if any(GLOBAL_HOOKS) or any(map(has_hooks, modules)):
        return None
    if any(type(other) is not nn.Identity for other in others):
        return None
    if (type(act).__module__, type(act).__name__) == ("timm.layers.activations", "GELU"):
        return "gelu"  # torch's exact GELU; its `inplace` does nothing
    return _activations.of_module(act)


class BitGroupNorm(FusedActivation, GroupNorm):
    """A GroupNorm that has an activation and no dropout."""

    _after = ("activation",)


class TimmRMSNorm(_RMSNorm):
    """An RMSNorm of timm, whose operations autocast leaves alone."""

    _autocasts = False


class RoundingRMSNorm(TimmRMSNorm):
    """Without timm's fast norm, a float32 weight and half-precision input give float32."""

    _call_reads = (*_RMSNorm._call_reads, "_fast_norm")

    @property
    def _rounding(self) -> str | None:  # type: ignore[override]
        return None if self._fast_norm else "input"


class RoundingRMSNorm2d(ChannelsFirst, TimmRMSNorm):
    """An RMSNorm of channels-first images, which rounds with timm's fast norm, too."""

    _rounding = "input"


class OneNode:
    """Makes the whole layer one node for torch.fx, for a class whose forward calls LayerNorm's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the library's forward; make one node of it if torch.fx traces."""
        if args and isinstance(args[0], fx.Proxy):
            return self._as_leaf(args[0])  # type: ignore[attr-defined]
        return super().forward(*args, **kwargs)  # type: ignore[misc]


_NO_MEAN = "it divides by the standard deviation about a mean that it does not subtract"
# transformers' LayerNorms of images, which permute channels-first input: class -> model.
_OF_MODELS = {
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
# The library's module -> name of a class -> the bases of its normplug class before the class
# itself, or why its layers stay. For `OneNode`, LayerNorm is another base, after the class.
_NORMS: dict[str, dict[str, Any]] = {
    "diffusers.models.normalization": {
        "FP32LayerNorm": (Float32, LayerNorm),
    },
    "timm.layers.norm": {
        "GroupNorm": (GroupNorm,),
        "GroupNorm1": (GroupNorm,),
        "LayerNorm": (LayerNorm,),
        "LayerNorm2d": (ChannelsFirst, LayerNorm),
        "LayerNormExp2d": (ChannelsFirst, LayerNorm),
        "LayerNormFp32": (Float32, LayerNorm),
        "LayerNorm2dFp32": (Float32, ChannelsFirst, LayerNorm),
        "RmsNorm": (RoundingRMSNorm,),
        "RmsNorm2d": (RoundingRMSNorm2d,),
        "RmsNormFp32": (Float32, TimmRMSNorm),
        "RmsNorm2dFp32": (Float32, ChannelsFirst, TimmRMSNorm),
        "SimpleNorm": _NO_MEAN,
        "SimpleNorm2d": _NO_MEAN,
        "SimpleNormFp32": _NO_MEAN,
        "SimpleNorm2dFp32": _NO_MEAN,
    },
    "timm.layers.norm_act": {
        "BatchNormAct2d": (FusedActivation, _BatchNorm),
        "GroupNormAct": (FusedActivation, GroupNorm),
        "GroupNorm1Act": (FusedActivation, GroupNorm),
        "LayerNormAct": (RowsThenActivation, LayerNorm),
        "LayerNormAct2d": (RowsThenActivation, ChannelsFirst, LayerNorm),
        "LayerNormActFp32": (RowsThenActivation, Float32, LayerNorm),
        "LayerNormAct2dFp32": (RowsThenActivation, Float32, ChannelsFirst, LayerNorm),
        "RmsNormAct": (RowsThenActivation, RoundingRMSNorm),
        "RmsNormAct2d": (RowsThenActivation, RoundingRMSNorm2d),
        "RmsNormActFp32": (RowsThenActivation, Float32, RoundingRMSNorm),
        "RmsNormAct2dFp32": (RowsThenActivation, Float32, RoundingRMSNorm2d),
    },
    "timm.models.metaformer": {
        "GroupNorm1NoBias": (GroupNorm,),
        "LayerNormNoBias": (LayerNorm,),
        "LayerNorm2dNoBias": (ChannelsFirst, LayerNorm),
    },
    "torchvision.models.convnext": {
        "LayerNorm2d": (ChannelsFirst, LayerNorm),
    },
    "transformers.models.bit.modeling_bit": {
        "BitGroupNormActivation": (BitGroupNorm,),
    },
    "transformers.models.poolformer.modeling_poolformer": {
        "PoolFormerGroupNorm": (GroupNorm,),
    },
}
for _name, _model in _OF_MODELS.items():
    _NORMS[f"transformers.models.{_model}.modeling_{_model}"] = {_name: OneNode}


def adapt(cls: type[nn.Module]) -> type[TargetVarianceNorm] | str | None:
    """The normplug class for exactly this class of a library, or why its layers stay, or None."""
    row = _NORMS.get(cls.__module__, {}).get(cls.__name__)
    if isinstance(row, str):
        return row
    if row is not None:
        return _listed_class(cls, row)  # type: ignore[arg-type]
    if "Frozen" in cls.__name__:
        probe: Any = frozen.probe_frozen_norm
        unknown = frozen.UNKNOWN
    elif cls.__module__.startswith(("diffusers.", "transformers.")):
        if issubclass(cls, (nn.LayerNorm, nn.GroupNorm)):
            return None
        probe = rms_norms.probe_rms_norm
        unknown = rms_norms.UNKNOWN
    else:
        return None
    try:
        return _probed_class(cls, probe)  # type: ignore[arg-type]
    except Exception:  # not cached: a mode that is active now may have caused it
        return unknown


@functools.cache
def _listed_class(cls: Any, row: Any) -> Any:
    """The class that a row describes; None if the library's version has no forward to build on."""
    if row is OneNode:
        if not issubclass(cls, nn.LayerNorm):
            return None
        return class_for(cls, (OneNode, cls, LayerNorm))
    ours = class_for(cls, (*row, cls))
    if issubclass(ours, _BatchNorm):
        bases = (_SyncBatchNorm, ours)
        ours._synchronised = class_for(cls, bases, "Sync", _unsynchronised=ours)
        register(cls, FrozenActivation)
    return ours


@functools.cache
def _probed_class(cls: Any, probe: Callable[[Any], Any]) -> Any:
    """The class of a norm that a probe recognises by its forward, or why there is none."""
    recognised = probe(cls)
    if isinstance(recognised, str):
        return recognised
    base, declarations = recognised
    return class_for(cls, (base, cls), **declarations)


def class_for(
    cls: Any, bases: tuple[Any, ...], prefix: str = "", **declarations: Any
) -> Any:
    """A normplug class for a library's class, by which pickles find it: see `modules.table`."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    text = f"`{name}` that normalises to the target of its mode."
    namespace = {"__module__": __name__, "__doc__": text, **declarations}
    ours = type(prefix + cls.__name__, bases, namespace)
    name_arguments(ours, cls)
    return ours
