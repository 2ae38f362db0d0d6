"""Draw a group: curves and test scores here, the rest in `targets`, `blocks`, `throughput` etc."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
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
from normplug._report.measure import Measure
from normplug.compare.blocks import blocks_figure, dropped
from normplug.compare.canvas import arm_styles, seed_count
from normplug.compare.dots import draw_bar, draw_dots, row_height, row_name, say_no_pair
from normplug.compare.gather import Group
from normplug.compare.stats import adjusted_ps, p_text, paired_differences, scores
from normplug.compare.targets import target_groups, targets_figure
from normplug.compare.throughput import speeds_by_hardware, throughput_figure
from normplug.compare.variance import Variance
from normplug.compare.variance_plots import variance_by_depth_figure, variance_by_step_figure


def draw(
    groups: Sequence[Group],
    variances: Iterable[Mapping[str, Variance]],
    out: Path,
    plots: Collection[str] | None = None,
) -> list[Path]:
    """Write the plots that the groups have numbers for, as `out/<plot>_<group>.png`.

    Args:
        groups: an arm has the same style in the plots of all groups.
        variances: of the arms of each group.
        out: created if absent.
        plots: names of the plots to draw; None for all.
    """
    styles = arm_styles(groups)
    found = [
        (f"{name}_{stem}.png", figure)
        for group, of_arms, stem in zip(groups, variances, file_stems(groups), strict=True)
        for name, figure in _figures(group, of_arms, styles).items()
        if plots is None or name in plots
    ]
    if plots is None or "targets" in plots:
        together = target_groups(groups)
        firsts = [replace(members[0], model="targets") for members in together]
        stems = [f"{stem}.png" for stem in file_stems(firsts)]
        found += zip(stems, [partial(targets_figure, members) for members in together], strict=True)
    for name, figure in found:
        save_figure(figure(), out / name)
    return [out / name for name, _ in found]


def _figures(
    group: Group, variances: Mapping[str, Variance], styles: Mapping[str, Style]
) -> dict[str, Callable[[], Figure]]:
    """Return plot name -> function that draws it, for the plots of one group."""
    figures: dict[str, Callable[[], Figure]] = {}
    if any(_curves(group, arm) for arm in group.arms):
        figures[group.measure.name] = partial(curves_figure, group, styles)
    if any(scores(group, arm) for arm in group.arms):
        figures["seeds"] = partial(seeds_figure, group, styles)
    if any(dropped(group, arm) for arm in group.arms):
        figures["blocks"] = partial(blocks_figure, group, styles)
    if speeds_by_hardware(group):
        figures["throughput"] = partial(throughput_figure, group, styles)
    if variances:
        by_depth = partial(variance_by_depth_figure, group.title, variances, styles)
        figures["variance_by_depth"] = by_depth
        figures["variance_by_step"] = partial(variance_by_step_figure, group.title, variances)
    return figures


def file_stems(groups: Iterable[Group]) -> list[str]:
    """Return a unique part of a file name for each group: letters, digits, `.`, `_` and `-`."""
    stems: list[str] = []
    for group in groups:
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", f"{group.model}_{group.data}")
        while stem in stems:
            stem += "_"
        stems.append(stem)
    return stems


def curves_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Draw the validation by epoch: all epochs, and the last half, where arms differ by little."""
    measure = group.measure
    what = f"validation {measure.name}: mean, and band from lowest to highest seed"
    figure = new_figure(group.title, what, 10, 5)
    whole, late = figure.subplots(1, 2)
    for arm in group.arms:
        if not (curves := _curves(group, arm)):
            continue
        shown = measure.scale * np.array(curves)
        epochs = np.arange(1, shown.shape[1] + 1)
        label = f"{arm} ({seed_count(len(curves))})"
        for axes, start in ((whole, 0), (late, len(epochs) // 2)):
            x, y, colour = epochs[start:], shown[:, start:], styles[arm].colour
            axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.15, lw=0)
            # A marker at 100% is on the border: without clipping, it is drawn whole.
            draw_line(axes, x, y.mean(axis=0), styles[arm], label, clip_on=False)
    for axes, name in ((whole, "all epochs"), (late, "last half, enlarged")):
        axes.set_ylim(_possible(measure, *axes.get_ylim()))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel=f"validation {measure.name} ({measure.unit})")
        axes.xaxis.set_major_locator(whole_numbers(10))
        axes.grid(alpha=0.3)
    legend_below(figure)
    return figure


def seeds_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Draw the test score of every seed, and its difference from the reference."""
    measure = group.measure
    what = f"test {measure.name}: a dot for each seed, mean and 95% t-interval in black"
    ps = adjusted_ps(group)
    if ps:
        what += "; p of paired t-tests, adjusted by Holm"
    arms = list(group.arms)
    names = [row_name(arm, len(group.finished(arm)), group) for arm in arms]
    figure = new_figure(
        group.title, f"{what}\n{group.about_reference}", 10, 1.8 + row_height(names) * len(arms)
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for row, arm in enumerate(arms):
        for axes, by_seed in (
            (left, scores(group, arm)),
            (right, paired_differences(group, arm)),
        ):
            if interval := t_interval(by_seed.values()):
                shown = {seed: measure.scale * value for seed, value in by_seed.items()}
                draw_dots(axes, row, shown, group.seeds, styles[arm])
                mean = measure.scale * interval.mean
                half = measure.scale * (interval.half_width or 0.0)
                draw_bar(axes, row, mean, mean - half, mean + half)
        if not scores(group, arm):
            left.text(0.02, row, f"no test {measure.name}", transform=left.get_yaxis_transform())
    left.set_yticks(range(len(arms)), names)
    left.set_ylim(len(arms) - 0.5, -0.5)
    ends = left.dataLim.intervalx
    left.set_xlim(_possible(measure, *left.get_xlim()))
    low, high = measure.limits
    which = " and ".join(f"{limit:g}" for limit in (low, high) if limit < float("inf"))
    cut = f"; intervals are cut at {which}" if ends[0] < low or ends[1] > high else ""
    left.set_xlabel(f"test {measure.name} ({measure.unit}{cut})")
    if any(paired_differences(group, arm) for arm in arms):
        right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
        right.set_xlabel(
            f"test {measure.name} minus {group.reference}, same seed ({measure.difference_unit})"
        )
        _name_ps(right, group, ps)
    else:
        say_no_pair(right, group)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    return figure


def _name_ps(axes: Axes, group: Group, ps: Mapping[str, float]) -> None:
    """Write each arm's p-value, adjusted by Holm, beside its row."""
    beside = axes.get_yaxis_transform()
    if ps:
        axes.text(1.02, -0.6, "p (Holm)", va="bottom", transform=beside)
    for row, arm in enumerate(group.arms):
        text = "reference" if arm == group.reference else p_text(ps[arm]) if arm in ps else ""
        if text:
            axes.text(1.02, row, text, va="center", transform=beside)


def _curves(group: Group, arm: str) -> list[tuple[float, ...]]:
    """Return the validation curves of an arm's finished runs, cut to the epochs that all have."""
    found = [run.scores_by_epoch for run in group.finished(arm).values()]
    curves = [curve for curve in found if np.isfinite(curve).any()]
    shortest = min(map(len, curves), default=0)
    return [curve[:shortest] for curve in curves]


def _possible(measure: Measure, low: float, high: float) -> tuple[float, float]:
    """Clip the limits of an axis to the values that the measure can have."""
    least, most = measure.limits
    return max(low, least), min(high, most)
