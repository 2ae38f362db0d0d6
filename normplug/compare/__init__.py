"""A tool that compares the runs of a sweep in a table and plots (needs the `train` extra).

train.py calls it at the end of a sweep; it imports nothing that train.py runs.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from normplug._extras import needs
from normplug._report.files import write_file
from normplug.compare.gather import find_runs, group_runs

if TYPE_CHECKING:
    from normplug.compare.stats import Row

__all__ = ["Comparison", "compare"]

PLOTS = (
    "accuracy",
    "loss",
    "seeds",
    "targets",
    "blocks",
    "throughput",
    "variance_by_depth",
    "variance_by_step",
)
Source: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        rows: one for each (model, data, arm).
        markdown: the report.
        paths: the files written.
        complete: whether every arm has a finished run of every seed that any arm has.
    """

    rows: list[Row]
    markdown: str
    paths: list[Path]
    complete: bool


def compare(
    sources: Source | Sequence[Source],
    out: Source | None = None,
    plots: Collection[str] | None = None,
    reference: str | None = None,
) -> Comparison:
    """Compare all runs of the sources, arm by arm and seed by seed.

    Runs are grouped by (model, data). Only finished runs are averaged; every other run, and
    every seed that one arm has and another lacks, is listed under the table with its reason.

    Args:
        sources: one or more. A directory is searched at any depth for `result.json`; each is one
            run. A file holds the runs that `collect` wrote to it.
        out: the directory for `summary.md`, `summary.csv`, the plots, and `runs.csv` of sources
            that are directories; created if absent. None for the only source, a directory.
        plots: names of `PLOTS` to draw; None for all that the runs have numbers for.
        reference: the arm that others are compared with, where it has finished runs; otherwise
            "baseline", or "standard" if that has none.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: a directory holds no `result.json`; a file holds no list of runs; `out` is
            None, and `sources` is not a single directory; `plots` has an unknown name.
        ModuleNotFoundError: a package of the `train` extra is missing.
    """
    if unknown := set(plots or ()) - set(PLOTS):
        raise ValueError(
            f"normplug.compare: plots must be names among {', '.join(PLOTS)}; "
            f"got {', '.join(sorted(unknown))}."
        )
    with needs("normplug.compare", "train"):
        from normplug.compare.plots import draw
        from normplug.compare.report import render
        from normplug.compare.sheets import write_runs, write_summary
        from normplug.compare.stats import summarise
        from normplug.compare.variance import gather_variance

    given = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    paths = [Path(source) for source in given]
    runs, unreadable = find_runs(paths)
    target = _target(paths, out)
    groups = group_runs(runs, reference)
    variances = [gather_variance(group) for group in groups]
    notes = [variance.notes for variance in variances]
    where = " and ".join(path.name if path.is_file() else str(path) for path in paths)
    tables = [summarise(group) for group in groups]
    markdown = render(groups, tables, notes, unreadable, where)
    rows = [row for table in tables for row in table]

    written = [target / "summary.md", target / "summary.csv"]
    write_file(written[0], markdown)
    write_summary(written[1], rows)
    if any(path.is_dir() for path in paths):  # a collected file has the runs themselves
        written.append(target / "runs.csv")
        write_runs(written[-1], groups, unreadable)
    written += draw(groups, [variance.by_arm for variance in variances], target, plots)
    complete = not unreadable and all(row.n_finished == row.n_expected for row in rows)
    return Comparison(rows, markdown, written, complete)


def _target(sources: Sequence[Path], out: Source | None) -> Path:
    if out is not None:
        return Path(out)
    if len(sources) == 1 and sources[0].is_dir():
        return sources[0]
    raise ValueError(
        "normplug.compare: with several sources or a collected file, tables and plots need a "
        "directory of their own. Name it: --out DIR."
    )
