"""Pictures of what was measured: kernels, whole training steps and single calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._report.figures import FIXED, Style, draw_line, legend_below, new_figure
from normplug.bench.results import median
from normplug.bench.suites import NORMS, WIDTHS_ROWS, shape_name

Row = Mapping[str, Any]

OP = "ln"
# How an operation is called in a picture.
NAMES = {
    "bn": "BatchNorm",
    "bn_relu": "BatchNorm + ReLU",
    "bn_add_relu": "BatchNorm + add + ReLU",
    "ln": "LayerNorm",
    "ln_stats": "LayerNorm, statistics",
    "add_ln": "add + LayerNorm",
    "bias_ln": "bias + LayerNorm",
    "rms": "RMSNorm",
    "add_rms": "add + RMSNorm",
    "gn": "GroupNorm",
    "gn_silu": "GroupNorm + SiLU",
    "in3d": "InstanceNorm3d",
}
# In the order of drawing: in lines, normplug is on top of what it equals.
STYLES = {
    "eager": FIXED["baseline"]._replace(colour="#BDBDBD", hatch="..."),  # paler than golden
    "compile": FIXED["standard"]._replace(hatch="////"),
    "cudnn": Style("#8C5A2B", "X", 1.6, "OO"),
    "liger": Style("#009E73", "^", 1.6, "\\\\\\\\"),
    "flaggems": Style("#CC79A7", "v", 1.6, "xxx"),
    "quack": Style("#D55E00", "<", 1.6, "ooo"),
    "timm": Style("#5D4E8C", ">", 1.6, "+++"),
    "cpu": Style("#333333", "*", 1.6, "---"),
    "normplug-python": Style("#F5D080", "p", 1.6, "|||"),
    "normplug-triton": Style("#56B4E9", "P", 1.6, "**"),
    "normplug": FIXED["golden"],
}
# The arms whose steps are drawn, from top to bottom.
ARMS = {
    "eager": STYLES["eager"],
    "compile": STYLES["compile"],
    "swap": STYLES["normplug-python"],
    "swap+fuse": STYLES["normplug"],
    "swap+fuse+compile": Style("#009E73", "^", 1.6, "xxx"),
    "liger": Style("#CC79A7", "v", 1.6, "\\\\\\\\"),
}
DIRECTIONS = {"F": "forward", "F+B": "forward and backward"}
LAYOUTS = {
    "NC": "features (NC)",
    "NCHW": "contiguous (NCHW)",
    "NHWC": "channels_last (NHWC)",
    "rows": None,
}
INCH_A_BAR, BETWEEN_CASES = 0.17, 0.8  # the second in bars


class Bar(NamedTuple):
    """A length, and the range of the middle of its samples if it is known."""

    length: float
    spread: tuple[float, float] | None = None


Bars = Mapping[str, Mapping[str, Bar]]  # case -> series -> bar


def draw(
    content: Mapping[str, Any], norm: str | None = None, dtypes: Collection[str] = ()
) -> Figure:
    """The picture of a JSON file that `normplug.bench kernels`, `models` or `host` writes.

    Args:
        content: of the file.
        norm: of kernels, a key of `NORMS`; None for the first that the file has.
        dtypes: of kernels and single calls: those to draw; all if there is none.

    Raises:
        ValueError: it has no row to draw.
    """
    rows = [row for row in content["rows"] if not dtypes or row.get("dtype") in dtypes]
    content = {**content, "rows": rows}
    if "copy_gbps" in content:
        return kernel_figure(content, norm)
    return host_figure(content) if any("wall_us" in row for row in rows) else step_figure(content)


def kernel_figure(content: Mapping[str, Any], norm: str | None = None) -> Figure:
    """Lines over the width for LayerNorm, bars by shape for the others, as in `draw`.

    Raises:
        ValueError: `content` has no row of the norm.
    """
    there = [name for name, ops in NORMS.items() if any(r["op"] in ops for r in content["rows"])]
    if norm not in (None, *there) or not there:
        raise ValueError(f"no row of {norm or 'a norm'}")
    norm = norm or there[0]
    rows = [row for row in content["rows"] if row["op"] in NORMS[norm]]
    content = {**content, "rows": rows}
    return speed_figure(content) if norm == "LayerNorm" else shape_figure(content, norm)


def speed_figure(content: Mapping[str, Any]) -> Figure:
    """LayerNorm's GB/s by width: a column a direction, a row a dtype, a line a provider.

    Raises:
        ValueError: `content` has no row to draw.
    """
    rows = [row for row in content["rows"] if row["op"] == OP and row["shape"][0] == WIDTHS_ROWS]
    if not rows:
        raise ValueError(f"no row of {OP} with {WIDTHS_ROWS} rows")
    directions, dtypes = _in_order(rows, "direction"), _in_order(rows, "dtype")
    providers = [name for name in STYLES if name in _in_order(rows, "provider")]
    figure = new_figure(
        f"LayerNorm of {WIDTHS_ROWS} rows in training\n{_origin(content)}",
        "speed: the fewest bytes the operation can move, over GPU time",
        1 + 5 * len(directions),
        1.7 + 3 * len(dtypes),
    )
    panels = figure.subplots(len(dtypes), len(directions), sharex=True, sharey=True, squeeze=False)
    for i, dtype in enumerate(dtypes):
        for j, direction in enumerate(directions):
            axes = panels[i, j]
            shown = [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
            _draw_lines(axes, shown, providers, content["copy_gbps"])
            axes.set_title(f"{DIRECTIONS[direction]}, {dtype}", loc="left", fontsize="medium")
            axes.label_outer()
    legend_below(figure)
    return figure


def shape_figure(content: Mapping[str, Any], norm: str) -> Figure:
    """A norm's speed by shape: a column a direction, a row a layout, a bar a provider."""
    rows = content["rows"]
    names = _in_order(rows, "provider")
    twin = "normplug-triton" if "normplug" in names else None  # it runs the same kernels
    looks = {p: style for p, style in STYLES.items() if p in names and p != twin}
    layouts, directions = _in_order(rows, "layout"), _in_order(rows, "direction")
    many = len(_in_order(rows, "dtype")) > 1

    def name(row: Row) -> str:
        dtype = f", {row['dtype']}" if many else ""
        return f"{NAMES[row['op']]}\n{shape_name(row['shape'])}{dtype}"

    panels = [
        [
            _grouped(
                [row for row in rows if (row["layout"], row["direction"]) == (layout, direction)],
                name,
                lambda row: Bar(row["percent_of_copy"]),
            )
            for direction in directions
        ]
        for layout in layouts
    ]
    dtype = "" if many else f", {rows[0]['dtype']}"
    figure = new_figure(
        f"{norm} in training{dtype}\n{_origin(content)}",
        "speed: the fewest bytes the operation can move, over GPU time, in % of the speed of a "
        f"copy ({content['copy_gbps']:,.0f} GB/s)",
        2 + 4.5 * len(directions),
        1,
    )
    titles = [
        [
            ", ".join(filter(None, (DIRECTIONS[direction], LAYOUTS[layout])))
            for direction in directions
        ]
        for layout in layouts
    ]
    unit = "% of the speed of a copy"
    for axes in _draw_panels(figure, panels, titles, looks, unit, "{:.0f}"):
        axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    return figure


def step_figure(content: Mapping[str, Any]) -> Figure:
    """The speed of training steps over eager: a group of bars a case, a bar an arm.

    A second panel compares the times in which the GPU is busy, if the rows have them.

    Raises:
        ValueError: no case has a row of eager.
    """
    cases: dict[str, dict[str, Row]] = {}
    for row in content["rows"]:
        if "ms" in row:
            case = f"{row['model']}\nbatch {row['batch']}"
            cases.setdefault(case, {})[row["arm"]] = {**row, "ms": median(row, "ms")}
    cases = {name: rows for name, rows in cases.items() if "eager" in rows}
    if not cases:
        raise ValueError("no row of eager")
    looks = {arm: ARMS[arm] for arm in ARMS if any(arm in rows for rows in cases.values())}
    busy = any(rows["eager"].get("gpu_ms") for rows in cases.values())
    titles = {
        "ms": "whole step (wall time)",
        **({"gpu_ms": "GPU busy (mean of a trace)"} if busy else {}),
    }
    how = content["settings"]
    figure = new_figure(
        f"Speed of a whole training step over eager PyTorch's\n{_origin(content)}",
        f"{how['autocast']} autocast, mode {how['mode']}; bar: median, "
        "line: 20th to 80th percentile",
        4 + 4 * len(titles),
        1,
    )
    panels = [
        {case: _over_eager(rows, key, looks) for case, rows in cases.items()} for key in titles
    ]
    grid = _draw_panels(
        figure, [panels], [list(titles.values())], looks, "speed over eager (times)", "{:.2f}"
    )
    for axes in grid:
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    return figure


def host_figure(content: Mapping[str, Any]) -> Figure:
    """The wall time of single calls: a column a direction, a group of bars a case."""
    rows, how = content["rows"], content["settings"]
    directions = _in_order(rows, "direction")
    panels = [
        _grouped(
            [row for row in rows if row["direction"] == direction],
            lambda row: f"{NAMES[row['op']]}\n{shape_name(row['shape'])}, {row['dtype']}",
            lambda row: Bar(row["wall_us"]),
        )
        for direction in directions
    ]
    figure = new_figure(
        f"Wall time of single calls back to back\n{_origin(content)}",
        f"mode {how['mode']}, host path: {content['native']}; best of {how['repeats']} repeats, "
        "shorter is faster",
        2 + 4.5 * len(directions),
        1,
    )
    names = _in_order(rows, "provider")
    looks = {provider: style for provider, style in STYLES.items() if provider in names}
    titles = [[DIRECTIONS[direction] for direction in directions]]
    _draw_panels(figure, [panels], titles, looks, "microseconds a call", "{:.0f}")
    return figure


def _origin(content: Mapping[str, Any]) -> str:
    versions = content["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    return ", ".join([content["device"], *named, content["date"][:10]])


def _grouped(
    rows: Iterable[Row], name: Callable[[Row], str], bar: Callable[[Row], Bar]
) -> dict[str, dict[str, Bar]]:
    """The bars of kernels and single calls: the cases by name, a bar a provider."""
    groups: dict[str, dict[str, Bar]] = {}
    for row in rows:
        groups.setdefault(name(row), {})[row["provider"]] = bar(row)
    return groups


def _over_eager(rows: Mapping[str, Row], key: str, arms: Collection[str]) -> dict[str, Bar]:
    """Arm -> the speed over eager by the time of this key; steps have a spread."""
    found = {arm: row for arm, row in rows.items() if arm in arms and row.get(key)}
    eager = rows["eager"].get(key)
    if not eager:
        return {}
    return {
        arm: Bar(
            eager / row[key],
            (eager / row["ms_p80"], eager / row["ms_p20"]) if key == "ms" else None,
        )
        for arm, row in found.items()
    }


def _draw_panels(
    figure: Figure,
    panels: Sequence[Sequence[Bars]],
    titles: Sequence[Sequence[str]],
    looks: Mapping[str, Style],
    unit: str,
    form: str,
) -> list[Axes]:
    """Draw panels of bars, row by row, each as high as its bars; the figure grows to fit.

    Args:
        figure: it has no panels.
        panels: the bars of each; those of a row show the same cases at the same heights.
        titles: of the panels.
        looks: series -> its look, in the order of drawing from top to bottom.
        unit: of the lengths.
        form: how a length is written beside its bar.
    """
    rows = [_places(row, looks) for row in panels]
    heights = [INCH_A_BAR * (1 + max(at for _, _, at in places)) + 0.1 for places in rows]
    figure.set_figheight(1.7 + sum(heights) + 0.75 * len(heights))
    grid = figure.subplots(
        len(panels),
        len(panels[0]),
        sharex="col",
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes_of_row, places, bars_of_row, titles_of_row in zip(
        grid, rows, panels, titles, strict=True
    ):
        for axes, bars, title in zip(axes_of_row, bars_of_row, titles_of_row, strict=True):
            _draw_bars(axes, bars, places, looks, form)
            axes.set_title(title, loc="left", fontsize="medium")
            axes.set_xlabel(unit)
            axes.label_outer()
    legend_below(figure, columns=len(looks))
    return list(grid.flat)


def _places(panels: Iterable[Bars], looks: Collection[str]) -> list[tuple[str, str, float]]:
    """(case, series, y) of each bar that any of the panels has, from top to bottom."""
    there: dict[str, set[str]] = {}
    for bars in panels:
        for case, found in bars.items():
            there.setdefault(case, set()).update(found)
    places, y = [], 0.0
    for case, series in there.items():
        for name in [name for name in looks if name in series]:
            places.append((case, name, y))
            y += 1
        y += BETWEEN_CASES
    return places


def _draw_bars(
    axes: Axes,
    bars: Bars,
    places: Sequence[tuple[str, str, float]],
    looks: Mapping[str, Style],
    form: str,
) -> None:
    """The bars of a panel, each with its length beside it."""
    for name, look in looks.items():
        found = [
            (at, bars[case][name])
            for case, series, at in places
            if series == name and name in bars.get(case, {})
        ]
        lengths = np.array([bar.length for _, bar in found])
        more: dict[str, Any] = {}
        if spreads := [bar.spread for _, bar in found if bar.spread]:
            low, high = np.array(spreads).T
            more["xerr"] = np.maximum((lengths - low, high - lengths), 0)
            more["error_kw"] = {"ecolor": "black", "elinewidth": 1, "capsize": 2}
        drawn = axes.barh(
            [at for at, _ in found],
            lengths,
            0.9,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="0.15",
            linewidth=0.4,
            label=name,
            **more,
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # over a line behind it
        axes.bar_label(drawn, fmt=form, padding=3, fontsize="x-small", bbox=box)
    middles: dict[str, list[float]] = {}
    for case, _, at in places:
        middles.setdefault(case, []).append(at)
    ticks = [(at[0] + at[-1]) / 2 for at in middles.values()]
    axes.set_yticks(ticks, list(middles), fontsize="small")
    axes.set_ylim(places[-1][2] + 0.8, -0.8)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_lines(
    axes: Axes, rows: Iterable[Row], providers: Iterable[str], copy_gbps: float
) -> None:
    """One panel; a provider without a row here is in the legend all the same."""
    for provider in providers:
        points = {row["shape"][1]: row["gbps"] for row in rows if row["provider"] == provider}
        x = sorted(points)
        draw_line(axes, x, [points[width] for width in x], STYLES[provider], provider)
    axes.axhline(copy_gbps, color="black", linewidth=0.8, linestyle="--", label="copy")
    axes.set(xlabel="width of a row (elements)", ylabel="GB/s")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _in_order(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))
