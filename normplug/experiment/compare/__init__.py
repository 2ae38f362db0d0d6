"""Compare the runs of a sweep in tables and plots. train.py calls it at the end of a sweep."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from normplug._results import replace_file, write_file
from normplug.experiment.compare.frame import find_runs, group_runs
from normplug.experiment.compare.plots import PLOTS, draw
from normplug.experiment.compare.report import render, runs_table
from normplug.experiment.compare.stats import summarise

__all__ = ["PLOTS", "Comparison", "compare"]

Source: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        table: the content of `summary.csv`, a row for each (model, data, arm).
        markdown: the report.
        paths: the files written.
        complete: whether every arm has a finished run of every seed that any arm has.
    """

    table: pd.DataFrame
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
            run. A file holds the runs that `--collect` wrote to it.
        out: the directory for `summary.md`, `summary.csv`, the plots, and `runs.csv` of sources
            that are directories; created if absent. None for the only source, a directory.
        plots: names of `PLOTS` to draw; None for all that the runs have numbers for.
        reference: the arm that others are compared with, where it has finished runs; otherwise
            "baseline", or "standard" if that has none.

    Raises:
        FileNotFoundError: a source does not exist.
        ValueError: a directory holds no `result.json`; a file holds no list of runs; `out` is
            None, and `sources` is not a single directory; `plots` has an unknown name.
    """
    if unknown := set(plots or ()) - set(PLOTS):
        raise ValueError(
            f"normplug.compare: plots must be names among {', '.join(PLOTS)}; "
            f"got {', '.join(sorted(unknown))}."
        )
    given = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    paths = [Path(source) for source in given]
    runs, unreadable = find_runs(paths)
    target = _target(paths, out)
    groups = group_runs(runs, reference)
    tables = [summarise(group) for group in groups]
    where = " and ".join(path.name if path.is_file() else str(path) for path in paths)
    markdown = render(groups, tables, unreadable, where)
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()

    files = {"summary.csv": table}
    if any(path.is_dir() for path in paths):  # a collected file has the runs themselves
        files["runs.csv"] = runs_table(groups, unreadable)
    write_file(target / "summary.md", markdown)
    for name, content in files.items():
        with replace_file(target / name) as part:
            content.to_csv(part, index=False)
    written = [target / name for name in ("summary.md", *files)]
    written += draw(groups, tables, target, plots)
    complete = not unreadable and bool((table.n_finished == table.n_expected).all())
    return Comparison(table, markdown, written, complete)


def _target(sources: Sequence[Path], out: Source | None) -> Path:
    if out is not None:
        return Path(out)
    if len(sources) == 1 and sources[0].is_dir():
        return sources[0]
    raise ValueError(
        "normplug.compare: with several sources or a collected file, tables and plots need a "
        "directory of their own. Name it: --out DIR."
    )
