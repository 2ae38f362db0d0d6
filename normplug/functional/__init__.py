"""Norms as functions: each call is checked here, and runs on the route for its backend.

Each file holds the functions of one family. `carry_out` runs a call of any norm, given as the
`Tensors` and the spec that the rest of the package passes on; the modules call it directly.
"""

from normplug.functional.autocast import autocast_dtype as autocast_dtype
from normplug.functional.batch_norms import batch_norm, channel_stats
from normplug.functional.calls import carry_out as carry_out
from normplug.functional.group_norms import group_norm, instance_norm
from normplug.functional.layer_norms import add_layer_norm, layer_norm
from normplug.functional.rms_norms import add_rms_norm, rms_norm
from normplug.functional.rms_norms import autocast_of_rms_norm as autocast_of_rms_norm

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "batch_norm",
    "channel_stats",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "rms_norm",
]
