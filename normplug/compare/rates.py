"""Choose each arm's learning rate from a sweep over rates, by one rule for all arms."""

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from normplug._report.files import write_file
from normplug._report.markdown import table
from normplug._report.measure import Measure
from normplug.compare.gather import Run, find_runs
from normplug.compare.sources import refuse_unreadable

RATE = "optimizer.lr"
LEFT_OUT = (RATE, "seed", "study")  # options that the sweep after this one sets itself
RULE = (
    "The best rate has the {best} mean validation {name} after the last epoch, over all seeds of "
    "the arm.\nA rate counts if each of these seeds finished with it. If scores are equal, the "
    "smaller rate is taken."
)


@dataclass(frozen=True)
class Choice:
    """The rates of one arm.

    Attributes:
        title: model, data and arm.
        measure: what the runs are judged by.
        scores: rate -> mean validation score after the last epoch; None for a rate that does not
            count.
        best: the rate with the best score; None if no rate counts.
        overrides: the options of the arm with its best rate, without seed and study.
    """

    title: str
    measure: Measure
    scores: dict[float, float | None]
    best: float | None
    overrides: tuple[str, ...]

    @property
    def remark(self) -> str:
        """Why the choice may not be the best rate of the arm."""
        if self.best is None:
            return "no rate has finished runs of all seeds"
        if len(self.scores) > 1 and self.best in (min(self.scores), max(self.scores)):
            return "at the end of the range: extend it"
        return ""


def best_rates(sources: Sequence[Path], path: Path) -> str:
    """Write the options of each arm with its best rate, one line per arm; return the tables.

    Each measure has its own table.

    Raises:
        OSError: a source cannot be read, or `path` cannot be written.
        ValueError: a source holds no run, a `result.json` cannot be read, or no run records its
            learning rate and options.
    """
    runs, unreadable = find_runs(sources)
    refuse_unreadable(unreadable)
    found = choices([run for run in runs if run.learning_rate is not None and run.overrides])
    if not found:
        raise ValueError(
            "normplug.compare: no run records its learning rate. `result.json` needs the keys "
            "learning_rate and overrides, which train.py writes: repeat the sweep."
        )
    write_file(
        path, "".join(f"{shlex.join(choice.overrides)}\n" for choice in found if choice.best)
    )
    by_measure: dict[Measure, list[Choice]] = defaultdict(list)
    for choice in found:
        by_measure[choice.measure].append(choice)
    return "\n".join(_table(measure, of_one) for measure, of_one in by_measure.items())


def _table(measure: Measure, found: Sequence[Choice]) -> str:
    """Return the table of the choices with one measure, and the rule that made them."""
    rates = sorted({rate for choice in found for rate in choice.scores})
    header = ("arm", *(f"{rate:g}" for rate in rates), "best", "remark")
    rule = RULE.format(best=measure.best, name=measure.name)
    return f"{table(header, [_line(choice, rates) for choice in found], padded=True)}\n{rule}\n"


def choices(runs: Iterable[Run]) -> list[Choice]:
    """Return the choice of each arm, in the order of the runs."""
    members: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    for run in runs:
        members[run.model, run.data, run.arm].append(run)
    return [_choice(f"{m} on {d}: {arm}", found) for (m, d, arm), found in members.items()]


def _choice(title: str, runs: Sequence[Run]) -> Choice:
    measure = next((run.measure for run in runs if run.finished), runs[0].measure)
    seeds = {run.seed for run in runs}
    last: dict[float, dict[int, float]] = {}
    for run in runs:
        of_rate = last.setdefault(run.learning_rate or 0.0, {})
        if run.finished and run.validation_score is not None:
            of_rate[run.seed] = run.validation_score
    scores = {
        rate: float(np.mean(list(by_seed.values()))) if by_seed.keys() == seeds else None
        for rate, by_seed in sorted(last.items())
    }
    counted = {rate: score for rate, score in scores.items() if score is not None}
    sign = -1 if measure.better == "higher" else 1
    best = min(counted, key=lambda rate: (sign * counted[rate], rate), default=None)
    kept = [
        option for option in runs[0].overrides if option.lstrip("+").split("=")[0] not in LEFT_OUT
    ]
    return Choice(title, measure, scores, best, (*kept, f"{RATE}={best}"))


def _line(choice: Choice, rates: Sequence[float]) -> tuple[str, ...]:
    def cell(rate: float) -> str:
        if rate not in choice.scores:
            return "-"
        score = choice.scores[rate]
        return "unfinished" if score is None else choice.measure.number(score)

    best = "-" if choice.best is None else f"{choice.best:g}"
    return (choice.title, *map(cell, rates), best, choice.remark)
