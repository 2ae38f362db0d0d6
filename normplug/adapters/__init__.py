"""Normplug classes for norms of other libraries; `_ADAPTERS` in `normplug._convert` lists them.

Each module imports its library. `normplug._convert` imports the module when a model has a norm of
that library, and pickle does, too. Its `adapt(cls)` returns the normplug class for exactly that
class, or why the class stays, or None.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normplug.modules import LayerNorm
from normplug.modules.row_norms import RowNorm


def define(
    namespace: dict[str, Any], library: Any, bases: dict[str, tuple[type, ...]]
) -> dict[type, Any]:
    """Define the normplug classes of a library's norms, and return them by the library's class.

    Args:
        namespace: the globals of the module that gets the classes, where pickle looks them up.
        library: the module of the library that has the norms.
        bases: the name of each norm, and what its normplug class inherits from before it.
    """
    made = {}
    for name, ours in bases.items():
        theirs = getattr(library, name)
        doc = f"`{theirs.__module__}.{name}` that normalises to the target of its mode."
        attributes = {"__module__": namespace["__name__"], "__doc__": doc}
        made[theirs] = namespace[name] = type(name, (*ours, theirs), attributes)
    return made


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


class Float32(RowNorm):
    """Computes in float32 and returns the input's dtype, with or without autocast."""

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return super()._normalise(input.float(), weight, bias, "float32").to(input.dtype)
