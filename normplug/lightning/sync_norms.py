"""`SyncNorms`: synchronise BatchNorms over all processes while a Trainer fits."""

from __future__ import annotations

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins import LayerSync
from torch import nn

from normplug import _convert


class SyncNorms(LayerSync):
    """Synchronise BatchNorms over all processes while a Trainer fits, and undo it after the fit.

    Use it instead of `Trainer(sync_batchnorm=True)`, which rebuilds layers and drops their mode.
    Here every layer stays the same object, keeps its mode, and has its own class again after the
    fit. A stock layer takes part in mode standard and is stock again after the fit. A layer that
    already is a SyncBatchNorm is left alone.

    It acts only under distributed strategies that let Lightning synchronise layers (DDP and FSDP).

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> from normplug.lightning import SwapNorms
        >>> trainer = Trainer(plugins=[SyncNorms()], callbacks=[SwapNorms("golden")], logger=False)
    """

    def __init__(self) -> None:
        self._synchronised: list[nn.Module] = []
        self._deferred: Callback | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise every BatchNorm of `model`; on the CPU, when the fit starts."""
        trainer = vars(model).get("_trainer")
        if trainer is not None and trainer.strategy.root_device.type == "cpu":
            # DistributedDataParallel wraps the model before the fit starts. On the CPU it rejects a
            # model with a SyncBatchNorm, since torch's does not run there.
            self._deferred = LambdaCallback(on_fit_start=lambda _, model: self.synchronise(model))
            trainer.callbacks.insert(0, self._deferred)
        else:
            self.synchronise(model)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Undo `apply`."""
        trainer = vars(model).get("_trainer")
        if trainer is not None and self._deferred in trainer.callbacks:
            trainer.callbacks.remove(self._deferred)
        for module in self._synchronised:
            _convert.desynchronise(module)
        self._synchronised = []
        return model

    def synchronise(self, model: nn.Module) -> None:
        """Synchronise every BatchNorm of `model` now, until `revert`."""
        self._synchronised += [m for m in model.modules() if _convert.synchronise(m)]
