"""The GroupNorm of `transformers.models.poolformer`."""

from transformers.models.poolformer import modeling_poolformer

from normplug.adapters import define
from normplug.modules import GroupNorm

adapt = define(globals(), modeling_poolformer, {"PoolFormerGroupNorm": (GroupNorm,)}).get
