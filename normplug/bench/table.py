"""The rows of a JSON file as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from normplug._report.markdown import table
from normplug.bench.results import median
from normplug.bench.suites import SUITES, shape_name

NOTHING = "-"
SMALL = {case.shape for case in SUITES["small"]}
COLUMNS = ("op", "direction", "layout", "shape", "dtype")
CASE = ("model", "batch")

Row = Mapping[str, Any]


def render(content: Mapping[str, Any]) -> str:
    """The tables of what `normplug.bench kernels`, `models`, its `--profile` or `host` writes."""
    if "copy_gbps" in content:
        return _kernels(content)
    if any("wall_us" in row for row in content["rows"]):
        return _host(content)
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
    """A table for each kind of figure that any row has; older files have fewer."""
    rows = content["rows"]
    eager = {(row["model"], row["batch"]): row for row in rows if row["arm"] == "eager"}

    def over_eager(row: Row, ms: float, whole: Callable[[Row], float | None], shown: str) -> str:
        stock = eager.get((row["model"], row["batch"]))
        stock_ms = None if stock is None else whole(stock)
        return shown if stock_ms is None else f"{shown} ({stock_ms / ms:.2f}x)"

    def speed(row: Row) -> str:
        ms = median(row, "ms")
        shown = f"{ms:.2f} ms, {row['images_per_s']:.0f}/s"
        return over_eager(row, ms, lambda r: median(r, "ms") if "ms" in r else None, shown)

    def busy(row: Row) -> str:
        ms = row["gpu_ms"]
        return over_eager(row, ms, lambda r: r.get("gpu_ms"), f"{ms:.2f}")

    figures: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
        ("ms", "Median time of a training step, samples a second, and speed over eager", speed),
        ("median_ms", "Best time of a step, ms", lambda row: f"{row['ms']:.2f}"),
        ("gpu_ms", "Time in which the GPU is busy in a step, ms, and speed over eager", busy),
        ("peak_gib", "Peak memory of a step, GiB", lambda row: f"{row['peak_gib']:.2f}"),
        ("host_ms", "The host's time for a step, ms", lambda row: f"{median(row, 'host_ms'):.2f}"),
        (
            "first_step_s",
            "Time of the first step, with no compiled kernel on disk, s",
            lambda row: f"{row['first_step_s']:.1f}",
        ),
    )
    parts = [_training(content)]
    for key, caption, cell in figures:
        found = [row for row in rows if row.get(key) is not None]
        if found:
            parts += [f"{caption}:\n", _pivot(found, CASE, "arm", cell)]
    return "\n".join(parts)


def _host(content: Mapping[str, Any]) -> str:
    rows, how = content["rows"], content["settings"]
    cases = (*COLUMNS[:1], *COLUMNS[2:], COLUMNS[1])  # F and F+B of a case below each other

    def case(row: Row) -> tuple[str, ...]:
        return tuple(str(row[column]) for column in cases)

    eager = {case(row): row["wall_us"] for row in rows if row["provider"] == "eager"}

    def speed(row: Row) -> str:
        whole = eager.get(case(row))
        shown = _us(row["wall_us"])
        return shown if whole is None else f"{shown} ({whole / row['wall_us']:.2f}x)"

    return "\n".join(
        [
            f"{_origin(content)} Mode {how['mode']}; best of {how['repeats']} repeats; host path: "
            f"{content['native']}.\n",
            "Wall time of a call, microseconds, in calls back to back, and speed over eager:\n",
            _table(rows, speed, cases),
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


def _table(
    rows: Iterable[Row], cell: Callable[[Row], str], columns: Sequence[str] = COLUMNS
) -> str:
    """A line for each case of `kernels` or `host`, a column for each provider."""
    return _pivot(rows, columns, "provider", cell)


def _pivot(
    rows: Iterable[Row], columns: Sequence[str], series: str, cell: Callable[[Row], str]
) -> str:
    """A line for each combination of `columns`, a column for each value of `series`."""
    by_key: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(_text(row[column]) for column in columns)
        by_key.setdefault(key, {})[row[series]] = cell(row)
    names = list(dict.fromkeys(name for cells in by_key.values() for name in cells))
    lines = ([*key, *(cells.get(name, NOTHING) for name in names)] for key, cells in by_key.items())
    return table([*columns, *names], lines, text=len(columns))


def _text(value: Any) -> str:
    return shape_name(value) if isinstance(value, list) else str(value)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
