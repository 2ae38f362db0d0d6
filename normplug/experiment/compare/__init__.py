"""Compare the runs of a sweep in tables and plots. train.py calls it at the end of a sweep."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import pandas as pd

from normplug._results import write_file
from normplug.experiment.compare.frame import collect, find_runs
from normplug.experiment.compare.plots import PLOTS, draw
from normplug.experiment.compare.report import best_rates, render
from normplug.experiment.compare.stats import group_runs

__all__ = ["PLOTS", "Comparison", "compare"]

Source: TypeAlias = "str | os.PathLike[str]"
USAGE = """Compare the runs of a study: print the table, write it and the plots.

    python -m normplug.compare RUNS [--out DIR]         table and plots
    python -m normplug.compare RUNS --best FILE         the best learning rate of each arm
    python -m normplug.compare RUNS --collect FILE      all runs in one small file

RUNS are directories, searched at any depth for result.json, or files that --collect wrote.
"""
NOT_IN_RUNS = ["record", "curve", "versions", "overrides", "block_drop", "variances"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    table: pd.DataFrame  # of summary.csv: a row for each (model, data, arm)
    markdown: str  # the report
    paths: list[Path]  # the files written
    complete: bool  # whether every arm has a finished run of every seed that any arm has


def compare(
    sources: Source | Sequence[Source],
    out: Source | None = None,
    plots: Collection[str] | None = None,
    reference: str | None = None,
) -> Comparison:
    """Compare all runs of the sources, arm by arm and seed by seed.

    Runs are grouped by (model, data). Only finished runs are averaged; every other run is listed
    under the table with its reason. The table has the number of seeds that each arm lacks.

    Args:
        sources: one or more. A directory is searched at any depth for `result.json`; each is one
            run. A file holds the runs that `--collect` wrote to it.
        out: the directory for `summary.md`, `summary.csv`, the plots, and `runs.csv` of sources
            that are directories; created if absent. None for the source, if it is one directory.
        plots: names of `PLOTS` to draw; None for all that the runs have numbers for.
        reference: the arm that others are compared with. If it has no finished run, or is None:
            "baseline", or "standard" if that has none.

    Raises:
        OSError: a source cannot be read.
        ValueError: a source is not there, or holds no run; `out` is None, and `sources` is not a
            single directory; `plots` has an unknown name.
    """
    if unknown := set(plots or ()) - set(PLOTS):
        raise ValueError(
            f"normplug.compare: plots must be names among {', '.join(PLOTS)}; "
            f"got {', '.join(sorted(unknown))}."
        )
    given = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    paths = [Path(source) for source in given]
    runs, unusable = find_runs(paths)
    if out is None and (len(paths) > 1 or paths[0].is_file()):
        raise ValueError(
            "normplug.compare: with several sources or a collected file, tables and plots need a "
            "directory of their own. Name it: --out DIR."
        )
    target = Path(out or paths[0])
    groups = group_runs(runs, reference)
    where = " and ".join(path.name if path.is_file() else str(path) for path in paths)
    markdown = render(groups, unusable, where)
    table = pd.concat([group.table for group in groups] or [pd.DataFrame()], ignore_index=True)

    files = {"summary.md": markdown, "summary.csv": table.to_csv(index=False)}
    if any(path.is_dir() for path in paths):  # a collected file has the runs themselves
        averaged = runs.index.isin([index for group in groups for index in group.finished.index])
        rows = runs.assign(averaged=averaged, measure=[measure.name for measure in runs.measure])
        files["runs.csv"] = rows.drop(columns=NOT_IN_RUNS).to_csv(index=False)
    for name, content in files.items():
        write_file(target / name, content)
    written = [target / name for name in files]
    written += draw(groups, target, plots)
    complete = not unusable and bool((table.n_finished == table.n_expected).all())
    return Comparison(table, markdown, written, complete)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a run is missing, unfinished or failed."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.collect or arguments.best:
            print(_write(arguments))
            return 0
        comparison = compare(arguments.sources, arguments.out, arguments.plots, arguments.reference)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.markdown)
    print("\n".join(str(path) for path in comparison.paths))
    return 0 if comparison.complete else 1


def _write(arguments: argparse.Namespace) -> str:
    """Do what --collect or --best asks for, and return what to print."""
    runs, unusable = find_runs(arguments.sources)
    for name, why in unusable.items():
        raise ValueError(
            f"normplug.compare: {name} cannot be used: {why}. Delete it, or repeat the run."
        )
    if arguments.collect:
        collect(runs, arguments.collect)
        return f"{len(runs)} runs in {arguments.collect}"
    report, options = best_rates(runs)
    write_file(arguments.best, "".join(f"{shlex.join(of_arm)}\n" for of_arm in options))
    return f"{report}\n{arguments.best}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m normplug.compare",
        description=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("sources", metavar="RUNS", nargs="+", type=Path)
    add("--out", metavar="DIR", help="directory for tables and plots (default: the only RUNS)")
    add("--plots", metavar="NAME", nargs="*", help=f"draw only these, of {', '.join(PLOTS)}")
    add("--reference", metavar="ARM", help="compare with this arm, not baseline or standard")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--best", metavar="FILE", type=Path, help="write each arm's options with its best rate")
    add("--collect", metavar="FILE", type=Path, help="write all runs to this file")
    return parser
