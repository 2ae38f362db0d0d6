"""Draw the training speed of a group's runs."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from normplug._report.figures import Style, new_figure, wrapped
from normplug._report.intervals import geometric_mean
from normplug.compare.dots import draw_bar, draw_dots, row_height, row_name, say_no_pair
from normplug.compare.gather import Group
from normplug.compare.stats import speed_ratios

Speeds = Mapping[str, Mapping[int, float]]  # arm -> seed -> speed, on one hardware


def throughput_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Draw the speed of each run, and its ratio to the reference's; one row per hardware."""
    by_hardware = speeds_by_hardware(group)
    names = {
        hardware: [row_name(arm, len(by_seed), group) for arm, by_seed in arms.items()]
        for hardware, arms in by_hardware.items()
    }
    heights = [row_height(rows) * len(rows) for rows in names.values()]
    what = "training speed: a dot for each run; black: median (left), geometric mean (right), range"
    figure = new_figure(
        group.title, f"{what}\n{group.about_reference}", 10, 1.2 + sum(heights) + 0.8 * len(heights)
    )
    panels = figure.subplots(
        len(by_hardware), 2, sharey="row", squeeze=False, height_ratios=heights
    )
    for (hardware, arms), (left, right) in zip(by_hardware.items(), panels, strict=True):
        left.set_title(wrapped(hardware, 100), loc="left", fontsize="medium")
        _draw_speeds(left, arms, group, styles)
        _draw_speed_ratios(right, arms, group, styles)
        left.set_yticks(range(len(arms)), names[hardware])
        left.set_ylim(len(arms) - 0.5, -0.5)
    return figure


def _draw_speeds(axes: Axes, arms: Speeds, group: Group, styles: Mapping[str, Style]) -> None:
    for row, (arm, by_seed) in enumerate(arms.items()):
        draw_dots(axes, row, by_seed, group.seeds, styles[arm])
        values = list(by_seed.values())
        middle = float(np.median(values))
        draw_bar(axes, row, middle, min(values), max(values))
    axes.set_xlim(_at_least_a_tenth(*axes.get_xlim()))
    axes.set_xlabel(group.measure.speed_unit)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.grid(axis="x", alpha=0.3)


def _draw_speed_ratios(axes: Axes, arms: Speeds, group: Group, styles: Mapping[str, Style]) -> None:
    pairs = {}
    for arm, by_seed in arms.items():
        ratios = speed_ratios(group, arm)
        if here := {seed: ratios[seed] for seed in by_seed if seed in ratios}:
            pairs[arm] = here
    if not pairs:
        say_no_pair(axes, group)
        return
    for row, arm in enumerate(arms):
        beside = "reference" if arm == group.reference else ""
        if here := pairs.get(arm, {}):
            mean = geometric_mean(here.values())
            draw_dots(axes, row, here, group.seeds, styles[arm])
            draw_bar(axes, row, mean, min(here.values()), max(here.values()))
            beside = f"{mean:.3f}"
        axes.text(1.02, row, beside, va="center", transform=axes.get_yaxis_transform())
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--", zorder=0)
    axes.set_xlim(_at_least_a_tenth(*axes.get_xlim()))
    axes.set_xlabel(f"{group.measure.speed_unit} over {group.reference}'s, same seed")
    axes.grid(axis="x", alpha=0.3)


def speeds_by_hardware(group: Group) -> dict[str, dict[str, dict[int, float]]]:
    """Return hardware -> arm -> seed -> speed, of the finished runs that were timed."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for arm in group.arms:
        for seed, run in sorted(group.finished(arm).items()):
            if run.items_per_s is not None:
                of_arm = found.setdefault(run.hardware, {}).setdefault(arm, {})
                of_arm[seed] = run.items_per_s
    return found


def _at_least_a_tenth(low: float, high: float) -> tuple[float, float]:
    """Widen a speed axis to a tenth of its middle at least, so that noise does not fill it."""
    middle, half = (low + high) / 2, max((high - low) / 2, 0.05 * (low + high) / 2)
    return middle - half, middle + half
