"""Write the comparison as CSV. Values are as in `result.json`: accuracies are fractions."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from normplug._report.files import replace_file
from normplug._report.intervals import Interval
from normplug._report.measure import Measure
from normplug.compare.gather import Group, Run
from normplug.compare.stats import Row

REFERENCE_COLUMNS = ("reference", "why_reference")
MEASURE_COLUMNS = ("measure", "unit", "better", "items")
SUMMARY_COLUMNS = (
    "model",
    "data",
    "arm",
    "n_finished",
    "n_expected",
    *REFERENCE_COLUMNS,
    *MEASURE_COLUMNS,
    "test_n",
    "test_mean",
    "test_t95_half_width",
    "test_bits_n",
    "test_bits_mean",
    "test_bits_t95_half_width",
    "difference_to_reference_n",
    "difference_to_reference_mean",
    "difference_to_reference_t95_half_width",
    "difference_to_reference_p_holm",
    "validation_difference_to_reference_n",
    "validation_difference_to_reference_mean",
    "validation_difference_to_reference_t95_half_width",
    "speed_ratio_n",
    "speed_ratio_geometric_mean",
    "items_per_s_median",
    "step_ms_median",
    "peak_memory_mib_median",
    "norms_swapped",
)
RUN_FIELDS = (
    "model",
    "data",
    "arm",
    "seed",
    "learning_rate",
    "status",
    "error",
    "test_score",
    "test_bits",
    "items_per_s",
    "step_ms",
    "loader_wait_ms",
    "peak_memory_bytes",
    "norms_swapped",
    "hardware",
    "date",
)


def write_summary(path: Path, rows: Iterable[Row]) -> None:
    """Write one line for each (model, data, arm)."""
    _write(path, SUMMARY_COLUMNS, [_summary_line(row) for row in rows])


def write_runs(path: Path, groups: Iterable[Group], unreadable: Mapping[str, str]) -> None:
    """Write one line for each run; `averaged` is False for a run that no mean includes."""
    lines = []
    for group in groups:
        used = [run for runs in group.arms.values() for _, run in sorted(runs.items())]
        reference = {"reference": group.reference, "why_reference": group.why_reference}
        lines += [_run_line(run, run.finished) | reference for run in used]
        lines += [_run_line(run, averaged=False) | reference for run in group.left_out]
    for name, why in unreadable.items():
        lines.append({"status": "failed", "error": why, "averaged": False, "run": name})
    _write(path, (*RUN_FIELDS, *MEASURE_COLUMNS, "averaged", *REFERENCE_COLUMNS, "run"), lines)


def _summary_line(row: Row) -> dict[str, object]:
    return {
        "model": row.model,
        "data": row.data,
        "arm": row.arm,
        "n_finished": row.n_finished,
        "n_expected": row.n_expected,
        "reference": row.reference,
        "why_reference": row.why_reference,
        **_measure(row.measure),
        **_interval("test", row.test_score),
        **_interval("test_bits", row.test_bits),
        **_interval("difference_to_reference", row.difference),
        "difference_to_reference_p_holm": row.p,
        **_interval("validation_difference_to_reference", row.validation_difference),
        "speed_ratio_n": row.speed_pairs,
        "speed_ratio_geometric_mean": row.speed_ratio,
        "items_per_s_median": row.items_per_s,
        "step_ms_median": row.step_ms,
        "peak_memory_mib_median": row.peak_memory_mib,
        "norms_swapped": " ".join(map(str, row.norms_swapped)),
    }


def _interval(name: str, interval: Interval | None) -> dict[str, object]:
    if interval is None:
        return {f"{name}_n": 0}
    return {
        f"{name}_n": interval.n,
        f"{name}_mean": interval.mean,
        f"{name}_t95_half_width": interval.half_width,
    }


def _measure(measure: Measure) -> dict[str, object]:
    values = (measure.name, measure.unit, measure.better, measure.items)
    return dict(zip(MEASURE_COLUMNS, values, strict=True))


def _run_line(run: Run, averaged: bool) -> dict[str, object]:
    fields = {name: getattr(run, name) for name in RUN_FIELDS}
    return fields | _measure(run.measure) | {"averaged": averaged, "run": run.name}


def _write(path: Path, columns: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    with replace_file(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=columns)
        writer.writeheader()
        writer.writerows(lines)
