"""Tables and plots of rows, from one run or several: a case has the median of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._results import replace_file
from normplug.bench.rows import Row

CASE = ("model", "batch", "op", "direction", "layout", "shape", "dtype")
TIMES = (  # the columns of a table, the times in it, and their unit
    ("arm", "ms", "ms a training step"),
    ("provider", "us", "microseconds of the device"),
    ("provider", "wall_us", "microseconds of calls back to back"),
)
HATCHES = ("", "///", "...", "xx", "--", "++", "oo")
STYLES = ("o-", "s--", "^:", "D-.", "v-", "P--", "X:", "<-.")  # told apart without colour, too


def pivot(found: pd.DataFrame, series: str, values: str, how: str = "median") -> pd.DataFrame:
    """A line for each case, and a column for each arm or provider, in the order of the rows."""
    case = [key for key in CASE if key in found and found[key].notna().all()] or ["device"]
    wide = found.pivot_table(values, case, series, aggfunc=how, sort=False)
    return wide.reindex(found.set_index(case).index.unique())


def medians(rows: Sequence[Row]) -> tuple[pd.DataFrame, str]:
    """The median times of each case, and their unit.

    Raises:
        ValueError: the rows have no times of steps or operations.
    """
    found = pd.DataFrame(rows)
    for series, value, unit in TIMES:
        if {series, value} <= set(found):
            return pivot(found, series, value), unit
    raise ValueError("it has no times: `model`, `op` and `sweep` write them")


def render(rows: Sequence[Row]) -> str:
    """The median times as a Markdown table, with the speed of ours over others."""
    wide, unit = medians(rows)
    pairs = [("normplug", name) for name in wide if name != "normplug"]
    pairs += [("swap+fuse", "eager"), ("swap+fuse+compile", "compile")]
    cells = wide.map("{:.4g}".format).where(wide.notna())
    return f"{origin(rows)}. Median {unit}:\n\n{markdown(with_speeds(cells, wide, pairs))}"


def with_speeds(
    cells: pd.DataFrame, times: pd.DataFrame, pairs: Iterable[tuple[str, str]]
) -> pd.DataFrame:
    """The cells, and a column for each pair of columns of `times`: the first one's speed."""
    for ours, peer in pairs:
        if {ours, peer} <= set(times) and (speeds := (times[peer] / times[ours]).dropna()).any():
            cells = cells.assign(**{f"{ours} over {peer}": speeds.map("{:.2f}x".format)})
    return cells


def markdown(cells: pd.DataFrame) -> str:
    """A frame as a Markdown table, with the levels of its index first; numbers align right."""
    header = [*cells.index.names, *cells.columns]
    rules = ["---"] * cells.index.nlevels + ["---:"] * len(cells.columns)
    lines = cells.astype(object).fillna("-").reset_index().astype(str).values.tolist()
    lines = ([cell.replace("|", "/") for cell in line] for line in (header, rules, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot GB/s over the width for a norm of rows, and the speed over eager for everything else."""
    figure = Figure(layout="constrained")
    heights = {str(row.get("shape")).rpartition("x")[0] for row in rows}
    if {row.get("layout") for row in rows} == {"rows"} and len(heights) == 1 and "gbps" in rows[0]:
        _draw_widths(figure, pd.DataFrame(rows))
    else:
        _draw_speeds(figure, *medians(rows))
    figure.suptitle(origin(rows), fontsize="small")
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


def _draw_speeds(figure: Figure, wide: pd.DataFrame, unit: str) -> None:
    """A group of bars for each case."""
    if "eager" not in wide:
        raise ValueError("it has no row of eager, to compare the others with")
    faster = wide[wide["eager"].notna()].rdiv(wide["eager"], axis=0).drop(columns="eager")
    faster.index = [", ".join(map(str, case)) for case in faster.index.to_flat_index()]
    figure.set_size_inches(9, 1.5 + 0.17 * faster.size)
    axes: Axes = faster.plot.barh(ax=figure.subplots(), width=0.8)
    for bars, hatch in zip(axes.containers, HATCHES, strict=False):
        for bar in bars:
            bar.set(hatch=hatch, edgecolor="white", linewidth=0)
    axes.invert_yaxis()
    axes.set(xlabel=f"speed over eager, of the median {unit}")
    axes.axvline(1, color="black", linestyle="--", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend()  # with the hatches


def origin(rows: Sequence[Row], *packages: str) -> str:
    """Where rows come from, in words: the device, versions of packages, commits and dates."""
    words = []
    for key in ("device", "torch", "triton", "cuda", "python", "normplug", *packages, "commit"):
        if found := sorted({str(row[key]) for row in rows if row.get(key)}):
            words.append(("" if key == "device" else f"{key} ") + " or ".join(found))
    days = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    return ", ".join([*words, " to ".join(dict.fromkeys(days[:1] + days[-1:]))])
