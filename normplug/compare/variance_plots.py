"""Draw the variance of a group's norms: along the network, and while it trains."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import NDArray

from normplug.compare.canvas import (
    Style,
    draw_line,
    legend_below,
    new_figure,
    seed_count,
    whole_numbers,
)
from normplug.compare.variance import Floats, Variance

PANELS = {
    "input_variance": "input",
    "output_variance": "output, before weight and bias (dotted: target)",
    "affine_variance": "output, after weight and bias",
}
FINE_TICKS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


def variance_by_depth_figure(
    title: str, variances: Mapping[str, Variance], styles: Mapping[str, Style]
) -> Figure:
    """Variance along the network, at the last step that all seeds of an arm logged."""
    last_steps = sorted({int(variance.steps[-1]) for variance in variances.values()})
    when = " and ".join(f"{step}" for step in last_steps)
    what = f"variance at each norm at the last step logged ({when}), mean over seeds"
    figure = new_figure(title, what, 9, 9)
    panels = dict(zip(PANELS, figure.subplots(len(PANELS), 1, sharex=True), strict=True))
    for arm, variance in variances.items():
        label = f"{arm} ({seed_count(variance.runs)})"
        for column, axes in panels.items():
            last = variance.values[column][-1]
            draw_line(axes, variance.depths, last, styles[arm], label)
        target = variance.values["target_variance"][-1]
        panels["output_variance"].plot(variance.depths, target, "k:", zorder=3)
    for column, axes in panels.items():
        axes.set_title(PANELS[column], loc="left", fontsize="medium")
        axes.set_ylabel("variance")
        _log_scale(axes)
    axes.set_xlabel(_depth_label(variances))
    axes.xaxis.set_major_locator(whole_numbers(15))
    legend_below(figure)
    return figure


def variance_by_step_figure(title: str, variances: Mapping[str, Variance]) -> Figure:
    """Variance after weight and bias: a heat map of depth by step for each arm."""
    columns = len(variances) if len(variances) <= 3 else math.ceil(math.sqrt(len(variances)))
    rows = math.ceil(len(variances) / columns)
    what = "variance after weight and bias, mean over seeds (grey: no value)"
    figure = new_figure(title, what, 2.4 + 3.3 * columns, 1.4 + 3.2 * rows)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    low, high, extend = _shared_scale([v.values["affine_variance"] for v in variances.values()])
    for axes, (arm, variance) in zip(panels, variances.items(), strict=False):
        # LogNorm would paint a zero as if it were missing; this keeps it below the scale.
        values = np.maximum(variance.values["affine_variance"].T, np.finfo(float).tiny)
        x, y = _edges(variance.steps), _edges(variance.depths)
        image = axes.pcolormesh(x, y, values, norm=LogNorm(low, high), cmap="viridis")
        axes.set_facecolor("lightgrey")
        axes.set_title(f"{arm} ({seed_count(variance.runs)})", fontsize="medium")
    for axes in panels[len(variances) :]:
        axes.remove()
    for axes in panels[len(variances) - columns : len(variances)]:
        axes.tick_params(labelbottom=True)
    panels[0].xaxis.set_major_locator(whole_numbers(4))
    panels[0].yaxis.set_major_locator(whole_numbers(12))
    ticks, names = _plain_ticks(low, high)
    bar = figure.colorbar(
        image, ax=figure.axes, extend=extend, ticks=ticks, format=names, aspect=20 * rows, pad=0.02
    )
    bar.set_label("variance")
    bar.minorticks_off()
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel(_depth_label(variances), fontsize="medium")
    return figure


def _depth_label(variances: Mapping[str, Variance]) -> str:
    """The axis' name, with what the norms are."""
    kinds = next(iter(variances.values())).kinds
    return f"norm by depth, 0 = first ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"


def _log_scale(axes: Axes) -> None:
    """A log axis over all that is drawn."""
    low, high = _span(np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines]))
    # Limits come first: a log axis without them warns where no value is positive.
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.set_yscale("log", nonpositive="mask")
    ticks, names = _plain_ticks(low, high)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(names)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)


def _shared_scale(tables: Iterable[Floats]) -> tuple[float, float, str]:
    """One colour scale for all arms: the middle 98% of the values, arrows where some lie out."""
    values = np.concatenate([table.ravel() for table in tables])
    low, high = _span(values, outside=1)
    below, above = bool((values < low).any()), bool((values > high).any())
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}
    return low, high, extend.get((below, above), "neither")


def _span(values: Floats, outside: float = 0) -> tuple[float, float]:
    """Where positive values lie, but for `outside` percent at each end; a factor 2 at least."""
    positive = values[np.isfinite(values) & (values > 0)]
    if not positive.size:
        return 0.5, 2.0
    low, high = np.percentile(positive, (outside, 100 - outside))
    widen = max(1.0, math.sqrt(2 * low / high))
    return low / widen, high * widen


def _plain_ticks(low: float, high: float) -> tuple[LogLocator, FuncFormatter]:
    """Ticks of a log axis, sparser the more decades it spans, written as plain numbers."""
    decades = math.log10(high / low)
    subs = FINE_TICKS if decades < 1 else (1, 2, 5) if decades < 3 else (1,)
    return LogLocator(subs=subs), FuncFormatter(lambda value, _: f"{value:g}")


def _edges(centres: NDArray[np.int64]) -> Floats:
    """Cell borders half-way between the centres; a lone centre gets a cell of width 1."""
    middle = (centres[1:] + centres[:-1]) / 2
    first, last = (middle[0], middle[-1]) if len(middle) else (centres[0] + 0.5, centres[0] - 0.5)
    return np.concatenate([[2 * centres[0] - first], middle, [2 * centres[-1] - last]])
