"""Draw the comparison. An arm has one colour, marker and dash in all plots of all groups."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
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

from normplug._results import replace_file
from normplug.experiment.compare.frame import label
from normplug.experiment.compare.report import about_reference, count_of, p_text
from normplug.experiment.compare.stats import Group, adjusted_ps, far_off, intervals
from normplug.lightning.heat_map import log_span, log_ticks

PLOTS = ("accuracy", "loss", "seeds", "targets", "blocks", "variance_by_depth")
PANELS = {
    "input_variance": "input",
    "output_variance": "output, before weight and bias (dotted: target)",
    "affine_variance": "output, after weight and bias",
}
LEAST = 3  # the fewest target variances to draw a line over
TARGETS = {"standard": 1.0, "golden": (math.sqrt(5) - 1) / 2}  # other arms are named by it
Styles: TypeAlias = Mapping[str, dict[str, Any]]  # arm -> options of `Axes.plot`
# Okabe and Ito's palette, safe for every common colour blindness. Marker and dash identify an arm
# without colour. The baseline is drawn first and wide: a mode that equals it would hide it.
FIXED: dict[str, dict[str, Any]] = {
    "baseline": {"color": "#9A9A9A", "marker": "s", "linewidth": 4.0},
    "standard": {"color": "#0072B2", "marker": "o"},
    "golden": {"color": "#E69F00", "marker": "D"},
}
COLOURS = (
    *("#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#882255", "#999933", "#332288"),
    *("#E7298A", "#8B4513", "#00CED1"),
)


def arm_styles(groups: Iterable[Group]) -> Styles:
    """How to draw each arm in every group; no two arms have one colour."""
    others = sorted({arm for group in groups for arm in group.arms} - FIXED.keys())
    more = colormaps["turbo"](np.linspace(0.1, 0.9, max(len(others) - len(COLOURS), 0)))
    looks = zip((*COLOURS, *map(to_hex, more)), cycle("^vPX*<>"), cycle(("-", "--", "-.")))
    styles = [dict(zip(("color", "marker", "linestyle"), look, strict=True)) for look in looks]
    return FIXED | dict(zip(others, styles, strict=False))


def draw(groups: Sequence[Group], out: Path, plots: Collection[str] | None = None) -> list[Path]:
    """Write the plots (None for all) that the groups have numbers for: `out/<plot>_<group>.png`."""
    styles, written = arm_styles(groups), list[Path]()
    asked = set(PLOTS if plots is None else plots)
    for group in groups:
        for name, figure, known in (
            (group.measure.name, curves_figure, _lists(group, "curve")),
            ("seeds", seeds_figure, group.finished.test_score.notna().any()),
            ("targets", targets_figure, len(_over_targets(group.wide("test_score"))) >= LEAST),
            ("blocks", blocks_figure, _lists(group, "block_drop")),
            ("variance_by_depth", variance_by_depth_figure, group.variances),
        ):
            if known and name in asked:
                file = quote("_".join((name, group.model, group.data)), safe="")
                written.append(out / f"{file}.png")
                with replace_file(written[-1]) as part:
                    figure(group, styles).savefig(part, dpi=150)
    return written


def _lists(group: Group, field: str) -> dict[str, pd.DataFrame]:
    """Arm -> the lists of a column, a row a run, up to the end of the shortest."""
    runs, tables = group.finished, {}
    for arm in group.table.arm:
        lists = [pd.Series(values, dtype=float) for values in runs[field][runs.arm == arm]]
        table = pd.DataFrame(lists).dropna(how="all").dropna(axis=1)
        if table.size:
            tables[arm] = table.set_axis(table.columns + 1, axis=1)
    return tables


def curves_figure(group: Group, styles: Styles) -> Figure:
    """Draw the validation by epoch: all epochs, and the last half, where arms differ by little."""
    measure, scale = group.measure, group.measure.scale
    what = f"validation {measure.name}: median over seeds, and band between the quartiles"
    figure, (left, right) = _new_figure(group.title, what, (12, 5), (1, 2))
    whole = _lists(group, "curve")
    late = {arm: curves.iloc[:, curves.shape[1] // 2 :] for arm, curves in whole.items()}
    for axes, shown, name in (left, whole, "all epochs"), (right, late, "last half, enlarged"):
        for arm, curves in shown.items():
            ends = (scale * curves.quantile(q) for q in (0.25, 0.75))
            axes.fill_between(curves.columns, *ends, color=styles[arm]["color"], alpha=0.15, lw=0)
        middles = {arm: scale * curves.median() for arm, curves in shown.items()}
        _draw_lines(axes, group, styles, "curve", middles)
        axes.set_ylim(*np.clip(axes.get_ylim(), 0, 100 if measure.unit == "%" else None))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel=f"validation {measure.name} ({measure.unit})")
    _add_legend(figure)
    return figure


def seeds_figure(group: Group, styles: Styles) -> Figure:
    """Draw the test score of every seed, and its difference from the reference: a row an arm."""
    measure, paired = group.measure, group.differences()
    what = f"test {measure.name}: a dot for each seed, mean and 95% t-interval in black; "
    what += f"p of paired t-tests, adjusted by Holm\n{about_reference(group)}"
    names = [
        f"{textwrap.fill(label(row.arm), 30)}\n{row.n_finished} of {row.n_expected} seeds"
        + f", {row.n_diverged} diverged" * bool(row.n_diverged)
        for row in group.table.itertuples()
    ]
    height = 1.8 + max(0.6, *(0.2 * (name.count("\n") + 1) for name in names)) * len(names)
    figure, (left, right) = _new_figure(group.title, what, (10, height), (1, 2), sharey=True)
    left.set_yticks(range(len(names)), names)
    left.set_ylim(len(names) - 0.5, -0.5)
    _draw_dots(left, group, styles, measure.scale * group.wide("test_score"))
    left.set_xlim(*np.clip(left.get_xlim(), 0, 100 if measure.unit == "%" else None))
    left.set_xlabel(f"test {measure.name} ({measure.unit})")
    _draw_dots(right, group, styles, measure.scale * paired)
    if not right.lines:
        right.set_axis_off()
        right.text(0.5, 0.5, "no seed to compare", ha="center", transform=right.transAxes)
        return figure
    minus = f"test {measure.name} minus {label(group.reference or '')}, same seed"
    right.set_xlabel(textwrap.fill(f"{minus} ({measure.difference_unit})", 50))
    right.axvline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    texts = {arm: f"p: {p_text(p)}" for arm, p in adjusted_ps(paired).items()}
    for row, arm in enumerate(group.table.arm):
        text = "reference" if arm == group.reference else texts.get(arm, "")
        right.text(1.02, row, text, va="center", transform=right.get_yaxis_transform())
    return figure


def _draw_dots(axes: Axes, group: Group, styles: Styles, values: pd.DataFrame) -> None:
    """Draw a row for each arm: a dot for each seed, the mean and its interval below the dots."""
    # Each seed has its own height in every row, so that pairs can be matched.
    heights = pd.Series(np.linspace(-0.3, 0.1, len(group.seeds)), group.seeds)
    far, beside, means = far_off(values), axes.get_yaxis_transform(), intervals(values)
    least, most = values[~far].min(axis=None), values[~far].max(axis=None)
    for row, arm in enumerate(group.table.arm):
        dots, style = values[arm].dropna(), styles[arm] | {"linestyle": "none"}
        if dots.empty:
            continue
        axes.plot(dots, row + heights[dots.index], markersize=6, **style)
        _, mean, half = means.fillna(0).loc[arm]
        axes.plot([mean - half, mean, mean + half], 3 * [row + 0.28], "k|-", markersize=8)
        for value in values[arm][far[arm]]:
            x, text = (0.01, "\u25c2 {:.4g}") if value < least else (0.88, "{:.4g} \u25b8")
            axes.text(x, row - 0.3, text.format(value), fontsize="small", transform=beside)
    if far.any(axis=None):
        axes.set_xlim(least - 0.05 * (most - least), most + 0.05 * (most - least))
    axes.locator_params("x", nbins=4)
    axes.xaxis.set_major_formatter("{x:,.6g}")


def blocks_figure(group: Group, styles: Styles) -> Figure:
    """Draw how much each block of a language model matters: the loss added by dropping it."""
    measure = group.measure
    what = (
        f"test {measure.name} without one block minus that of the whole model, mean over seeds "
        "(the log axis leaves out what is not above 0)"
    )
    figure, (axes,) = _new_figure(group.title, what, (11, 5))
    added = {arm: drops.mean() for arm, drops in _lists(group, "block_drop").items()}
    _draw_lines(axes, group, styles, "block_drop", added)
    axes.set_xlabel("block without which the loss is measured, 1 = first")
    axes.set_ylabel(f"added {measure.name} ({measure.difference_unit})")
    _log_scale(axes)
    _add_legend(figure)
    return figure


def _over_targets(wide: pd.DataFrame) -> pd.DataFrame:
    """The intervals of the arms whose name is just a mode, by target variance, ascending."""
    found = intervals(wide.dropna(axis=1, how="all"))
    found.index = pd.to_numeric([TARGETS.get(arm, arm) for arm in found.index], errors="coerce")
    return found[found.index.notna()].sort_index()


def targets_figure(group: Group, styles: Styles) -> Figure:
    """Draw the test score and its difference from the reference over the target variance."""
    measure, scale = group.measure, group.measure.scale
    what = f"test {measure.name} over the target variance: means over seeds, 95% t-intervals"
    figure, panels = _new_figure(group.title, what, (10, 3.7), (1, 2))
    tables = group.wide("test_score"), group.differences()
    minus = f"minus {label(group.reference or 'a reference')}, same seed"
    titles = count_of(len(group.seeds), "seed"), minus
    units = measure.unit, measure.difference_unit
    for axes, wide, title, unit in zip(panels, tables, titles, units, strict=True):
        found = _over_targets(wide)
        half = found.t95_half_width.fillna(0)
        axes.errorbar(found.index, scale * found["mean"], scale * half, fmt="o-", capsize=3)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set(xscale="log", xlabel="target variance", ylabel=f"{measure.name} ({unit})")
        axes.set_xticks(found.index, [f"{target:.3g}" for target in found.index])
        axes.minorticks_off()
    panels[1].axhline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    return figure


def variance_by_depth_figure(group: Group, styles: Styles) -> Figure:
    """Draw the variance by depth, at the last step that all seeds of an arm logged."""
    last = {arm: table.iloc[-1] for arm, table in group.variances.items()}
    when = " and ".join(map(str, sorted({row.name for row in last.values()})))
    what = f"variance at each norm at the last step logged ({when}), mean over seeds"
    figure, panels = _new_figure(group.title, what, (11, 9), (len(PANELS), 1), sharex=True)
    for (quantity, title), axes in zip(PANELS.items(), panels, strict=True):
        of_quantity = {arm: row[quantity] for arm, row in last.items()}
        _draw_lines(axes, group, styles, "variances", of_quantity)
        for row in last.values() if quantity == "output_variance" else ():
            axes.plot(row["target_variance"], "k:", zorder=3)
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_ylabel("variance")
        _log_scale(axes)
    panels[-1].set_xlabel("norm by depth, 0 = first")
    _add_legend(figure)
    return figure


def _new_figure(
    title: str, what: str, size: tuple[float, float], shape: tuple[int, int] = (1, 1), **share: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of `size` inches, without pyplot's global state, and its `shape` of panels."""
    figure = Figure(figsize=size, layout="constrained")
    lines = [textwrap.fill(line, int(11 * size[0])) for line in (title, *what.splitlines())]
    figure.suptitle("\n".join(lines), fontsize="medium")
    panels = list(figure.subplots(*shape, squeeze=False, **share).flat)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def _named(group: Group, arm: str, field: str) -> str:
    """The name of an arm, with the number of its seeds that have `field`."""
    found = group.finished[field][group.finished.arm == arm]
    return textwrap.fill(f"{label(arm)} ({count_of(found.map(bool).sum(), 'seed')})", 30)


def _draw_lines(
    axes: Axes, group: Group, styles: Styles, field: str, lines: Mapping[str, pd.Series[float]]
) -> None:
    """Plot a line for each arm, with markers sparse enough to tell apart, over whole numbers."""
    for arm, y in lines.items():
        name, few = _named(group, arm, field), 1 + len(y) // 25
        axes.plot(y, label=name, markevery=few, markersize=5, clip_on=False, **styles[arm])
    axes.locator_params("x", integer=True, min_n_ticks=1)


def _add_legend(figure: Figure) -> None:
    """Add the legend of the first panel beside the panels, where no line can cross it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    lines = sum(name.count("\n") + 1 for name in labels)
    figure.set_figheight(max(figure.get_figheight(), 1.6 + 0.2 * lines))
    figure.legend(handles, labels, loc="outside right center", frameon=False)


def _log_scale(axes: Axes) -> None:
    """Give the axes a log y axis that spans all lines."""
    low, high = log_span(np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines]))
    # Set the limits first: a log axis without them warns if no value is positive.
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.set_yscale("log", nonpositive="mask")
    axes.yaxis.set_major_locator(log_ticks(low, high))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
