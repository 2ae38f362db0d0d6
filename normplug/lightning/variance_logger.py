"""`VarianceLogger`: log the variance before and after every norm layer during training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from normplug import _checks, _convert
from normplug._extras import MissingPackage, needs
from normplug.lightning.variance_table import (
    MEASURED,
    LayerVariance,
    append,
    as_metrics,
    as_table,
    keep_before,
)
from normplug.modules import TargetVarianceNorm
from normplug.modules.probe import Probe, averages


class VarianceLogger(Callback):
    """Log the variance before and after every norm layer during training.

    For each norm it logs the variance of the input, of the output before weight and bias (which the
    mode sets) and of the output after them, and the root mean square of the weight. The variance
    before weight and bias is computed from the input's: tv * var / (var + eps). A variance is that
    of the values that are normalised together, averaged over all channels (BatchNorm), rows
    (LayerNorm), or groups of channels of each sample (GroupNorm, InstanceNorm). For a norm that
    does not centre (RMSNorm) it is the second moment, as the column `measure` says. A layer that
    does not run, or whose batch is empty, has nan.

    The layers measure in their forward, on logged steps only. At the end of the step, the values of
    all layers are averaged together and copied to the host in one transfer. Under `torch.compile`
    logged steps have a second graph. Stock norms are measured too: for a logged step they act as
    normplug layers of mode standard, which compute the same. Torch's own SyncBatchNorm is not
    measured, as one process cannot change what it sends; `swap(model, "standard")` turns it into a
    layer that is. Under a distributed strategy only rank 0 measures, on its own part of the batch;
    the columns `rank` and `world_size` record this.

    It writes `variance.csv` during the fit, `variance.png` (a heat map, layer by step) at its end,
    and to the Trainer's loggers `variance/<layer>/{input,output,affine}` and
    `variance/<layer>/weight_rms`.

    Args:
        every_n_steps: log on optimizer steps 0, n, 2n, ...
        dirpath: the directory of the files; None for the Trainer's log directory, or its root
            directory if it has no log directory.

    Raises:
        ValueError: `every_n_steps` below 1.
        TypeError: `every_n_steps` is not an integer, or `dirpath` not a path.

    Attributes:
        last: the rows of the latest logged step, one per layer.
        logged_step: the latest logged step, -1 before the first.
        path: the CSV file; None before the first fit.
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
        """Choose the directory of the files; a resumed run continues its file."""
        directory = self.dirpath or trainer.log_dir or trainer.default_root_dir
        self.path = Path(directory) / "variance.csv"
        if trainer.is_global_zero and not trainer.ckpt_path:
            self.path.unlink(missing_ok=True)
        self.logged_step, self._rows = -1, []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of steps that a resumed run repeats."""
        if trainer.ckpt_path and trainer.is_global_zero and self.path is not None:
            self._rows = keep_before(trainer.global_step, self.path)
            self.last = [row for row in self._rows if row.step == self._rows[-1].step]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """On a logged step, make every norm measure."""
        step = trainer.global_step
        if step % self.every_n_steps or step == self.logged_step:
            return
        self.logged_step = step  # in every process
        if not trainer.is_global_zero:
            return
        for name, module in _convert.norm_layers(pl_module):
            if isinstance(module, TargetVarianceNorm) or not hasattr(module, "process_group"):
                self._probed.append(_Probed(name, module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a logged step, fetch and write the measured values."""
        if not self._probed:
            return
        values = averages([probed.probe for probed in self._probed])
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
                measure=probed.module._measure,
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
        """Draw the heat map; without matplotlib, warn instead."""
        if not self._rows or self.path is None:
            return
        try:
            with needs("normplug.lightning.VarianceLogger: variance.png", "train"):
                from normplug.lightning.heat_map import draw_heat_map
        except MissingPackage as error:
            warnings.warn(str(error), stacklevel=2)
            return
        draw_heat_map(self._rows, self.path.with_suffix(".png"), model=type(pl_module).__name__)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop all layers from measuring."""
        self._release()

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        return as_table(self.last)

    def _release(self) -> None:
        for probed in self._probed:
            probed.release()
        self._probed = []


class _Probed:
    """A norm layer that measures until it is released."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.kind = _convert.plain_class(module).__name__
        self.is_stock = not isinstance(module, TargetVarianceNorm)
        if self.is_stock:
            _convert.convert(module, 1.0, backend="torch")
        assert isinstance(module, TargetVarianceNorm)
        self.module = module
        self.target_variance = module.target_variance
        module._probe = self.probe = Probe()

    def release(self) -> None:
        del self.module._probe
        if self.is_stock:
            _convert.revert(self.module)
