"""Norms over the channels of an image, as in several libraries."""

from __future__ import annotations

from torch import Tensor

from normplug.modules import LayerNorm
from normplug.modules.row_norm import RowNorm


class ChannelsFirst(RowNorm):
    """A norm of rows that takes (N, C, H, W); the rows are the channels of each position."""

    _channels_first = True

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        # Both permutes are views: channels_last input is not copied.
        x = input.permute(0, 2, 3, 1)
        return super()._normalise(x, weight, bias, autocast_output).permute(0, 3, 1, 2)


class ChannelsFirstLayerNorm(ChannelsFirst, LayerNorm):
    """LayerNorm of each position of (N, C, H, W) over its channels."""
