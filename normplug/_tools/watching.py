"""`watch`: the variance before and after every norm layer, while a model trains."""

from __future__ import annotations

import csv
import io
import math
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks, _convert
from normplug._checks import needs
from normplug._files import write_file
from normplug._ops import subclasses
from normplug._table import table
from normplug._tools.loop import Loop
from normplug.modules import TargetVarianceNorm
from normplug.modules.probe import (
    Measured,
    Probe,
    SharedProbe,
    averages,
    is_only_measured,
)
from normplug.modules.row_norms import RowNorm
from normplug.reference import channel_dims

# Column of a table -> the field, and its format.
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

    input_variance: of the layer's input.
    output_variance: of its output, with weight and bias undone: what the mode sets; nan where a
        weight is 0.
    affine_variance: of its output.
    weight_rms: the root mean square of the weight.
    measure: "variance", or "second moment" for a norm that does not centre.

    With `details`:
    input_variance_10, _50, _90: percentiles of the variances that `input_variance` averages.
    dead, saturated: the shares of channels whose output is never above 0, and never below 0.
    gradient: the second moment of the output's gradient; nan in a compiled model.
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
    input_mean: float = math.nan
    input_variance_10: float = math.nan
    input_variance_50: float = math.nan
    input_variance_90: float = math.nan
    dead: float = math.nan
    saturated: float = math.nan
    gradient: float = math.nan


MEASURED = LayerVariance._fields[6:10]
DETAILS = LayerVariance._fields[13:]


# Held while a layer starts or stops measuring, and while rows are added.
_lock = threading.Lock()


class _DetailedProbe(Probe):
    """Measures what `details` asks for, too, as `DETAILS`."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(model)
        self.details = torch.full((len(DETAILS),), math.nan)

    def store(
        self, layer: TargetVarianceNorm, x: Tensor, y: Tensor, measured: Measured
    ) -> None:
        """Measure the channels of input and output, and, in the backward, the gradient of y."""
        super().store(layer, x, y, measured)
        with torch.no_grad():
            values = _details(layer, x, y, measured)
            # Activation checkpointing may repeat a forward after the gradient was measured.
            gradient = self.details[-1:].to(values)
            self.details = torch.cat([values, gradient])
        if y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(self._add_gradient)

    def _add_gradient(self, gradient: Tensor) -> None:
        self.details[-1] = subclasses.own_part(gradient.detach()).float().square().mean()


def _details(
    layer: TargetVarianceNorm, x: Tensor, y: Tensor, measured: Measured
) -> Tensor:
    """The `DETAILS` of a call but for the gradient."""
    variances = measured.input.flatten().sort().values
    places = [round(share * (len(variances) - 1)) for share in (0.1, 0.5, 0.9)]
    local = subclasses.own_part(y.detach())
    dims = channel_dims(local)
    if isinstance(layer, RowNorm):
        dims = tuple(range(local.dim() - len(layer._affine_shape())))
    dead = (local.amax(dims) <= 0).float().mean()
    saturated = (local.amin(dims) >= 0).float().mean()
    return torch.stack([x.float().mean(), *variances[places].float(), dead, saturated])


def _attach(layer: nn.Module, probe: Probe) -> None:
    """Have a layer measure for a probe; the first one of a stock layer converts it."""
    with _lock:
        before: SharedProbe | None = vars(layer).get("_probe")
        probes = [probe] if before is None else [*before.probes, probe]
        revert = None if before is None else before.revert
        if not isinstance(layer, TargetVarianceNorm):
            revert = _convert.revert
            _convert.convert(layer, 1.0, backend="torch")
        vars(layer)["_probe"] = SharedProbe(probes, revert)


def _detach(layer: nn.Module, probe: Probe) -> None:
    """Undo `_attach`; the last one of a stock layer turns it back, unless its mode was changed."""
    with _lock:
        before: SharedProbe | None = vars(layer).get("_probe")
        if before is None:
            return
        probes = [other for other in before.probes if other is not probe]
        if probes:
            vars(layer)["_probe"] = SharedProbe(probes, before.revert)
            return
        is_stock = is_only_measured(layer)
        del vars(layer)["_probe"]
        if is_stock:
            _convert.revert(layer)


class _Measuring(NamedTuple):
    """A layer that measures, and the probe that it fills."""

    path: str
    layer: nn.Module
    probe: Probe


class _Step(NamedTuple):
    """A finished step."""

    labels: list[dict[str, Any]]  # the columns of each row that are not measured
    values: Tensor  # `MEASURED`, (rows, 4), on the device
    probes: list[_DetailedProbe]  # with details; a backward adds the gradient to them

    def measurements(self, device: torch.device) -> Tensor:
        """What was measured, a row for each layer: `MEASURED`, and `DETAILS` if asked."""
        values = self.values.to(device)
        if not self.probes:
            return values
        details = torch.stack([probe.details.to(values) for probe in self.probes])
        return torch.cat([values, details], 1)


class Watch:
    """What `normplug.watch` measures; see there.

    A callback calls `start` and `finish` around a step itself, and then `release`.
    """

    def __init__(self, model: nn.Module, every: int = 1, details: bool = False) -> None:
        self._model = model
        self._every = every
        self._details = details
        self._measuring: list[_Measuring] = []
        self._pending: list[_Step] = []
        self._rows: list[LayerVariance] = []
        self._loop: Loop | None = None  # since the first `with`

    def start(self, model: nn.Module | None = None) -> None:
        """Have every norm measure from now on.

        model: if set, only calls of this model in training, with gradients enabled, count.
        """
        for path, layer in _convert.norm_layers(self._model):
            is_stock = not isinstance(layer, TargetVarianceNorm)
            if is_stock and hasattr(layer, "process_group"):
                continue
            probe = _DetailedProbe(model) if self._details else Probe(model)
            _attach(layer, probe)
            self._measuring.append(_Measuring(path, layer, probe))

    def has_run(self) -> bool:
        """Whether a norm has run since `start`."""
        return any(one.probe.measured is not None for one in self._measuring)

    def finish(self, step: int, epoch: int = 0) -> None:
        """Record what was measured as this step's, and turn stock layers back.

        Until `release`, swapped layers run as they did while they measured, so that activation
        checkpointing repeats the same forward.
        """
        is_distributed = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if is_distributed else 0
        world_size = dist.get_world_size() if is_distributed else 1
        labels = []
        for depth, (path, layer, _) in enumerate(self._measuring):
            row = {
                "step": step,
                "epoch": epoch,
                "layer": path,
                "depth": depth,
                "kind": _convert.plain_class(layer).__name__,
                "target_variance": _convert.target_variance(layer),
                "rank": rank,
                "world_size": world_size,
                "measure": _convert.declared(layer)._measure,
            }
            labels.append(row)
        probes = [one.probe for one in self._measuring]
        detailed = [probe for probe in probes if isinstance(probe, _DetailedProbe)]
        with _lock:
            self._pending.append(_Step(labels, averages(probes), detailed))
        self.release(swapped=False)

    def release(self, swapped: bool = True) -> None:
        """Stop stock layers from measuring, and turn them back; stop swapped layers, if asked."""
        remaining = []
        for one in self._measuring:
            shared = vars(one.layer).get("_probe")
            if swapped or shared is None or shared.revert is not None:
                _detach(one.layer, one.probe)
                one.probe.measured = None  # free its memory
            else:
                remaining.append(one)
        self._measuring = remaining

    def __enter__(self) -> Watch:
        if self._loop is None:
            self._loop = Loop(self._model, self._every, self)
        self._loop.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        assert self._loop is not None
        self._loop.end(completed=kind is None)
        if kind is None and not self._rows and not self._pending:
            _checks.warn(
                "normplug.watch: nothing was measured: no norm of the model ran in training with "
                "gradients enabled. Call model.train(), and watch the module that the loop calls."
            )

    @property
    def rows(self) -> list[LayerVariance]:
        """Every row so far, one for each layer and logged step. Waits for the GPU."""
        self._fetch()
        return self._rows

    def _fetch(self) -> None:
        """Add the rows of the finished steps, in one transfer from the device."""
        names = MEASURED + DETAILS if self._details else MEASURED
        with _lock:
            if not self._pending:
                return
            device = self._pending[0].values.device
            values = torch.cat([step.measurements(device) for step in self._pending])
            labels = [row for step in self._pending for row in step.labels]
            self._pending = []
            for row, measured in zip(labels, values.tolist(), strict=True):
                columns = dict(zip(names, measured, strict=True))
                self._rows.append(LayerVariance(**row, **columns))

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        if not self.rows:
            return ""
        step, world_size = self._rows[-1].step, self._rows[-1].world_size
        title = f"variance at step {step}"
        if world_size > 1:
            title += f", rank {self._rows[-1].rank} of {world_size}'s part of the batch"
        lines = [tuple(COLUMNS)]
        for row in self._rows:
            if row.step == step:
                cells = [
                    format(getattr(row, name), form) for name, form in COLUMNS.values()
                ]
                lines.append(tuple(cells))
        return f"{title}\n{table(lines)}"

    def to_csv(self, path: str | Path) -> None:
        """Write all rows to a CSV file, which is replaced as a whole; without rows, its header."""
        write_file(Path(path), self._csv())

    def append_csv(self, path: Path) -> None:
        """Append all rows, if there are any, to a CSV file, which is created with its header."""
        if not self.rows:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self._csv(header=not path.exists())
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)

    def _csv(self, header: bool = True) -> str:
        text = io.StringIO()
        columns = len(LayerVariance._fields) - (0 if self._details else len(DETAILS))
        lines = [LayerVariance._fields, *self.rows] if header else self.rows
        csv.writer(text, lineterminator="\n").writerows(line[:columns] for line in lines)
        return text.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw a heat map of variances over their targets, layer by step; needs matplotlib."""
        if not self.rows:
            raise ValueError(
                "normplug.watch: plot needs at least one measured step, and nothing has been "
                "measured yet. Call it after the first step in training."
            )
        with needs("normplug.watch: plot", "train"):
            from normplug._tools.heat_map import draw_heat_map
        draw_heat_map(io.StringIO(self._csv()), Path(path), type(self._model).__name__)


def watch(model: nn.Module, every: int = 50, details: bool = False) -> Watch:
    """Measure the variance of every norm's input and output while a model trains, in any loop.

        with normplug.watch(model) as w:
            train(model)
        print(w.table())

    Each is measured on the tensor itself, on every `every`-th step. A step is a forward of `model`
    in training, with gradients enabled. If the loop calls only parts of `model`, a step ends with a
    step of the optimizer, and a norm's latest call in it counts. A variance is taken over the
    values that are normalised together, and averaged over channels (BatchNorm), rows (LayerNorm),
    or groups of channels of each sample (GroupNorm, InstanceNorm). For a norm that does not centre
    (RMSNorm), the second moment takes its place, and the column `measure` says so. A layer that
    does not run has nan. `LayerVariance` lists the columns.

    The values stay on the device until they are read. Norms that `normplug.fuse` fused run unfused
    while they measure. Stock norms are measured, too, except torch's SyncBatchNorm, whose messages
    one process cannot change. Each process watches its own part of the batch. Several watches may
    run at once, of one model or of its parts. Copies and pickles of the model are not measured.

    A warning says so if the block ends and nothing has been measured.

    Args:
        model: the module that the loop calls, or whose parts it calls.
        every: measure on steps 0, every, 2 * every, ...
        details: whether to measure the additional columns, which cost more.

    Returns:
        A `Watch`, to enter by `with`: it has `rows`, `table()`, `to_csv(path)` and `plot(path)`.

    Raises:
        TypeError: `model` is not a module, `every` not an integer, or `details` not a bool.
        ValueError: `every` below 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> with watch(model, every=1) as w:
        ...     y = model(torch.randn(8, 4))
        >>> [row.layer for row in w.rows]
        ['1']
    """
    _checks.module("watch", model)
    _checks.count("watch", "every", every)
    _checks.flags("watch", details=details)
    return Watch(model, every, details)
