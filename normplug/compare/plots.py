"""Draw the comparison. An arm has one colour, marker and dash in all plots of all groups."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote
from zlib import crc32

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from normplug._measure import Measure
from normplug._pictures import (
    COLOURS,
    GREY,
    WIDTH,
    colours_of,
    known,
    origin_text,
    save,
    styled,
    title_text,
)
from normplug.compare.report import about_reference, count_of, p_text
from normplug.compare.runs import (
    Group,
    far_off,
    intervals,
    label,
    plain_title,
)

VARIANCES = {
    "input_variance": "input of each norm at the last step logged, median over seeds",
    "output_variance": "output, before weight and bias; dotted: the target variance",
    "affine_variance": "output, after weight and bias",
}
# Target variances of the arms whose names do not say them.
TARGETS = {"standard": 1.0, "golden": (math.sqrt(5) - 1) / 2}
LOG_RANGE = 10.0  # a logarithmic axis of a smaller range might have a single tick
Styles: TypeAlias = Mapping[str, dict[str, Any]]  # arm -> options of `Axes.plot`
# Marker and dash identify an arm without its colour. The baseline is wide and below the others: a
# mode that equals it would hide it.
FIXED: dict[str, dict[str, Any]] = {
    "baseline": {"marker": "s", "linewidth": 4.0, "zorder": 1.9},
    "standard": {"marker": "o"},
    "golden": {"marker": "D"},
}
MARKERS = "^vPX*<>"
DASHES = ("-", "--", "-.")
LOOKS = len(MARKERS) * len(DASHES)
POINT = {"linestyle": "none", "elinewidth": 1.5, "capsize": 3}  # with its interval
MOST_BANDS = 4  # intervals of one panel that can be told apart


def arm_styles(arms: Iterable[str]) -> Styles:
    """How to draw each arm in every group: a colour, a marker and a dash that its name picks."""
    arms = {*FIXED, *arms}
    colours = colours_of(arms)
    numbers = {name: number for number, name in enumerate(COLOURS)}
    taken: set[int] = set()
    styles = {arm: {"color": colours[arm], **look} for arm, look in FIXED.items()}
    for arm in sorted(
        arms - FIXED.keys(), key=lambda arm: (known(arm) not in numbers, arm)
    ):
        look = numbers.get(known(arm), crc32(arm.encode())) % LOOKS
        while look in taken and len(taken) < LOOKS:
            look = (look + 1) % LOOKS
        taken.add(look)
        marker, dash = MARKERS[look % len(MARKERS)], DASHES[look % len(DASHES)]
        styles[arm] = {"color": colours[arm], "marker": marker, "linestyle": dash}
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


def figures(group: Group, styles: Styles) -> Iterator[tuple[str, Figure]]:
    """Draw the plots that the group has numbers for, and yield each with its name."""
    for name, plot in PLOTS.items():
        figure = styled(plot)(group, styles)
        if figure is not None:
            yield name, figure


def _seeds(group: Group, styles: Styles) -> Figure | None:
    """The test score of every seed, and its difference from the reference: one row per arm."""
    if group.finished.test_score.isna().all():
        return None
    measure = group.measure
    title = (
        f"{group.plain_title}\n"
        f"test {measure.name}: one dot per seed, mean and 95% t-interval below; "
        f"p of paired t-tests, adjusted by Holm\n{about_reference(group)}"
    )
    names = []
    for arm in group.table.itertuples():
        name = f"{textwrap.fill(label(arm.arm), 24)}\n{arm.n_finished} of {arm.n_expected} seeds"
        if arm.n_diverged:
            name += f", {arm.n_diverged} diverged"
        names.append(name)
    row_height = max(0.55, *(0.17 * (name.count("\n") + 1) for name in names))
    height = 1.6 + row_height * len(names)
    figure, (left, right) = _new_figure(group, title, height, (1, 2), sharey=True)
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
    right.set_xlabel(textwrap.fill(f"{minus} ({measure.difference_unit})", 40))
    right.axvline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    by_row = right.get_yaxis_transform()
    for row, arm in group.table.iterrows():
        p = arm.difference_to_reference_p_holm
        if arm.arm == group.reference:
            text = "reference"
        elif np.isnan(p):
            continue
        else:
            text = f"p: {p_text(p)}"
        right.text(1.02, row, text, va="center", transform=by_row)
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
        axes.plot(
            group.measure.scale * ends, 3 * [row + 0.28], "|-", color=GREY, markersize=8
        )
        for value in dots[far[arm.arm]]:
            x, text = 0.88, f"{value:.4g} \u25b8"
            if value < least:
                x, text = 0.01, f"\u25c2 {value:.4g}"
            by_row = axes.get_yaxis_transform()
            axes.text(x, row - 0.3, text, fontsize="small", transform=by_row)
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
    title = (
        f"{group.plain_title}\ntest {measure.name}: mean and 95% t-interval over seeds"
    )
    figure, (axes,) = _new_figure(group, title, 3.8)
    for arm, target in targets.items():
        name = label(arm)
        if far[arm].any():
            name += f", without {far[arm].sum()} far off"
        mean, half = found.loc[arm, ["mean", "t95_half_width"]]
        look = {**styles[arm], **POINT, "label": textwrap.fill(name, 30)}
        axes.errorbar(target, mean, half, **look)
    axes.axhline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    _log_x(axes, targets)
    axes.set_xlabel("target variance")
    minus = f"minus {label(group.reference or '')}, {measure.difference_unit}"
    axes.set_ylabel(f"{minus}, {measure.better} is better")
    _add_legend(figure, *axes.get_legend_handles_labels())
    return figure


def _speed(group: Group, styles: Styles) -> Figure | None:
    """The test score of each arm over the median speed of its runs."""
    table = group.table.assign(items_per_s=group.table.items_per_s_median)
    return speeds_figure(table, origin_of_runs(group.every))


@styled
def speeds_figure(table: pd.DataFrame, origin: str = "") -> Figure | None:
    """Draw the score of each arm over its speed, with their intervals: a panel for each model.

    `table` has a row for each model and arm, with `items_per_s`, and perhaps the ends of its
    interval: `items_per_s_p20` and `items_per_s_p80`. A model with fewer than two timed arms has
    no panel; without panels, there is no figure. The last line of the title is `origin`, or what
    the columns of `normplug._files.stamp` say.
    """
    styles = arm_styles(table.arm)
    timed = table[table.items_per_s.notna()]
    by_model = timed.groupby(["model", "data"])
    panels = {names: rows for names, rows in by_model if len(rows) > 1}
    if not panels:
        return None
    title = "test score: mean and 95% t-interval over seeds"
    if "items_per_s_p20" in table:
        title += "; speed: median, and 20th to 80th percentile"
    if "device" in table:
        origin = origin_text(table.to_dict("records"))
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    figure, drawn = _new_figure(origin, title, 0.9 + 2.9 * rows, (rows, columns))
    for axes in drawn[len(panels) :]:
        axes.set_axis_off()
    handles: dict[str, Any] = {}
    for (names, found), axes in zip(panels.items(), drawn, strict=False):
        first = found.iloc[0]
        measure = Measure(first["measure"], first.unit, first.better, first["items"])
        for row in found.to_dict("records"):
            speed = row["items_per_s"]
            slower = speed - row.get("items_per_s_p20", speed)
            faster = row.get("items_per_s_p80", speed) - speed
            score = measure.scale * row["test_mean"]
            half = measure.scale * np.nan_to_num(row["test_t95_half_width"])
            name = textwrap.fill(label(row["arm"]), 30)
            look = {**styles[row["arm"]], **POINT, "label": name}
            axes.errorbar(speed, score, half, [[slower], [faster]], **look)
        axes.margins(0.05)  # the axes end just outside the points and their intervals
        axes.set_title(plain_title(*names))
        _label_speed(axes, measure)
        lines, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    _add_legend(figure, list(handles.values()), list(handles))
    return figure


def _label_speed(axes: Axes, measure: Measure) -> None:
    axes.set_ylim(_possible(measure, axes.get_ylim()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(6, min_n_ticks=2, steps=[1, 2, 5, 10]))
        axis.set_major_formatter("{x:,.6g}")
    axes.set_xlabel(f"median {measure.items}/s, higher is better")
    axes.set_ylabel(f"test {measure.name} ({measure.unit}), {measure.better} is better")


def _possible(measure: Measure, limits: tuple[float, float]) -> tuple[float, float]:
    """The limits of an axis of scores; percentages end at 0 and 100."""
    low, high = limits
    return (max(low, 0), min(high, 100)) if measure.unit == "%" else limits


def _gap(group: Group, styles: Styles) -> Figure | None:
    """The validation of each arm minus the reference's, by epoch, with its interval.

    Up to `MOST_BANDS` arms share a panel. More have a panel each, where the others are grey.
    """
    measure = group.measure
    gaps = {
        arm: measure.scale * gap for arm, gap in group.gaps().items() if gap.shape[1] > 1
    }
    if not gaps:
        return None
    title = (
        f"{group.plain_title}\nvalidation {measure.name} minus "
        f"{label(group.reference or '')}, same seed: mean and 95% t-interval over seeds"
    )
    minus = f"{measure.difference_unit}, {measure.better} is better"
    together = len(gaps) <= MOST_BANDS
    shape = (1, 1) if together else (math.ceil(len(gaps) / 2), 2)
    height = 3.6 if together else 1 + 1.7 * shape[0]
    figure, panes = _new_figure(group, title, height, shape, sharex=True, sharey=True)
    for number, arm in enumerate(gaps):
        axes = panes[0] if together else panes[number]
        _draw_gap(axes, arm, gaps[arm], styles[arm])
        if not together:
            axes.set_title(textwrap.fill(_line_name(arm, gaps[arm]), 34))
            for other in gaps.keys() - {arm}:
                middle = gaps[other].mean()
                axes.plot(middle.index, middle, color=GREY, alpha=0.4, linewidth=0.8)
    used = panes[: 1 if together else len(gaps)]
    for axes in panes[len(used) :]:
        axes.set_axis_off()
    for axes in used:
        axes.axhline(0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
        axes.xaxis.set_major_locator(
            MaxNLocator(7, integer=True, min_n_ticks=2, steps=[1, 2, 5, 10])
        )
        axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=2))
    for axes in used[-shape[1] :]:  # the lowest of each column
        axes.set_xlabel("epoch, 1 = first")
        axes.tick_params(labelbottom=True)
    figure.supylabel(minus, fontsize="medium")
    if together:
        _add_legend(figure, *panes[0].get_legend_handles_labels())
    return figure


def _draw_gap(axes: Axes, arm: str, gap: pd.DataFrame, style: dict[str, Any]) -> None:
    """Draw the mean over seeds; with two seeds or more, also its interval as a band."""
    found = intervals(gap)
    few = 1 + gap.shape[1] // 25
    name = textwrap.fill(_line_name(arm, gap), 40)
    axes.plot(
        found.index, found["mean"], label=name, markevery=few, markersize=4, **style
    )
    band = found.dropna()
    low = band["mean"] - band.t95_half_width
    high = band["mean"] + band.t95_half_width
    if len(band):
        axes.fill_between(band.index, low, high, color=style["color"], alpha=0.2)


def _rates(group: Group, styles: Styles) -> Figure | None:
    """The last validation of each arm over the learning rate."""
    measure = group.measure
    done = group.every[group.every.status == "finished"]
    columns = ["plain_arm", "learning_rate"]
    scores = measure.scale * done.pivot_table("validation_score", "seed", columns)
    by_arm = {arm: scores[arm] for arm in scores.columns.unique("plain_arm")}
    title = plain_title(group.model, group.data)
    what = f"median over seeds; {measure.better} is better"
    score = f"validation {measure.name} ({measure.unit})"
    figure = _lines(group, title, styles, {what: by_arm}, "learning rate", score)
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
    x = "block, 1 = first"
    return _lines(group, group.plain_title, styles, panels, x, added, log=True)


def _variances(group: Group, styles: Styles) -> Figure | None:
    """The variance of the input and the output of each norm, by depth."""
    panels = {title: group.lists(name) for name, title in VARIANCES.items()}
    targets = group.lists("target_variance")
    x = "norm, 1 = first"
    title = group.plain_title
    figure = _lines(group, title, styles, panels, x, "variance", log=True)
    for axes in [] if figure is None else figure.axes:
        if axes.get_title("left") != VARIANCES["output_variance"]:
            continue
        for arm, table in targets.items():
            look = {"color": styles[arm]["color"], "linestyle": ":", "linewidth": 1.5}
            axes.plot(table.columns, table.median(), **look)
    return figure


def _line_name(arm: str, table: pd.DataFrame) -> str:
    return f"{label(arm)} ({count_of(len(table), 'seed')})"


def _lines(
    group: Group,
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
    height = 1 + 2.3 * len(drawn) + 0.3 * (len(drawn) == 1)
    figure, panes = _new_figure(group, title, height, (len(drawn), 1))
    for (what, lines), axes in zip(drawn.items(), panes, strict=True):
        for arm, table in lines.items():
            name = textwrap.fill(_line_name(arm, table), 40)
            few = 1 + table.shape[1] // 25  # markers sparse enough to tell apart
            options = {"markevery": few, "markersize": 4, "clip_on": False, **styles[arm]}
            axes.plot(table.columns, table.median(), label=name, **options)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=2))
        if log:
            _log_y(axes, np.concatenate([np.ravel(table) for table in lines.values()]))
        axes.set_title(what, loc="left")
        axes.set_ylabel(y)
    panes[-1].set_xlabel(x)
    _add_legend(figure, *panes[0].get_legend_handles_labels())
    return figure


def _add_legend(figure: Figure, handles: Sequence[Any], labels: Sequence[Any]) -> None:
    """Add a legend below the panels, and make the figure higher by it."""
    longest = max(len(line) for name in labels for line in name.split("\n"))
    columns = max(1, min(4, 100 // (longest + 8), len(labels)))
    lines = max(name.count("\n") + 1 for name in labels)
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + 0.15 + 0.19 * rows * lines)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _log_y(axes: Axes, values: np.ndarray) -> None:
    """Make y logarithmic if the values have a large range."""
    positive = values[(values > 0) & np.isfinite(values)]
    if positive.size and positive.max() >= LOG_RANGE * positive.min():
        axes.set_yscale("log", nonpositive="mask")
        subs = (1, 2, 5) if positive.max() < 1e3 * positive.min() else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()


def _log_x(axes: Axes, ticks: Iterable[float]) -> None:
    """Make x logarithmic, with a label at each of the ticks."""
    axes.set_xscale("log")
    axes.set_xticks(list(ticks), [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()


def _new_figure(
    origin: Group | str,
    title: str,
    height: float,
    shape: tuple[int, int] = (1, 1),
    **share: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure without pyplot's global state, and its `shape` of panels.

    The last line of the title says where the runs come from.
    """
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    last = origin if isinstance(origin, str) else origin_of_runs(origin.every)
    figure.suptitle(title_text(f"{title}\n{last}"))
    panels = list(figure.subplots(*shape, squeeze=False, **share).flat)
    for axes in panels:
        axes.grid(visible=True)
    return figure, panels


def origin_of_runs(runs: pd.DataFrame) -> str:
    """Where the finished ones of these runs come from, in words: see `origin_text`."""
    finished = runs[runs["status"] == "finished"]
    rows = [
        {**run.versions, "device": run.hardware, "commit": run.commit, "date": run.date}
        for run in finished.itertuples()
    ]
    return origin_text(rows)


PLOTS: dict[str, Callable[[Group, Styles], Figure | None]] = {
    "seeds": _seeds,
    "targets": _targets,
    "speed": _speed,
    "gap": _gap,
    "rates": _rates,
    "blocks": _blocks,
    "variance_by_depth": _variances,
}
