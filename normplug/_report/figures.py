"""Shared by the plots: figures that need no display, lines, legends, scales that hide noise."""

import math
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from normplug._report.files import replace_file

Floats = NDArray[np.float64]
FINE_TICKS = (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)


class Style(NamedTuple):
    """The style of an arm in every plot; marker, dash and hatch identify it without colour."""

    colour: str
    marker: str
    width: float
    hatch: str = ""
    dash: str = "-"


# Okabe and Ito's palette, safe for every common colour blindness. The baseline is drawn first and
# wide, since a mode that equals it would otherwise hide it.
FIXED = {
    "baseline": Style("#9A9A9A", "s", 4.0),
    "standard": Style("#0072B2", "o", 1.6),
    "golden": Style("#E69F00", "D", 1.6),
}


def new_figure(title: str, what: str, width: float, height: float) -> Figure:
    """Create a figure of width x height inches, without a display or pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    lines = (wrapped(text, int(11 * width)) for text in (title, what))
    figure.suptitle("\n".join(lines), fontsize="medium")
    return figure


def save_figure(figure: Figure, path: Path, dpi: int = 150) -> None:
    """Write a PNG atomically; create its directory if there is none."""
    with replace_file(path) as part:
        figure.savefig(part, format="png", dpi=dpi)


def wrapped(text: str, width: int) -> str:
    """Break a long text into lines of at most `width` characters."""
    return "\n".join(textwrap.fill(line, max(width, 10)) for line in text.splitlines())


def whole_numbers(most: int) -> MaxNLocator:
    """A locator of at most `most` ticks, at integers only: for epochs, steps and depths."""
    return MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def draw_line(
    axes: Axes, x: ArrayLike, y: ArrayLike, style: Style, label: str, **options: Any
) -> None:
    """Plot a line in the style of its arm, with markers sparse enough to tell apart."""
    (line,) = axes.plot(x, y, style.dash, color=style.colour, label=label, **options)
    line.set_linewidth(style.width)
    line.set_marker(style.marker)
    line.set_markersize(4 + style.width / 2)
    gap = np.pad(~np.isfinite(np.asarray(y, dtype=float)), 1, constant_values=True)
    shown = gap[:-2] & gap[2:]  # a point without neighbours has no line: only its marker shows it
    shown[:: 1 + np.size(x) // 25] = True
    line.set_markevery(np.flatnonzero(shown).tolist())


def legend_below(figure: Figure, columns: int = 4) -> None:
    """Add a legend below the panels, where no line can cross it.

    Args:
        figure: its first panel has every entry of the legend.
        columns: the most entries in a row; long names leave space for fewer.
    """
    handles, labels = figure.axes[0].get_legend_handles_labels()
    width, height = figure.get_size_inches()
    names = [wrapped(label, int(11 * width) - 8) for label in labels]
    # An entry whose name has c characters is about (c + 8) / 12 inches wide.
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(max(int(12 * width / (8 + longest)), 1), columns)
    # The figure has space for two rows; it grows for more.
    rows = math.ceil(len(names) / columns) * max(name.count("\n") + 1 for name in names)
    figure.set_figheight(height + 0.22 * max(rows - 2, 0))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def log_span(values: Floats, outside: float = 0, least: float = 2) -> tuple[float, float]:
    """The range of the positive values, without `outside` percent at each end.

    Args:
        values: any; those that are not finite or not positive are ignored.
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


def plain_ticks(low: float, high: float) -> tuple[Locator, FuncFormatter]:
    """Ticks of a log axis as plain numbers; the more decades it spans, the fewer."""
    decades = math.log10(high / low)
    locator: Locator = MaxNLocator(5, steps=[1, 2, 5, 10])
    if decades > 0.3:
        locator = LogLocator(subs=FINE_TICKS if decades < 1 else (1, 2, 5) if decades < 3 else (1,))
    return locator, FuncFormatter(lambda value, _: f"{value:g}")


def colour_scale(tables: Iterable[Floats], least: float = 2) -> LogNorm:
    """A log scale over the middle 98% of all values; see `log_span` for `least`."""
    return LogNorm(*log_span(np.concatenate([table.ravel() for table in tables]), 1, least))


def heat_map(
    axes: Axes, x: NDArray[Any], y: NDArray[Any], table: Floats, norm: Normalize
) -> QuadMesh:
    """Draw `table` (len(y), len(x)), first row at the top; hatch values that are not finite."""
    # LogNorm would mask a zero as if it were missing; a tiny value is drawn below the scale.
    shown = np.maximum(table, np.finfo(float).tiny) if isinstance(norm, LogNorm) else table
    axes.patch.set(facecolor="white", edgecolor="0.5", hatch="////")
    mesh = axes.pcolormesh(cell_edges(x), cell_edges(y), shown, norm=norm, cmap="viridis")
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    return mesh


def colour_bar(
    figure: Figure, mesh: QuadMesh, tables: Iterable[Floats], axes: Any, **options: Any
) -> None:
    """Add a colour bar for heat maps of `tables`; an arrow marks an end that values exceed."""
    low, high = mesh.get_clim()
    assert low is not None
    assert high is not None
    values = np.concatenate([table[np.isfinite(table)] for table in tables])
    beyond = {
        (True, True): "both",
        (True, False): "min",
        (False, True): "max",
        (False, False): "neither",
    }[bool((values < low).any()), bool((values > high).any())]
    ticks, names = plain_ticks(low, high)
    bar = figure.colorbar(mesh, ax=axes, extend=beyond, ticks=ticks, format=names, **options)
    bar.minorticks_off()


def cell_edges(centres: NDArray[Any]) -> Floats:
    """Cell borders half-way between the centres; a single centre gets a cell of width 1."""
    middle = (centres[1:] + centres[:-1]) / 2
    first, last = (middle[0], middle[-1]) if len(middle) else (centres[0] + 0.5, centres[0] - 0.5)
    return np.concatenate([[2 * centres[0] - first], middle, [2 * centres[-1] - last]])
