"""Compile the host path in C++, or print where it is; exit status 1 unless it is compiled."""

from __future__ import annotations

import argparse
import sys

from normplug import native
from normplug.native import building


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m normplug.native", description=__doc__)
    parser.add_argument(
        "command",
        choices=("build", "status"),
        help="build: compile it and wait; status: print the compiled file, or why there is none",
    )
    command = parser.parse_args(arguments).command
    try:
        if command == "build":
            library = native.build()
        elif (library := building.library()).exists():
            building.load(library)
        else:
            raise RuntimeError(building.failure(library) or f"{library} is not compiled yet")
    except (ImportError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    print(library)
    return 0


if __name__ == "__main__":
    sys.exit(main())
