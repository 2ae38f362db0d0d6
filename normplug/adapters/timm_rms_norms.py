"""The RMSNorms of `timm.layers`, and why its SimpleNorms stay.

The output's dtype under autocast is that of `swap(autocast_output=...)`, as in `timm_layers`.
"""

from __future__ import annotations

from timm.layers import norm, norm_act
from torch import nn

from normplug.adapters.channels_first import ChannelsFirst
from normplug.adapters.float32 import Float32
from normplug.adapters.timm_layers import WithActivation
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.rms_norm import _RMSNorm


class _TimmRMSNorm(_RMSNorm):
    """An RMSNorm of timm, whose operations autocast leaves alone."""

    normalized_shape: tuple[int, ...]
    _autocasts = False

    def _affine_shape(self) -> tuple[int, ...]:
        return self.normalized_shape


class RmsNorm(_TimmRMSNorm, norm.RmsNorm):
    """`timm.layers.RmsNorm` that normalises to a target second moment.

    Without timm's fast norm, a float32 weight with half-precision input gives a float32 result.
    """

    _call_reads = (*_RMSNorm._call_reads, "_fast_norm")

    @property
    def _rounding(self) -> str | None:  # type: ignore[override]
        return None if self._fast_norm else "input"


class RmsNorm2d(ChannelsFirst, _TimmRMSNorm, norm.RmsNorm2d):
    """`timm.layers.RmsNorm2d` that normalises to a target second moment."""

    _rounding = "input"


class RmsNormFp32(Float32, _TimmRMSNorm, norm.RmsNormFp32):
    """`timm.layers.RmsNormFp32` that normalises to a target second moment."""


class RmsNorm2dFp32(Float32, ChannelsFirst, _TimmRMSNorm, norm.RmsNorm2dFp32):
    """`timm.layers.RmsNorm2dFp32` that normalises to a target second moment."""


class RmsNormAct(WithActivation, RmsNorm, norm_act.RmsNormAct):
    """`timm.layers.RmsNormAct` that normalises to a target second moment."""


class RmsNormAct2d(WithActivation, RmsNorm2d, norm_act.RmsNormAct2d):
    """`timm.layers.RmsNormAct2d` that normalises to a target second moment."""


class RmsNormActFp32(WithActivation, Float32, RmsNorm, norm_act.RmsNormActFp32):
    """`timm.layers.RmsNormActFp32` that normalises to a target second moment."""


class RmsNormAct2dFp32(WithActivation, Float32, RmsNorm2d, norm_act.RmsNormAct2dFp32):
    """`timm.layers.RmsNormAct2dFp32` that normalises to a target second moment."""


_SIMPLE = "it divides by the standard deviation about a mean that it does not subtract"

_ADAPTED: dict[type[nn.Module], type[TargetVarianceNorm] | str] = {
    norm.RmsNorm: RmsNorm,
    norm.RmsNorm2d: RmsNorm2d,
    norm.RmsNormFp32: RmsNormFp32,
    norm.RmsNorm2dFp32: RmsNorm2dFp32,
    norm_act.RmsNormAct: RmsNormAct,
    norm_act.RmsNormAct2d: RmsNormAct2d,
    norm_act.RmsNormActFp32: RmsNormActFp32,
    norm_act.RmsNormAct2dFp32: RmsNormAct2dFp32,
    norm.SimpleNorm: _SIMPLE,
    norm.SimpleNorm2d: _SIMPLE,
    norm.SimpleNormFp32: _SIMPLE,
    norm.SimpleNorm2dFp32: _SIMPLE,
}
adapt = _ADAPTED.get
