"""The LayerNorm of `torchvision.models.convnext`."""

from torchvision.models import convnext

from normplug.adapters import ChannelsFirstLayerNorm, define

adapt = define(globals(), convnext, {"LayerNorm2d": (ChannelsFirstLayerNorm,)}).get
