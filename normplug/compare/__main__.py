"""Compare the runs of a study: print the table, write it and the plots.

    python -m normplug.compare RUNS [--out DIR]         table and plots
    python -m normplug.compare RUNS --best FILE         the best learning rate of each arm
    python -m normplug.compare RUNS --collect FILE      all runs in one small file

RUNS are directories, searched at any depth for result.json, or files that --collect wrote.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from normplug._extras import MissingPackage, needs
from normplug.compare import PLOTS, compare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a run is missing, unfinished or failed."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.collect:
            return _collect(arguments.sources, arguments.collect)
        if arguments.best:
            return _best(arguments.sources, arguments.best)
        comparison = compare(arguments.sources, arguments.out, arguments.plots, arguments.reference)
    except (OSError, ValueError, MissingPackage) as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.markdown)
    print("\n".join(str(path) for path in comparison.paths))
    return 0 if comparison.complete else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m normplug.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sources", metavar="RUNS", nargs="+", type=Path)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory for tables and plots (default: RUNS, if it is one directory)",
    )
    parser.add_argument(
        "--plots",
        metavar="NAME",
        nargs="*",
        choices=PLOTS,
        help=f"draw only these, of {', '.join(PLOTS)}",
    )
    parser.add_argument(
        "--reference",
        metavar="ARM",
        help="arm to compare the others with (default: baseline, else standard)",
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--best", metavar="FILE", type=Path, help="write each arm's options with its best rate"
    )
    instead.add_argument("--collect", metavar="FILE", type=Path, help="write all runs to this file")
    return parser


def _best(sources: Sequence[Path], path: Path) -> int:
    with needs("normplug.compare", "train"):
        from normplug.compare.rates import best_rates

    print(f"{best_rates(sources, path)}\n{path}")
    return 0


def _collect(sources: Sequence[Path], path: Path) -> int:
    with needs("normplug.compare", "train"):
        from normplug.compare.collect import collect

    print(f"{collect(sources, path)} runs in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
