"""Plots of rows, from one run or several: a case has the median of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._results import replace_file
from normplug.bench.rows import ORIGIN, Row

CASE = ("model", "batch", "op", "direction", "layout", "shape", "dtype")
HATCHES = ("", "///", "...", "xx", "--", "++", "oo")
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")  # distinct without colour, too


def pivot(found: pd.DataFrame, series: str, values: str, how: str = "median") -> pd.DataFrame:
    """A line for each case, and a column for each arm or provider, in the order of the rows."""
    case = [key for key in CASE if key in found and found[key].notna().all()] or ["device"]
    wide = found.pivot_table(values, case, series, aggfunc=how, sort=False)
    return wide.reindex(found.set_index(case).index.unique())


def draw(rows: Sequence[Row], path: Path, title: str | None = None) -> None:
    """Plot GB/s over the width for a norm of rows, and the speed over eager for everything else.

    Raises:
        ValueError: the rows have no speeds.
    """
    found = pd.DataFrame(rows)
    if "over_eager" not in found:
        raise ValueError("it has no speeds over eager: `model`, `op` and `sweep` write them")
    figure = Figure(layout="constrained")
    heights = {str(row.get("shape")).rpartition("x")[0] for row in rows}
    if {row.get("layout") for row in rows} == {"rows"} and len(heights) == 1 and "gbps" in found:
        _draw_widths(figure, found)
    else:
        _draw_speeds(figure, found)
    figure.suptitle(title or ORIGIN.format(**rows[0]), fontsize="small")
    with replace_file(path) as part:
        figure.savefig(part, format="png", dpi=150)


def _draw_widths(figure: Figure, found: pd.DataFrame) -> None:
    """A panel for each dtype and direction, and a line for each provider."""
    found = found.assign(width=found["shape"].str.split("x").str[-1].astype(int))
    names = found["provider"].unique()
    panels = list(found.groupby(["dtype", "direction"], sort=False))
    height = -(-len(panels) // 2)
    figure.set_size_inches(10, 4 * height)
    grid = figure.subplots(height, min(len(panels), 2), sharex=True, sharey=True, squeeze=False)
    for axes, (panel, part) in zip(grid.flat, panels, strict=False):
        speeds = part.pivot_table("gbps", "width", "provider", aggfunc="median")
        speeds = speeds.reindex(columns=names)
        speeds.plot(ax=axes, style=list(STYLES[: len(names)]), title=", ".join(panel))
        axes.set_xscale("log", base=2)
        axes.set(xlabel="width of a row", ylabel="median GB/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        if copy := part["copy_gbps"].iloc[0]:
            axes.axhline(copy, color="black", linestyle="--", linewidth=0.8)


def _draw_speeds(figure: Figure, found: pd.DataFrame) -> None:
    """A group of bars for each case."""
    faster = pivot(found, "arm" if "arm" in found else "provider", "over_eager")
    faster = faster.drop(columns="eager", errors="ignore")
    faster.index = [", ".join(map(str, case)) for case in faster.index.to_flat_index()]
    figure.set_size_inches(9, 1.5 + 0.17 * faster.size)
    axes: Axes = faster.plot.barh(ax=figure.subplots(), width=0.8)
    for bars, hatch in zip(axes.containers, HATCHES, strict=False):
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white", linewidth=0)
    axes.invert_yaxis()
    axes.set(xlabel="speed over eager, of the medians")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()  # with the hatches
