"""Lightning plug-ins that swap a model's norms, synchronise them, and log their variances."""

from normplug._checks import needs
from normplug._convert import norm_layers

with needs("normplug.lightning", "lightning"):
    from normplug.lightning.swap_norms import SwapNorms, SyncNorms
    from normplug.lightning.variance_logger import VarianceLogger

__all__ = ["SwapNorms", "SyncNorms", "VarianceLogger", "norm_layers"]
