"""What a variance log holds, and how it is written: CSV, metrics, a table, a heat map."""

from __future__ import annotations

import csv
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_type_hints

from normplug._extras import MissingPackage, needs

if TYPE_CHECKING:
    from normplug._report.figures import Floats

MEASURED = ("input_variance", "output_variance", "affine_variance", "weight_rms")
RATIO = "output before weight and bias, over target"


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


def draw_heat_map(rows: list[LayerVariance], path: Path, model: str) -> None:
    """Draw the variances of every layer (first at the top) at every logged step, as a PNG.

    From left to right: input; output before weight and bias, over the target; output after them.
    Without matplotlib it warns, and draws nothing.

    Args:
        rows: of one run.
        path: of the PNG; the run is named after its directory.
        model: the name of the model, for the title.
    """
    try:
        with needs("normplug.lightning.VarianceLogger: variance.png", "train"):
            import numpy as np
            from matplotlib.colors import Normalize

            from normplug._report import figures as _plots
    except MissingPackage as error:
        warnings.warn(str(error), stacklevel=2)
        return

    depths = {row.layer: row.depth for row in reversed(rows)}
    layers = sorted(depths, key=depths.__getitem__)
    steps = sorted({row.step for row in rows})
    tables = {name: np.array(table) for name, table in _tables(rows, layers, steps).items()}
    inches = min(max(0.17 * len(layers), 2.0), 40.0)
    longest = max(map(len, layers))
    figure = _plots.new_figure(
        f"{model}, run {'/'.join(path.resolve().parent.parts[1:][-4:])}",
        f"variance at each norm ({_summary(rows, steps)}; hatched: no finite value)",
        12 + 0.065 * longest,
        inches + 1.5,
    )
    panels = figure.subplots(1, len(tables), sharey=True)
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        # The ratio differs from 1 by rounding and eps, or something is wrong: a fixed scale.
        fixed = Normalize(0.9, 1.1)
        norm = fixed if name == RATIO else _plots.colour_scale([table], least=1.2)
        mesh = _plots.heat_map(axes, np.array(steps), np.arange(len(layers)), table, norm)
        _plots.colour_bar(figure, mesh, [table], axes, fraction=0.06, pad=0.02)
        axes.set_title(name + _closeness(table[np.isfinite(table)]), fontsize="medium")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(_plots.whole_numbers(5))
    shown = range(0, len(layers), math.ceil(0.13 * len(layers) / inches))
    panels[0].set_yticks(shown, [layers[i] for i in shown], fontsize=7)
    figure.savefig(path, dpi=120)


def _tables(
    rows: list[LayerVariance], layers: list[str], steps: list[int]
) -> dict[str, list[list[float]]]:
    """Title of a panel -> value of each layer at each step; NaN where there is no row."""
    cells = {(row.layer, row.step): row for row in rows}

    def table(value: Callable[[LayerVariance], float]) -> list[list[float]]:
        lines = [[cells.get((layer, step)) for step in steps] for layer in layers]
        return [[math.nan if row is None else value(row) for row in line] for line in lines]

    return {
        "input": table(lambda row: row.input_variance),
        RATIO: table(lambda row: row.output_variance / row.target_variance),
        "output after weight and bias": table(lambda row: row.affine_variance),
    }


def _summary(rows: list[LayerVariance], steps: list[int]) -> str:
    targets = sorted({row.target_variance for row in rows})
    target = " to ".join(f"{value:.4g}" for value in dict.fromkeys((targets[0], targets[-1])))
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    ranks = rows[0].world_size
    whose = "" if ranks == 1 else f", rank 0 of {ranks}'s part of the batch"
    return f"target {target}, {when}{whose}"


def _closeness(values: Floats) -> str:
    """A second line for values that are equal within a percent, which no colour shows."""
    if not values.size or values.min() <= 0:
        return ""
    middle = (values.min() + values.max()) / 2
    off = 100 * float(values.max() / middle - 1)
    if off > 1:
        return ""
    return f"\nall within {off:.1g}% of {middle:.4g}" if off > 0 else f"\nall {middle:.4g}"
