"""Plots of rows, from one run or several: a case has the median of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from normplug._results import replace_file
from normplug.bench.rows import ORIGIN, Row

CASE = ("model", "batch", "op", "direction", "layout", "shape", "dtype")
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")  # distinct without colour, too


def pivot(found: pd.DataFrame, values: str) -> pd.DataFrame:
    """The medians of a field: a line for each case, a column for each arm or provider."""
    case = [key for key in CASE if key in found and found[key].notna().all()] or ["device"]
    series = "arm" if "arm" in found else "provider"
    wide = found.pivot_table(values, case, series, aggfunc="median", sort=False)
    return wide[[name for name in found[series].unique() if name in wide]]


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
    faster = pivot(found, "over_eager").drop(columns="eager", errors="ignore")
    faster.index = [", ".join(map(str, case)) for case in faster.index.to_flat_index()]
    figure.set_size_inches(9, 1.5 + 0.17 * faster.size)
    axes = faster.plot.barh(ax=figure.subplots(), width=0.8)
    axes.invert_yaxis()
    axes.set(xlabel="speed over eager, of the medians")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
