"""Draw a group: its accuracy by epoch and by seed here, the variance of its norms next door."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug.compare.canvas import (
    Style,
    draw_line,
    legend_below,
    new_figure,
    seed_count,
    whole_numbers,
)
from normplug.compare.gather import BASELINE, Group
from normplug.compare.stats import accuracies, paired_differences, t_interval
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
    if variances:
        figures["variance_by_depth"] = variance_by_depth_figure(group.title, variances, styles)
        figures["variance_by_step"] = variance_by_step_figure(group.title, variances)
    paths = []
    for name, figure in figures.items():
        paths.append(out / f"{name}_{stem}.png")
        figure.savefig(paths[-1], dpi=150)
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
            draw_line(axes, x, y.mean(axis=0), styles[arm], label)
    for axes, name in ((whole, "all epochs"), (late, "last half, enlarged")):
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel="validation accuracy (%)")
        axes.xaxis.set_major_locator(whole_numbers(10))
        axes.grid(alpha=0.3)
    legend_below(figure)
    return figure


def seeds_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Test accuracy of every seed, and its difference to the baseline."""
    what = "test accuracy: a dot for each seed, mean and 95% t-interval in black"
    arms = list(group.arms)
    figure = new_figure(group.title, what, 10, 1.8 + 0.6 * len(arms))
    left, right = figure.subplots(1, 2, sharey=True)
    for row, arm in enumerate(arms):
        _dots(left, row, accuracies(group, arm), group.seeds, styles[arm])
        _dots(right, row, paired_differences(group, arm), group.seeds, styles[arm])
    counts = [f"{arm}\n{len(group.finished(arm))} of {len(group.seeds)} seeds" for arm in arms]
    left.set_yticks(range(len(arms)), counts)
    left.set_ylim(len(arms) - 0.5, -0.5)
    left.set_xlabel("test accuracy (%)")
    if any(paired_differences(group, arm) for arm in arms):
        right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
        right.set_xlabel(f"test accuracy minus {BASELINE}, same seed (points)")
    else:
        right.set_axis_off()
        middle = {"x": 0.5, "y": 0.5, "ha": "center", "transform": right.transAxes}
        right.text(s=f"no seed to compare with {BASELINE}", **middle)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    return figure


def _curves(group: Group, arm: str) -> list[tuple[float, ...]]:
    """The accuracy curves of an arm's finished runs, cut to the epochs that all of them have."""
    runs = group.finished(arm).values()
    curves = [run.accuracy_by_epoch for run in runs if run.accuracy_by_epoch]
    shortest = min(map(len, curves), default=0)
    return [curve[:shortest] for curve in curves]


def _dots(
    axes: Axes, row: int, by_seed: Mapping[int, float], seeds: Sequence[int], style: Style
) -> None:
    """Dots over their interval; a seed has one height in every row, so pairs can be followed."""
    interval = t_interval(by_seed.values())
    if interval is None:
        return
    x = [100 * value for value in by_seed.values()]
    y = [row - 0.35 + 0.5 * (seeds.index(seed) + 0.5) / len(seeds) for seed in by_seed]
    axes.plot(x, y, linestyle="", marker=style.marker, color=style.colour, markersize=6)
    mean, half_width = 100 * interval.mean, 100 * (interval.half_width or 0)
    axes.errorbar(mean, row + 0.28, xerr=half_width, color="black", marker="|", ms=12, capsize=3)
