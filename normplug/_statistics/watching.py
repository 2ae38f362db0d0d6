"""`watch`: the variance before and after every norm layer, while a model trains."""

from __future__ import annotations

import csv
import io
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks, _convert
from normplug._checks import needs
from normplug._ops import parts
from normplug._results import write_file
from normplug._table import table
from normplug._torch import in_backward
from normplug.modules import TargetVarianceNorm
from normplug.modules.probe import Probe, averages
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
    dead, saturated: shares of channels whose output is nowhere above 0, and nowhere below 0.
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


class _Details(Probe):
    """Measures what `details` asks for, too, as `DETAILS`."""

    def __init__(self) -> None:
        self.details = torch.full((len(DETAILS),), math.nan)

    def look(self, layer: TargetVarianceNorm, x: Tensor, y: Tensor) -> None:
        """Measure the channels of input and output, and, in the backward, the gradient of y."""
        assert self.input is not None
        variances = self.input.flatten().sort().values
        places = [round(share * (len(variances) - 1)) for share in (0.1, 0.5, 0.9)]
        own = parts.own_part(y.detach())
        dims = channel_dims(own)
        if isinstance(layer, RowNorm):
            dims = tuple(range(own.dim() - len(layer._affine_shape())))
        shares = [(own.amax(dims) <= 0).float().mean(), (own.amin(dims) >= 0).float().mean()]
        found = [x.float().mean(), *variances[places].float(), *shares]
        self.details = torch.stack([*found, torch.full_like(found[0], math.nan)])
        if y.requires_grad and not torch.compiler.is_compiling():
            y.register_hook(partial(_add_gradient, self.details))


def _add_gradient(details: Tensor, gradient: Tensor) -> None:
    details[-1] = parts.own_part(gradient.detach()).float().square().mean()


class Watch:
    """What `normplug.watch` measures; see there.

    A callback calls `start` and `finish` around a step itself, and then `release`.
    """

    def __init__(self, model: nn.Module, every: int = 1, details: bool = False) -> None:
        self._model, self._every, self._details = model, every, details
        self._forwards = 0
        self._runs = False  # whether a forward that measures runs
        self._measuring: list[tuple[str, TargetVarianceNorm, bool]] = []  # path, layer, is stock
        # Of each finished step: what is known of each row before and after the values; the values.
        self._pending: list[tuple[list[tuple[Any, Any]], list[Tensor]]] = []
        self._rows: list[LayerVariance] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Have every norm measure from now on."""
        for path, module in _convert.norm_layers(self._model):
            is_stock = not isinstance(module, TargetVarianceNorm)
            if is_stock and hasattr(module, "process_group"):
                continue
            if is_stock:
                _convert.convert(module, 1.0, backend="torch")
            assert isinstance(module, TargetVarianceNorm)
            module._probe = _Details() if self._details else Probe()
            self._measuring.append((path, module, is_stock))

    def finish(self, step: int, epoch: int = 0) -> None:
        """Take what was measured as this step's, and turn stock layers back.

        Until `release`, swapped layers run as they did while they measured, so that activation
        checkpointing repeats the same forward.
        """
        joined = dist.is_available() and dist.is_initialized()
        place = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        known = []
        probes: list[Any] = [layer._probe for _, layer, _ in self._measuring]
        for depth, (path, layer, _) in enumerate(self._measuring):
            kind = _convert.plain_class(layer).__name__
            head = step, epoch, path, depth, kind, layer.target_variance
            known.append((head, (*place, layer._measure)))
        values = averages(probes)
        self._pending.append((known, [values, *(p.details for p in probes if self._details)]))
        self.release(swapped=False)

    def release(self, swapped: bool = True) -> None:
        """Stop stock layers from measuring, and turn them back; stop swapped layers, if asked."""
        for _, layer, is_stock in self._measuring:
            if swapped or is_stock:
                del layer._probe
            if is_stock:
                _convert.revert(layer)
        self._measuring = [] if swapped else [each for each in self._measuring if not each[2]]

    def __enter__(self) -> Watch:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self.release()

    def _before(self, model: nn.Module, inputs: Any) -> None:
        if in_backward():  # activation checkpointing repeats the last forward
            return
        self.release()
        self._runs = False
        if model.training and torch.is_grad_enabled():
            if self._forwards % self._every == 0:
                self._runs = True
                self.start()
            self._forwards += 1

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._runs:
            self._runs = False
            self.finish(self._forwards - 1)

    @property
    def rows(self) -> list[LayerVariance]:
        """Every row so far, one for each layer and logged step. Waits for the GPU."""
        tables = []
        for _, (values, *details) in self._pending:
            more = [torch.stack([each.to(values) for each in details])] if details else []
            tables.append(torch.cat([values, *more], 1).to(self._pending[0][1][0].device))
        found = torch.cat(tables).tolist() if tables else []  # one transfer
        known = [row for step, _ in self._pending for row in step]
        for (head, tail), row in zip(known, found, strict=True):
            self._rows.append(LayerVariance(*head, *row[:4], *tail, *row[4:]))
        self._pending = []
        return self._rows

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        rows = [row for row in self.rows if row.step == self.rows[-1].step]
        if not rows:
            return ""
        cells = [
            tuple(format(getattr(row, name), form) for name, form in COLUMNS.values())
            for row in rows
        ]
        step, processes = rows[0].step, rows[0].world_size
        part = "" if processes == 1 else f", rank {rows[0].rank} of {processes}'s part of the batch"
        return f"variance at step {step}{part}\n{table([tuple(COLUMNS), *cells])}"

    def to_csv(self, path: str | Path) -> None:
        """Write all rows to a CSV file, which is replaced as a whole."""
        write_file(Path(path), self._csv())

    def append_csv(self, path: Path) -> None:
        """Append all rows to a CSV file, which is created with its header."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self._csv(header=not path.exists())
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(text)

    def _csv(self, header: bool = True) -> str:
        text, width = io.StringIO(), None if self._details else -len(DETAILS)
        lines = [LayerVariance._fields, *self.rows] if header else self.rows
        csv.writer(text, lineterminator="\n").writerows(line[:width] for line in lines)
        return text.getvalue()

    def plot(self, path: str | Path) -> None:
        """Draw a heat map of the variances, layer by step, as a PNG; needs matplotlib."""
        with needs("normplug.watch: plot", "train"):
            from normplug._statistics.heat_map import draw_heat_map
        draw_heat_map(io.StringIO(self._csv()), Path(path), type(self._model).__name__)


def watch(model: nn.Module, every: int = 50, details: bool = False) -> Watch:
    """Measure the variance of every norm's input and output while a model trains, in any loop.

        with normplug.watch(model) as w:
            train(model)
        print(w.table())

    Each is measured on the tensor itself, on every `every`-th forward in training with gradients
    enabled. It is taken over the values that are normalised together, and averaged over channels
    (BatchNorm), rows (LayerNorm), or groups of channels of each sample (GroupNorm, InstanceNorm).
    For a norm that does not centre (RMSNorm), the second moment takes its place, and the column
    `measure` says so. A layer that does not run has nan. `LayerVariance` lists the columns.

    The values stay on the device until they are read. Norms that `normplug.fuse` fused run unfused
    while they measure. Stock norms are measured, too, except torch's SyncBatchNorm, whose messages
    one process cannot change. Each process watches its own part of the batch.

    Args:
        model: the module that the loop calls.
        every: measure on forwards 0, every, 2 * every, ...
        details: whether to measure the further columns, which cost more.

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
