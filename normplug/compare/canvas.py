"""How the arms of a comparison look in every plot."""

from collections.abc import Iterable
from itertools import cycle, islice

from normplug._report.figures import FIXED, Style
from normplug.compare.gather import Group

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


def seed_count(count: int) -> str:
    """The number of seeds in words."""
    return "1 seed" if count == 1 else f"{count} seeds"
