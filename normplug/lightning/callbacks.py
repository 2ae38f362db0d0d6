"""For Lightning: swap a LightningModule's norms, synchronise them, watch the variance of each."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normplug import _checks, _convert
from normplug._extras import needs
from normplug._swap import record as _record
from normplug._swap.check import refuse
from normplug._swap.swap import swap
from normplug.lightning.variance_table import (
    MEASURED,
    LayerVariance,
    append,
    as_metrics,
    as_table,
    draw_heat_map,
    keep_before,
)
from normplug.modes import ModeLike, NormMode
from normplug.modules import TargetVarianceNorm

with needs("normplug.lightning", "train"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import LayerSync
    from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
    from lightning.pytorch.utilities import rank_zero_info

__all__ = ["SwapNorms", "SyncNorms", "VarianceLogger"]

_OPTIONS = [p.name for p in inspect.signature(swap).parameters.values() if p.kind is p.KEYWORD_ONLY]


class SwapNorms(Callback):
    """Swap the norms of a LightningModule before its optimizer is built.

    The mode goes into checkpoints; resuming under another is refused. At the start of fit,
    validate and test the layers are compared with the record of the swap, as `normplug.check` does,
    since a tool that rebuilds norms would silently drop the target variance. One that is known to,
    `Trainer(sync_batchnorm=True)`, is refused before it does: `SyncNorms` is for that.

    Args:
        mode: "golden" (1/phi), "standard" (1), a finite number above 0, or a `NormMode`.
        **options: those of `normplug.swap`.

    Raises:
        ValueError: an unknown mode, autocast_output or backend; a checkpoint of another mode.
        TypeError: an unknown option, or one of another type.
        RuntimeError: where swapped layers have been rebuilt or bypassed since, or BatchNorms are
            about to be.

    Example:
        >>> trainer = Trainer(callbacks=[SwapNorms("golden", exclude="head.*")], logger=False)
    """

    def __init__(self, mode: ModeLike = "golden", **options: Any) -> None:
        self.mode = NormMode(mode)
        _checks.known("lightning.SwapNorms", options, _OPTIONS)
        _checks.swap_options("lightning.SwapNorms", **options)
        self.options = options
        self._model: LightningModule | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Swap, unless the layers are only made later, in `configure_model`."""
        if self._model is not pl_module and any(True for _ in norm_layers(pl_module)):
            self._swap(pl_module)
        if stage == "fit":
            self._refuse_torchs_sync(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Swap what `configure_model` has made; see that what was swapped still is."""
        self._verify(pl_module)
        self._refuse_torchs_sync(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_fit_start`."""
        self._verify(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_fit_start`."""
        self._verify(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The mode, for the checkpoint."""
        return {"target_variance": self.mode.target_variance}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse a checkpoint of another mode."""
        saved = NormMode(state_dict["target_variance"])
        if saved != self.mode:
            raise ValueError(
                f"normplug.lightning.SwapNorms: the checkpoint was trained in mode {saved}; this "
                f"run's mode is {self.mode}. Resume with SwapNorms({saved.argument})."
            )

    def _swap(self, pl_module: LightningModule) -> None:
        swap(pl_module, self.mode, **self.options)
        self._model = pl_module
        swapped = sum(1 for _ in _convert.normplug_layers(pl_module))
        rank_zero_info(f"normplug: {swapped} norm layers in mode {self.mode}")

    def _refuse_torchs_sync(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Only strategies over several processes have one.
        if not isinstance(getattr(trainer.strategy, "_layer_sync", None), TorchSyncBatchNorm):
            return
        layers = (layer for _, layer in _convert.normplug_layers(pl_module))
        if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in layers):
            raise RuntimeError(
                "normplug.lightning.SwapNorms: Trainer(sync_batchnorm=True) would rebuild every "
                f"BatchNorm as torch's SyncBatchNorm, without mode {self.mode}. Use "
                "Trainer(plugins=[normplug.lightning.SyncNorms()]) in its place."
            )

    def _verify(self, pl_module: LightningModule) -> None:
        if self._model is not pl_module:
            self._swap(pl_module)
        refuse("lightning.SwapNorms", pl_module, _record.findings(pl_module))


class SyncNorms(LayerSync):
    """Synchronise BatchNorms over all processes while a Trainer fits; give them back after.

    In place of `Trainer(sync_batchnorm=True)`, which forgets what it rebuilds: here every layer
    stays the same object, in its mode, and is of its own class again after the fit. Stock layers
    take part in mode standard, and come back as stock. Layers that are SyncBatchNorms already are
    left alone.

    Only strategies over several processes that Lightning lets synchronise layers (DDP and FSDP)
    have an effect: in one process there is nothing to join.

    Example:
        >>> trainer = Trainer(plugins=[SyncNorms()], callbacks=[SwapNorms("golden")], logger=False)
    """

    def __init__(self) -> None:
        self._synchronised: list[nn.Module] = []
        self._deferred: _AtFitStart | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronise every BatchNorm of `model`; on the CPU, when the fit starts."""
        trainer = vars(model).get("_trainer")
        if trainer is not None and trainer.strategy.root_device.type == "cpu":
            # DistributedDataParallel wraps the model in between, and refuses to on the CPU where
            # there is a SyncBatchNorm, since torch's own does not run there.
            self._deferred = _AtFitStart(self)
            trainer.callbacks.insert(0, self._deferred)
        else:
            self.synchronise(model)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Give back what `apply` has synchronised."""
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


class _AtFitStart(Callback):
    def __init__(self, sync_norms: SyncNorms) -> None:
        self._sync_norms = sync_norms

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._sync_norms.synchronise(pl_module)


class VarianceLogger(Callback):
    """Log the variance in and out of every norm layer while it trains.

    For each norm: the variance of its input; of its output before weight and bias, which is what
    the mode targets; of its output after them; and the root mean square of its weight. Variances
    are taken within each channel (BatchNorm) or row (LayerNorm) and averaged over them. They are
    measured inside the layer's forward, on logged steps only, stay on the device, and come over in
    one transfer a log. Stock norms are measured as well: for a logged step they act as normplug
    layers of mode standard, which compute the same. Only torch's own SyncBatchNorm is not, as one
    process cannot change what it sends; `swap(model, "standard")` makes it one that is. Works with
    `torch.compile`, which makes a second graph for logged steps. On other steps nothing runs.

    Under a distributed strategy only rank 0 measures, and its own part of the batch; rows say so
    in `rank` and `world_size`.

    Writes `variance.csv` as it goes, `variance.png` (a heat map, layer by step) at the end of the
    fit, and to the Trainer's logger `variance/<layer>/{input,output,affine}` and
    `variance/<layer>/weight_rms`.

    Args:
        every_n_steps: log on optimizer steps 0, n, 2n, ...
        dirpath: where the files go; None is the Trainer's log directory, else its root directory.

    Raises:
        ValueError: `every_n_steps` below 1.
        TypeError: `every_n_steps` is no integer, or `dirpath` no path.

    Attributes:
        last: the rows of the latest logged step, one a layer.
        logged_step: the latest step that was measured, -1 before the first.
        path: the CSV file, once there is one.
    """

    def __init__(self, every_n_steps: int = 50, dirpath: str | Path | None = None) -> None:
        _checks.count("lightning.VarianceLogger", "every_n_steps", every_n_steps)
        _checks.path("lightning.VarianceLogger", "dirpath", dirpath)
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self.path: Path | None = None
        self.last: list[LayerVariance] = []
        self._probed: list[_Probed] = []
        self.logged_step = -1
        self._rows: list[LayerVariance] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose where the files go; continue a file of the run that is resumed."""
        directory = self.dirpath or trainer.log_dir or trainer.default_root_dir
        self.path = Path(directory) / "variance.csv"
        if trainer.is_global_zero and not trainer.ckpt_path:
            self.path.unlink(missing_ok=True)
        self.logged_step, self._rows = -1, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of steps that the resumed run trains again."""
        if trainer.ckpt_path and trainer.is_global_zero and self.path is not None:
            self._rows = keep_before(trainer.global_step, self.path)
            self.last = [row for row in self._rows if row.step == self._rows[-1].step]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """On a logged step, let every norm measure."""
        step = trainer.global_step
        if step % self.every_n_steps or step == self.logged_step or not trainer.is_global_zero:
            return
        self.logged_step = step
        for name, module in norm_layers(pl_module):
            if _convert.plain_class(module) is nn.SyncBatchNorm:
                continue
            self._probed.append(_Probed(name, module, pl_module.device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a logged step, fetch and write what was measured."""
        if not self._probed:
            return
        values = torch.stack([probed.values for probed in self._probed]).tolist()
        self.last = [
            LayerVariance(
                step=self.logged_step,
                epoch=trainer.current_epoch,
                layer=probed.name,
                depth=depth,
                kind=probed.kind,
                target_variance=probed.target_variance,
                **dict(zip(MEASURED, measured, strict=True)),
                rank=trainer.global_rank,
                world_size=trainer.world_size,
            )
            for depth, (probed, measured) in enumerate(zip(self._probed, values, strict=True))
        ]
        self._release()
        self._rows += self.last
        assert self.path is not None
        append(self.last, self.path)
        for logger in trainer.loggers:
            logger.log_metrics(as_metrics(self.last), step=self.logged_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map."""
        if self._rows and self.path is not None:
            draw_heat_map(self._rows, self.path.with_suffix(".png"), model=type(pl_module).__name__)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave no layer measuring."""
        self._release()

    def table(self) -> str:
        """The latest logged step as a table, one line a layer; "" before the first."""
        return as_table(self.last)

    def _release(self) -> None:
        for probed in self._probed:
            probed.release()
        self._probed = []


def norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of each normplug layer, and of each layer that a swap could make one."""
    for path, module in model.named_modules():
        if isinstance(module, TargetVarianceNorm) or _convert.replacement(module) is not None:
            yield path, module


class _Probed:
    """A norm layer that measures until it is released."""

    def __init__(self, name: str, module: nn.Module, device: torch.device) -> None:
        self.name = name
        self.kind = _convert.plain_class(module).__name__
        self.is_stock = not isinstance(module, TargetVarianceNorm)
        if self.is_stock:
            _convert.convert(module, 1.0, backend="torch")
        assert isinstance(module, TargetVarianceNorm)
        self.module = module
        self.target_variance = module.target_variance
        self.values = torch.full((4,), math.nan, device=device)  # a layer that is not run stays nan
        module._probe = self.values

    def release(self) -> None:
        del self.module._probe
        if self.is_stock:
            _convert.revert(self.module)
