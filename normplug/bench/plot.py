"""The speed of LayerNorm over the width of its rows, as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._report.figures import FIXED, Style, draw_line, legend_below, new_figure
from normplug.bench.suites import WIDTHS_ROWS

Row = Mapping[str, Any]

OP = "ln"
# In the order of drawing, in the colours of every plot: normplug is on top of what it equals.
STYLES = {
    "eager": FIXED["baseline"],
    "compile": FIXED["standard"],
    "liger": Style("#009E73", "^", 1.6),
    "flaggems": Style("#CC79A7", "v", 1.6),
    "normplug-triton": Style("#56B4E9", "P", 1.6),
    "normplug": FIXED["golden"],
}


def speed_figure(content: Mapping[str, Any]) -> Figure:
    """GB/s over width: a column for each direction, a row for each dtype, a line each provider.

    Args:
        content: of the JSON file that `python -m normplug.bench kernels` writes.

    Raises:
        ValueError: it has no row to draw.
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
            _draw(axes, shown, providers, content["copy_gbps"])
            axes.set_title(f"{direction}, {dtype}", loc="left", fontsize="medium")
            axes.label_outer()
    legend_below(figure)
    return figure


def _draw(axes: Axes, rows: Iterable[Row], providers: Iterable[str], copy_gbps: float) -> None:
    """One panel; a provider that has no row here is in its legend, as in that of the others."""
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
