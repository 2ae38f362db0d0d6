"""The summary that a finished run prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normplug._report.measure import Measure


def summary(
    result: Mapping[str, Any],
    headlines: Mapping[str, str],
    directory: Path,
    tables: Iterable[str] = (),
) -> str:
    """Format the content of `result.json`, the `tables`, and the list of files in the directory.

    `headlines` are the lines of the task: title -> text.
    """
    r = result
    files = (
        f"{p.name}/" if p.is_dir() else p.name for p in directory.iterdir() if p.name[0] != "."
    )
    titled = {
        **headlines,
        "trained": f"{r['epochs']} epochs",
        "speed": _speed(r),
        "peak memory": _memory(r["peak_memory_bytes"]),
        "norm layers": f"{r['norms_swapped']} swapped, {r['norms_fused']} fused",
    }
    lines = [
        "",
        f"{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}",
        *(f"{title:<19}  {text}" for title, text in titled.items()),
        *tables,
        f"{'written to':<19}  {directory}: {', '.join(sorted(files))}",
    ]
    return "\n".join(lines)


def _speed(result: Mapping[str, Any]) -> str:
    measure = Measure.of(result)
    speed = result[measure.speed_key]
    if speed is None:
        return "not timed: too few steps"
    details = f"median step {result['step_ms']:.2f} ms"
    if result["loader_wait_ms"] is not None:
        details += f", loader wait {result['loader_wait_ms']:.2f} ms"
    return f"{speed:,.0f} {measure.speed_unit} ({details})"


def _memory(peak_bytes: int | None) -> str:
    return "unknown" if peak_bytes is None else f"{peak_bytes / 2**20:,.0f} MiB"
