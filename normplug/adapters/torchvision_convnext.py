"""The LayerNorm of `torchvision.models.convnext`."""

from __future__ import annotations

from torchvision.models import convnext

from normplug.adapters.channels_first import ChannelsFirstLayerNorm


class LayerNorm2d(ChannelsFirstLayerNorm, convnext.LayerNorm2d):
    """`torchvision.models.convnext.LayerNorm2d` that normalises to a target variance."""


adapt = {convnext.LayerNorm2d: LayerNorm2d}.get
