"""Compare the runs of a directory: print the table, and write it and the plots."""

import argparse
import sys
from collections.abc import Sequence

from normplug._extras import MissingPackage
from normplug.compare import compare


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 1 if a run is missing, unfinished or failed."""
    parser = argparse.ArgumentParser(prog="python -m normplug.compare", description=__doc__)
    parser.add_argument("directory", metavar="DIR", help="searched at any depth for result.json")
    parser.add_argument("--out", metavar="DIR", help="for tables and plots; default: the first DIR")
    arguments = parser.parse_args(argv)
    try:
        comparison = compare(arguments.directory, arguments.out)
    except (OSError, ValueError, MissingPackage) as error:
        print(error, file=sys.stderr)
        return 1
    print(comparison.markdown)
    print("\n".join(str(path) for path in comparison.paths))
    return 0 if comparison.complete else 1


if __name__ == "__main__":
    sys.exit(main())
