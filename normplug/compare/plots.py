"""Draw a group: its accuracy here, its speed in `throughput`, its variances in `variance_plots`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from normplug._report.figures import (
    Style,
    draw_line,
    legend_below,
    new_figure,
    save_figure,
    whole_numbers,
)
from normplug._report.intervals import t_interval
from normplug.compare.canvas import seed_count
from normplug.compare.dots import draw_bar, draw_dots, row_height, row_name, say_no_pair
from normplug.compare.gather import Group
from normplug.compare.stats import accuracies, paired_differences
from normplug.compare.throughput import speeds_by_hardware, throughput_figure
from normplug.compare.variance import Variance
from normplug.compare.variance_plots import variance_by_depth_figure, variance_by_step_figure


def draw(
    group: Group,
    variances: Mapping[str, Variance],
    styles: Mapping[str, Style],
    out: Path,
    stem: str,
) -> list[Path]:
    """Write the plots that the group has numbers for, as `out/<plot>_<stem>.png`."""
    figures = {}
    if any(_curves(group, arm) for arm in group.arms):
        figures["accuracy"] = accuracy_figure(group, styles)
    if any(accuracies(group, arm) for arm in group.arms):
        figures["seeds"] = seeds_figure(group, styles)
    if speeds_by_hardware(group):
        figures["throughput"] = throughput_figure(group, styles)
    if variances:
        figures["variance_by_depth"] = variance_by_depth_figure(group.title, variances, styles)
        figures["variance_by_step"] = variance_by_step_figure(group.title, variances)
    paths = []
    for name, figure in figures.items():
        paths.append(out / f"{name}_{stem}.png")
        save_figure(figure, paths[-1])
    return paths


def file_stems(groups: Iterable[Group]) -> list[str]:
    """A part of a file name for each group: letters, digits, `.`, `_` and `-`, no two alike."""
    stems: list[str] = []
    for group in groups:
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", f"{group.model}_{group.data}")
        while stem in stems:
            stem += "_"
        stems.append(stem)
    return stems


def accuracy_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Validation accuracy by epoch: all of it, and the last half where arms part by little."""
    what = "validation accuracy: mean, and band from lowest to highest seed"
    figure = new_figure(group.title, what, 10, 5)
    whole, late = figure.subplots(1, 2)
    for arm in group.arms:
        if not (curves := _curves(group, arm)):
            continue
        percent = 100 * np.array(curves)
        epochs = np.arange(1, percent.shape[1] + 1)
        label = f"{arm} ({seed_count(len(curves))})"
        for axes, start in ((whole, 0), (late, len(epochs) // 2)):
            x, y, colour = epochs[start:], percent[:, start:], styles[arm].colour
            axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, lw=0)
            # A marker at 100% is on the border: it is drawn whole.
            draw_line(axes, x, y.mean(axis=0), styles[arm], label, clip_on=False)
    for axes, name in ((whole, "all epochs"), (late, "last half, enlarged")):
        axes.set_ylim(_percent(*axes.get_ylim()))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel="validation accuracy (%)")
        axes.xaxis.set_major_locator(whole_numbers(10))
        axes.grid(alpha=0.3)
    legend_below(figure)
    return figure


def seeds_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Test accuracy of every seed, and its difference to the reference."""
    what = "test accuracy: a dot for each seed, mean and 95% t-interval in black"
    arms = list(group.arms)
    names = [row_name(arm, len(group.finished(arm)), group) for arm in arms]
    figure = new_figure(
        group.title, f"{what}\n{group.about_reference}", 10, 1.8 + row_height(names) * len(arms)
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for row, arm in enumerate(arms):
        for axes, by_seed in (
            (left, accuracies(group, arm)),
            (right, paired_differences(group, arm)),
        ):
            if interval := t_interval(by_seed.values()):
                percent = {seed: 100 * value for seed, value in by_seed.items()}
                draw_dots(axes, row, percent, group.seeds, styles[arm])
                mean, off = 100 * interval.mean, 100 * (interval.half_width or 0)
                draw_bar(axes, row, mean, mean - off, mean + off)
        if not accuracies(group, arm):
            left.text(0.02, row, "no test accuracy", transform=left.get_yaxis_transform())
    left.set_yticks(range(len(arms)), names)
    left.set_ylim(len(arms) - 0.5, -0.5)
    ends = left.dataLim.intervalx
    left.set_xlim(_percent(*left.get_xlim()))
    cut = "; intervals are cut at 0 and 100" if ends[0] < 0 or ends[1] > 100 else ""
    left.set_xlabel(f"test accuracy (%{cut})")
    if any(paired_differences(group, arm) for arm in arms):
        right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
        right.set_xlabel(f"test accuracy minus {group.reference}, same seed (points)")
    else:
        say_no_pair(right, group)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    return figure


def _curves(group: Group, arm: str) -> list[tuple[float, ...]]:
    """The accuracy curves of an arm's finished runs, cut to the epochs that all of them have."""
    found = [run.accuracy_by_epoch for run in group.finished(arm).values()]
    curves = [curve for curve in found if np.isfinite(curve).any()]
    shortest = min(map(len, curves), default=0)
    return [curve[:shortest] for curve in curves]


def _percent(low: float, high: float) -> tuple[float, float]:
    """The limits of an axis of accuracies, without what no accuracy can be."""
    return max(low, 0.0), min(high, 100.0)
