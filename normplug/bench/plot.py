"""Pictures of what was measured: the speed of LayerNorm by width, and of whole training steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._report.figures import FIXED, Style, draw_line, legend_below, new_figure
from normplug.bench.results import median
from normplug.bench.suites import WIDTHS_ROWS

Row = Mapping[str, Any]

OP = "ln"
# In the order of drawing: normplug is on top of what it equals.
STYLES = {
    "eager": FIXED["baseline"],
    "compile": FIXED["standard"],
    "liger": Style("#009E73", "^", 1.6),
    "flaggems": Style("#CC79A7", "v", 1.6),
    "normplug-triton": Style("#56B4E9", "P", 1.6),
    "normplug": FIXED["golden"],
}
# The arms whose steps are drawn, from top to bottom.
ARM_COLOURS = {
    "eager": FIXED["baseline"].colour,
    "compile": FIXED["standard"].colour,
    "swap": "#F5D080",
    "swap+fuse": FIXED["golden"].colour,
    "swap+fuse+compile": "#009E73",
    "liger": "#CC79A7",
}


def draw(content: Mapping[str, Any]) -> Figure:
    """The picture of a JSON file that `normplug.bench kernels` or `models` writes.

    Raises:
        ValueError: it has no row to draw.
    """
    return speed_figure(content) if "copy_gbps" in content else step_figure(content)


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
        f"LayerNorm of {WIDTHS_ROWS} rows, {content['device']}",
        "speed: the fewest bytes the operation can move, over GPU time",
        1 + 5 * len(directions),
        1.5 + 3 * len(dtypes),
    )
    panels = figure.subplots(len(dtypes), len(directions), sharex=True, sharey=True, squeeze=False)
    for i, dtype in enumerate(dtypes):
        for j, direction in enumerate(directions):
            axes = panels[i, j]
            shown = [row for row in rows if (row["dtype"], row["direction"]) == (dtype, direction)]
            _draw_lines(axes, shown, providers, content["copy_gbps"])
            axes.set_title(f"{direction}, {dtype}", loc="left", fontsize="medium")
            axes.label_outer()
    legend_below(figure)
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
    arms = [arm for arm in ARM_COLOURS if any(arm in rows for rows in cases.values())]
    busy = any(rows["eager"].get("gpu_ms") for rows in cases.values())
    panels = {"ms": "whole step", **({"gpu_ms": "GPU busy"} if busy else {})}
    how = content["settings"]
    bars = sum(len(rows.keys() & set(arms)) for rows in cases.values())
    figure = new_figure(
        f"Speed of a whole training step over eager PyTorch's, {content['device']}",
        f"{how['autocast']} autocast, {how['mode']}, torch {content['versions']['torch']}, "
        f"{content['date'][:10]}; bar: median, line: 20th to 80th percentile",
        4 + 4 * len(panels),
        1.6 + 0.17 * bars + 0.12 * len(cases),
    )
    for axes, (key, title) in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels.items(), strict=True
    ):
        _draw_cases(axes, cases, arms, key)
        axes.set_title(title, loc="left", fontsize="medium")
    legend_below(figure, columns=len(arms))
    return figure


def _draw_cases(
    axes: Axes, cases: Mapping[str, Mapping[str, Row]], arms: Sequence[str], key: str
) -> None:
    """The cases from top to bottom, each as high as its bars; `key` is the time compared."""
    places: dict[str, list[tuple[float, Mapping[str, Row]]]] = {arm: [] for arm in arms}
    ticks, y = [], 0.0
    for rows in cases.values():
        there = [arm for arm in arms if arm in rows]
        ticks.append(y + (len(there) - 1) / 2)
        for arm in there:
            if rows[arm].get(key) and rows["eager"].get(key):
                places[arm].append((y, rows))
            y += 1
        y += 0.7  # between two cases
    for arm, found in places.items():
        _draw_bars(axes, [at for at, _ in found], arm, [rows for _, rows in found], key)
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(ticks, list(cases))
    axes.set_ylim(y - 0.7, -0.8)
    axes.set_xlabel("speed over eager")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_bars(
    axes: Axes, y: Sequence[float], arm: str, cases: Collection[Mapping[str, Row]], key: str
) -> None:
    """The bars of an arm, each with its length; steps get a line over their middle 60%."""
    speed = np.array([rows["eager"][key] / rows[arm][key] for rows in cases])
    spread: dict[str, Any] = {}
    if key == "ms":
        slow, fast = (
            np.array([rows["eager"][key] / rows[arm][bound] for rows in cases])
            for bound in ("ms_p80", "ms_p20")
        )
        spread["xerr"] = (speed - slow, fast - speed)
        spread["error_kw"] = {"ecolor": "0.25", "elinewidth": 1, "capsize": 2}
    bars = axes.barh(y, speed, 0.9, color=ARM_COLOURS[arm], label=arm, **spread)
    axes.bar_label(bars, fmt="%.2f", padding=3, fontsize="x-small")


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
