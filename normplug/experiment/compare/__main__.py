"""Compare the runs of a study: print the table, write it and the plots.

    python -m normplug.compare RUNS [--out DIR]         table and plots
    python -m normplug.compare RUNS --best FILE         the best learning rate of each arm
    python -m normplug.compare RUNS --collect FILE      all runs in one small file

RUNS are directories, searched at any depth for result.json, or files that --collect wrote.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from normplug._results import write_file
from normplug.experiment.compare import PLOTS, compare
from normplug.experiment.compare.frame import collect, find_runs
from normplug.experiment.compare.report import best_rates


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
        description=__doc__,
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


if __name__ == "__main__":
    sys.exit(main())
