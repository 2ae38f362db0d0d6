"""The rows of a run as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from normplug.bench.suites import SUITES, shape_name

NOTHING = "-"
SMALL = {case.shape for case in SUITES["small"]}
COLUMNS = ("op", "direction", "layout", "shape", "dtype")

Row = Mapping[str, Any]
Key = tuple[str, ...]


def render(content: Mapping[str, Any]) -> str:
    """The whole document.

    Args:
        content: of the JSON file that `python -m normplug.bench kernels` writes.
    """
    rows = content["rows"]
    parts = [
        _header(content),
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


def _header(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return (
        f"{content['device']}, {versions}, {content['date'][:10]}. "
        f"Copy: {content['copy_gbps']:.0f} GB/s, read and written.\n"
    )


def _floors(rows: Iterable[Row]) -> str:
    """Each operation's passes over its input."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        found.setdefault(row["op"], {})[row["direction"]] = row["floor_passes"]
    return "; ".join(
        f"{op}: {', '.join(f'{direction} {n}P' for direction, n in passes.items())}"
        for op, passes in found.items()
    )


def _table(rows: Iterable[Row], cell: Callable[[Row], str]) -> str:
    by_key: dict[Key, dict[str, str]] = {}
    for row in rows:
        by_key.setdefault(_key(row), {})[row["provider"]] = cell(row)
    providers = list(dict.fromkeys(name for cells in by_key.values() for name in cells))
    lines = [
        [*COLUMNS, *providers],
        ["---"] * len(COLUMNS) + ["---:"] * len(providers),
        *([*key, *(cells.get(p, NOTHING) for p in providers)] for key, cells in by_key.items()),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _key(row: Row) -> Key:
    shown = {**row, "shape": shape_name(row["shape"])}
    return tuple(shown[column] for column in COLUMNS)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
