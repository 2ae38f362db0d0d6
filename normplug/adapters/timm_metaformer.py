"""The norms without bias of `timm.models.metaformer`."""

from __future__ import annotations

from timm.models import metaformer
from torch import nn

from normplug import modules
from normplug._convert import Adapted
from normplug.adapters.timm_layers import LayerNorm2d


class LayerNormNoBias(modules.LayerNorm, metaformer.LayerNormNoBias):
    """`timm.models.metaformer.LayerNormNoBias` that normalises to a target variance."""


class LayerNorm2dNoBias(LayerNorm2d, metaformer.LayerNorm2dNoBias):
    """`timm.models.metaformer.LayerNorm2dNoBias` that normalises to a target variance."""


_ADAPTED: dict[type[nn.Module], Adapted] = {
    metaformer.LayerNormNoBias: Adapted(LayerNormNoBias),
    metaformer.LayerNorm2dNoBias: Adapted(LayerNorm2dNoBias),
}


def adapt(cls: type[nn.Module]) -> Adapted | None:
    """The normplug class of a norm of `timm.models.metaformer`."""
    return _ADAPTED.get(cls)
