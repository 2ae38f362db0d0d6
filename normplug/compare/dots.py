"""Rows of dots: a row for each arm, a dot for each seed, and a bar that summarises the row."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from normplug._report.figures import Style, wrapped
from normplug.compare.canvas import seed_count
from normplug.compare.gather import Group


def row_name(arm: str, count: int, group: Group) -> str:
    """Return the label of a row: the arm, and how many of the group's seeds it has."""
    return f"{wrapped(arm, 30)}\n{count} of {seed_count(len(group.seeds))}"


def row_height(names: Iterable[str]) -> float:
    """Return the height in inches that each row needs for its name."""
    return max(0.6, *(0.2 * (name.count("\n") + 1) for name in names))


def say_no_pair(axes: Axes, group: Group) -> None:
    """Replace a panel by a note that no seed can be compared."""
    axes.set_axis_off()
    text = f"no seed to compare with {group.reference or 'a reference'}"
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def draw_dots(
    axes: Axes, row: int, by_seed: Mapping[int, float], seeds: Sequence[int], style: Style
) -> None:
    """Draw a dot per seed, at the seed's own height in every row, so that pairs can be matched."""
    y = [row - 0.35 + 0.5 * (seeds.index(seed) + 0.5) / len(seeds) for seed in by_seed]
    x = list(by_seed.values())
    axes.plot(x, y, style.marker, color=style.colour, markersize=6, clip_on=False)


def draw_bar(axes: Axes, row: int, middle: float, low: float, high: float) -> None:
    """Draw a bar below the dots of a row."""
    # Rounding may put `low` above `middle`, or `high` below it.
    spread = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
    axes.errorbar(middle, row + 0.28, xerr=spread, color="black", marker="|", ms=12, capsize=3)
