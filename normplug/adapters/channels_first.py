"""LayerNorm over the channels of an image, as in several libraries."""

from __future__ import annotations

from torch import Tensor

from normplug.modules import LayerNorm


class ChannelsFirstLayerNorm(LayerNorm):
    """LayerNorm of each position of (N, C, H, W) over its channels."""

    _channels_first = True

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        # Both permutes are views: channels_last input is not copied.
        x = input.permute(0, 2, 3, 1)
        return super()._normalise(x, weight, bias, autocast_output).permute(0, 3, 1, 2)
