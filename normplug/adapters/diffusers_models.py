"""The norms of `diffusers`: a LayerNorm, and RMSNorms, which `rms_norms` recognises."""

from __future__ import annotations

from diffusers.models import normalization
from torch import nn

from normplug.adapters import rms_norms
from normplug.adapters.float32 import Float32
from normplug.modules import LayerNorm, TargetVarianceNorm


class FP32LayerNorm(Float32, LayerNorm, normalization.FP32LayerNorm):
    """`diffusers`' FP32LayerNorm that normalises to a target variance."""


def adapt(cls: type[nn.Module]) -> type[TargetVarianceNorm] | str | None:
    """The normplug class of a norm of `diffusers`; None or the reason if it stays."""
    if cls is normalization.FP32LayerNorm:
        return FP32LayerNorm
    if issubclass(cls, (nn.LayerNorm, nn.GroupNorm)):
        return None
    return rms_norms.adapt(cls)
