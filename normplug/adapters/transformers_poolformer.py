"""The GroupNorm of `transformers.models.poolformer`."""

from __future__ import annotations

from transformers.models.poolformer import modeling_poolformer

from normplug import modules


class PoolFormerGroupNorm(modules.GroupNorm, modeling_poolformer.PoolFormerGroupNorm):
    """`PoolFormerGroupNorm` that normalises to a target variance."""


adapt = {modeling_poolformer.PoolFormerGroupNorm: PoolFormerGroupNorm}.get
