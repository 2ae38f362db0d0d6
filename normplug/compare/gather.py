"""Find the runs under a directory, and sort them into groups that may be compared."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from normplug._report.arms import ARM_ORDER, REFERENCES, REFUSAL
from normplug._report.measure import ACCURACY, Measure


@dataclass(frozen=True)
class Run:
    """What one `result.json` says. A number that is null or not finite is None.

    `test_score` and `scores_by_epoch` are values of its measure, `items_per_s` is its speed.
    """

    path: Path
    error: str
    model: str
    data: str
    arm: str
    seed: int
    status: str
    measure: Measure
    test_score: float | None
    scores_by_epoch: tuple[float, ...]
    step_ms: float | None
    items_per_s: float | None
    loader_wait_ms: float | None
    peak_memory_bytes: int | None
    norms_swapped: int | None
    versions: dict[str, str]
    hardware: str
    date: str

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, and so may be averaged."""
        return self.status == "finished"


BY_MEASURE = ("measure", "test_score", "scores_by_epoch", "items_per_s")
KEYS = tuple(f.name for f in fields(Run) if f.name not in ("path", "error", *BY_MEASURE))
IDENTITY = ("model", "data", "arm", "seed", "status")


@dataclass(frozen=True)
class Group:
    """All runs of one model on one data set.

    Attributes:
        model: name of the network.
        data: name of the data set.
        arms: arm -> seed -> the run used; arms in the order of the table.
        left_out: runs replaced by a finished or newer run of the same arm and seed.
    """

    model: str
    data: str
    arms: dict[str, dict[int, Run]]
    left_out: list[Run]

    @property
    def title(self) -> str:
        """The group's name in headings."""
        return f"{self.model} on {self.data}"

    @property
    def measure(self) -> Measure:
        """What the runs are judged by; a run that failed early does not say it."""
        runs = (run for arm in self.arms for run in self.finished(arm).values())
        return next((run.measure for run in runs), ACCURACY)

    @property
    def seeds(self) -> list[int]:
        """Every seed that any arm has: what each arm should have."""
        return sorted({seed for runs in self.arms.values() for seed in runs})

    @property
    def reference(self) -> str | None:
        """The arm that the others are compared with; None if no such arm has a finished run."""
        return next((arm for arm in REFERENCES if self.finished(arm)), None)

    @property
    def why_reference(self) -> str:
        """Why this arm is the reference, or why there is none."""
        if self.reference == REFERENCES[0]:
            return "it has finished runs"
        passed_over = [arm for arm in REFERENCES if not self.finished(arm)]
        return " and ".join(
            f"{arm} has no {'finished run' if arm in self.arms else 'run'}" for arm in passed_over
        )

    @property
    def about_reference(self) -> str:
        """Which arm is the reference, and why, in words."""
        which = "No reference:" if self.reference is None else f"Reference: {self.reference}, since"
        return f"{which} {self.why_reference}"

    def finished(self, arm: str) -> dict[int, Run]:
        """The finished runs of `arm` by seed; empty for an arm that the group lacks."""
        return {seed: run for seed, run in self.arms.get(arm, {}).items() if run.finished}


def find_runs(directory: Path) -> tuple[list[Run], dict[Path, str]]:
    """The runs of every `result.json` at any depth, and unreadable files with the reason."""
    if not directory.is_dir():
        raise FileNotFoundError(
            f"normplug.compare: {directory} is not a directory. "
            "Give the directory that holds the runs of a sweep."
        )
    paths = sorted(directory.rglob("result.json"))
    if not paths:
        raise ValueError(
            f"normplug.compare: no result.json at any depth under {directory}. train.py writes "
            "one into the directory of each run: give that directory, or one above it."
        )
    runs, unreadable = [], {}
    for path in paths:
        try:
            runs.append(read_run(path))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            unreadable[path] = str(error)
    return runs, unreadable


def keys(measure: Measure) -> tuple[str, ...]:
    """What the `result.json` of a finished run with this measure holds."""
    return (*KEYS, measure.test_key, measure.curve_key, measure.speed_key)


def read_run(path: Path) -> Run:
    """Read one `result.json`; one that says "finished" but lacks keys is a failed run."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError("holds no JSON object")
    measure = Measure.of(record)
    lacking = [key for key in keys(measure) if key not in record]
    if set(lacking) & set(IDENTITY):
        raise ValueError(f"lacks {', '.join(lacking)}")
    status, error = record["status"], str(record.get("error") or "")
    if lacking and status == "finished":
        status, error = "failed", f"result.json lacks {', '.join(lacking)}"
    if (refusal := path.with_name(REFUSAL)).is_file():
        status, error = "failed", refusal.read_text(encoding="utf-8")
    try:
        seed = int(record["seed"])
    except (OverflowError, TypeError, ValueError):
        raise ValueError(error or f"its seed is {record['seed']!r}, not an integer") from None
    curve = (_number(value) for value in record.get(measure.curve_key) or ())
    return Run(
        path=path,
        error=error,
        model=str(record["model"]),
        data=str(record["data"]),
        arm=str(record["arm"]),
        seed=seed,
        status=str(status),
        measure=measure,
        test_score=_number(record.get(measure.test_key)),
        scores_by_epoch=tuple(math.nan if value is None else value for value in curve),
        step_ms=_number(record.get("step_ms")),
        items_per_s=_number(record.get(measure.speed_key)),
        loader_wait_ms=_number(record.get("loader_wait_ms")),
        peak_memory_bytes=_whole(record.get("peak_memory_bytes")),
        norms_swapped=_whole(record.get("norms_swapped")),
        versions={str(k): str(v) for k, v in (record.get("versions") or {}).items()},
        hardware=str(record.get("hardware") or "unknown"),
        date=str(record.get("date") or ""),
    )


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Group by (model, data), then by arm and seed."""
    members: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        members[run.model, run.data].append(run)
    return [_group(*names, members[names]) for names in sorted(members)]


def _group(model: str, data: str, runs: list[Run]) -> Group:
    arms: dict[str, dict[int, Run]] = {}
    left_out = []
    # Of two runs of one arm and seed the later in this order stays: finished before newer.
    for run in sorted(runs, key=lambda run: (_arm_rank(run.arm), run.finished, run.date)):
        of_arm = arms.setdefault(run.arm, {})
        if run.seed in of_arm:
            left_out.append(of_arm[run.seed])
        of_arm[run.seed] = run
    return Group(model, data, arms, left_out)


def _arm_rank(arm: str) -> tuple[int, str]:
    return (ARM_ORDER.index(arm) if arm in ARM_ORDER else len(ARM_ORDER), arm)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else round(number)
