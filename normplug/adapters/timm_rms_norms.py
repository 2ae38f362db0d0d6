"""The RMSNorms of `timm.layers`, and why its SimpleNorms stay.

The output's dtype under autocast is that of `swap(autocast_output=...)`, as in `timm_layers`.
"""

from __future__ import annotations

from timm.layers import norm, norm_act
from torch import nn

from normplug.adapters import ChannelsFirst, Float32, define
from normplug.adapters.timm_layers import WithActivation
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.row_norms import _RMSNorm


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


_SIMPLE = "it divides by the standard deviation about a mean that it does not subtract"
_ADAPTED: dict[type[nn.Module], type[TargetVarianceNorm] | str] = {
    norm.RmsNorm: RmsNorm,
    norm.RmsNorm2d: RmsNorm2d,
    **define(
        globals(),
        norm,
        {
            "RmsNormFp32": (Float32, _TimmRMSNorm),
            "RmsNorm2dFp32": (Float32, ChannelsFirst, _TimmRMSNorm),
        },
    ),
    **define(
        globals(),
        norm_act,
        {
            "RmsNormAct": (WithActivation, RmsNorm),
            "RmsNormAct2d": (WithActivation, RmsNorm2d),
            "RmsNormActFp32": (WithActivation, Float32, RmsNorm),
            "RmsNormAct2dFp32": (WithActivation, Float32, RmsNorm2d),
        },
    ),
    norm.SimpleNorm: _SIMPLE,
    norm.SimpleNorm2d: _SIMPLE,
    norm.SimpleNormFp32: _SIMPLE,
    norm.SimpleNorm2dFp32: _SIMPLE,
}
adapt = _ADAPTED.get
