"""Norms as functions: each call is checked here, and carried out by the route for its backend.

A file holds the functions of one family. `carry_out` takes a call of any norm as the rest of the
package describes it; modules call that.
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
