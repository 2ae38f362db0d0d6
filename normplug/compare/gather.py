"""Read the runs of a study, and group those that can be compared."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from normplug._report.arms import ARM_ORDER, REFERENCES
from normplug._report.measure import ACCURACY, Measure
from normplug.compare.sources import Record, find_records


@dataclass(frozen=True)
class Run:
    """The content of one `result.json`. A number that is null or not finite is None.

    `test_score` and `scores_by_epoch` are values of `measure`; `items_per_s` is the speed.

    Attributes:
        name: its directory, relative to where it was found.
        variances: its `variance.csv`, or what a collected file keeps of it; None for neither.
        test_bits: the test loss of a text in bits per character.
        text_sha256: of the text; "" for images.
        block_drop: test loss without each block minus the loss with all of them.
        overrides: the options of its command line, as typed.
    """

    name: str
    variances: Path | Mapping[str, Any] | None
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
    epochs: int = 0
    learning_rate: float | None = None
    test_bits: float | None = None
    text_sha256: str = ""
    block_drop: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def validation_score(self) -> float | None:
        """The measure on the validation part after the last epoch."""
        last = self.scores_by_epoch[-1:]
        return last[0] if last and math.isfinite(last[0]) else None

    @property
    def finished(self) -> bool:
        """Whether the run finished; no other run is averaged."""
        return self.status == "finished"


BY_MEASURE = ("measure", "test_score", "scores_by_epoch", "items_per_s")
NO_KEYS = ("name", "variances", "error", *BY_MEASURE)
# What each `result.json` of a finished run must hold; fields with a default may be absent.
KEYS = tuple(f.name for f in fields(Run) if f.name not in NO_KEYS and f.default is MISSING)
IDENTITY = ("model", "data", "arm", "seed", "status")  # a record that lacks one is unreadable


@dataclass(frozen=True)
class Group:
    """All runs of one model on one data set.

    Attributes:
        model: name of the network.
        data: name of the data set.
        arms: arm -> seed -> the run used; arms in the order of the table.
        left_out: runs replaced by a finished or newer run of the same arm and seed.
        references: the arms to compare with, by preference.
    """

    model: str
    data: str
    arms: dict[str, dict[int, Run]]
    left_out: list[Run]
    references: tuple[str, ...] = REFERENCES

    @property
    def title(self) -> str:
        """The group's name in headings."""
        return f"{self.model} on {self.data}"

    @property
    def measure(self) -> Measure:
        """What the runs are evaluated by; only a finished run is sure to record it."""
        runs = (run for arm in self.arms for run in self.finished(arm).values())
        return next((run.measure for run in runs), ACCURACY)

    @property
    def seeds(self) -> list[int]:
        """Every seed that any arm has, and so every seed that each arm should have."""
        return sorted({seed for runs in self.arms.values() for seed in runs})

    @property
    def reference(self) -> str | None:
        """The arm that the others are compared with; None if no such arm has a finished run."""
        return next((arm for arm in self.references if self.finished(arm)), None)

    @property
    def why_reference(self) -> str:
        """Why this arm is the reference, or why there is none."""
        if self.reference == self.references[0]:
            return "it has finished runs"
        if any(arm.startswith(f"{name} lr=") for name in self.references for arm in self.arms):
            return "each rate is an arm of its own; --best chooses each arm's rate"
        passed_over = [arm for arm in self.references if not self.finished(arm)]
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


def find_runs(sources: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs of all sources, and file -> reason for unreadable ones (`find_records`)."""
    records, unreadable = find_records(sources)
    runs = []
    for record in records:
        try:
            runs.append(read_run(record))
        except (ValueError, TypeError, AttributeError) as error:
            unreadable[record.file] = str(error)
    return runs, unreadable


def keys(measure: Measure) -> tuple[str, ...]:
    """Return the keys that `result.json` of a finished run with this measure must hold."""
    return (*KEYS, measure.test_key, measure.curve_key, measure.speed_key)


def read_run(found: Record) -> Run:
    """Convert a record to a run; a "finished" one that lacks keys is a failed run."""
    record = found.values
    measure = Measure.of(record)
    lacking = [key for key in keys(measure) if key not in record]
    if set(lacking) & set(IDENTITY):
        raise ValueError(f"lacks {', '.join(lacking)}")
    status, error = record["status"], str(record.get("error") or "")
    if lacking and status == "finished":
        status, error = "failed", f"result.json lacks {', '.join(lacking)}"
    try:
        seed = int(record["seed"])
    except (OverflowError, TypeError, ValueError):
        raise ValueError(error or f"its seed is {record['seed']!r}, not an integer") from None
    curve = [_number(value) for value in record.get(measure.curve_key) or ()]
    dropped = record.get("block_drop") or {}
    return Run(
        name=found.name,
        variances=record.get("variances") or found.variances,
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
        epochs=_whole(record.get("epochs")) or len(curve),
        learning_rate=_number(record.get("learning_rate")),
        test_bits=_number(record.get("test_bits_per_character")),
        text_sha256=str(record.get("text_sha256") or ""),
        block_drop=tuple(loss - dropped["loss"] for loss in dropped.get("loss_without", ())),
        overrides=tuple(map(str, record.get("overrides") or ())),
    )


def group_runs(runs: Iterable[Run], reference: str | None = None) -> list[Group]:
    """Group by (model, data), then by arm and seed.

    Where an arm of a group has runs of several learning rates, each rate is an arm of its own.
    `reference` is the arm that others are compared with, where it has finished runs.
    """
    members: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in _by_rate(runs):
        members[run.model, run.data].append(run)
    references = (reference, *REFERENCES) if reference else REFERENCES
    return [_group(*names, members[names], references) for names in sorted(members)]


def _group(model: str, data: str, runs: list[Run], references: tuple[str, ...]) -> Group:
    arms: dict[str, dict[int, Run]] = {}
    left_out = []
    # Of the runs of one arm and seed, the last in this order stays: a finished run if there is one,
    # then the newest.
    for run in sorted(runs, key=lambda run: (_arm_rank(run.arm), run.finished, run.date)):
        of_arm = arms.setdefault(run.arm, {})
        if run.seed in of_arm:
            left_out.append(of_arm[run.seed])
        of_arm[run.seed] = run
    return Group(model, data, arms, left_out, references)


def _by_rate(runs: Iterable[Run]) -> list[Run]:
    """Add the learning rate to the name of each arm that has several."""
    runs = list(runs)
    rates: dict[tuple[str, str, str], set[float | None]] = defaultdict(set)
    for run in runs:
        rates[run.model, run.data, run.arm].add(run.learning_rate)
    return [
        replace(run, arm=f"{run.arm} lr={run.learning_rate:g}")
        if run.learning_rate is not None and len(rates[run.model, run.data, run.arm]) > 1
        else run
        for run in runs
    ]


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
