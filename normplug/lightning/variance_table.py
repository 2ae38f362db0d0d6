"""The rows of a variance log, and their output as CSV, metrics, a table and a heat map."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_type_hints

from normplug._extras import MissingPackage, needs
from normplug._report.files import replace_file
from normplug._table import table

if TYPE_CHECKING:
    from normplug._report.figures import Floats

MEASURED = ("input_variance", "output_variance", "affine_variance", "weight_rms")
RATIO = "output before weight and bias, over target"


class LayerVariance(NamedTuple):
    """The measurements of one norm layer on one logged step; variances as in `VarianceLogger`.

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
    measure: str = "variance"


def append(rows: list[LayerVariance], path: Path) -> None:
    """Add rows to the CSV file; a new file gets a header first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(LayerVariance._fields)
        writer.writerows(rows)


def keep_before(step: int, path: Path) -> list[LayerVariance]:
    """Drop the CSV file's rows from `step` on, and an unfinished line; return the other rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = [_parsed(row) for row in csv.DictReader(lines)]
    kept = [row for row in rows if row.step < step]
    with replace_file(path) as part:
        append(kept, part)
    return kept


def _parsed(row: dict[str, str]) -> LayerVariance:
    types = get_type_hints(LayerVariance)
    # Files of earlier versions lack the last column.
    return LayerVariance(**{n: types[n](row[n]) for n in LayerVariance._fields if n in row})


def as_metrics(rows: list[LayerVariance]) -> dict[str, float]:
    """The rows for a Lightning logger: `variance/<layer>/<quantity>` -> value."""
    metrics = {}
    for row in rows:
        for field in MEASURED:
            key = field.removesuffix("_variance")
            metrics[f"variance/{row.layer}/{key}"] = getattr(row, field)
    return metrics


def as_table(rows: list[LayerVariance]) -> str:
    """The rows of one step as a table, one line per layer; empty without rows."""
    if not rows:
        return ""
    head = ["layer", "target", "input var", "output var", "after affine", "weight rms"]
    lines = [
        [
            row.layer,
            f"{row.target_variance:6.4f}",
            f"{row.input_variance:9.4g}",
            f"{row.output_variance:10.4f}",
            f"{row.affine_variance:12.4g}",
            f"{row.weight_rms:10.4f}",
        ]
        for row in rows
    ]
    if any(row.measure != "variance" for row in rows):
        for line, measure in zip(
            (head, *lines), ("measure", *(r.measure for r in rows)), strict=True
        ):
            line.append(measure)
    text = table([tuple(line) for line in (head, *lines)])
    return f"variance at step {rows[0].step}{_whose(rows[0])}\n{text}"


def draw_heat_map(rows: list[LayerVariance], path: Path, model: str) -> None:
    """Draw the variances of every layer (first at the top) at every logged step, as a PNG.

    The panels, from left to right: the input; the output before weight and bias, over the target;
    the output after them. The title names the model and the run (the PNG's directory). Without
    matplotlib it warns and draws nothing.
    """
    try:
        with needs("normplug.lightning.VarianceLogger: variance.png", "train"):
            import numpy as np
            from matplotlib.colors import Normalize

            from normplug._report import figures
    except MissingPackage as error:
        warnings.warn(str(error), stacklevel=2)
        return

    depths = {row.layer: row.depth for row in reversed(rows)}
    layers = sorted(depths, key=depths.__getitem__)
    steps = sorted({row.step for row in rows})
    panels = {title: np.array(values) for title, values in _panels(rows, layers, steps).items()}
    inches = min(max(0.17 * len(layers), 2.0), 40.0)
    longest = max(map(len, layers))
    figure = figures.new_figure(
        f"{model}, run {'/'.join(path.resolve().parent.parts[1:][-4:])}",
        f"variance at each norm ({_summary(rows, steps)}; hatched: no finite value)",
        12 + 0.065 * longest,
        inches + 1.5,
    )
    drawn = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, values) in zip(drawn, panels.items(), strict=True):
        # The ratio should be 1 up to rounding and eps, so its scale is fixed.
        fixed = Normalize(0.9, 1.1)
        norm = fixed if title == RATIO else figures.colour_scale([values], least=1.2)
        mesh = figures.heat_map(axes, np.array(steps), np.arange(len(layers)), values, norm)
        figures.colour_bar(figure, mesh, [values], axes, fraction=0.06, pad=0.02)
        axes.set_title(title + _closeness(values[np.isfinite(values)]), fontsize="medium")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(figures.whole_numbers(5))
    shown = range(0, len(layers), math.ceil(0.13 * len(layers) / inches))
    drawn[0].set_yticks(shown, [layers[i] for i in shown], fontsize=7)
    figure.savefig(path, dpi=120)


def _panels(
    rows: list[LayerVariance], layers: list[str], steps: list[int]
) -> dict[str, list[list[float]]]:
    """Title of each panel -> its value for each layer and step; NaN where there is no row."""
    cells = {(row.layer, row.step): row for row in rows}

    def values(value: Callable[[LayerVariance], float]) -> list[list[float]]:
        lines = [[cells.get((layer, step)) for step in steps] for layer in layers]
        return [[math.nan if row is None else value(row) for row in line] for line in lines]

    return {
        "input": values(lambda row: row.input_variance),
        RATIO: values(lambda row: row.output_variance / row.target_variance),
        "output after weight and bias": values(lambda row: row.affine_variance),
    }


def _summary(rows: list[LayerVariance], steps: list[int]) -> str:
    targets = sorted({row.target_variance for row in rows})
    target = " to ".join(f"{value:.4g}" for value in dict.fromkeys((targets[0], targets[-1])))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return f"target {target}, {when}{_whose(rows[0])}"


def _whose(row: LayerVariance) -> str:
    """Which part of the batch was measured; empty for the whole batch."""
    return "" if row.world_size == 1 else f", rank 0 of {row.world_size}'s part of the batch"


def _closeness(values: Floats) -> str:
    """A second title line for values within 1% of their middle, where colours show nothing."""
    if not values.size or values.min() <= 0:
        return ""
    middle = (values.min() + values.max()) / 2
    off = 100 * float(values.max() / middle - 1)
    if off > 1:
        return ""
    return f"\nall within {off:.1g}% of {middle:.4g}" if off > 0 else f"\nall {middle:.4g}"
