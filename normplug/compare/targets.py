"""Draw the test score over the target variance: a line for each model."""

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from normplug import NormMode
from normplug._report.figures import Style, legend_below, new_figure
from normplug._report.intervals import t_interval
from normplug.compare.canvas import OTHERS, seed_count
from normplug.compare.dots import say_no_pair
from normplug.compare.gather import Group
from normplug.compare.stats import paired_differences, scores

LEAST = 3  # minimum number of target variances for a line
BESIDE = 1.02  # spreads models on the log axis, so that their intervals are side by side


def target_groups(groups: Iterable[Group]) -> list[list[Group]]:
    """Return the groups that have a line, in one list per data set and measure."""
    found: dict[object, list[Group]] = {}
    for group in groups:
        if len(targets(group)) >= LEAST:
            found.setdefault((group.data, group.measure), []).append(group)
    return list(found.values())


def targets(group: Group) -> dict[float, str]:
    """Return target variance -> arm, ascending, of the arms whose name is just a mode."""
    found = {}
    for arm in group.arms:
        if scores(group, arm) and (variance := _target_variance(arm)):
            found[variance] = arm
    return dict(sorted(found.items()))


def targets_figure(groups: Sequence[Group]) -> Figure:
    """Draw the test score, and its difference from the reference, over the target variance.

    Args:
        groups: of one data set and one measure.
    """
    measure = groups[0].measure
    what = f"test {measure.name} over the target variance: means over seeds, 95% t-intervals"
    figure = new_figure(groups[0].data, what, 10, max(4.2, 1.2 + 2.0 * len(groups)))
    grid = figure.add_gridspec(len(groups), 2)
    right = figure.add_subplot(grid[:, 1])
    compared = [group for group in groups if _pairs(group)]
    for place, (group, style) in enumerate(zip(groups, OTHERS, strict=False)):
        left = figure.add_subplot(grid[place, 0])
        label = f"{group.model} ({seed_count(len(group.seeds))})"
        drawn = {tv: scores(group, arm) for tv, arm in targets(group).items()}
        _draw_line(left, drawn, measure.scale, style, label)
        left.set_title(label, loc="left", fontsize="medium")
        left.set_ylabel(f"{measure.name} ({measure.unit})")
        _target_axis(left, drawn, place == len(groups) - 1)
        if group in compared:
            shift = BESIDE ** (2 * place - len(groups) + 1)
            beside = {tv * shift: pairs for tv, pairs in _pairs(group).items()}
            _draw_line(right, beside, measure.scale, style, label)
    if compared:
        minus = " or ".join(sorted({str(group.reference) for group in compared}))
        right.axhline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
        right.set_title(f"minus {minus}, same seed", loc="left", fontsize="medium")
        right.set_ylabel(f"difference ({measure.difference_unit})")
        _target_axis(right, {tv for group in compared for tv in targets(group)}, named=True)
        legend_below(figure)
    else:
        say_no_pair(right, groups[0])
    return figure


def _pairs(group: Group) -> dict[float, dict[int, float]]:
    """Return target variance -> differences from the reference by seed, where there are any."""
    found = {tv: paired_differences(group, arm) for tv, arm in targets(group).items()}
    return {tv: differences for tv, differences in found.items() if differences}


def _target_variance(arm: str) -> float | None:
    """Return the target variance of an arm named by it or by a mode; None for other arms."""
    for name in (float, str):
        try:
            return NormMode(name(arm)).target_variance
        except ValueError:
            continue
    return None


def _draw_line(
    axes: Axes,
    by_target: Mapping[float, Mapping[int, float]],
    scale: float,
    style: Style,
    label: str,
) -> None:
    """Draw means and intervals at each target variance, in the style of the model."""
    intervals = {tv: t_interval(values.values()) for tv, values in by_target.items()}
    found = {tv: interval for tv, interval in intervals.items() if interval}
    axes.errorbar(
        list(found),
        [scale * interval.mean for interval in found.values()],
        yerr=[scale * (interval.half_width or 0.0) for interval in found.values()],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dash,
        linewidth=style.width,
        capsize=3,
        label=label,
    )


def _target_axis(axes: Axes, ticks: Iterable[float], named: bool) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    if named:
        axes.set_xlabel("target variance")
    axes.grid(alpha=0.3)
