"""Plots of measurements: kernels, whole training steps and single calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._report.figures import FIXED, Style, draw_line, legend_below, new_figure
from normplug.bench.bars import Bar, draw_panels
from normplug.bench.results import HOST, KERNELS, Kind, median
from normplug.bench.suites import NORMS, WIDTHS_ROWS, shape_name

Row = Mapping[str, Any]

OP = "ln"  # of `speed_figure`
# Operations by their names in plots.
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
# In the order of drawing, so that the line of normplug is on top.
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


def draw(
    kind: Kind, content: Mapping[str, Any], norm: str | None = None, dtypes: Collection[str] = ()
) -> Figure:
    """Plot a JSON file that `normplug.bench kernels`, `models` or `host` has written.

    Args:
        kind: the kind of the file.
        content: the content of the file.
        norm: for kernels: a key of `NORMS`; None for the first norm in the file.
        dtypes: for kernels and single calls: the dtypes to draw; empty for all.

    Raises:
        ValueError: it has no row to draw.
    """
    rows = [row for row in content["rows"] if not dtypes or row.get("dtype") in dtypes]
    if not rows:
        raise ValueError(f"no row of {' or '.join(dtypes) or 'any dtype'}")
    content = {**content, "rows": rows}
    if kind == KERNELS:
        return kernel_figure(content, norm)
    return host_figure(content) if kind == HOST else step_figure(content)


def kernel_figure(content: Mapping[str, Any], norm: str | None = None) -> Figure:
    """Lines over the width for LayerNorm, bars by shape for the others, as in `draw`.

    Raises:
        ValueError: `content` has no row of the norm.
    """
    present = [name for name, ops in NORMS.items() if any(r["op"] in ops for r in content["rows"])]
    if norm not in (None, *present) or not present:
        raise ValueError(f"no row of {norm or 'a norm'}")
    norm = norm or present[0]
    rows = [row for row in content["rows"] if row["op"] in NORMS[norm]]
    content = {**content, "rows": rows}
    return speed_figure(content) if norm == "LayerNorm" else shape_figure(content, norm)


def speed_figure(content: Mapping[str, Any]) -> Figure:
    """LayerNorm's GB/s by width: a column per direction, a row per dtype, a line per provider.

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
    """A norm's speed by shape: a column per direction, a row per layout, a bar per provider."""
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
    for axes in draw_panels(figure, panels, titles, looks, unit, "{:.0f}"):
        axes.axvline(100, color="black", linewidth=0.8, linestyle="--")
    return figure


def step_figure(content: Mapping[str, Any]) -> Figure:
    """The speed of training steps over eager: a group of bars per case, a bar per arm.

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
    grid = draw_panels(
        figure, [panels], [list(titles.values())], looks, "speed over eager (times)", "{:.2f}"
    )
    for axes in grid:
        axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    return figure


def host_figure(content: Mapping[str, Any]) -> Figure:
    """The wall time of single calls: a column per direction, a group of bars per case."""
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
    draw_panels(figure, [panels], titles, looks, "microseconds a call", "{:.0f}")
    return figure


def _origin(content: Mapping[str, Any]) -> str:
    versions = content["versions"]
    named = [f"{name} {versions[name]}" for name in ("torch", "triton") if name in versions]
    return ", ".join([content["device"], *named, content["date"][:10]])


def _grouped(
    rows: Iterable[Row], name: Callable[[Row], str], bar: Callable[[Row], Bar]
) -> dict[str, dict[str, Bar]]:
    """The bars of kernels and single calls: case -> provider -> bar."""
    groups: dict[str, dict[str, Bar]] = {}
    for row in rows:
        groups.setdefault(name(row), {})[row["provider"]] = bar(row)
    return groups


def _over_eager(rows: Mapping[str, Row], key: str, arms: Collection[str]) -> dict[str, Bar]:
    """Arm -> its speed over eager, from the time under `key`; whole steps have a spread."""
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


def _draw_lines(
    axes: Axes, rows: Sequence[Row], providers: Iterable[str], copy_gbps: float
) -> None:
    """Draw one panel; providers without a row here still get a legend entry."""
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
