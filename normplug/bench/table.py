"""The rows of a JSON file as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from normplug._report.markdown import table
from normplug.bench.accuracy import NEAR, NEAR_DTYPES, is_far
from normplug.bench.results import HOST, KERNELS, MODELS, PROFILE, Kind, best, median
from normplug.bench.suites import SUITES, shape_name

NOTHING = "-"
SMALL = {case.shape for case in SUITES["small"]}
COLUMNS = ("op", "direction", "layout", "shape", "dtype")
CASE = ("model", "batch")

Row = Mapping[str, Any]
Time = Callable[[Row], float | None]

OURS, TWIN = "normplug", "normplug-triton"  # the twin is compared only if normplug is missing
PEERS = ("eager", "compile", "liger")  # arms of others
# Pairs of arms whose training steps are compared.
STEPS = (
    ("swap", "eager"),
    *(("swap+fuse", peer) for peer in PEERS),
    ("swap+fuse+compile", "compile"),
    ("swap+fuse+graph", "eager+graph"),
    ("no-norm", "eager"),
)
# The table's caption, the time of a row, and the format of a cell.
STEP_TIMES: tuple[tuple[str, Time, str], ...] = (
    (
        "Median time of a training step, and samples a second",
        lambda row: median(row, "ms"),
        "{0:.2f} ms, {images_per_s:.0f}/s",
    ),
    ("Best time of a step, ms", lambda row: best(row, "ms"), "{0:.2f}"),
    ("Time in which the GPU is busy in a step, ms", lambda row: row.get("gpu_ms"), "{0:.2f}"),
    ("The host's time for a step, ms", lambda row: median(row, "host_ms"), "{0:.2f}"),
    (
        "Time of the first step, with no compiled kernel on disk, s",
        lambda row: row.get("first_step_s"),
        "{0:.1f}",
    ),
)


def render(kind: Kind, content: Mapping[str, Any]) -> str:
    """The tables of a file; its kind must be one of `TABLES`."""
    return TABLES[kind](content)


def _kernels(content: Mapping[str, Any]) -> str:
    rows = content["rows"]
    processor = f" cpu: eager's wall time, {content['cpu']}." if "cpu" in content else ""
    parts = [
        f"{_origin(content)} Copy: {content['copy_gbps']:.0f} GB/s, read and written.{processor}\n",
        "GPU time, as % of the speed of a copy that moves the fewest bytes the operation can "
        f"({_floors(rows)}), and median microseconds:\n",
        _by_provider(
            rows,
            lambda row: f"{row['percent_of_copy']:.0f}% ({_us(row['us'])})",
            time=itemgetter("us"),
        ),
    ]
    small = [row for row in rows if tuple(row["shape"]) in SMALL]
    if small:
        parts += [
            "Small shapes, microseconds a call: until the host is free again / in calls back to "
            "back, host and GPU overlapped. The last columns compare calls back to back:\n",
            _by_provider(
                small,
                lambda row: f"{_us(row['host_us'])} / {_us(row['wall_us'])}",
                time=itemgetter("wall_us"),
            ),
        ]
    compared = [row for row in rows if "difference" in row]
    if compared:
        parts += [
            "Largest difference from eager, in parts of the largest element of the same output; "
            f"ours in mode standard; bold above {NEAR:g} in {' or '.join(NEAR_DTYPES)}:\n",
            _by_provider(compared, _difference),
        ]
    return "\n".join(parts)


def _difference(row: Row) -> str:
    shown = f"{row['difference']:.1e}"
    return f"**{shown}**" if is_far(row) else shown


def _models(content: Mapping[str, Any]) -> str:
    """A table for each kind of figure that any row has; older files have fewer."""
    rows = content["rows"]
    parts = [_training(content)]
    for caption, time, shown in STEP_TIMES:
        found = [row for row in rows if time(row) is not None]
        if found:

            def cell(row: Row, time: Time = time, shown: str = shown) -> str:
                return shown.format(time(row), **row)

            parts += [f"{caption}:\n", _pivot(found, CASE, "arm", cell, STEPS, time)]
    weighed = [row for row in rows if row.get("peak_gib") is not None]
    if weighed:
        table_of_peaks = _pivot(weighed, CASE, "arm", lambda row: f"{row['peak_gib']:.2f}")
        parts += ["Peak memory of a step, GiB:\n", table_of_peaks]
    return "\n".join(parts)


def _host(content: Mapping[str, Any]) -> str:
    rows, how = content["rows"], content["settings"]
    cases = (*COLUMNS[:1], *COLUMNS[2:], COLUMNS[1])  # F and F+B of a case below each other
    return "\n".join(
        [
            f"{_origin(content)} Mode {how['mode']}; best of {how['repeats']} repeats; host path: "
            f"{content['native']}.\n",
            "Wall time of a call, microseconds, in calls back to back:\n",
            _by_provider(rows, lambda row: _us(row["wall_us"]), cases, itemgetter("wall_us")),
        ]
    )


def _profile(content: Mapping[str, Any]) -> str:
    """A line per arm, with the speed of its kernels over those of each peer."""
    rows = content["rows"]
    totals = {_key(row, (*CASE, "arm")): sum(row["groups_ms"].values()) for row in rows}
    groups = list(dict.fromkeys(group for row in rows for group in row["groups_ms"]))
    peers = [peer for peer in PEERS if any(row["arm"] == peer for row in rows)]
    lines = []
    for row in rows:
        case, total = _key(row, CASE), totals[_key(row, (*CASE, "arm"))]
        times = [row["groups_ms"].get(group) for group in groups]
        over = [totals.get((*case, peer)) if peer != row["arm"] else None for peer in peers]
        lines.append(
            [
                *case,
                row["arm"],
                *(NOTHING if time is None else f"{time:.2f}" for time in (*times, total)),
                *(_times(whole, total) for whole in over),
            ]
        )
    header = [*CASE, "arm", *groups, "all", *(f"over {peer}" for peer in peers)]
    return "\n".join(
        [
            _training(content),
            "GPU time of a training step by groups of kernels, ms:\n",
            table(header, lines, text=len(CASE) + 1),
        ]
    )


TABLES = {KERNELS: _kernels, MODELS: _models, PROFILE: _profile, HOST: _host}


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


def _by_provider(
    rows: Sequence[Row],
    cell: Callable[[Row], str],
    columns: Sequence[str] = COLUMNS,
    time: Time | None = None,
) -> str:
    """A line per case of `kernels` or `host`, and a column per provider.

    With `time`, also a column for the speed of normplug over each other provider.
    """
    names = list(dict.fromkeys(row["provider"] for row in rows))
    ours = [name for name in names if name.startswith(OURS)]
    compared = [name for name in ours if name != TWIN or OURS not in ours]
    pairs = [(name, peer) for name in compared for peer in names if peer not in ours]
    return _pivot(rows, columns, "provider", cell, pairs if time else (), time)


def _pivot(
    rows: Iterable[Row],
    columns: Sequence[str],
    series: str,
    cell: Callable[[Row], str],
    pairs: Iterable[tuple[str, str]] = (),
    time: Time | None = None,
) -> str:
    """A line per combination of `columns`, and a column per value of `series`.

    Args:
        rows: the rows to show.
        columns: keys of the rows.
        series: a key of the rows.
        cell: the text for a row.
        pairs: pairs of values of `series`; a column has the speedup of the first over the second.
        time: the time of a row, for the speed.
    """
    by_key: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        by_key.setdefault(_key(row, columns), {})[row[series]] = row
    lines = by_key.values()
    names = list(dict.fromkeys(name for line in lines for name in line))
    pairs = [pair for pair in pairs if any(line.keys() >= set(pair) for line in lines)]

    def speed(line: Mapping[str, Row], pair: tuple[str, str]) -> str:
        assert time is not None
        ours, peer = (time(line[name]) if name in line else None for name in pair)
        return _times(peer, ours)

    cells = (
        [
            *key,
            *(cell(line[name]) if name in line else NOTHING for name in names),
            *(speed(line, pair) for pair in pairs),
        ]
        for key, line in by_key.items()
    )
    header = [*columns, *names, *(f"{ours} over {peer}" for ours, peer in pairs)]
    return table(header, cells, text=len(columns))


def _times(whole: float | None, part: float | None) -> str:
    return NOTHING if whole is None or part is None else f"{whole / part:.2f}x"


def _key(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(_text(row[column]) for column in columns)


def _text(value: Any) -> str:
    return shape_name(value) if isinstance(value, list) else str(value)


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
