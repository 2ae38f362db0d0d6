"""`SwapNorms` swaps a LightningModule's norms, `SyncNorms` synchronises its BatchNorms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from normplug import _checks, _convert
from normplug._fuse.fuse import fuse as fuse_norms
from normplug._swap import record
from normplug._swap.check import refuse
from normplug._swap.layer_modes import ModesLike, read
from normplug._swap.swap import SwapOptions, swap

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing since Python 3.11

_OPTIONS = [*SwapOptions.__annotations__]


class SwapNorms(Callback):
    """Swap the norms of a LightningModule before its optimizer is built, and fuse them if asked.

    Checkpoints record the mode of each layer; resuming with other modes is refused. A tool that
    rebuilds norms silently drops the target variance. So the layers are compared with the record of
    the swap when fit, validate and test start. `Trainer(sync_batchnorm=True)` is such a tool and is
    refused at once; use `SyncNorms` instead.

    Args:
        mode: one mode, or a mode for each layer, for `normplug.swap`.
        fuse: run norms and the operations next to them in one kernel, by `normplug.fuse`.
        recompute: with `fuse`, save memory by recomputing results in the backward.
        warm_up: deprecated, without effect: worker processes compile kernels ahead of time.
        **options: further options of `normplug.swap`.

    Raises:
        ValueError: an unknown mode, autocast_output or backend; `recompute` without `fuse`; a
            checkpoint of another mode.
        TypeError: an unknown option, or an option of the wrong type.
        RuntimeError: swapped layers were rebuilt or are bypassed; `Trainer(sync_batchnorm=True)`.

    Warns:
        DeprecationWarning: `warm_up` is passed.

    Examples:
        >>> trainer = Trainer(callbacks=[SwapNorms(fuse=True)], logger=False)
        >>> trainer = Trainer(callbacks=[SwapNorms("golden", exclude="head.*")], logger=False)
    """

    def __init__(
        self,
        mode: ModesLike = "standard",
        *,
        fuse: bool = False,
        recompute: bool = False,
        warm_up: bool | None = None,
        **options: Unpack[SwapOptions],
    ) -> None:
        self.mode = read(mode)
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise TypeError(
                f"normplug.lightning.SwapNorms: unknown option {unknown[0]!r}; the options are "
                f"fuse, recompute, {', '.join(_OPTIONS)}."
            )
        _checks.swap_options("lightning.SwapNorms", **options)
        _checks.flags("lightning.SwapNorms", fuse=fuse, recompute=recompute)
        if warm_up is not None:
            _checks.warn(
                "normplug.lightning.SwapNorms: warm_up is deprecated, and has no effect. Since "
                "version 0.2, worker processes compile kernels ahead of time. Omit it.",
                DeprecationWarning,
            )
        if recompute and not fuse:
            raise ValueError(
                "normplug.lightning.SwapNorms: recompute=True needs fuse=True."
            )
        self.fuse = fuse
        self.recompute = recompute
        self.options = options
        self._model: LightningModule | None = None
        # The target variance of each layer, at the swap and in a checkpoint that is resumed.
        self._targets: dict[str, float] = {}
        self._saved: dict[str, float] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Swap, unless `configure_model` has yet to create the layers; refuse `sync_batchnorm`."""
        # Only strategies over several processes have a `_layer_sync`.
        sync = getattr(trainer.strategy, "_layer_sync", None)
        if stage == "fit" and isinstance(sync, TorchSyncBatchNorm):
            raise RuntimeError(
                "normplug.lightning.SwapNorms: Trainer(sync_batchnorm=True) would rebuild every "
                f"BatchNorm as torch's SyncBatchNorm, without mode {self.mode}. Use "
                "Trainer(plugins=[normplug.lightning.SyncNorms()]) instead."
            )
        has_norms = next(iter(_convert.norm_layers(pl_module)), None) is not None
        if self._model is not pl_module and has_norms:
            self._swap(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap layers that `configure_model` created; verify layers, and modes of a checkpoint."""
        self._verify(pl_module)
        if self._saved is not None:
            saved = self._saved
            self._saved = None
            record.refuse_other_modes("lightning.SwapNorms", self._targets, saved)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Verify the swapped layers."""
        self._verify(pl_module)

    on_test_start = on_validation_start

    def state_dict(self) -> dict[str, Any]:
        """The target variance of each layer, for the checkpoint."""
        return {"target_variances": dict(self._targets)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the modes of the checkpoint; the start of fit refuses others."""
        self._saved = state_dict["target_variances"]

    def _swap(self, pl_module: LightningModule) -> None:
        swap(pl_module, self.mode, **self.options)
        if self.fuse:
            fuse_norms(pl_module, recompute=self.recompute)
        self._model = pl_module
        layers = dict(_convert.normplug_layers(pl_module))
        self._targets = {path: layer.target_variance for path, layer in layers.items()}
        rank_zero_info(f"normplug: norm layers in mode {self.mode}: {len(layers)}")

    def _verify(self, pl_module: LightningModule) -> None:
        if self._model is not pl_module:
            self._swap(pl_module)
        refuse("lightning.SwapNorms", pl_module, record.findings(pl_module))


class SyncNorms(LayerSync):
    """Synchronise BatchNorms over all processes while a Trainer fits, and undo it after the fit.

    Use it instead of `Trainer(sync_batchnorm=True)`, which rebuilds layers and drops their mode.
    Here every layer stays the same object, keeps its mode, and has its own class again after the
    fit. A stock layer takes part in mode standard and is stock again after the fit. A layer that
    already is a SyncBatchNorm is left alone.

    It acts only under distributed strategies that let Lightning synchronise layers (DDP and FSDP).

    Examples:
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
            self._deferred = LambdaCallback(
                on_fit_start=lambda _, model: self.synchronise(model)
            )
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
