"""Compile the C++ launcher, or print where it is; exit status 1 unless it is compiled."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from normplug import native
from normplug.native import building


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m normplug.native", description=__doc__
    )
    parser.add_argument(
        "command",
        choices=("build", "status"),
        help="build: compile it and wait; status: print the compiled file, if there is one",
    )
    command = parser.parse_args(arguments).command
    try:
        print(native.build() if command == "build" else compiled())
    except (ImportError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def compiled() -> Path:
    """The compiled file, checked to load."""
    library = building.library()
    if not library.exists():
        raise RuntimeError(f"{library} is not compiled yet")
    building.load(library)
    return library


if __name__ == "__main__":
    sys.exit(main())
