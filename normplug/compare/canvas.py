"""How the arms of a comparison look in every plot."""

import math
from collections.abc import Iterable
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from normplug._report.figures import wrapped
from normplug.compare.gather import Group


class Style(NamedTuple):
    """How an arm looks in every plot."""

    colour: str
    marker: str
    width: float


# Okabe and Ito's palette: told apart in every common colour blindness. The baseline is drawn
# first and wide, since a mode that equals it would otherwise hide it.
FIXED = {
    "baseline": Style("#9A9A9A", "s", 4.0),
    "standard": Style("#0072B2", "o", 1.6),
    "golden": Style("#E69F00", "D", 1.6),
}
COLOURS = ("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "^vPX*<>"  # one more arm, one more marker: arms are told apart in grey, too
OTHERS = tuple(
    Style(colour, marker, 1.6)
    for colour, marker in islice(zip(cycle(COLOURS), cycle(MARKERS)), len(COLOURS) * len(MARKERS))
)


def arm_styles(groups: Iterable[Group]) -> dict[str, Style]:
    """A style for each arm, the same in every group."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    return FIXED | dict(zip(others, cycle(OTHERS)))


def draw_line(
    axes: Axes, x: ArrayLike, y: ArrayLike, style: Style, label: str, **options: Any
) -> None:
    """Plot a line in the look of its arm, with markers no denser than can be told apart."""
    (line,) = axes.plot(x, y, color=style.colour, linewidth=style.width, label=label, **options)
    line.set_marker(style.marker)
    line.set_markersize(4 + style.width / 2)
    gap = np.pad(~np.isfinite(np.asarray(y, dtype=float)), 1, constant_values=True)
    shown = gap[:-2] & gap[2:]  # a point without neighbours has no line: only its marker shows it
    shown[:: 1 + np.size(x) // 25] = True
    line.set_markevery(np.flatnonzero(shown).tolist())


def legend_below(figure: Figure) -> None:
    """Name the arms under the panels, where no line can pass beneath a name."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    width, height = figure.get_size_inches()
    names = [wrapped(label, int(11 * width) - 8) for label in labels]
    # A name of c letters and its sample take about (c + 8) / 12 inches.
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(max(int(12 * width / (8 + longest)), 1), 4)
    # Two rows fit into the figure as it is; it grows for the others.
    rows = math.ceil(len(names) / columns) * max(name.count("\n") + 1 for name in names)
    figure.set_figheight(height + 0.22 * max(rows - 2, 0))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def seed_count(count: int) -> str:
    """The number of seeds in words."""
    return "1 seed" if count == 1 else f"{count} seeds"
