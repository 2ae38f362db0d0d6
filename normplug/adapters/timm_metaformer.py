"""The norms without bias of `timm.models.metaformer`."""

from __future__ import annotations

from timm.models import metaformer

from normplug import modules
from normplug.adapters.timm_layers import LayerNorm2d


class GroupNorm1NoBias(modules.GroupNorm, metaformer.GroupNorm1NoBias):
    """`timm.models.metaformer.GroupNorm1NoBias` that normalises to a target variance."""


class LayerNormNoBias(modules.LayerNorm, metaformer.LayerNormNoBias):
    """`timm.models.metaformer.LayerNormNoBias` that normalises to a target variance."""


class LayerNorm2dNoBias(LayerNorm2d, metaformer.LayerNorm2dNoBias):
    """`timm.models.metaformer.LayerNorm2dNoBias` that normalises to a target variance."""


adapt = {
    metaformer.GroupNorm1NoBias: GroupNorm1NoBias,
    metaformer.LayerNormNoBias: LayerNormNoBias,
    metaformer.LayerNorm2dNoBias: LayerNorm2dNoBias,
}.get
