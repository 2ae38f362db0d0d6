"""Draw the comparison. An arm has one colour, marker and dash in all plots of all groups."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from normplug._measure import Measure
from normplug.compare.report import about_reference, count_of, p_text
from normplug.compare.runs import Group, far_off, intervals, label

VARIANCES = {
    "input_variance": "input of each norm at the last step logged, median over seeds",
    "output_variance": "output, before weight and bias; dotted: the target variance",
    "affine_variance": "output, after weight and bias",
}
# Target variances of the arms that are not named by them.
TARGETS = {"standard": 1.0, "golden": (math.sqrt(5) - 1) / 2}
LOG_RANGE = 10.0  # a logarithmic axis of a smaller range might have a single tick
Styles: TypeAlias = Mapping[str, dict[str, Any]]  # arm -> options of `Axes.plot`
# Okabe and Ito's palette, safe for every common colour blindness. Marker and dash identify an arm
# without colour. The baseline is wide and below the others: a mode that equals it would hide it.
FIXED: dict[str, dict[str, Any]] = {
    "baseline": {"color": "#9A9A9A", "marker": "s", "linewidth": 4.0, "zorder": 1.9},
    "standard": {"color": "#0072B2", "marker": "o"},
    "golden": {"color": "#E69F00", "marker": "D"},
}
COLOURS = [
    "#009E73",
    "#CC79A7",
    "#D55E00",
    "#56B4E9",
    "#000000",
    "#882255",
    "#999933",
    "#332288",
]
POINT = {"linestyle": "none", "elinewidth": 1.5, "capsize": 3}  # with its interval
MARKERS = "^vPX*<>"
DASHES = ("-", "--", "-.")


def arm_styles(arms: Iterable[str]) -> Styles:
    """How to draw each arm in every group; no two arms have one colour."""
    others = sorted({*arms} - FIXED.keys())
    more = np.linspace(0.1, 0.9, max(len(others) - len(COLOURS), 0))
    colours = [*COLOURS, *map(to_hex, colormaps["turbo"](more))]
    styles = dict(FIXED)
    looks = zip(colours, cycle(MARKERS), cycle(DASHES))  # noqa: B905
    for arm, (colour, marker, dash) in zip(others, looks, strict=False):
        styles[arm] = {"color": colour, "marker": marker, "linestyle": dash}
    return styles


def draw(groups: Sequence[Group], out: Path) -> list[Path]:
    """Write the plots that the groups have numbers for: `out/<plot>_<group>.png`."""
    arms = [arm for group in groups for arm in (*group.every.plain_arm, *group.arms)]
    styles = arm_styles(arms)
    written = []
    for group in groups:
        for name, figure in figures(group, styles):
            file = quote(f"{name}_{group.model}_{group.data}", safe="")
            written.append(save(figure, out / f"{file}.png"))
    return written


def save(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, and return its path."""
    with replace_file(path) as part:
        figure.savefig(part, dpi=150)
    return path


def figures(group: Group, styles: Styles) -> Iterator[tuple[str, Figure]]:
    """Draw the plots that the group has numbers for, and yield each with its name."""
    for name, plot in PLOTS.items():
        figure = plot(group, styles)
        if figure is not None:
            yield name, figure


def _seeds(group: Group, styles: Styles) -> Figure | None:
    """The test score of every seed, and its difference from the reference: a row an arm."""
    if group.finished.test_score.isna().all():
        return None
    measure = group.measure
    title = (
        f"{group.title}\ntest {measure.name}: a dot a seed, mean and 95% t-interval in black; "
        f"p of paired t-tests, adjusted by Holm\n{about_reference(group)}"
    )
    names = []
    for arm in group.table.itertuples():
        name = f"{textwrap.fill(label(arm.arm), 30)}\n{arm.n_finished} of {arm.n_expected} seeds"
        if arm.n_diverged:
            name += f", {arm.n_diverged} diverged"
        names.append(name)
    row_height = max(0.6, *(0.2 * (name.count("\n") + 1) for name in names))
    size = (10, 1.8 + row_height * len(names))
    figure, (left, right) = _new_figure(title, size, (1, 2), sharey=True)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    _draw_dots(left, group, styles, "test", group.wide("test_score"))
    left.set_xlim(_possible(measure, left.get_xlim()))
    left.set_xlabel(f"test {measure.name} ({measure.unit}), {measure.better} is better")
    _draw_dots(right, group, styles, "difference_to_reference", group.differences())
    if not right.lines:
        right.set_axis_off()
        return figure
    minus = f"test {measure.name} minus {label(group.reference or '')}, same seed"
    right.set_xlabel(textwrap.fill(f"{minus} ({measure.difference_unit})", 50))
    right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    beside = right.get_yaxis_transform()
    for row, arm in group.table.iterrows():
        p = arm.difference_to_reference_p_holm
        text = "reference" if arm.arm == group.reference else f"p: {p_text(p)}"
        if text != "p: nan":
            right.text(1.02, row, text, va="center", transform=beside)
    return figure


def _draw_dots(
    axes: Axes, group: Group, styles: Styles, name: str, stored: pd.DataFrame
) -> None:
    """Draw a row for each arm: a dot for each seed; below, the mean and interval of the table."""
    # Each seed has its own height in every row, so that pairs can be matched.
    heights = pd.Series(np.linspace(-0.3, 0.1, len(group.seeds)), group.seeds)
    values = group.measure.scale * stored
    far = far_off(values)
    least = values[~far].min(axis=None)
    most = values[~far].max(axis=None)
    for row, arm in group.table.iterrows():
        dots = values[arm.arm].dropna()
        if dots.empty:
            continue
        style = styles[arm.arm] | {"linestyle": "none"}
        axes.plot(dots, row + heights[dots.index], markersize=6, **style)
        half = np.nan_to_num(arm[f"{name}_t95_half_width"])
        ends = arm[f"{name}_mean"] + np.array([-half, 0, half])
        axes.plot(group.measure.scale * ends, 3 * [row + 0.28], "k|-", markersize=8)
        for value in dots[far[arm.arm]]:
            x, text = 0.88, f"{value:.4g} \u25b8"
            if value < least:
                x, text = 0.01, f"\u25c2 {value:.4g}"
            beside = axes.get_yaxis_transform()
            axes.text(x, row - 0.3, text, fontsize="small", transform=beside)
    if far.any(axis=None):
        edge = 0.05 * (most - least)
        axes.set_xlim(least - edge, most + edge)
    axes.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
    axes.xaxis.set_major_formatter("{x:,.6g}")


def _targets(group: Group, styles: Styles) -> Figure | None:
    """The mean difference of each arm from the reference, over its target variance."""
    table = group.table[group.table.difference_to_reference_n > 0].set_index("arm")
    arms = table.index.to_series().replace(TARGETS)
    targets = pd.to_numeric(arms, errors="coerce").dropna()
    if len(targets) < 3:
        return None
    measure = group.measure
    differences = measure.scale * group.differences()
    far = far_off(differences)
    found = intervals(differences.mask(far)).fillna(0)
    title = f"{group.title}\ntest {measure.name}: mean and 95% t-interval"
    figure, (axes,) = _new_figure(title, (9, 4.5))
    for arm, target in targets.items():
        name = label(arm)
        if far[arm].any():
            name += f", without {far[arm].sum()} far off"
        mean, half = found.loc[arm, ["mean", "t95_half_width"]]
        look = {**styles[arm], **POINT, "label": textwrap.fill(name, 30)}
        axes.errorbar(target, mean, half, **look)
    _log_x(axes, targets)
    axes.set_xlabel("target variance")
    minus = f"minus {label(group.reference or '')}, {measure.difference_unit}"
    axes.set_ylabel(f"{minus}, {measure.better} is better")
    _add_legend(figure, *axes.get_legend_handles_labels())
    return figure


def _speed(group: Group, styles: Styles) -> Figure | None:
    """The test score of each arm over the median speed of its runs."""
    return speeds_figure(group.table.assign(items_per_s=group.table.items_per_s_median))


def speeds_figure(table: pd.DataFrame) -> Figure | None:
    """Draw the score of each arm over its speed, with their intervals: a panel for each model.

    `table` has a row for each model and arm, with `items_per_s`, and perhaps the ends of its
    interval: `items_per_s_p20` and `items_per_s_p80`. A model with fewer than two timed arms has
    no panel; without panels, there is no figure.
    """
    styles = arm_styles(table.arm)
    timed = table[table.items_per_s.notna()]
    by_model = timed.groupby(["model", "data"])
    panels = {names: rows for names, rows in by_model if len(rows) > 1}
    if not panels:
        return None
    title = "Test score: mean and 95% t-interval over seeds"
    if "items_per_s_p20" in table:
        title += ". Speed: median, and 20th to 80th percentile"
    size = (3 + 4.5 * len(panels), 4.5)
    figure, drawn = _new_figure(title, size, (1, len(panels)))
    handles: dict[str, Any] = {}
    for (names, rows), axes in zip(panels.items(), drawn, strict=True):
        first = rows.iloc[0]
        measure = Measure(first["measure"], first.unit, first.better, first["items"])
        for row in rows.to_dict("records"):
            speed = row["items_per_s"]
            slower = speed - row.get("items_per_s_p20", speed)
            faster = row.get("items_per_s_p80", speed) - speed
            score = measure.scale * row["test_mean"]
            half = measure.scale * np.nan_to_num(row["test_t95_half_width"])
            name = textwrap.fill(label(row["arm"]), 30)
            look = {**styles[row["arm"]], **POINT, "label": name}
            axes.errorbar(speed, score, half, [[slower], [faster]], **look)
        axes.margins(0.15)
        axes.set_title(" on ".join(names), fontsize="medium")
        _label_speed(axes, measure)
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    _add_legend(figure, list(handles.values()), list(handles))
    return figure


def _label_speed(axes: Axes, measure: Measure) -> None:
    axes.set_ylim(_possible(measure, axes.get_ylim()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
        axis.set_major_formatter("{x:,.6g}")
    axes.set_xlabel(f"median {measure.items}/s, higher is better")
    axes.set_ylabel(f"test {measure.name} ({measure.unit}), {measure.better} is better")


def _possible(measure: Measure, limits: tuple[float, float]) -> tuple[float, float]:
    """The limits of an axis of scores; percentages end at 0 and 100."""
    low, high = limits
    return (max(low, 0), min(high, 100)) if measure.unit == "%" else limits


def _gap(group: Group, styles: Styles) -> Figure | None:
    """The validation of each arm minus the reference's, by epoch."""
    measure = group.measure
    gaps = {arm: measure.scale * gap for arm, gap in group.gaps().items()}
    what = f"validation {measure.name}, same seed, median over seeds; {measure.better} is better"
    minus = f"minus {label(group.reference or '')} ({measure.difference_unit})"
    return _lines(group.title, styles, {what: gaps}, "epoch, 1 = first", minus)


def _rates(group: Group, styles: Styles) -> Figure | None:
    """The last validation of each arm over the learning rate."""
    measure = group.measure
    done = group.every[group.every.status == "finished"]
    columns = ["plain_arm", "learning_rate"]
    scores = measure.scale * done.pivot_table("validation_score", "seed", columns)
    by_arm = {arm: scores[arm] for arm in scores.columns.unique("plain_arm")}
    title = f"{group.model} on {group.data}"
    what = f"median over seeds; {measure.better} is better"
    score = f"validation {measure.name} ({measure.unit})"
    figure = _lines(title, styles, {what: by_arm}, "learning rate", score)
    if figure is not None:
        (axes,) = figure.axes
        axes.set_ylim(_possible(measure, axes.get_ylim()))
        _log_x(axes, scores.columns.unique("learning_rate"))
    return figure


def _blocks(group: Group, styles: Styles) -> Figure | None:
    """What dropping each block of a GPT adds to the loss."""
    what = f"test {group.measure.name} without a block minus the whole model's, median over seeds"
    panels = {what: group.lists("block_drop")}
    added = f"added {group.measure.unit}"
    return _lines(group.title, styles, panels, "block, 1 = first", added, log=True)


def _variances(group: Group, styles: Styles) -> Figure | None:
    """The variance of the input and the output of each norm, by depth."""
    panels = {title: group.lists(name) for name, title in VARIANCES.items()}
    targets = group.lists("target_variance")
    figure = _lines(group.title, styles, panels, "norm, 1 = first", "variance", log=True)
    for axes in [] if figure is None else figure.axes:
        if axes.get_title("left") != VARIANCES["output_variance"]:
            continue
        for arm, table in targets.items():
            look = {"color": styles[arm]["color"], "linestyle": ":", "linewidth": 1.5}
            axes.plot(table.columns, table.median(), **look)
    return figure


def _lines(
    title: str,
    styles: Styles,
    panels: Mapping[str, Mapping[str, pd.DataFrame]],
    x: str,
    y: str,
    log: bool = False,
) -> Figure | None:
    """Draw a panel for each title: for each arm, the median over its seeds.

    A table has a row for each seed and a column for each x. None if no table has two columns.
    """
    drawn = {}
    for what, tables in panels.items():
        lines = {arm: table for arm, table in tables.items() if table.shape[1] > 1}
        if lines:
            drawn[what] = lines
    if not drawn:
        return None
    figure, panes = _new_figure(title, (11, 2 + 2.5 * len(drawn)), (len(drawn), 1))
    for (what, lines), axes in zip(drawn.items(), panes, strict=True):
        for arm, table in lines.items():
            name = textwrap.fill(f"{label(arm)} ({count_of(len(table), 'seed')})", 34)
            few = 1 + table.shape[1] // 25  # markers sparse enough to tell apart
            options = {"markevery": few, "markersize": 5, "clip_on": False, **styles[arm]}
            axes.plot(table.columns, table.median(), label=name, **options)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
        if log:
            _log_y(axes, np.concatenate([np.ravel(table) for table in lines.values()]))
        axes.set_title(what, loc="left", fontsize="medium")
        axes.set_ylabel(y)
    panes[-1].set_xlabel(x)
    _add_legend(figure, *panes[0].get_legend_handles_labels())
    return figure


def _add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[Any]) -> None:
    """Add a legend beside the panels, and make the figure as high as it."""
    height = 1.6 + 0.2 * "\n".join(labels).count("\n")
    figure.set_figheight(max(figure.get_figheight(), height))
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def _log_y(axes: Axes, values: np.ndarray) -> None:
    """Make y logarithmic if the values have a large range."""
    positive = values[(values > 0) & np.isfinite(values)]
    if positive.size and positive.max() >= LOG_RANGE * positive.min():
        axes.set_yscale("log", nonpositive="mask")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()


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


PLOTS: dict[str, Callable[[Group, Styles], Figure | None]] = {
    "seeds": _seeds,
    "targets": _targets,
    "speed": _speed,
    "gap": _gap,
    "rates": _rates,
    "blocks": _blocks,
    "variance_by_depth": _variances,
}
