"""The rows of a JSON file as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from normplug._report.markdown import table
from normplug.bench.suites import SUITES, shape_name

NOTHING = "-"
SMALL = {case.shape for case in SUITES["small"]}
COLUMNS = ("op", "direction", "layout", "shape", "dtype")
CASE = ("model", "batch")

Row = Mapping[str, Any]


def render(content: Mapping[str, Any]) -> str:
    """The tables of what `normplug.bench kernels`, `models` or `models --profile` writes."""
    if "copy_gbps" in content:
        return _kernels(content)
    profiled = any("groups_ms" in row for row in content["rows"])
    return _profile(content) if profiled else _models(content)


def _kernels(content: Mapping[str, Any]) -> str:
    rows = content["rows"]
    parts = [
        f"{_origin(content)} Copy: {content['copy_gbps']:.0f} GB/s, read and written.\n",
        "GPU time, as % of the speed of a copy that moves the fewest bytes the operation can "
        f"({_floors(rows)}), and median microseconds:\n",
        _table(rows, lambda row: f"{row['percent_of_copy']:.0f}% ({_us(row['us'])})"),
    ]
    small = [row for row in rows if tuple(row["shape"]) in SMALL]
    if small:
        parts += [
            "Small shapes, microseconds a call: until the host is free again / in calls back to "
            "back, host and GPU overlapped:\n",
            _table(small, lambda row: f"{_us(row['host_us'])} / {_us(row['wall_us'])}"),
        ]
    return "\n".join(parts)


def _models(content: Mapping[str, Any]) -> str:
    rows = content["rows"]
    eager = {(row["model"], row["batch"]): row["ms"] for row in rows if row["arm"] == "eager"}

    def speed(row: Row) -> str:
        shown = f"{row['ms']:.2f} ms, {row['images_per_s']:.0f}/s"
        whole = eager.get((row["model"], row["batch"]))
        return shown if whole is None else f"{shown} ({whole / row['ms']:.2f}x)"

    return "\n".join(
        [
            _training(content),
            "Median time of a training step, images a second, and speed over eager:\n",
            _pivot(rows, CASE, "arm", speed),
            "Peak memory of a step, GiB:\n",
            _pivot(rows, CASE, "arm", lambda row: f"{row['peak_gib']:.2f}"),
            "The host's time for a step, ms:\n",
            _pivot(rows, CASE, "arm", lambda row: f"{row['host_ms']:.2f}"),
        ]
    )


def _profile(content: Mapping[str, Any]) -> str:
    cells = [
        {**row, "group": group, "ms": ms}
        for row in content["rows"]
        for group, ms in row["groups_ms"].items()
    ]
    return "\n".join(
        [
            _training(content),
            "GPU time of a training step by groups of kernels, ms:\n",
            _pivot(cells, (*CASE, "arm"), "group", lambda cell: f"{cell['ms']:.2f}"),
        ]
    )


def _training(content: Mapping[str, Any]) -> str:
    how = content["settings"]
    return (
        f"{_origin(content)} Training under {how['autocast']} autocast, {how['optimizer']}; "
        f"swapped in mode {how['mode']}.\n"
    )


def _origin(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return f"{content['device']}, {versions}, {content['date'][:10]}."


def _floors(rows: Iterable[Row]) -> str:
    """The fewest passes over the input, by operation and direction."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row["op"], {})[row["direction"]] = row["floor_passes"]
    return "; ".join(
        f"{op}: {', '.join(f'{direction} {n}P' for direction, n in passes.items())}"
        for op, passes in found.items()
    )


def _table(rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    """A line for each case of the kernels, a column for each provider."""
    shown = ({**row, "shape": shape_name(row["shape"])} for row in rows)
    return _pivot(shown, COLUMNS, "provider", cell)


def _pivot(
    rows: Iterable[Row], columns: Sequence[str], series: str, cell: Callable[[Row], str]
) -> str:
    """A line for each combination of `columns`, a column for each value of `series`."""
    by_key: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(str(row[column]) for column in columns)
        by_key.setdefault(key, {})[row[series]] = cell(row)
    names = list(dict.fromkeys(name for cells in by_key.values() for name in cells))
    lines = ([*key, *(cells.get(name, NOTHING) for name in names)] for key, cells in by_key.items())
    return table([*columns, *names], lines, text=len(columns))


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
