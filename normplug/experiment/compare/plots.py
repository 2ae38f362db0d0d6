"""Draw the comparison. An arm has one colour, marker and dash in all plots of all groups."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

from normplug import NormMode
from normplug._results import replace_file
from normplug.experiment.compare.frame import Group, Variance, label
from normplug.experiment.compare.report import p_text, speed_text
from normplug.experiment.compare.stats import (
    adjusted_ps,
    differences,
    far_off,
    intervals,
    speed_ratios,
)
from normplug.lightning.heat_map import colour_bar, colour_scale, heat_map, log_span, log_ticks

PLOTS = (
    *("accuracy", "loss", "seeds", "targets", "blocks", "throughput"),
    *("variance_by_depth", "variance_by_step"),
)
PANELS = {
    "input_variance": "input",
    "output_variance": "output, before weight and bias (dotted: target)",
    "affine_variance": "output, after weight and bias",
}
LEAST = 3  # target variances in a line
BESIDE = 1.02  # spreads models on the log axis, so that their intervals are side by side


class Style(NamedTuple):
    """How an arm is drawn in every plot; marker and dash identify it without colour."""

    colour: str
    marker: str
    width: float = 1.6
    dash: str = "-"


Styles: TypeAlias = Mapping[str, Style]
# Okabe and Ito's palette, safe for every common colour blindness. The baseline is drawn first and
# wide, since a mode that equals it would otherwise hide it.
FIXED = {
    "baseline": Style("#9A9A9A", "s", 4.0),
    "standard": Style("#0072B2", "o"),
    "golden": Style("#E69F00", "D"),
}
COLOURS = (
    *("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#882255", "#999933", "#332288"),
    *("#E7298A", "#8B4513", "#00CED1"),
)


def other_styles(count: int) -> list[Style]:
    """`count` styles, none with the colour of another."""
    more = colormaps["turbo"](np.linspace(0.1, 0.9, max(count - len(COLOURS), 0)))
    looks = zip((*COLOURS, *map(to_hex, more)), cycle("^vPX*<>"), cycle(("-", "--", "-.")))
    return [Style(colour, marker, dash=dash) for colour, marker, dash in islice(looks, count)]


def arm_styles(groups: Iterable[Group]) -> dict[str, Style]:
    """A style for each arm, the same in every group."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    return FIXED | dict(zip(others, other_styles(len(others)), strict=True))


def draw(
    groups: Sequence[Group],
    tables: Sequence[pd.DataFrame],
    out: Path,
    plots: Collection[str] | None = None,
) -> list[Path]:
    """Write the plots (None for all) that the groups have numbers for: `out/<plot>_<group>.png`.

    Arms are drawn in the order of `tables`, the rows of each group.
    """
    styles = arm_styles(groups)
    found: list[tuple[str, str, Callable[[], Figure]]] = []
    for group, table in zip(groups, tables, strict=True):
        stem, finished, of_arms = f"{group.model}_{group.data}", group.finished, group.variances[0]
        ordered = {arm: of_arms[arm] for arm in table.arm if arm in of_arms}
        of_group, of_variance = (group, table, styles), (group.title, ordered, styles)
        curves = any(np.isfinite(curve).any() for curve in finished.curve)
        for name, figure, given, known in (
            (group.measure.name, curves_figure, of_group, curves),
            ("seeds", seeds_figure, of_group, finished.test_score.notna().any()),
            ("blocks", blocks_figure, of_group, finished.block_drop.map(len).any()),
            ("throughput", throughput_figure, of_group, finished.items_per_s.notna().any()),
            ("variance_by_depth", variance_by_depth_figure, of_variance, ordered),
            ("variance_by_step", variance_by_step_figure, of_variance[:2], ordered),
        ):
            found += [(name, f"{name}_{stem}", partial(figure, *given))] if known else []
    for members in target_groups(groups):
        stem = f"targets_{members[0].data}"
        found.append(("targets", stem, partial(targets_figure, members)))
    written: list[Path] = []
    for name, stem, draw_figure in found:
        if plots is None or name in plots:
            path = out / f"{re.sub(r'[^A-Za-z0-9._-]', '_', stem)[:200]}.png"
            while path in written:
                path = path.with_stem(f"{path.stem}_")
            written.append(path)
            with replace_file(path) as part:
                draw_figure().savefig(part, format="png", dpi=150)
    return written


def curves_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the validation by epoch: all epochs, and the last half, where arms differ by little."""
    measure = group.measure
    what = f"validation {measure.name}: median over seeds, and band between the quartiles"
    figure = _new_figure(group.title, what, 10, 5)
    panels = figure.subplots(1, 2)
    for arm in table.arm:
        curves = [c for c in _of_arm(group, arm, "curve") if np.isfinite(c).any()]
        if not curves:
            continue
        shortest = min(map(len, curves))
        shown = measure.scale * np.array([curve[:shortest] for curve in curves])
        quartiles = np.quantile(shown, [0.25, 0.5, 0.75], axis=0)
        for axes, start in zip(panels, (0, shortest // 2), strict=True):
            x, (low, middle, high) = np.arange(start, shortest) + 1, quartiles[:, start:]
            axes.fill_between(x, low, high, color=styles[arm].colour, alpha=0.15, lw=0)
            _draw_line(axes, x, middle, styles[arm], f"{label(arm)} ({_seeds(len(curves))})")
    for axes, name in zip(panels, ("all epochs", "last half, enlarged"), strict=True):
        axes.set_ylim(*np.clip(axes.get_ylim(), *measure.limits))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel=f"validation {measure.name} ({measure.unit})")
        axes.xaxis.set_major_locator(_whole_numbers(10))
        axes.grid(alpha=0.3)
    _legend_below(figure)
    return figure


def seeds_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the test score of every seed, and its difference from the reference."""
    measure, paired = group.measure, differences(group)
    ps = adjusted_ps(paired)
    what = f"test {measure.name}: a dot for each seed, mean and 95% t-interval in black"
    what += "; p of paired t-tests, adjusted by Holm" * bool(len(ps))
    figure, (left, right) = _rows_of_arms(group, table, what)
    for axes, values in (
        (left, measure.scale * group.wide("test_score")),
        (right, measure.scale * paired),
    ):
        found = intervals(values)
        half = found.t95_half_width.fillna(0)
        bars = pd.DataFrame({0: found["mean"], 1: found["mean"] - half, 2: found["mean"] + half})
        _draw_dots(axes, group, table, styles, values, bars)
    left.set_xlim(*np.clip(left.get_xlim(), *measure.limits))
    left.set_xlabel(f"test {measure.name} ({measure.unit})")
    minus = f"test {measure.name} minus {label(group.reference or '')}, same seed"
    texts = ps.map(p_text).to_dict() | {group.reference: "reference"}
    _compare_with(right, f"{minus} ({measure.difference_unit})", 0, map(texts.get, table.arm))
    if len(ps):
        right.text(1.02, -0.6, "p (Holm)", va="bottom", transform=right.get_yaxis_transform())
    return figure


def throughput_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the speed of each run, and its ratio to the reference's."""
    speeds, unit = group.wide("items_per_s"), group.measure.speed_unit
    machines = group.finished.hardware[group.finished.items_per_s.notna()].unique()
    what = "training speed: a dot for each run; black: median (left), geometric mean (right), range"
    figure, (left, right) = _rows_of_arms(group, table, f"{what}\n{' and '.join(machines)}")
    ratios = speed_ratios(group)
    for axes, values, middle in (
        (left, speeds, speeds.median()),
        (right, ratios, np.exp(np.log(ratios).mean())),
    ):
        bars = pd.DataFrame({0: middle, 1: values.min(), 2: values.max()})
        _draw_dots(axes, group, table, styles, values, bars)
        # At least a tenth of the middle, so that noise does not fill the axis.
        low, high = axes.get_xlim()
        half = max(high - low, 0.05 * (low + high)) / 2
        axes.set_xlim((low + high) / 2 - half, (low + high) / 2 + half)
    left.set_xlabel(unit)
    of = " or ".join(label(arm) for arm in table.speed_reference.dropna().unique())
    texts = [re.sub(r":.*|, \d+ pairs", "", speed_text(row)) for row in table.to_dict("records")]
    _compare_with(right, f"{unit} over {of}'s, same seed", 1, texts)
    return figure


def _rows_of_arms(group: Group, table: pd.DataFrame, what: str) -> tuple[Figure, list[Axes]]:
    """A figure with two panels of a row for each arm, the first at the top."""
    names = [
        f"{textwrap.fill(label(row.arm), 30)}\n{row.n_finished} of {_seeds(row.n_expected)}"
        + f", {row.n_diverged} diverged" * bool(row.n_diverged)
        for row in table.itertuples()
    ]
    height = max(0.6, *(0.2 * (name.count("\n") + 1) for name in names)) * len(names)
    what = f"{what}\n{group.about_reference}"
    figure = _new_figure(group.title, what, 10, 1.8 + height)
    panels = figure.subplots(1, 2, sharey=True)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    return figure, list(panels)


def _draw_dots(
    axes: Axes,
    group: Group,
    table: pd.DataFrame,
    styles: Styles,
    values: pd.DataFrame,
    bars: pd.DataFrame,
) -> None:
    """Draw a dot for each seed of `values` (seeds, arms), and a bar below the dots of an arm.

    `bars` are the middle and the ends of each arm's bar. A value that is far from all others is
    written at the end of the axis.
    """
    if not values.notna().any(axis=None):
        _say_no_pair(axes, group)
        return
    far, beside = far_off(values), axes.get_yaxis_transform()
    least, most = values[~far].min(axis=None), values[~far].max(axis=None)
    for row, arm in enumerate(table.arm):
        if arm not in values or values[arm].isna().all():
            continue
        found = values[arm].dropna()
        # Each seed has its own height in every row, so that pairs can be matched.
        y = [
            row - 0.35 + 0.5 * (group.seeds.index(s) + 0.5) / len(group.seeds) for s in found.index
        ]
        axes.plot(found, y, styles[arm].marker, color=styles[arm].colour, markersize=6)
        middle, low, high = bars.loc[arm]
        # Rounding may put `low` above `middle`, or `high` below it.
        spread = np.maximum([[middle - low], [high - middle]], 0)
        bar = axes.errorbar(middle, row + 0.28, xerr=spread, color="black", marker="|", capsize=3)
        bar.lines[0].set_markersize(12)
        for value in found[far[arm].reindex(found.index)]:
            place, arrows = (0.01, ("\u25c2 ", "")) if value < least else (0.88, ("", " \u25b8"))
            text = f"{value:.4g}".join(arrows)
            axes.text(place, row - 0.3, text, fontsize="small", transform=beside)
    if far.any(axis=None):
        margin = 0.05 * (most - least)
        axes.set_xlim(least - margin, most + margin)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.grid(axis="x", alpha=0.3)


def _say_no_pair(axes: Axes, group: Group) -> None:
    """Replace a panel by a note that no seed can be compared."""
    axes.set_axis_off()
    text = f"no seed to compare with {label(group.reference or 'a reference')}"
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def _compare_with(axes: Axes, name: str, equal: float, texts: Iterable[str | None]) -> None:
    """Name the axis, draw the line where nothing differs, and write a text beside each row."""
    if not axes.axison:
        return
    axes.set_xlabel(textwrap.fill(name, 60))
    axes.axvline(equal, color="black", linewidth=0.8, linestyle="--", zorder=0)
    for row, text in enumerate(texts):
        axes.text(1.02, row, text or "", va="center", transform=axes.get_yaxis_transform())


def blocks_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw how much each block of a language model matters: the loss added by dropping it."""
    measure = group.measure
    what = (
        f"test {measure.name} without one block minus that of the whole model, mean over seeds "
        "(the log axis leaves out what is not above 0)"
    )
    figure = _new_figure(group.title, what, 9, 5)
    axes = figure.subplots()
    for arm in table.arm:
        found = [drop for drop in _of_arm(group, arm, "block_drop") if drop]
        found = [drop for drop in found if len(drop) == len(found[0])]
        if found:
            name = f"{label(arm)} ({_seeds(len(found))})"
            _draw_line(axes, np.arange(len(found[0])) + 1, np.mean(found, 0), styles[arm], name)
    axes.set_xlabel("block without which the loss is measured, 1 = first")
    axes.set_ylabel(f"added {measure.name} ({measure.difference_unit})")
    axes.xaxis.set_major_locator(_whole_numbers(15))
    _log_scale(axes)
    _legend_below(figure)
    return figure


def target_groups(groups: Iterable[Group]) -> list[list[Group]]:
    """The groups that have a line over target variances, in one list per data set and measure."""
    found: dict[object, list[Group]] = {}
    for group in groups:
        if len(_over_targets(group.wide("test_score"))) >= LEAST:
            found.setdefault((group.data, group.measure), []).append(group)
    return list(found.values())


def _over_targets(wide: pd.DataFrame) -> pd.DataFrame:
    """The intervals of the arms whose name is just a mode, by target variance, ascending."""
    found = intervals(wide.dropna(axis=1, how="all")).rename(index=_target_variance)
    return found[found.index.notna()].sort_index()


def _target_variance(arm: str) -> float:
    for name in (float, str):
        try:
            return NormMode(name(arm)).target_variance
        except ValueError:
            continue
    return math.nan


def targets_figure(groups: Sequence[Group]) -> Figure:
    """Draw the test score and its difference from the reference over the target variance.

    The groups have one data set and one measure; each has a line.
    """
    measure = groups[0].measure
    what = f"test {measure.name} over the target variance: means over seeds, 95% t-intervals"
    figure = _new_figure(groups[0].data, what, 10, max(4.2, 1.2 + 2.0 * len(groups)))
    grid = figure.add_gridspec(len(groups), 2)
    right, ticks = figure.add_subplot(grid[:, 1]), set[float]()
    for place, (group, style) in enumerate(zip(groups, other_styles(len(groups)), strict=True)):
        left = figure.add_subplot(grid[place, 0])
        title = f"{group.model} ({_seeds(len(group.seeds))})"
        shift = BESIDE ** (2 * place - len(groups) + 1)
        scores, paired = _over_targets(group.wide("test_score")), _over_targets(differences(group))
        for axes, found, moved in ((left, scores, 1), (right, paired, shift)):
            if len(found):
                axes.errorbar(
                    found.index * moved,
                    measure.scale * found["mean"],
                    yerr=measure.scale * found.t95_half_width.fillna(0),
                    color=style.colour,
                    marker=style.marker,
                    linestyle=style.dash,
                    capsize=3,
                    label=title,
                )
        ticks |= set(paired.index)
        left.set_title(title, loc="left", fontsize="medium")
        left.set_ylabel(f"{measure.name} ({measure.unit})")
        _target_axis(left, scores.index)
    left.set_xlabel("target variance")
    if not ticks:
        _say_no_pair(right, groups[0])
        return figure
    minus = " or ".join(sorted({label(group.reference or "") for group in groups}))
    right.axhline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    right.set_title(f"minus {minus}, same seed", loc="left", fontsize="medium")
    right.set(ylabel=f"difference ({measure.difference_unit})", xlabel="target variance")
    _target_axis(right, ticks)
    _legend_below(figure)
    return figure


def _target_axis(axes: Axes, ticks: Iterable[float]) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.grid(alpha=0.3)


def variance_by_depth_figure(
    title: str, variances: Mapping[str, Variance], styles: Styles
) -> Figure:
    """Draw the variance by depth, at the last step that all seeds of an arm logged."""
    last = {arm: variance.table.iloc[-1] for arm, variance in variances.items()}
    when = " and ".join(map(str, sorted({row.name for row in last.values()})))
    what = f"variance at each norm at the last step logged ({when}), mean over seeds"
    figure = _new_figure(title, what, 9, 9)
    panels = dict(zip(PANELS, figure.subplots(len(PANELS), 1, sharex=True), strict=True))
    for arm, row in last.items():
        name = f"{label(arm)} ({_seeds(variances[arm].runs)})"
        for quantity, axes in panels.items():
            _draw_line(axes, row[quantity].index, row[quantity], styles[arm], name)
        target = row["target_variance"]
        panels["output_variance"].plot(target.index, target, "k:", zorder=3)
    for quantity, axes in panels.items():
        axes.set_title(PANELS[quantity], loc="left", fontsize="medium")
        axes.set_ylabel("variance")
        _log_scale(axes)
    axes.set_xlabel(_depth_label(variances))
    axes.xaxis.set_major_locator(_whole_numbers(15))
    _legend_below(figure)
    return figure


def variance_by_step_figure(title: str, variances: Mapping[str, Variance]) -> Figure:
    """Draw the variance after weight and bias: for each arm, a heat map of depth (down) by step."""
    columns = len(variances) if len(variances) <= 3 else math.ceil(math.sqrt(len(variances)))
    rows = math.ceil(len(variances) / columns)
    names = [textwrap.fill(f"{label(arm)} ({_seeds(v.runs)})", 40) for arm, v in variances.items()]
    lines = max(name.count("\n") for name in names)
    what = "variance after weight and bias, mean over seeds (hatched: no finite value)"
    figure = _new_figure(title, what, 2.4 + 3.3 * columns, 1.4 + (3.2 + 0.17 * lines) * rows)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    tables = [variance.table["affine_variance"] for variance in variances.values()]
    values = np.concatenate([table.to_numpy().ravel() for table in tables])
    norm = colour_scale(values)
    for axes, name, table in zip(panels, names, tables, strict=False):
        x, y = table.index.to_numpy(), table.columns.to_numpy()
        mesh = heat_map(axes, x, y, table.to_numpy().T, norm)
        axes.set_title(name, fontsize="medium")
    for axes in panels[len(tables) :]:
        axes.remove()
    for axes in panels[len(tables) - columns : len(tables)]:
        axes.tick_params(labelbottom=True)
    panels[0].xaxis.set_major_locator(_whole_numbers(4))
    panels[0].yaxis.set_major_locator(_whole_numbers(12))
    colour_bar(figure, mesh, values, figure.axes, aspect=20 * rows, pad=0.02, label="variance")
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel(_depth_label(variances), fontsize="medium")
    return figure


def _depth_label(variances: Mapping[str, Variance]) -> str:
    kinds = next(iter(variances.values())).kinds
    return f"norm by depth, 0 = first ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"


def _of_arm(group: Group, arm: str, field: str) -> list[Any]:
    return list(group.finished[field][group.finished.arm == arm])


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _new_figure(title: str, what: str, width: float, height: float) -> Figure:
    """A figure of width x height inches, without a display or pyplot's global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    lines = [textwrap.fill(line, int(11 * width)) for line in (title, *what.splitlines())]
    figure.suptitle("\n".join(lines), fontsize="medium")
    return figure


def _whole_numbers(most: int) -> MaxNLocator:
    """A locator of at most `most` ticks, at integers only: for epochs, steps and depths."""
    return MaxNLocator(most, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)


def _draw_line(axes: Axes, x: Any, y: Any, style: Style, name: str) -> None:
    """Plot a line in the style of its arm, with markers sparse enough to tell apart."""
    (line,) = axes.plot(x, y, style.dash, color=style.colour, label=name, linewidth=style.width)
    line.set(marker=style.marker, markersize=4 + style.width / 2, markevery=1 + len(x) // 25)
    line.set_clip_on(False)  # a marker at 100% is on the border, and is drawn whole


def _legend_below(figure: Figure) -> None:
    """Add the legend of the first panel below the panels, where no line can cross it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    width, height = figure.get_size_inches()
    names = [textwrap.fill(name, int(11 * width) - 8) for name in labels]
    # An entry whose name has c characters is about (c + 8) / 12 inches wide.
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(max(int(12 * width / (8 + longest)), 1), 4)
    # The figure has space for two rows; it grows for more.
    rows = math.ceil(len(names) / columns) * max(name.count("\n") + 1 for name in names)
    figure.set_figheight(height + 0.22 * max(rows - 2, 0))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False)


def _log_scale(axes: Axes) -> None:
    """Give the axes a log y axis that spans all lines."""
    low, high = log_span(np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines]))
    # Set the limits first: a log axis without them warns if no value is positive.
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(log_ticks(low, high))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
