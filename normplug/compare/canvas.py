"""What all plots share: the look of each arm, and a figure that needs no display."""

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

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
OTHERS = tuple(
    Style(colour, marker, 1.6)
    for marker in "^vP"
    for colour in ("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
)


def arm_styles(groups: Iterable[Group]) -> dict[str, Style]:
    """A style for each arm, the same in every group."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    return FIXED | dict(zip(others, cycle(OTHERS)))


def new_figure(title: str, what: str, width: float, height: float) -> Figure:
    """A figure of so many inches that draws off screen, apart from pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n{what}", fontsize="medium")
    return figure


def draw_line(axes: Axes, x: ArrayLike, y: ArrayLike, style: Style, label: str) -> None:
    """Plot a line in the look of its arm, with markers no denser than can be told apart."""
    (line,) = axes.plot(x, y, color=style.colour, linewidth=style.width, label=label)
    line.set_marker(style.marker)
    line.set_markersize(4 + style.width / 2)
    line.set_markevery(1 + np.size(x) // 25)


def whole_numbers(most: int) -> MaxNLocator:
    """Ticks for epochs, steps and depths: at most so many, none between two whole numbers."""
    return MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def legend_below(figure: Figure) -> None:
    """Name the arms under the panels, where no line can pass beneath a name."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    # A name of c letters and its sample take about (c + 8) / 12 inches.
    columns = int(12 * figure.get_figwidth() / (8 + max(map(len, labels))))
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(max(columns, 1), 4), frameon=False
    )


def seed_count(count: int) -> str:
    """The number of seeds in words."""
    return "1 seed" if count == 1 else f"{count} seeds"
