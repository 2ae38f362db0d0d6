"""The comparison of runs: what `compare` reads, returns and writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from normplug._files import write_file
from normplug.compare.plots import draw
from normplug.compare.report import render
from normplug.compare.runs import find_runs, group_runs, label


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        table: the table of `summary.csv`: a row for each (model, data, arm).
        markdown: the report.
        paths: the files written.
        complete: whether every arm has a finished run of every seed that any arm has.
    """

    table: pd.DataFrame
    markdown: str
    paths: list[Path]
    complete: bool


def compare(
    *sources: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    reference: str | None = None,
    margin: float | None = None,
    over_rates: bool = False,
    rate: float | None = None,
    plots: bool = False,
) -> Comparison:
    """Compare all runs of the sources, arm by arm and seed by seed.

    Runs are grouped by (model, data). Only finished runs are averaged; every other run is listed
    under the table with its reason. The table has the number of seeds that each arm lacks.

    Args:
        *sources: one or more. A directory is searched at any depth for `result.json`; each is one
            run. A file holds the runs that `--collect` wrote to it.
        out: the directory for `summary.md`, `summary.csv` and the plots, created if absent. None
            for the source, if it is one directory.
        reference: the arm that others are compared with, or None for "standard". Where it has no
            finished run, "standard" or else "baseline" stands in, and the report says so.
        margin: also test whether each difference lies within ± this margin, in the unit of
            differences: points of an accuracy, or the unit of a loss.
        over_rates: average the runs of an arm and seed over their learning rates. Otherwise each
            rate of an arm that has several is an arm of its own.
        rate: compare only the runs with this learning rate.
        plots: also draw each group of runs: its seeds, its curves, and what else it has.

    Returns:
        The table and the report, and the paths of what was written.

    Raises:
        OSError: a source cannot be read.
        ValueError: a source is not there, or holds no run; no run has `rate` or `reference`; `out`
            is None, and `sources` is not a single directory.
    """
    paths = [Path(source) for source in sources]
    runs, unusable = find_runs(paths)
    if out is None and (len(paths) > 1 or paths[0].is_file()):
        raise ValueError(
            "normplug.compare: several sources or a collected file need a directory for the "
            "tables and plots. Name it: --out DIR."
        )
    if rate is not None:
        rates = sorted(set(runs.learning_rate.dropna()))
        if rate not in rates:
            raise ValueError(
                f"normplug.compare: no run has the learning rate {rate:g}, only {rates}."
            )
        runs = runs[runs.learning_rate == rate]
    groups = group_runs(runs, reference, margin, over_rates)
    names = sorted({label(arm) for group in groups for arm in group.arms})
    if reference is not None and names and label(reference) not in names:
        raise ValueError(
            f"normplug.compare: the reference must be an arm of the runs; got {reference!r}. "
            f"Choose one of these: --reference {', '.join(map(repr, names))}."
        )
    where = " and ".join(path.name if path.is_file() else str(path) for path in paths)
    markdown = render(groups, unusable, where)
    tables = [group.table for group in groups]
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    complete = not unusable and bool((table.n_finished == table.n_expected).all())

    target = Path(out or paths[0])
    written = [target / "summary.md", target / "summary.csv"]
    write_file(written[0], markdown)
    write_file(written[1], table.to_csv(index=False))
    if plots:
        written += draw(groups, target)
    return Comparison(table, markdown, written, complete)
