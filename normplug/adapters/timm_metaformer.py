"""The norms of `timm.models.metaformer`, which have no bias."""

from timm.models import metaformer

from normplug import modules
from normplug.adapters import ChannelsFirstLayerNorm, define

adapt = define(
    globals(),
    metaformer,
    {
        "GroupNorm1NoBias": (modules.GroupNorm,),
        "LayerNormNoBias": (modules.LayerNorm,),
        "LayerNorm2dNoBias": (ChannelsFirstLayerNorm,),
    },
).get
