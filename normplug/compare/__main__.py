"""Compare the runs of a study: print the table, and write it and the plots."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from normplug._files import write_file
from normplug.compare.comparison import compare
from normplug.compare.report import best_rates
from normplug.compare.runs import collect, find_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a run is missing, unfinished or failed."""
    options = vars(_parser().parse_args(argv))
    sources = options.pop("sources")
    best = options.pop("best")
    collected = options.pop("collect")
    try:
        if best or collected:
            _write(sources, best, collected)
            return 0
        comparison = compare(*sources, **options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.markdown, *comparison.paths, sep="\n")
    return 0 if comparison.complete else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m normplug.compare", description=__doc__)
    add = parser.add_argument
    text = "directories of runs, or files"
    add("sources", metavar="RUNS", nargs="+", type=Path, help=text)
    text = "directory for tables and plots (default: the only RUNS)"
    add("--out", metavar="DIR", help=text)
    add("--plots", action="store_true", help="also draw the runs")
    add("--reference", metavar="ARM", help="compare with this arm instead of standard")
    text = "test whether differences are within ± M (TOST)"
    add("--margin", metavar="M", type=float, help=text)
    text = "average an arm's runs over learning rates"
    add("--over-rates", action="store_true", help=text)
    text = "compare only the runs with this learning rate"
    add("--rate", metavar="LR", type=float, help=text)
    add = parser.add_mutually_exclusive_group().add_argument
    text = "write each arm's options with its best rate"
    add("--best", metavar="FILE", type=Path, help=text)
    add("--collect", metavar="FILE", type=Path, help="write all runs to this file")
    return parser


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
        write_file(best, "".join(f"{shlex.join(words)}\n" for words in options))
        print(f"{report}\n{best}")


if __name__ == "__main__":
    sys.exit(main())
