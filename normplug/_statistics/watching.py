"""`watch`: the variance before and after every norm layer, while a model trains."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug import _checks, _convert
from normplug._checks import needs
from normplug._results import write_file
from normplug._table import table
from normplug._torch import in_backward
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
_PENDING = 64  # steps whose values may wait on the device


class LayerVariance(NamedTuple):
    """The measurements of one norm layer on one logged step.

    input_variance: of the layer's input.
    output_variance: of its output, with weight and bias undone: what the mode sets.
    affine_variance: of its output.
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


class Measurement:
    """The norm layers of a model, which measure from now until `release`."""

    def __init__(self, model: nn.Module) -> None:
        self._measuring: list[tuple[str, TargetVarianceNorm, bool]] = []  # path, layer, is stock
        for name, module in _convert.norm_layers(model):
            is_stock = not isinstance(module, TargetVarianceNorm)
            if is_stock and hasattr(module, "process_group"):
                continue
            if is_stock:
                _convert.convert(module, 1.0, backend="torch")
            assert isinstance(module, TargetVarianceNorm)
            module._probe = Probe()
            self._measuring.append((name, module, is_stock))

    def finish(self, step: int, epoch: int, rank: int, world_size: int) -> tuple[list[Any], Tensor]:
        """Turn stock layers back; return a row for each layer without its values, and the values.

        Until `release`, swapped layers run as they did while they measured, so that activation
        checkpointing repeats the same forward.
        """
        values = averages([layer._probe for _, layer, _ in self._measuring if layer._probe])
        rows = [
            LayerVariance(
                step=step,
                epoch=epoch,
                layer=name,
                depth=depth,
                kind=_convert.plain_class(layer).__name__,
                target_variance=layer.target_variance,
                **dict.fromkeys(MEASURED, math.nan),
                rank=rank,
                world_size=world_size,
                measure=layer._measure,
            )
            for depth, (name, layer, _) in enumerate(self._measuring)
        ]
        self._stop([each for each in self._measuring if each[2]])
        return rows, values

    def release(self) -> None:
        """Stop all layers from measuring, and turn stock layers back."""
        self._stop(self._measuring)

    def _stop(self, layers: list[tuple[str, TargetVarianceNorm, bool]]) -> None:
        self._measuring = [each for each in self._measuring if each not in layers]
        for _, layer, is_stock in layers:
            del layer._probe
            if is_stock:
                _convert.revert(layer)


def filled(found: Sequence[tuple[list[Any], Tensor]]) -> list[LayerVariance]:
    """The rows of some steps with their values, which are copied to the host together."""
    if not found:
        return []
    device = found[0][1].device
    values = iter(torch.cat([values.to(device) for _, values in found]).tolist())
    rows = [row for rows, _ in found for row in rows]
    return [row._replace(**dict(zip(MEASURED, next(values), strict=True))) for row in rows]


def as_csv(rows: Sequence[LayerVariance], header: bool = True) -> str:
    """The rows as the text of a CSV file."""
    text = io.StringIO()
    head = [LayerVariance._fields] if header else []
    csv.writer(text, lineterminator="\n").writerows([*head, *rows])
    return text.getvalue()


def append_csv(path: Path, rows: Sequence[LayerVariance]) -> None:
    """Append rows to a CSV file, which is created with its header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = as_csv(rows, header=not path.exists())
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(text)


def as_table(rows: Sequence[LayerVariance]) -> str:
    """The rows of one step as a table, one line per layer; empty without rows."""
    if not rows:
        return ""
    cells = [
        tuple(format(getattr(row, name), form) for name, form in COLUMNS.values()) for row in rows
    ]
    step, processes = rows[0].step, rows[0].world_size
    part = "" if processes == 1 else f", rank {rows[0].rank} of {processes}'s part of the batch"
    return f"variance at step {step}{part}\n{table([tuple(COLUMNS), *cells])}"


class Watch:
    """What `normplug.watch` has measured; see there."""

    def __init__(self, model: nn.Module, every: int) -> None:
        self._model, self._every = model, every
        self._steps = 0
        self._measurement: Measurement | None = None
        self._runs = False  # whether its forward runs
        self._pending: list[tuple[list[Any], Tensor]] = []
        self._rows: list[LayerVariance] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Watch:
        self._hooks = [
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after, always_call=True),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._release()

    def _release(self) -> None:
        if self._measurement is not None:
            self._measurement.release()
        self._measurement = None

    def _before(self, model: nn.Module, inputs: Any) -> None:
        if in_backward():  # activation checkpointing repeats the last forward
            return
        self._release()
        if model.training and torch.is_grad_enabled():
            if self._steps % self._every == 0:
                self._measurement, self._runs = Measurement(model), True
            self._steps += 1

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if self._measurement is None or not self._runs:
            return
        self._runs = False
        joined = dist.is_available() and dist.is_initialized()
        place = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self._pending.append(self._measurement.finish(self._steps - 1, 0, *place))
        if len(self._pending) >= _PENDING:
            self._fetch()

    def _fetch(self) -> None:
        self._rows += filled(self._pending)
        self._pending = []

    @property
    def rows(self) -> list[LayerVariance]:
        """Every row so far, one for each layer and logged step. Waits for the GPU."""
        self._fetch()
        return self._rows

    def table(self) -> str:
        """The latest logged step as a table, one line per layer; empty before the first."""
        rows = self.rows
        return as_table([row for row in rows if row.step == rows[-1].step])

    def to_csv(self, path: str | Path) -> None:
        """Write all rows to a CSV file, which is replaced as a whole."""
        write_file(Path(path), as_csv(self.rows))

    def plot(self, path: str | Path) -> None:
        """Draw a heat map of the variances, layer by step, as a PNG; needs matplotlib."""
        with needs("normplug.watch: plot", "train"):
            from normplug._statistics.heat_map import draw_heat_map
        text = io.StringIO(as_csv(self.rows))
        draw_heat_map(text, Path(path), type(self._model).__name__)


def watch(model: nn.Module, every: int = 50) -> Watch:
    """Measure the variance of every norm's input and output while a model trains, in any loop.

        with normplug.watch(model) as w:
            train(model)
        print(w.table())

    Each is measured on the tensor itself, on every `every`-th forward in training with gradients
    enabled. It is taken over the values that are normalised together, and averaged over channels
    (BatchNorm), rows (LayerNorm), or groups of channels of each sample (GroupNorm, InstanceNorm).
    For a norm that does not centre (RMSNorm), the second moment takes its place, and the column
    `measure` says so. A layer that does not run has nan.

    The columns are the variance of the input, of the output with weight and bias undone (what the
    mode sets; nan where a weight is 0), and of the output after them, and the root mean square of
    the weight. The values stay on the device until they are read. Norms that `normplug.fuse` fused
    run unfused while they measure. Stock norms are measured, too, except torch's SyncBatchNorm,
    whose messages one process cannot change. Each process watches its own part of the batch.

    Args:
        model: the module that the loop calls.
        every: measure on forwards 0, every, 2 * every, ...

    Returns:
        A `Watch`, to enter by `with`: it has `rows`, `table()`, `to_csv(path)` and `plot(path)`.

    Raises:
        TypeError: `model` is not a module, or `every` not an integer.
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
    return Watch(model, every)
