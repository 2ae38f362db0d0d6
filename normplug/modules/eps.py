"""The eps that a layer shows: code that drops the target variance gets nan from it.

Tools that fold, rebuild or recompute a norm read its eps and scale every output by 1/sqrt(tv). So a
layer whose target variance is not 1 shows a `HiddenEps`, and normplug reads `_normplug.eps`. With
it, each of these prints the eps, and gives nan or skips what would be wrong: FrozenBatchNorm2d
with load_state_dict, convert_sync_batchnorm, fuse_conv_bn_eval, timm's reparameterize and freeze, a
rebuilt GroupNorm, `nn.LayerNorm.forward(layer, x)`, a copied `__dict__`, TransformerEncoderLayer's
fast path (no two are equal), Dynamo, export, ONNX, printers and inventories. A property that
judged its reader by the names in its byte code missed the first, the fifth and the sixth, and
refused the last two. `check` names a layer that has been rebuilt.
"""

from __future__ import annotations

import math
import sys
from types import CodeType
from typing import Any

import torch
from torch import nn


class HiddenEps(float):
    """An eps to look at: its text is the true eps, and its value is nan."""

    true: float | None  # None is an RMSNorm's default

    def __new__(cls, true: float | None) -> HiddenEps:
        """Hide an eps."""
        self = super().__new__(cls, math.nan)
        self.true = true
        return self

    def __repr__(self) -> str:
        return repr(self.true)

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return self._equals(other, sys._getframe(1).f_code)

    def __ne__(self, other: object) -> bool:
        return not self._equals(other, sys._getframe(1).f_code)

    def _equals(self, other: object, reader: CodeType) -> bool:
        """False, except for the encoder: if two are equal, it removes padding, and no more."""
        encoder = (nn.TransformerEncoder.__init__, nn.TransformerEncoder.forward)
        if all(reader is not getattr(method, "__code__", None) for method in encoder):
            return False
        return self.true == (other.true if isinstance(other, HiddenEps) else other)

    __hash__ = float.__hash__

    def __format__(self, spec: str) -> str:
        return format(self.true, spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return HiddenEps, (self.true,)


def eps_property(name: str) -> Any:
    """The property for the eps that the stock class calls `name`."""

    def read(layer: Any) -> Any:
        settings = layer._normplug
        if settings.target_variance == 1.0:
            return settings.eps
        # Dynamo knows no subclasses of float.
        return math.nan if torch.compiler.is_dynamo_compiling() else HiddenEps(settings.eps)

    def write(layer: Any, eps: Any) -> None:
        layer._set(eps=eps.true if isinstance(eps, HiddenEps) else eps)

    doc = "As in the stock class; a `HiddenEps` if the target variance is not 1."
    return property(read, write, doc=doc)
