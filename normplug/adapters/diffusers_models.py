"""The norms of `diffusers`: a LayerNorm, and RMSNorms, which `rms_norms` recognises."""

from __future__ import annotations

from diffusers.models import normalization
from torch import nn

from normplug.adapters import Float32, define, rms_norms
from normplug.modules import LayerNorm, TargetVarianceNorm

_ADAPTED = define(globals(), normalization, {"FP32LayerNorm": (Float32, LayerNorm)})


def adapt(cls: type[nn.Module]) -> type[TargetVarianceNorm] | str | None:
    """The normplug class of a norm of `diffusers`; None or the reason if it stays."""
    if issubclass(cls, (nn.LayerNorm, nn.GroupNorm)):
        return _ADAPTED.get(cls)
    return rms_norms.adapt(cls)
