"""`VarianceLogger`: log the variance before and after every norm layer during training."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from normplug import _checks
from normplug._checks import MissingPackage, needs
from normplug._tools.log import resume_log, start_log
from normplug._tools.watching import MEASURED, LayerVariance, Watch


class VarianceLogger(Callback):
    """Log the variance before and after every norm layer during training.

    It is `normplug.watch` for a Trainer, which explains what is measured. The values are copied to
    the host at the end of a logged step, in one transfer. Under `torch.compile` logged steps have a
    second graph. Under a distributed strategy only rank 0 measures, on its own part of the batch;
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
        logged_step: the latest logged step, -1 before the first.
        path: the CSV file; None before the first fit.
    """

    def __init__(
        self, every_n_steps: int = 50, dirpath: str | Path | None = None
    ) -> None:
        _checks.count("lightning.VarianceLogger", "every_n_steps", every_n_steps)
        _checks.path("lightning.VarianceLogger", "dirpath", dirpath)
        self.every_n_steps = every_n_steps
        self.dirpath = dirpath
        self.path: Path | None = None
        self.logged_step = -1
        self._measuring: Watch | None = None
        self._measured: Watch | None = None  # on the latest logged step

    @property
    def last(self) -> list[LayerVariance]:
        """The rows of the latest logged step, one per layer."""
        return [] if self._measured is None else self._measured.rows

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the directory of the files; a resumed run continues its file."""
        directory = self.dirpath or trainer.log_dir or trainer.default_root_dir
        self.path = Path(directory) / "variance.csv"
        if trainer.is_global_zero and not trainer.ckpt_path:
            start_log(self.path)
        self.logged_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of steps that a resumed run repeats, and an unfinished line."""
        if trainer.is_global_zero and self.path is not None:
            resume_log(self.path, trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """On a logged step, make every norm measure."""
        step = trainer.global_step
        if step % self.every_n_steps == 0 and step != self.logged_step:
            self.logged_step = step  # in every process
            if trainer.is_global_zero:
                self._measuring = Watch(pl_module)
                self._measuring.start()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """After a logged step, fetch and write the measured values."""
        if self._measuring is None:
            return
        assert self.path is not None
        self._measured = self._measuring
        self._measuring = None
        self._measured.finish(self.logged_step, trainer.current_epoch)
        self._measured.release()
        self._measured.append_csv(self.path)
        metrics = {}
        for row in self.last:
            for field in MEASURED:
                name = f"variance/{row.layer}/{field.removesuffix('_variance')}"
                metrics[name] = getattr(row, field)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self.logged_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map; without matplotlib, warn instead."""
        if self.path is None or not self.path.exists() or not trainer.is_global_zero:
            return
        try:
            with needs("normplug.lightning.VarianceLogger: variance.png", "train"):
                from normplug._tools.heat_map import draw_heat_map
        except MissingPackage as error:
            warnings.warn(str(error), stacklevel=2)
            return
        draw_heat_map(self.path, self.path.with_suffix(".png"), _model_name(pl_module))

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop all layers from measuring."""
        if self._measuring is not None:
            self._measuring.release()
            self._measuring = None

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        return "" if self._measured is None else self._measured.table()


def _model_name(module: LightningModule) -> str:
    """The class of the only child with parameters, and of the module; else of the module."""
    name = type(module).__name__
    children = [child for child in module.children() if [*child.parameters()]]
    return f"{type(children[0]).__name__} in {name}" if len(children) == 1 else name
