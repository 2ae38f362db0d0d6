"""The styles of the arms in every plot, and the axes that several plots share."""

from collections.abc import Iterable
from itertools import cycle, islice

import numpy as np
from matplotlib.axes import Axes

from normplug._report.figures import FIXED, Style, log_span, plain_ticks
from normplug.compare.gather import Group

COLOURS = ("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "^vPX*<>"  # they change with each arm, so that arms differ in greyscale, too
DASHES = ("-", "--", "-.")
LOOKS = zip(cycle(COLOURS), cycle(MARKERS), cycle(DASHES), strict=False)
OTHERS = tuple(
    Style(colour, marker, 1.6, dash=dash)
    for colour, marker, dash in islice(LOOKS, len(COLOURS) * len(MARKERS))
)


def arm_styles(groups: Iterable[Group]) -> dict[str, Style]:
    """Return a style for each arm, the same in every group."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    return FIXED | dict(zip(others, cycle(OTHERS)))


def seed_count(count: int) -> str:
    """Format a number of seeds."""
    return "1 seed" if count == 1 else f"{count} seeds"


def log_scale(axes: Axes) -> None:
    """Give the axes a log y axis that spans all lines."""
    low, high = log_span(np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines]))
    # Set the limits first: a log axis without them warns if no value is positive.
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.set_yscale("log", nonpositive="mask")
    ticks, names = plain_ticks(low, high)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(names)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
