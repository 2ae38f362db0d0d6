"""For Lightning: swap a LightningModule's norms, synchronise them, watch the variance of each."""

from normplug.lightning.callbacks import SwapNorms, SyncNorms, VarianceLogger, norm_layers

__all__ = ["SwapNorms", "SyncNorms", "VarianceLogger", "norm_layers"]
