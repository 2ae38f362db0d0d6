"""The norms without bias of `timm.models.metaformer`."""

from __future__ import annotations

from timm.models import metaformer

from normplug import _convert, modules
from normplug.adapters.timm_layers import LayerNorm2d


class LayerNormNoBias(modules.LayerNorm, metaformer.LayerNormNoBias):
    """`timm.models.metaformer.LayerNormNoBias` that normalises to a target variance."""


class LayerNorm2dNoBias(LayerNorm2d, metaformer.LayerNorm2dNoBias):
    """`timm.models.metaformer.LayerNorm2dNoBias` that normalises to a target variance."""


_convert.register(LayerNormNoBias, metaformer.LayerNormNoBias)
_convert.register(LayerNorm2dNoBias, metaformer.LayerNorm2dNoBias)
