"""Read the variances that runs logged, select some for a file, and average them over seeds."""

import csv
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normplug.compare.gather import Group

Floats = NDArray[np.float64]
COLUMNS = ("target_variance", "input_variance", "output_variance", "affine_variance")
NEEDED = {"step", "depth", "kind", *COLUMNS}
STEPS_KEPT = 8  # per run in a collected file: enough for a heat map of depth by step
DIGITS_KEPT = 3


@dataclass(frozen=True)
class Variance:
    """The variances of one run, or of one arm averaged over its runs.

    Attributes:
        steps: (S,), the logged steps, ascending.
        depths: (L,), the norms in the order of the network.
        kinds: how many norms of each class.
        values: column of `variance.csv` -> (S, L); NaN where nothing was logged.
        runs: how many runs the values are the mean of.
    """

    steps: NDArray[np.int64]
    depths: NDArray[np.int64]
    kinds: Counter[str]
    values: dict[str, Floats]
    runs: int = 1


@dataclass(frozen=True)
class GroupVariance:
    """The mean variances of each arm that has any, and notes on what is missing."""

    by_arm: dict[str, Variance]
    notes: list[str]


def gather_variance(group: Group) -> GroupVariance:
    """Read and average the variances of finished runs, arm by arm."""
    by_arm, notes, absent = {}, [], []
    for arm in group.arms:
        found = []
        for seed, run in sorted(group.finished(arm).items()):
            if run.variances is None:
                absent.append(f"{arm} seed {seed}")
                continue
            try:
                found.append(_variance_of(run.variances))
            except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
                notes.append(f"{arm}, seed {seed}: variance.csv could not be read: {error}")
        if found and (mean := mean_variance(found)):
            by_arm[arm] = mean
        elif found:
            notes.append(f"{arm}: its seeds logged no step in common")
    if not by_arm:
        notes.append("no variance plots: no finished run has a variance.csv")
    elif absent:
        notes.append(f"no variance.csv, so not in those plots: {', '.join(absent)}")
    return GroupVariance(by_arm, notes)


def read_variance(path: Path) -> Variance:
    """Read the rows of rank 0 of a file; of a step logged twice (a resumed run), the last."""
    cells: dict[tuple[int, int], list[float]] = {}
    kind_of: dict[int, str] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if lacking := NEEDED - set(reader.fieldnames or ()):
            raise ValueError(f"lacks the columns {', '.join(sorted(lacking))}")
        for row in reader:
            cut_short = None in row.values()  # DictReader fills in the missing cells
            if cut_short or row.get("rank") not in ("0", "", None):
                continue
            depth = int(row["depth"])
            kind_of[depth] = row["kind"]
            cells[int(row["step"]), depth] = [float(row[name] or "nan") for name in COLUMNS]
    if not cells:
        raise ValueError("holds no row")

    steps = sorted({step for step, _ in cells})
    depths = sorted(kind_of)
    row_of = {step: index for index, step in enumerate(steps)}
    column_of = {depth: index for index, depth in enumerate(depths)}
    table = np.full((len(COLUMNS), len(steps), len(depths)), np.nan)
    for (step, depth), values in cells.items():
        table[:, row_of[step], column_of[depth]] = values
    return Variance(
        steps=np.array(steps),
        depths=np.array(depths),
        kinds=Counter(kind_of.values()),
        values=dict(zip(COLUMNS, table, strict=True)),
    )


def kept_variance(path: Path) -> dict[str, Any] | None:
    """Return what a collected file keeps: `STEPS_KEPT` steps, including the first and the last.

    None for a file that cannot be read.
    """
    try:
        found = read_variance(path)
    except (OSError, ValueError, csv.Error):
        return None
    last = len(found.steps) - 1
    places = np.unique(np.linspace(0, last, STEPS_KEPT).round().astype(int))
    return {
        "steps": found.steps[places].tolist(),
        "depths": found.depths.tolist(),
        "kinds": dict(found.kinds),
        **{name: _rounded(table[places]) for name, table in found.values.items()},
    }


def _variance_of(variances: Path | Mapping[str, Any]) -> Variance:
    """Return the variances of a run, from its `variance.csv` or from a collected file."""
    if isinstance(variances, Path):
        return read_variance(variances)
    return Variance(
        steps=np.array(variances["steps"]),
        depths=np.array(variances["depths"]),
        kinds=Counter(variances["kinds"]),
        values={name: np.array(variances[name], dtype=float) for name in COLUMNS},
    )


def _rounded(table: Floats) -> list[list[float | None]]:
    """Round to a few digits; replace values that are not finite, which JSON lacks, by None."""
    return [
        [float(f"{value:.{DIGITS_KEPT}g}") if np.isfinite(value) else None for value in row]
        for row in table
    ]


def mean_variance(runs: list[Variance]) -> Variance | None:
    """Return the mean over runs at the steps that all of them logged; None if there is none."""
    steps = reduce(np.intersect1d, [run.steps for run in runs])
    depths = reduce(np.intersect1d, [run.depths for run in runs])
    if not steps.size or not depths.size:
        return None
    values = {}
    for name in COLUMNS:
        # A NaN in one run stays NaN in the mean: no cell is averaged over fewer runs.
        shared = [
            run.values[name][np.isin(run.steps, steps)][:, np.isin(run.depths, depths)]
            for run in runs
        ]
        values[name] = np.mean(shared, axis=0)
    return Variance(steps, depths, runs[0].kinds, values, len(runs))
