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
        # The encoder only removes padding if two are equal. Its layers, which compare too, compute.
        frame, forward = sys._getframe(1), nn.TransformerEncoder.forward
        if frame.f_code is not getattr(forward, "__code__", None):
            return False
        return isinstance(other, HiddenEps) and self.true == other.true

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
