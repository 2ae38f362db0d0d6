"""The heat map of a variance log, and the scales that plots of variances share."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import Locator, LogLocator, MaxNLocator
from numpy.typing import NDArray

from normplug._results import replace_file
from normplug.lightning.variance_logger import LayerVariance

Floats = NDArray[np.float64]
TITLES = ("input", "output before weight and bias, over target", "output after weight and bias")


def draw_heat_map(rows: list[LayerVariance], path: Path, model: str) -> None:
    """Draw the variances of every layer (first at the top) at every logged step, as a PNG.

    The panels, from left to right: the input; the output before weight and bias, over the target;
    the output after them. The title names the model and the run (the PNG's directory).
    """
    frame = pd.DataFrame(rows)
    frame["ratio"] = frame["output_variance"] / frame["target_variance"]
    panels = ["input_variance", "ratio", "affine_variance"]
    values = frame.pivot(index=["depth", "layer"], columns="step", values=panels)  # or NaN
    layers, steps = list(values.index.get_level_values("layer")), values["ratio"].columns.to_numpy()
    inches = min(max(0.17 * len(layers), 2.0), 40.0)
    width = 12 + 0.065 * max(map(len, layers))
    figure = Figure(figsize=(width, inches + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    run = "/".join(path.resolve().parent.parts[1:][-4:])
    low, high = frame["target_variance"].min(), frame["target_variance"].max()
    target = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    what = (
        f"variance at each norm (target {target}, {when}{rows[0].whose()}; "
        "hatched: no finite value)"
    )
    titles = [textwrap.fill(text, int(11 * width)) for text in (f"{model}, run {run}", what)]
    figure.suptitle("\n".join(titles), fontsize="medium")
    drawn = figure.subplots(1, len(panels), sharey=True)
    for axes, title, name in zip(drawn, TITLES, panels, strict=True):
        panel = values[name].to_numpy()
        # The ratio should be 1 up to rounding and eps, so its scale is fixed.
        norm = Normalize(0.9, 1.1) if name == "ratio" else colour_scale(panel, least=1.2)
        mesh = heat_map(axes, steps, np.arange(len(layers)), panel, norm)
        colour_bar(figure, mesh, panel, axes, fraction=0.06, pad=0.02)
        axes.set_title(title + _closeness(panel[np.isfinite(panel)]), fontsize="medium")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    shown = range(0, len(layers), math.ceil(0.13 * len(layers) / inches))
    drawn[0].set_yticks(shown, [layers[i] for i in shown], fontsize=7)
    with replace_file(path) as part:
        figure.savefig(part, format="png", dpi=120)


def heat_map(
    axes: Axes, x: NDArray[Any], y: NDArray[Any], table: Floats, norm: Normalize
) -> QuadMesh:
    """Draw `table` (len(y), len(x)), first row at the top; hatch values that are not finite."""
    # LogNorm would mask a zero as if it were missing; a tiny value is drawn below the scale.
    shown = np.maximum(table, np.finfo(float).tiny) if isinstance(norm, LogNorm) else table
    axes.patch.set(facecolor="white", edgecolor="0.5", hatch="////")
    mesh = axes.pcolormesh(_edges(x), _edges(y), shown, norm=norm, cmap="viridis")
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return mesh


def colour_bar(figure: Figure, mesh: QuadMesh, values: Floats, axes: Any, **options: Any) -> None:
    """Add a colour bar for heat maps of `values`; an arrow marks an end that values exceed."""
    low, high = mesh.get_clim()
    assert low is not None
    assert high is not None
    below, above = bool((values < low).any()), bool((values > high).any())
    beyond = "both" if below and above else "min" if below else "max" if above else "neither"
    ticks = log_ticks(low, high)
    bar = figure.colorbar(mesh, ax=axes, extend=beyond, ticks=ticks, format="{x:g}", **options)
    bar.minorticks_off()


def colour_scale(values: Floats, least: float = 2) -> LogNorm:
    """A log scale over the middle 98% of all values; its ends have at least the ratio `least`."""
    return LogNorm(*log_span(values, 1, least))


def log_span(values: Floats, outside: float = 0, least: float = 2) -> tuple[float, float]:
    """The range of the positive values, without `outside` percent at each end.

    Args:
        values: any; only finite values above 0 count.
        outside: percent of the values to leave out below, and above.
        least: the smallest ratio of the two ends, so that values which differ only by rounding do
            not fill the scale.
    """
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 1 / math.sqrt(least), math.sqrt(least)
    low, high = np.percentile(positive, (outside, 100 - outside), method="inverted_cdf")
    widen = max(1.0, math.sqrt(least * low / high))
    return float(low / widen), float(high * widen)


def log_ticks(low: float, high: float) -> Locator:
    """Ticks for a log axis that may span less than a decade."""
    if high / low < 3:
        return MaxNLocator(5, steps=[1, 2, 5, 10])
    return LogLocator(subs=(1, 2, 5) if high / low < 1000 else (1,))


def _edges(centres: NDArray[Any]) -> Floats:
    """Cell borders half-way between the centres; a single centre gets a cell of width 1."""
    middle = (centres[1:] + centres[:-1]) / 2
    first, last = (middle[0], middle[-1]) if len(middle) else (centres[0] + 0.5, centres[0] - 0.5)
    return np.concatenate([[2 * centres[0] - first], middle, [2 * centres[-1] - last]])


def _closeness(values: Floats) -> str:
    """A second title line for values within 1% of their middle, where colours show nothing."""
    if not values.size or values.min() <= 0:
        return ""
    middle = (values.min() + values.max()) / 2
    off = 100 * float(values.max() / middle - 1)
    if off > 1:
        return ""
    return f"\nall within {off:.1g}% of {middle:.4g}" if off > 0 else f"\nall {middle:.4g}"
