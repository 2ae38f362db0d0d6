"""What a variance log holds, and how it is written: CSV, metrics, a table, a heat map."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, get_type_hints

MEASURED = ("input_variance", "output_variance", "affine_variance", "weight_rms")


class LayerVariance(NamedTuple):
    """What one norm layer did on one logged step; variances are per channel or row, averaged."""

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


def append(rows: list[LayerVariance], path: Path) -> None:
    """Add rows to the CSV file, which is made, with a header, where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(LayerVariance._fields)
        writer.writerows(rows)


def keep_before(step: int, path: Path) -> list[LayerVariance]:
    """Drop the CSV file's rows from `step` on, and a line that was cut off; return the others."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = [_parsed(row) for row in csv.DictReader(lines)]
    kept = [row for row in rows if row.step < step]
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    append(kept, part)
    part.replace(path)
    return kept


def _parsed(row: dict[str, str]) -> LayerVariance:
    types = get_type_hints(LayerVariance)
    return LayerVariance(**{name: types[name](row[name]) for name in LayerVariance._fields})


def as_metrics(rows: list[LayerVariance]) -> dict[str, float]:
    """The rows as a Lightning logger takes them: `variance/<layer>/<what>` -> value."""
    metrics = {}
    for row in rows:
        for field in MEASURED:
            key = field.removesuffix("_variance")
            metrics[f"variance/{row.layer}/{key}"] = getattr(row, field)
    return metrics


def as_table(rows: list[LayerVariance]) -> str:
    """The rows of one step as a table, one line a layer; "" for none."""
    if not rows:
        return ""
    width = max(len("layer"), *(len(row.layer) for row in rows))
    head = f"{'layer':{width}}  target   input var  output var  after affine  weight rms"
    lines = [
        f"{row.layer:{width}}  {row.target_variance:6.4f}  {row.input_variance:10.4g}  "
        f"{row.output_variance:10.4f}  {row.affine_variance:12.4g}  {row.weight_rms:10.4f}"
        for row in rows
    ]
    step, ranks = rows[0].step, rows[0].world_size
    whose = "" if ranks == 1 else f", rank 0 of {ranks}'s part of the batch"
    return "\n".join([f"variance at step {step}{whose}", head, *lines])


def draw_heat_map(rows: list[LayerVariance], path: Path) -> None:
    """Draw the variances of every layer (down) at every logged step (across), as a PNG.

    From left to right: input; output before weight and bias, over the target; output after them.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = sorted({row.step for row in rows})
    layers = list(dict.fromkeys(row.layer for row in rows))
    cells = {(row.layer, row.step): row for row in rows}

    def grid(value: Callable[[LayerVariance], float]) -> list[list[float]]:
        lines = [[cells.get((layer, step)) for step in steps] for layer in layers]
        return [[math.nan if row is None else value(row) for row in line] for line in lines]

    panels = {
        "input (log10)": (lambda row: _log10(row.input_variance), None),
        # a scale of its own: the values differ from 1 by rounding and eps, or something is wrong
        "output before weight and bias, / target": (
            lambda row: row.output_variance / row.target_variance,
            (0.9, 1.1),
        ),
        "output after weight and bias": (lambda row: row.affine_variance, None),
    }
    figure = Figure(figsize=(15, 1.5 + 0.22 * len(layers)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, (value, limits)) in zip(all_axes, panels.items(), strict=True):
        image = axes.imshow(grid(value), aspect="auto", cmap="viridis", interpolation="nearest")
        image.set_clim(limits)
        figure.colorbar(image, ax=axes)
        axes.set_title(f"variance of {title}", fontsize="medium")
        axes.set_xlabel("optimizer step")
        ticks = range(0, len(steps), max(1, len(steps) // 6))
        axes.set_xticks(list(ticks), [str(steps[i]) for i in ticks])
    all_axes[0].set_yticks(range(len(layers)), layers, fontsize=7)
    figure.savefig(path, dpi=120)


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan
