"""The rows of a variance log, and their output as CSV, metrics and a table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple, get_type_hints

from normplug._results import replace_file
from normplug._table import table

MEASURED = ("input_variance", "output_variance", "affine_variance", "weight_rms")


class LayerVariance(NamedTuple):
    """The measurements of one norm layer on one logged step; variances as in `VarianceLogger`.

    measure: "variance", or "second moment" for a norm that does not centre.
    """

    step: int
    epoch: int
    layer: str
    depth: int
    kind: str
    target_variance: float
    input_variance: float
    output_variance: float
    affine_variance: float
    weight_rms: float
    rank: int
    world_size: int
    measure: str = "variance"


def append(rows: list[LayerVariance], path: Path) -> None:
    """Add rows to the CSV file; a new file gets a header first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(LayerVariance._fields)
        writer.writerows(rows)


def keep_before(step: int, path: Path) -> list[LayerVariance]:
    """Drop the CSV file's rows from `step` on, and an unfinished line; return the other rows."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        lines = [line for line in file if line.endswith("\n")]
    rows = [_parsed(row) for row in csv.DictReader(lines)]
    kept = [row for row in rows if row.step < step]
    with replace_file(path) as part:
        append(kept, part)
    return kept


def _parsed(row: dict[str, str]) -> LayerVariance:
    types = get_type_hints(LayerVariance)
    # Files of earlier versions lack the last column.
    return LayerVariance(**{n: types[n](row[n]) for n in LayerVariance._fields if n in row})


def as_metrics(rows: list[LayerVariance]) -> dict[str, float]:
    """The rows for a Lightning logger: `variance/<layer>/<quantity>` -> value."""
    metrics = {}
    for row in rows:
        for field in MEASURED:
            key = field.removesuffix("_variance")
            metrics[f"variance/{row.layer}/{key}"] = getattr(row, field)
    return metrics


def as_table(rows: list[LayerVariance]) -> str:
    """The rows of one step as a table, one line per layer; empty without rows."""
    if not rows:
        return ""
    head = ["layer", "target", "input var", "output var", "after affine", "weight rms"]
    lines = [
        [
            row.layer,
            f"{row.target_variance:6.4f}",
            f"{row.input_variance:9.4g}",
            f"{row.output_variance:10.4f}",
            f"{row.affine_variance:12.4g}",
            f"{row.weight_rms:10.4f}",
        ]
        for row in rows
    ]
    if any(row.measure != "variance" for row in rows):
        for line, measure in zip(
            (head, *lines), ("measure", *(r.measure for r in rows)), strict=True
        ):
            line.append(measure)
    text = table([tuple(line) for line in (head, *lines)])
    return f"variance at step {rows[0].step}{whose(rows[0])}\n{text}"


def whose(row: LayerVariance) -> str:
    """Which part of the batch was measured; empty for the whole batch."""
    return "" if row.world_size == 1 else f", rank 0 of {row.world_size}'s part of the batch"
