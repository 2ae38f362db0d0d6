"""Tables and plots of rows, from one run or several: a case has the median of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normplug._results import replace_file
from normplug.bench.rows import Row, frame

CASE = ("model", "batch", "op", "direction", "layout", "shape", "dtype")
HATCHES = ("", "///", "...", "xx", "--", "++", "oo")
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")  # told apart without colour, too


def medians(rows: Sequence[Row]) -> tuple[Any, str]:
    """A frame with a line for each case and a column for each arm or provider, and its unit.

    Raises:
        ValueError: the rows have no times of steps or operations.
    """
    found = frame(rows)
    for series, value, unit in (
        ("arm", "ms", "ms a training step"),
        ("provider", "us", "microseconds of the device"),
        ("provider", "wall_us", "microseconds of calls back to back"),
    ):
        if {series, value} <= set(found):
            case = [key for key in CASE if key in found and found[key].notna().all()]
            if not case:
                case = ["device"]
            wide = found.pivot_table(value, case, series, aggfunc="median")
            wide = wide.reindex(found.set_index(case).index.unique())  # in the order of the rows
            return wide[[name for name in found[series].unique() if name in wide]], unit
    raise ValueError("it has no times: `model`, `op` and `sweep` write them")


def render(rows: Sequence[Row]) -> str:
    """The median times as a Markdown table, with the speed of ours over others."""
    wide, unit = medians(rows)
    pairs = [("normplug", name) for name in wide if name != "normplug"]
    pairs += [("swap+fuse", "eager"), ("swap+fuse+compile", "compile")]
    for ours, peer in [pair for pair in pairs if set(pair) <= set(wide)]:
        wide[f"{ours} over {peer}"] = (wide[peer] / wide[ours]).map("{:.2f}x".format)
    cells = wide.map(lambda cell: f"{cell:.4g}" if isinstance(cell, float) else cell)
    return f"{origin(rows)}. Median {unit}:\n\n{markdown(cells)}"


def markdown(cells: Any) -> str:
    """A frame as a Markdown table, with the levels of its index first; numbers align right."""
    header = [*cells.index.names, *cells.columns]
    rules = ["---"] * cells.index.nlevels + ["---:"] * len(cells.columns)
    lines = cells.astype(object).fillna("-").reset_index().astype(str).values.tolist()
    lines = ([cell.replace("|", "/") for cell in line] for line in (header, rules, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot GB/s over the width for a norm of rows, and the speed over eager for everything else."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    heights = {str(row.get("shape")).rpartition("x")[0] for row in rows}
    if {row.get("layout") for row in rows} == {"rows"} and len(heights) == 1 and "gbps" in rows[0]:
        _draw_widths(figure, rows)
    else:
        _draw_speeds(figure, rows)
    figure.suptitle(origin(rows), fontsize="small")
    with replace_file(path) as part:
        figure.savefig(part, format="png", dpi=150)


def _draw_widths(figure: Any, rows: Sequence[Row]) -> None:
    """A panel for each dtype and direction, and a line for each provider."""
    found = frame([{**row, "width": int(row["shape"].split("x")[-1])} for row in rows])
    names = list(found["provider"].unique())
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
        if rows[0].get("copy_gbps"):
            axes.axhline(rows[0]["copy_gbps"], color="black", linestyle="--", linewidth=0.8)


def _draw_speeds(figure: Any, rows: Sequence[Row]) -> None:
    """A group of bars for each case."""
    wide, unit = medians(rows)
    if "eager" not in wide:
        raise ValueError("it has no row of eager, to compare the others with")
    faster = wide[wide["eager"].notna()].rdiv(wide["eager"], axis=0).drop(columns="eager")
    faster.index = [", ".join(map(str, case)) for case in faster.index.to_flat_index()]
    figure.set_size_inches(9, 1.5 + 0.17 * faster.size)
    axes = figure.subplots()
    faster.plot.barh(ax=axes, width=0.8)
    for bars, hatch in zip(axes.containers, HATCHES, strict=False):
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white", linewidth=0)
    axes.invert_yaxis()
    axes.set(xlabel=f"speed over eager, of the median {unit}")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()  # with the hatches


def origin(rows: Sequence[Row]) -> str:
    """Where rows come from, in words."""
    keys = ("device", "torch", "triton", "normplug", "commit")
    found = {key: sorted({str(row[key])[:40] for row in rows if row.get(key)}) for key in keys}
    words = [
        f"{key} {' or '.join(values)}" if key != "device" else " or ".join(values)
        for key, values in found.items()
        if values
    ]
    dates = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    return ", ".join([*words, " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else ""])
