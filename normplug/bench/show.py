"""The plot of a norm of rows over the width, from one run or several: the median of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from normplug._results import replace_file
from normplug.bench.rows import ORIGIN, Row

STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")  # distinct without colour, too


def draw(rows: Sequence[Row], path: Path, title: str | None = None) -> None:
    """Plot GB/s: a panel for each operation, dtype and direction, and a line for each provider.

    Raises:
        ValueError: there are no rows of a norm of rows.
    """
    found = pd.DataFrame([row for row in rows if row.get("layout") == "rows" and "gbps" in row])
    if found.empty:
        raise ValueError("it has no rows of LayerNorm or RMSNorm: `op` and `sweep` write them")
    found[["rows", "width"]] = found["shape"].str.rsplit("x", n=1, expand=True)
    found = found.astype({"width": int})
    names = found["provider"].unique()
    panels = list(found.groupby(["op", "rows", "dtype", "direction"], sort=False))
    height = -(-len(panels) // 2)
    figure = Figure((10, 4 * height), layout="constrained")
    grid = figure.subplots(height, min(len(panels), 2), sharex=True, sharey=True, squeeze=False)
    for axes, (panel, part) in zip(grid.flat, panels, strict=False):
        speeds = part.pivot_table("gbps", "width", "provider", aggfunc="median")
        speeds = speeds.reindex(columns=names)
        speeds.plot(ax=axes, style=list(STYLES[: len(names)]), title=", ".join(panel))
        axes.set_xscale("log", base=2)
        axes.set(xlabel="width of a row", ylabel="median GB/s", ylim=(0, None))
        axes.grid(alpha=0.3)
        if "copy_gbps" in part:
            axes.axhline(part["copy_gbps"].iloc[0], color="black", linestyle="--", linewidth=0.8)
    figure.suptitle(title or ORIGIN.format(**rows[0]), fontsize="small")
    with replace_file(path) as new:
        figure.savefig(new, format="png", dpi=150)
