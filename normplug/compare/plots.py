"""Draw the comparison. An arm has one colour, marker and dash in all plots of all groups."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from normplug._files import replace_file
from normplug.compare.measure import Measure
from normplug.compare.report import about_reference, count_of, p_text
from normplug.compare.runs import Group, far_off, intervals, label

VARIANCES = {
    "input_variance": "input of each norm at the last step logged, median over seeds",
    "output_variance": "output, before weight and bias",
    "affine_variance": "output, after weight and bias",
}
TARGETS = {
    "standard": 1.0,
    "golden": (math.sqrt(5) - 1) / 2,
}  # other arms are named by it
Styles: TypeAlias = Mapping[str, dict[str, Any]]  # arm -> options of `Axes.plot`
# Okabe and Ito's palette, safe for every common colour blindness. Marker and dash identify an arm
# without colour. The baseline is wide and below the others: a mode that equals it would hide it.
FIXED: dict[str, dict[str, Any]] = {
    "baseline": {"color": "#9A9A9A", "marker": "s", "linewidth": 4.0, "zorder": 1.9},
    "standard": {"color": "#0072B2", "marker": "o"},
    "golden": {"color": "#E69F00", "marker": "D"},
}
COLOURS = (
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
)


def arm_styles(groups: Iterable[Group]) -> Styles:
    """How to draw each arm in every group; no two arms have one colour."""
    named = {arm for group in groups for arm in (*group.every.plain_arm, *group.arms)}
    others = sorted(named - FIXED.keys())
    more = colormaps["turbo"](np.linspace(0.1, 0.9, max(len(others) - len(COLOURS), 0)))
    looks = zip(
        (*COLOURS, *map(to_hex, more)), cycle("^vPX*<>"), cycle(("-", "--", "-."))
    )
    styles = [
        dict(zip(("color", "marker", "linestyle"), look, strict=True)) for look in looks
    ]
    return FIXED | dict(zip(others, styles, strict=False))


def draw(groups: Sequence[Group], out: Path) -> list[Path]:
    """Write the plots that the groups have numbers for: `out/<plot>_<group>.png`."""
    styles, written = arm_styles(groups), list[Path]()
    for group in groups:
        for name, figure in figures(group, styles):
            file = quote("_".join((name, group.model, group.data)), safe="")
            written.append(out / f"{file}.png")
            with replace_file(written[-1]) as part:
                figure.savefig(part, dpi=150)
    return written


def figures(group: Group, styles: Styles) -> Iterator[tuple[str, Figure]]:
    """Draw the plots that the group has numbers for, and yield each with its name."""
    measure, better = group.measure, f"{group.measure.better} is better"
    if group.finished.test_score.notna().any():
        yield "seeds", _seeds(group, styles)
    arms = group.table.set_index("arm", drop=False)
    compared = arms.arm[arms.difference_to_reference_n > 0].replace(TARGETS)
    targets = pd.to_numeric(compared, errors="coerce").dropna()
    if len(targets) >= 3:
        y = f"minus {label(group.reference or '')}, {measure.difference_unit}, {better}"
        figure = _points(
            group, styles, targets, group.differences(), "target variance", y
        )
        _log_x(figure.axes[0], targets)
        yield "targets", figure
    speeds = arms.items_per_s_median.dropna()
    if len(speeds) > 1:
        x, y = f"median {measure.items}/s, higher is better", f"{measure.unit}, {better}"
        yield "speed", _points(group, styles, speeds, group.wide("test_score"), x, y)
    lines = partial(_lines, group.title, styles)
    score = f"validation {measure.name} ({measure.unit})"
    if curves := {arm: measure.scale * table for arm, table in group.curves().items()}:
        panel = {f"median over seeds; {better}": curves}
        yield measure.name, lines(panel, "epoch, 1 = first", score)
    if gaps := {
        arm: measure.scale * gap for arm, gap in group.gaps().items() if gap.shape[1] > 1
    }:
        y = f"minus {label(group.reference or '')} ({measure.difference_unit})"
        title = f"validation {measure.name}, same seed, median over seeds; {better}"
        late = {
            arm: gap.loc[:, gap.columns > gap.columns[-1] / 2]
            for arm, gap in gaps.items()
        }
        yield "gap", lines({title: gaps, "the second half": late}, "epoch, 1 = first", y)
    done = group.every[group.every.status == "finished"]
    by_rate = done.pivot_table("validation_score", "seed", ["plain_arm", "learning_rate"])
    rates = {
        arm: measure.scale * by_rate[arm] for arm in by_rate.columns.unique("plain_arm")
    }
    if any(table.shape[1] > 1 for table in rates.values()):
        title, panel = (
            f"{group.model} on {group.data}",
            {f"median over seeds; {better}": rates},
        )
        figure = _lines(title, styles, panel, "learning rate", score)
        _log_x(figure.axes[0], by_rate.columns.unique("learning_rate"))
        yield "rates", figure
    if drops := group.lists("block_drop"):
        title = f"test {measure.name} without a block minus the whole model's, median over seeds"
        yield (
            "blocks",
            lines({title: drops}, "block, 1 = first", f"added {measure.unit}", log=True),
        )
    panels = {title: group.lists(name) for name, title in VARIANCES.items()}
    if any(panels.values()):
        yield "variance_by_depth", lines(panels, "norm, 1 = first", "variance", log=True)


def _lines(
    title: str,
    styles: Styles,
    panels: Mapping[str, Mapping[str, pd.DataFrame]],
    x: str,
    y: str,
    log: bool = False,
) -> Figure:
    """Draw a panel for each title: for each arm, the median over its seeds."""
    figure, drawn = _new_figure(title, (11, 2 + 2.5 * len(panels)), (len(panels), 1))
    for (what, runs), axes in zip(panels.items(), drawn, strict=True):
        for arm, table in runs.items():
            name = textwrap.fill(f"{label(arm)} ({count_of(len(table), 'seed')})", 34)
            few = 1 + table.shape[1] // 25  # markers sparse enough to tell apart
            options = {"markevery": few, "markersize": 5, "clip_on": False, **styles[arm]}
            axes.plot(table.columns, table.median(), label=name, **options)
        axes.locator_params("x", integer=True, min_n_ticks=1)
        if log and any((table > 0).any(axis=None) for table in runs.values()):
            axes.set_yscale("log", nonpositive="mask")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
        axes.set_title(what, loc="left", fontsize="medium")
        axes.set_ylabel(y)
    drawn[-1].set_xlabel(x)
    handles, labels = drawn[0].get_legend_handles_labels()
    figure.set_figheight(
        max(figure.get_figheight(), 1.6 + 0.2 * "\n".join(labels).count("\n"))
    )
    figure.legend(handles, labels, loc="outside right center", frameon=False)
    return figure


def _seeds(group: Group, styles: Styles) -> Figure:
    """Draw the test score of every seed, and its difference from the reference: a row an arm."""
    measure, table = group.measure, group.table
    title = (
        f"{group.title}\ntest {measure.name}: a dot a seed, mean and 95% t-interval in black; "
        f"p of paired t-tests, adjusted by Holm\n{about_reference(group)}"
    )
    names = [
        f"{textwrap.fill(label(row.arm), 30)}\n{row.n_finished} of {row.n_expected} seeds"
        + f", {row.n_diverged} diverged" * bool(row.n_diverged)
        for row in table.itertuples()
    ]
    height = 1.8 + max(0.6, *(0.2 * (name.count("\n") + 1) for name in names)) * len(
        names
    )
    figure, (left, right) = _new_figure(title, (10, height), (1, 2), sharey=True)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    _draw_dots(left, group, styles, "test", group.wide("test_score"))
    left.set_xlabel(f"test {measure.name} ({measure.unit}), {measure.better} is better")
    _draw_dots(right, group, styles, "difference_to_reference", group.differences())
    if not right.lines:
        right.set_axis_off()
        return figure
    minus = f"test {measure.name} minus {label(group.reference or '')}, same seed"
    right.set_xlabel(textwrap.fill(f"{minus} ({measure.difference_unit})", 50))
    right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    for row, p in table.difference_to_reference_p_holm.items():
        text = "reference" if table.arm[row] == group.reference else f"p: {p_text(p)}"
        if text != "p: nan":
            right.text(
                1.02, row, text, va="center", transform=right.get_yaxis_transform()
            )
    return figure


def _draw_dots(
    axes: Axes, group: Group, styles: Styles, name: str, stored: pd.DataFrame
) -> None:
    """Draw a row for each arm: a dot for each seed; below, the mean and interval of the table."""
    # Each seed has its own height in every row, so that pairs can be matched.
    heights = pd.Series(np.linspace(-0.3, 0.1, len(group.seeds)), group.seeds)
    scale = group.measure.scale
    values = scale * stored
    far, beside = far_off(values), axes.get_yaxis_transform()
    least, most = values[~far].min(axis=None), values[~far].max(axis=None)
    for row, of_arm in group.table.iterrows():
        arm = of_arm.arm
        dots, style = values[arm].dropna(), styles[arm] | {"linestyle": "none"}
        if dots.empty:
            continue
        axes.plot(dots, row + heights[dots.index], markersize=6, **style)
        mean, half = (
            of_arm[f"{name}_mean"],
            np.nan_to_num(of_arm[f"{name}_t95_half_width"]),
        )
        ends = scale * np.array([mean - half, mean, mean + half])
        axes.plot(ends, 3 * [row + 0.28], "k|-", markersize=8)
        for value in values[arm][far[arm]]:
            x, text = (
                (0.01, "\u25c2 {:.4g}") if value < least else (0.88, "{:.4g} \u25b8")
            )
            axes.text(
                x, row - 0.3, text.format(value), fontsize="small", transform=beside
            )
    if far.any(axis=None):
        axes.set_xlim(least - 0.05 * (most - least), most + 0.05 * (most - least))
    axes.locator_params("x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.6g}")


def _points(
    group: Group,
    styles: Styles,
    xs: pd.Series[float],
    stored: pd.DataFrame,
    x: str,
    y: str,
) -> Figure:
    """Draw the mean and interval of each arm's values, without those far off, over `xs`."""
    measure, far = group.measure, far_off(stored)
    found = measure.scale * intervals(stored.mask(far)).fillna(0)
    title = f"{group.title}\ntest {measure.name}: mean and 95% t-interval"
    figure, (axes,) = _new_figure(title, (9, 2.4 + 0.4 * len(xs)))
    for arm, at in xs.items():
        name = label(arm) + f", without {far[arm].sum()} far off" * int(far[arm].any())
        style = styles[arm] | {"linestyle": "none", "elinewidth": 1.5, "capsize": 3}
        style["label"] = textwrap.fill(name, 30)
        axes.errorbar(at, found["mean"][arm], found.t95_half_width[arm], **style)
    axes.set(xlabel=x, ylabel=y)
    figure.legend(loc="outside right center", frameon=False)
    return figure


def speeds_figure(groups: Sequence[Group], table: pd.DataFrame) -> Figure | None:
    """Draw the score of each arm over its speed, with their intervals: a panel for each group.

    `table` has a row for each arm of the groups, with `items_per_s`, `ms`, `ms_p20` and `ms_p80`.
    A group with fewer than two timed arms has no panel; without panels, there is no figure.
    """
    styles = arm_styles(groups)
    panels = []
    for group in groups:
        rows = table[(table.model == group.model) & (table.data == group.data)]
        rows = rows[rows.items_per_s.notna()]
        if len(rows) > 1:
            panels.append((group, rows))
    if not panels:
        return None
    title = (
        "Test score: mean and 95% t-interval over seeds. "
        "Speed: median, and 20th to 80th percentile."
    )
    size = (1.5 + 4.5 * len(panels), 4.5)
    figure, drawn = _new_figure(title, size, (1, len(panels)))
    handles: dict[str, Any] = {}
    for (group, rows), axes in zip(panels, drawn, strict=True):
        _draw_speeds(axes, group.measure, rows, styles)
        axes.set_title(f"{group.model} on {group.data}", fontsize="medium")
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    figure.legend(handles.values(), handles, loc="outside right center", frameon=False)
    return figure


def _draw_speeds(
    axes: Axes, measure: Measure, rows: pd.DataFrame, styles: Styles
) -> None:
    for row in rows.itertuples():
        speed = row.items_per_s
        slower = speed - speed * row.ms / row.ms_p80
        faster = speed * row.ms / row.ms_p20 - speed
        half = measure.scale * np.nan_to_num(row.test_t95_half_width)
        style = styles[row.arm] | {"linestyle": "none", "elinewidth": 1.5, "capsize": 3}
        axes.errorbar(
            speed,
            measure.scale * row.test_mean,
            yerr=half,
            xerr=[[slower], [faster]],
            label=label(row.arm),
            **style,
        )
    axes.margins(0.15)
    if measure.unit == "%":
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, 0), min(high, 100))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
        axis.set_major_formatter("{x:,.6g}")
    better = f"{measure.better} is better"
    axes.set_xlabel(f"{measure.items}/s, higher is better")
    axes.set_ylabel(f"test {measure.name} ({measure.unit}), {better}")


def _log_x(axes: Axes, ticks: Iterable[float]) -> None:
    """Make x logarithmic, with a label at each of the ticks."""
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()


def _new_figure(
    title: str, size: tuple[float, float], shape: tuple[int, int] = (1, 1), **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches, without pyplot's global state, and its `shape` of panels."""
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title, fontsize="medium", wrap=True)
    panels = list(figure.subplots(*shape, squeeze=False, **share).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels
