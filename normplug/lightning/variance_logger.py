"""`VarianceLogger`: log the variance before and after every norm layer during training."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any, get_type_hints

from lightning.pytorch import Callback, LightningModule, Trainer

from normplug import _checks
from normplug._checks import MissingPackage, needs
from normplug._results import write_file
from normplug._statistics.watching import (
    MEASURED,
    LayerVariance,
    Measurement,
    append_csv,
    as_table,
    filled,
)


class VarianceLogger(Callback):
    """Log the variance before and after every norm layer during training.

    It is `normplug.watch` for a Trainer: see there for what is measured. On logged steps each norm
    measures in its forward, and the values are copied to the host at the end of the step, in one
    transfer. Under `torch.compile` logged steps have a second graph. Under a distributed strategy
    only rank 0 measures, on its own part of the batch; the columns `rank` and `world_size` record
    this.

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
        self._measurement: Measurement | None = None
        self.logged_step = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the directory of the files; a resumed run continues its file."""
        directory = self.dirpath or trainer.log_dir or trainer.default_root_dir
        self.path = Path(directory) / "variance.csv"
        if trainer.is_global_zero and not trainer.ckpt_path:
            self.path.unlink(missing_ok=True)
        self.logged_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop the rows of steps that a resumed run repeats, and an unfinished line."""
        if trainer.is_global_zero and self.path is not None and self.path.exists():
            header, *lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            whole = (line for line in lines if line.endswith("\n"))
            kept = [line for line in whole if int(line.split(",")[0]) < trainer.global_step]
            write_file(self.path, "".join([header, *kept]))
            types = get_type_hints(LayerVariance).values()
            cells = (zip(types, line, strict=True) for line in csv.reader(kept))
            rows = [LayerVariance(*(to(cell) for to, cell in row)) for row in cells]
            self.last = [row for row in rows if row.step == rows[-1].step]

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
        self._measurement = Measurement(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a logged step, fetch and write the measured values."""
        if self._measurement is None:
            return
        place = (trainer.current_epoch, trainer.global_rank, trainer.world_size)
        self.last = filled([self._measurement.finish(self.logged_step, *place)])
        self._measurement.release()
        self._measurement = None
        assert self.path is not None
        append_csv(self.path, self.last)
        metrics = {
            f"variance/{row.layer}/{field.removesuffix('_variance')}": getattr(row, field)
            for row in self.last
            for field in MEASURED
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self.logged_step)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the heat map; without matplotlib, warn instead."""
        if self.path is None or not self.path.exists() or not trainer.is_global_zero:
            return
        try:
            with needs("normplug.lightning.VarianceLogger: variance.png", "train"):
                from normplug._statistics.heat_map import draw_heat_map
        except MissingPackage as error:
            warnings.warn(str(error), stacklevel=2)
            return
        draw_heat_map(self.path, self.path.with_suffix(".png"), type(pl_module).__name__)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop all layers from measuring."""
        if self._measurement is not None:
            self._measurement.release()
            self._measurement = None

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        return as_table(self.last)
