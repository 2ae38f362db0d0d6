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
    speed_ratios,
    t_interval,
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


# Okabe and Ito's palette, safe for every common colour blindness. The baseline is drawn first and
# wide, since a mode that equals it would otherwise hide it.
FIXED = {
    "baseline": Style("#9A9A9A", "s", 4.0),
    "standard": Style("#0072B2", "o"),
    "golden": Style("#E69F00", "D"),
}
Styles: TypeAlias = Mapping[str, Style]
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
    variances: Sequence[Mapping[str, Variance]],
    out: Path,
    plots: Collection[str] | None = None,
) -> list[Path]:
    """Write the plots that the groups have numbers for, as `out/<plot>_<group>.png`.

    Args:
        groups: an arm has the same style in the plots of all groups.
        tables: the rows of each group.
        variances: of the arms of each group.
        out: created if absent.
        plots: names of the plots to draw; None for all.
    """
    styles = arm_styles(groups)
    found: list[tuple[str, str, Callable[[], Figure]]] = []
    for group, table, of_arms in zip(groups, tables, variances, strict=True):
        figures = _figures(group, table, of_arms, styles)
        stem = f"{group.model}_{group.data}"
        found += [(name, f"{name}_{stem}", figure) for name, figure in figures.items()]
    found += [
        ("targets", f"targets_{members[0].data}", partial(targets_figure, members))
        for members in target_groups(groups)
    ]
    written: list[Path] = []
    for name, stem, figure in found:
        if plots is None or name in plots:
            path = out / f"{re.sub(r'[^A-Za-z0-9._-]', '_', stem)[:200]}.png"
            while path in written:
                path = path.with_stem(f"{path.stem}_")
            written.append(path)
            with replace_file(path) as part:
                figure().savefig(part, format="png", dpi=150)
    return written


def _figures(
    group: Group, table: pd.DataFrame, variances: Mapping[str, Variance], styles: Styles
) -> dict[str, Callable[[], Figure]]:
    """Plot name -> function that draws it, for the plots that a group has numbers for."""
    finished = group.finished
    found = {
        group.measure.name: (curves_figure, any(np.isfinite(c).any() for c in finished.curve)),
        "seeds": (seeds_figure, finished.test_score.notna().any()),
        "blocks": (blocks_figure, finished.block_drop.map(len).any()),
        "throughput": (throughput_figure, finished.items_per_s.notna().any()),
    }
    figures = {
        n: partial(figure, group, table, styles) for n, (figure, has) in found.items() if has
    }
    if variances:
        ordered = {arm: variances[arm] for arm in table.arm if arm in variances}
        by_depth = partial(variance_by_depth_figure, group.title, ordered, styles)
        figures["variance_by_depth"] = by_depth
        figures["variance_by_step"] = partial(variance_by_step_figure, group.title, ordered)
    return figures


def curves_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the validation by epoch: all epochs, and the last half, where arms differ by little."""
    measure = group.measure
    what = f"validation {measure.name}: median over seeds, and band between the quartiles"
    figure = _new_figure(group.title, what, 10, 5)
    whole, late = figure.subplots(1, 2)
    for arm in table.arm:
        curves = [c for c in _of_arm(group, arm, "curve") if np.isfinite(c).any()]
        if not curves:
            continue
        shortest = min(map(len, curves))
        shown = measure.scale * np.array([curve[:shortest] for curve in curves])
        epochs, style = np.arange(1, shortest + 1), styles[arm]
        for axes, start in ((whole, 0), (late, shortest // 2)):
            x, y = epochs[start:], shown[:, start:]
            low, middle, high = np.quantile(y, [0.25, 0.5, 0.75], axis=0)
            axes.fill_between(x, low, high, color=style.colour, alpha=0.15, lw=0)
            _draw_line(axes, x, middle, style, f"{label(arm)} ({_seeds(len(curves))})")
    for axes, name in ((whole, "all epochs"), (late, "last half, enlarged")):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, measure.limits[0]), min(high, measure.limits[1]))
        axes.set_title(name, loc="left", fontsize="medium")
        axes.set(xlabel="epoch", ylabel=f"validation {measure.name} ({measure.unit})")
        axes.xaxis.set_major_locator(_whole_numbers(10))
        axes.grid(alpha=0.3)
    _legend_below(figure)
    return figure


def seeds_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the test score of every seed, and its difference from the reference."""
    measure, paired, ps = group.measure, differences(group), adjusted_ps(differences(group))
    what = f"test {measure.name}: a dot for each seed, mean and 95% t-interval in black"
    what += "; p of paired t-tests, adjusted by Holm" * bool(len(ps))
    minus = f"test {measure.name} minus {label(group.reference or '')}, same seed"
    texts = {arm: p_text(p) for arm, p in ps.items()} | {group.reference: "reference"}
    return _dots_figure(
        group,
        table,
        styles,
        what,
        _Dots(
            measure.scale * group.wide("test_score"),
            _mean_and_interval,
            f"test {measure.name} ({measure.unit})",
            measure.limits,
        ),
        _Dots(
            measure.scale * paired,
            _mean_and_interval,
            f"{minus} ({measure.difference_unit})",
            line=0,
            beside=texts if group.reference else {},
            title="p (Holm)" * bool(len(ps)),
        ),
    )


def throughput_figure(group: Group, table: pd.DataFrame, styles: Styles) -> Figure:
    """Draw the speed of each run, and its ratio to the reference's."""
    unit = group.measure.speed_unit
    what = "training speed: a dot for each run; black: median (left), geometric mean (right), range"
    machines = list(group.finished.hardware[group.finished.items_per_s.notna()].unique())
    references = table.speed_reference.dropna().unique()
    return _dots_figure(
        group,
        table,
        styles,
        f"{what}\n{' and '.join(machines)}",
        _Dots(group.wide("items_per_s"), _median_and_range, unit, least=0.1),
        _Dots(
            speed_ratios(group),
            _geometric_mean_and_range,
            f"{unit} over {' or '.join(map(label, references))}'s, same seed",
            line=1,
            least=0.1,
            beside={row["arm"]: _speed_beside(row) for row in table.to_dict("records")},
        ),
    )


def _speed_beside(row: Mapping[str, Any]) -> str:
    return re.sub(r":.*|, \d+ pairs", "", speed_text(row))


class _Dots(NamedTuple):
    """A panel with a row of dots for each arm: values by seed and arm, and how to sum up a row."""

    values: pd.DataFrame
    bar: Callable[[pd.Series[float]], tuple[float, float, float]]  # middle, low, high
    name: str
    limits: tuple[float, float] = (-math.inf, math.inf)
    line: float | None = None  # where a difference is none
    least: float = 0  # width of the axis, over its middle, so that noise does not fill it
    beside: Mapping[Any, str] = {}  # texts at the right of the rows
    title: str = ""  # of these texts


def _mean_and_interval(values: pd.Series[float]) -> tuple[float, float, float]:
    _, mean, half_width = t_interval(values)
    half_width = np.nan_to_num(half_width)
    return mean, mean - half_width, mean + half_width


def _median_and_range(values: pd.Series[float]) -> tuple[float, float, float]:
    return values.median(), values.min(), values.max()


def _geometric_mean_and_range(values: pd.Series[float]) -> tuple[float, float, float]:
    return np.exp(np.log(values).mean()), values.min(), values.max()


def _dots_figure(
    group: Group, table: pd.DataFrame, styles: Styles, what: str, *panels: _Dots
) -> Figure:
    """Panels side by side, with a row for each arm, the first at the top."""
    rows = table.set_index("arm")
    names = [
        f"{textwrap.fill(label(arm), 30)}\n{row.n_finished} of {_seeds(row.n_expected)}"
        + f", {row.n_diverged} diverged" * bool(row.n_diverged)
        for arm, row in rows.iterrows()
    ]
    height = max(0.6, *(0.2 * (name.count("\n") + 1) for name in names)) * len(names)
    what = f"{what}\n{group.about_reference}"
    figure = _new_figure(group.title, what, 10, 1.8 + height)
    drawn_on = figure.subplots(1, len(panels), sharey=True)
    drawn_on[0].set_yticks(range(len(names)), names)
    drawn_on[0].set_ylim(len(names) - 0.5, -0.5)
    for axes, panel in zip(drawn_on, panels, strict=True):
        _draw_dots(axes, group, list(table.arm), styles, panel)
    return figure


def _draw_dots(axes: Axes, group: Group, arms: Sequence[str], styles: Styles, panel: _Dots) -> None:
    seeds = group.seeds
    if not panel.values.notna().any(axis=None):
        axes.set_axis_off()
        reference = label(group.reference or "a reference")
        axes.text(
            0.5, 0.5, f"no seed to compare with {reference}", ha="center", transform=axes.transAxes
        )
        return
    for row, arm in enumerate(arms):
        values = panel.values.get(arm, pd.Series(dtype=float)).dropna()
        if len(values):
            # Each seed has its own height in every row, so that pairs can be matched.
            y = [row - 0.35 + 0.5 * (seeds.index(seed) + 0.5) / len(seeds) for seed in values.index]
            style = styles[arm]
            axes.plot(values, y, style.marker, color=style.colour, markersize=6)
            middle, low, high = panel.bar(values)
            # Rounding may put `low` above `middle`, or `high` below it.
            spread = [[max(middle - low, 0.0)], [max(high - middle, 0.0)]]
            bar = {"color": "black", "marker": "|", "ms": 12, "capsize": 3}
            axes.errorbar(middle, row + 0.28, xerr=spread, **bar)
        elif panel.line is None:
            axes.text(0.02, row, "no value", transform=axes.get_yaxis_transform())
        beside = axes.get_yaxis_transform()
        axes.text(1.02, row, panel.beside.get(arm, ""), va="center", transform=beside)
    axes.text(1.02, -0.6, panel.title, va="bottom", transform=axes.get_yaxis_transform())
    if panel.line is not None:
        axes.axvline(panel.line, color="black", linewidth=0.8, linestyle="--", zorder=0)
    _set_limits(axes, panel, arms)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(textwrap.fill(panel.name, 60))


def _say_no_pair(axes: Axes, group: Group) -> None:
    axes.set_axis_off()
    text = f"no seed to compare with {label(group.reference or 'a reference')}"
    axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)


def _set_limits(axes: Axes, panel: _Dots, arms: Sequence[str]) -> None:
    """Set the x axis; values that are far from all others are written at its end instead."""
    low, high = axes.get_xlim()
    far = far_off(panel.values)
    if far.any(axis=None):
        inside = panel.values[~far].stack()
        margin = 0.05 * (inside.max() - inside.min())
        low, high = inside.min() - margin, inside.max() + margin
    for row, arm in enumerate(arms):
        for value in panel.values[arm][far[arm]] if arm in far else ():
            place, text = (
                (0.01, f"\u25c2 {value:.4g}") if value < low else (0.9, f"{value:.4g} \u25b8")
            )
            axes.text(
                place, row - 0.3, text, fontsize="small", transform=axes.get_yaxis_transform()
            )
    low, high = max(low, panel.limits[0]), min(high, panel.limits[1])
    half = max((high - low) / 2, panel.least * (low + high) / 4)
    axes.set_xlim((low + high) / 2 - half, (low + high) / 2 + half)


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
        found = [drop for drop in _of_arm(group, arm, "block_drop") if len(drop)]
        found = [drop for drop in found if len(drop) == len(found[0])]
        if found:
            name = f"{label(arm)} ({_seeds(len(found))})"
            blocks = np.arange(1, len(found[0]) + 1)
            _draw_line(axes, blocks, np.mean(found, axis=0), styles[arm], name)
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
        if len(targets(group)) >= LEAST:
            found.setdefault((group.data, group.measure), []).append(group)
    return list(found.values())


def targets(group: Group) -> dict[float, str]:
    """Target variance -> arm, ascending, of the arms whose name is just a mode."""
    scores = group.wide("test_score")
    found = {_target_variance(arm): arm for arm in group.arms if scores[arm].notna().any()}
    return {target: found[target] for target in sorted(t for t in found if t is not None)}


def _target_variance(arm: str) -> float | None:
    for name in (float, str):
        try:
            return NormMode(name(arm)).target_variance
        except ValueError:
            continue
    return None


def targets_figure(groups: Sequence[Group]) -> Figure:
    """Draw the test score, and its difference from the reference, over the target variance.

    Args:
        groups: of one data set and one measure; each has a line.
    """
    measure = groups[0].measure
    what = f"test {measure.name} over the target variance: means over seeds, 95% t-intervals"
    figure = _new_figure(groups[0].data, what, 10, max(4.2, 1.2 + 2.0 * len(groups)))
    grid = figure.add_gridspec(len(groups), 2)
    right = figure.add_subplot(grid[:, 1])
    compared: list[Group] = []
    styles = other_styles(len(groups))
    for place, (group, style) in enumerate(zip(groups, styles, strict=True)):
        left = figure.add_subplot(grid[place, 0])
        title = f"{group.model} ({_seeds(len(group.seeds))})"
        arms = targets(group)
        _draw_targets(left, arms, measure.scale * group.wide("test_score"), style, title)
        left.set_title(title, loc="left", fontsize="medium")
        left.set_ylabel(f"{measure.name} ({measure.unit})")
        _target_axis(left, arms, place == len(groups) - 1)
        paired = measure.scale * differences(group)
        pairs = {target: arm for target, arm in arms.items() if arm in paired}
        if paired[[*pairs.values()]].notna().any(axis=None):
            compared.append(group)
            shift = BESIDE ** (2 * place - len(groups) + 1)
            beside = {target * shift: arm for target, arm in pairs.items()}
            _draw_targets(right, beside, paired, style, title)
    if not compared:
        _say_no_pair(right, groups[0])
        return figure
    minus = " or ".join(sorted({str(group.reference) for group in compared}))
    right.axhline(0, color="black", linewidth=0.8, linestyle="--", zorder=0)
    right.set_title(f"minus {minus}, same seed", loc="left", fontsize="medium")
    right.set_ylabel(f"difference ({measure.difference_unit})")
    _target_axis(right, {target for group in compared for target in targets(group)}, named=True)
    _legend_below(figure)
    return figure


def _draw_targets(
    axes: Axes, arms: Mapping[float, str], table: pd.DataFrame, style: Style, title: str
) -> None:
    found = {target: t_interval(table[arm]) for target, arm in arms.items()}
    found = {target: interval for target, interval in found.items() if interval.n}
    axes.errorbar(
        list(found),
        [interval.mean for interval in found.values()],
        yerr=[np.nan_to_num(interval.half_width) for interval in found.values()],
        color=style.colour,
        marker=style.marker,
        linestyle=style.dash,
        linewidth=style.width,
        capsize=3,
        label=title,
    )


def _target_axis(axes: Axes, ticks: Iterable[float], named: bool) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.3g}")
    axes.set_xlabel("target variance" * named)
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
            values = row[quantity]
            _draw_line(axes, values.index, values, styles[arm], name)
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
    axes.plot(
        x,
        y,
        style.dash,
        color=style.colour,
        label=name,
        linewidth=style.width,
        marker=style.marker,
        markersize=4 + style.width / 2,
        markevery=1 + len(x) // 25,
        clip_on=False,
    )


def _legend_below(figure: Figure, columns: int = 4) -> None:
    """Add the legend of the first panel below the panels, where no line can cross it."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    width, height = figure.get_size_inches()
    names = [textwrap.fill(name, int(11 * width) - 8) for name in labels]
    # An entry whose name has c characters is about (c + 8) / 12 inches wide.
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(max(int(12 * width / (8 + longest)), 1), columns)
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
