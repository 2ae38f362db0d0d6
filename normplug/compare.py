"""Compare the runs of a study: print the table, write it and the plots."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normplug._checks import MissingPackage, needs
from normplug._files import write_file

with needs(
    "normplug.compare", "train", SystemExit if __name__ == "__main__" else MissingPackage
):
    import pandas as pd

    from normplug._compare.plots import draw
    from normplug._compare.report import best_rates, render
    from normplug._compare.runs import collect, find_runs, group_runs

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found."""

    table: pd.DataFrame  # of summary.csv: a row for each (model, data, arm)
    markdown: str  # the report
    paths: list[Path]  # the files written
    complete: bool  # whether every arm has a finished run of every seed that any arm has


def compare(
    *sources: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    reference: str | None = None,
    margin: float | None = None,
    over_rates: bool = False,
    rate: float | None = None,
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

    Raises:
        OSError: a source cannot be read.
        ValueError: a source is not there, or holds no run; no run has `rate` or `reference`; `out`
            is None, and `sources` is not a single directory.
    """
    paths = [Path(source) for source in sources]
    runs, unusable = find_runs(paths)
    if out is None and (len(paths) > 1 or paths[0].is_file()):
        raise ValueError(
            "normplug.compare: with several sources or a collected file, tables and plots need a "
            "directory of their own. Name it: --out DIR."
        )
    if rate is not None and rate not in (
        rates := sorted(set(runs.learning_rate.dropna()))
    ):
        raise ValueError(
            f"normplug.compare: no run has the learning rate {rate:g}, only {rates}."
        )
    runs = runs if rate is None else runs[runs.learning_rate == rate]
    target = Path(out or paths[0])
    groups = group_runs(runs, reference, margin, over_rates)
    where = " and ".join(path.name if path.is_file() else str(path) for path in paths)
    markdown = render(groups, unusable, where)
    table = pd.concat(
        [group.table for group in groups] or [pd.DataFrame()], ignore_index=True
    )
    files = {"summary.md": markdown, "summary.csv": table.to_csv(index=False)}
    for name, content in files.items():
        write_file(target / name, content)
    written = [*(target / name for name in files), *draw(groups, target)]
    complete = not unusable and bool((table.n_finished == table.n_expected).all())
    return Comparison(table, markdown, written, complete)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a run is missing, unfinished or failed."""
    parser = argparse.ArgumentParser("python -m normplug.compare", description=__doc__)
    add = parser.add_argument
    add(
        "sources",
        metavar="RUNS",
        nargs="+",
        type=Path,
        help="directories of runs, or files",
    )
    add(
        "--out",
        metavar="DIR",
        help="directory for tables and plots (default: the only RUNS)",
    )
    add("--reference", metavar="ARM", help="compare with this arm, not standard")
    add(
        "--margin",
        metavar="M",
        type=float,
        help="test whether differences are within ± M (TOST)",
    )
    add(
        "--over-rates",
        action="store_true",
        help="average an arm's runs over learning rates",
    )
    add(
        "--rate",
        metavar="LR",
        type=float,
        help="compare only the runs with this learning rate",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    add(
        "--best",
        metavar="FILE",
        type=Path,
        help="write each arm's options with its best rate",
    )
    add("--collect", metavar="FILE", type=Path, help="write all runs to this file")
    options = vars(parser.parse_args(argv))
    sources, best, collected = map(options.pop, ("sources", "best", "collect"))
    try:
        if best or collected:
            _write(sources, best, collected)
            return 0
        found = compare(*sources, **options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(found.markdown, *found.paths, sep="\n")
    return 0 if found.complete else 1


def _write(sources: Sequence[Path], best: Path | None, collected: Path | None) -> None:
    """Write the file of --best or --collect."""
    runs, unusable = find_runs(sources)
    for name, why in unusable.items():
        raise ValueError(
            f"normplug.compare: {name} cannot be used: {why}. Delete it, or repeat the run."
        )
    if collected:
        collect(runs, collected)
        print(f"{len(runs)} runs in {collected}")
    if best:
        report, options = best_rates(runs)
        write_file(best, "".join(f"{shlex.join(of_arm)}\n" for of_arm in options))
        print(f"{report}\n{best}")


if __name__ == "__main__":
    sys.exit(main())
