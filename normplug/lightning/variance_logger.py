"""`VarianceLogger`: log the variance before and after every norm layer during training."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from lightning.pytorch import Callback, LightningModule, Trainer

from normplug import _checks, _convert
from normplug._checks import MissingPackage, needs
from normplug._results import write_file
from normplug._table import table
from normplug.modules import TargetVarianceNorm
from normplug.modules.probe import Probe, averages

MEASURED = ("input_variance", "output_variance", "affine_variance", "weight_rms")
COLUMNS = {
    "layer": ("layer", ""),
    "target": ("target_variance", "6.4f"),
    "input var": ("input_variance", "9.4g"),
    "output var": ("output_variance", "10.4f"),
    "after affine": ("affine_variance", "12.4g"),
    "weight rms": ("weight_rms", "10.4f"),
    "measure": ("measure", ""),
}


class LayerVariance(NamedTuple):
    """The measurements of one norm layer on one logged step.

    measure: "variance", or "second moment" for a norm that does not centre.
    """

    step: int
    epoch: int
    layer: str
    depth: int
    kind: str
    target_variance: float
    input_variance: float
    output_variance: float
    affine_variance: float
    weight_rms: float
    rank: int
    world_size: int
    measure: str


class VarianceLogger(Callback):
    """Log the variance before and after every norm layer during training.

    For each norm it logs the variance of the input, of the output before weight and bias (which the
    mode sets) and of the output after them, and the root mean square of the weight. The variance
    before weight and bias is computed from the input's: tv * var / (var + eps). Each variance is
    taken over the values that are normalised together, and averaged over all channels (BatchNorm),
    rows (LayerNorm), or groups of channels of each sample (GroupNorm, InstanceNorm). For a norm
    that does not centre (RMSNorm), the second moment takes its place, and the column `measure` says
    so. A layer that does not run, or whose batch is empty, has nan.

    The layers measure in their forward, on logged steps only. At the end of the step, the values of
    all layers are averaged together and copied to the host in one transfer. Under `torch.compile`
    logged steps have a second graph. Stock norms are measured too: for a logged step they act as
    normplug layers of mode standard, which compute the same. Torch's own SyncBatchNorm is not
    measured, since one process cannot change what it sends; `swap(model, "standard")` makes it a
    layer that can be measured. Under a distributed strategy only rank 0 measures, on its own part
    of the batch; the columns `rank` and `world_size` record this.

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
        self._measuring: list[tuple[str, TargetVarianceNorm, bool]] = []  # path, layer, is stock
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
        for name, module in _convert.norm_layers(pl_module):
            is_stock = not isinstance(module, TargetVarianceNorm)
            if is_stock and hasattr(module, "process_group"):
                continue
            if is_stock:
                _convert.convert(module, 1.0, backend="torch")
            assert isinstance(module, TargetVarianceNorm)
            module._probe = Probe()
            self._measuring.append((name, module, is_stock))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a logged step, fetch and write the measured values."""
        if not self._measuring:
            return
        layers = [(name, layer) for name, layer, _ in self._measuring]
        values = averages([layer._probe for _, layer in layers if layer._probe is not None])
        self.last = [
            LayerVariance(
                step=self.logged_step,
                epoch=trainer.current_epoch,
                layer=name,
                depth=depth,
                kind=_convert.plain_class(layer).__name__,
                target_variance=layer.target_variance,
                **dict(zip(MEASURED, measured, strict=True)),
                rank=trainer.global_rank,
                world_size=trainer.world_size,
                measure=layer._measure,
            )
            for depth, ((name, layer), measured) in enumerate(zip(layers, values, strict=True))
        ]
        self._release()
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = [] if self.path.exists() else [LayerVariance._fields]
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*header, *self.last])
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
                from normplug.lightning.heat_map import draw_heat_map
        except MissingPackage as error:
            warnings.warn(str(error), stacklevel=2)
            return
        draw_heat_map(self.path, type(pl_module).__name__)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop all layers from measuring."""
        self._release()

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        if not self.last:
            return ""
        cells = [
            tuple(format(getattr(row, name), form) for name, form in COLUMNS.values())
            for row in self.last
        ]
        step, parts = self.last[0].step, self.last[0].world_size
        part = "" if parts == 1 else f", rank 0 of {parts}'s part of the batch"
        return f"variance at step {step}{part}\n{table([tuple(COLUMNS), *cells])}"

    def _release(self) -> None:
        for _, layer, is_stock in self._measuring:
            del layer._probe
            if is_stock:
                _convert.revert(layer)
        self._measuring = []
