"""What a finished run prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def summary(result: Mapping[str, Any], directory: Path, tables: Iterable[str] = ()) -> str:
    """The content of `result.json` in words, the `tables`, and the files in the directory."""
    r = result
    files = (
        f"{p.name}/" if p.is_dir() else p.name for p in directory.iterdir() if p.name[0] != "."
    )
    lines = [
        "",
        f"{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}",
        f"test accuracy  {100 * r['test_accuracy']:.2f} % after {r['epochs']} epochs",
        f"speed          {_speed(r)}",
        f"peak memory    {_memory(r['peak_memory_bytes'])}",
        f"norm layers    {r['norms_swapped']} swapped, {r['norms_fused']} fused",
        *tables,
        f"written to     {directory}: {', '.join(sorted(files))}",
    ]
    return "\n".join(lines)


def _speed(result: Mapping[str, Any]) -> str:
    if result["images_per_s"] is None:
        return "not timed: too few steps"
    details = f"median step {result['step_ms']:.2f} ms"
    if result["loader_wait_ms"] is not None:
        details += f", loader wait {result['loader_wait_ms']:.2f} ms"
    return f"{result['images_per_s']:,.0f} images/s ({details})"


def _memory(peak_bytes: int | None) -> str:
    return "unknown" if peak_bytes is None else f"{peak_bytes / 2**20:,.0f} MiB"
