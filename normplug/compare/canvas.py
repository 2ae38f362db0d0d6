"""How the arms of a comparison look in every plot, and the axes that several plots have."""

from collections.abc import Iterable
from itertools import cycle, islice

import numpy as np
from matplotlib.axes import Axes

from normplug._report.figures import FIXED, Style, log_span, plain_ticks
from normplug.compare.gather import Group

COLOURS = ("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")
MARKERS = "^vPX*<>"  # one more arm, one more marker: arms are told apart in grey, too
DASHES = ("-", "--", "-.")
LOOKS = zip(cycle(COLOURS), cycle(MARKERS), cycle(DASHES), strict=False)
OTHERS = tuple(
    Style(colour, marker, 1.6, dash=dash)
    for colour, marker, dash in islice(LOOKS, len(COLOURS) * len(MARKERS))
)


def arm_styles(groups: Iterable[Group]) -> dict[str, Style]:
    """A style for each arm, the same in every group."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    return FIXED | dict(zip(others, cycle(OTHERS)))


def seed_count(count: int) -> str:
    """The number of seeds in words."""
    return "1 seed" if count == 1 else f"{count} seeds"


def log_scale(axes: Axes) -> None:
    """A log axis over all that is drawn."""
    low, high = log_span(np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines]))
    # Limits come first: a log axis without them warns where no value is positive.
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.set_yscale("log", nonpositive="mask")
    ticks, names = plain_ticks(low, high)
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(names)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
