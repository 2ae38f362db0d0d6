"""The LayerNorm of `torchvision.models.convnext`."""

from __future__ import annotations

from torch import nn
from torchvision.models import convnext

from normplug._convert import Adapted
from normplug.adapters.channels_first import ChannelsFirstLayerNorm


class LayerNorm2d(ChannelsFirstLayerNorm, convnext.LayerNorm2d):
    """`torchvision.models.convnext.LayerNorm2d` that normalises to a target variance."""


def adapt(cls: type[nn.Module]) -> Adapted | None:
    """The normplug class of torchvision's `LayerNorm2d`."""
    return Adapted(LayerNorm2d) if cls is convnext.LayerNorm2d else None
