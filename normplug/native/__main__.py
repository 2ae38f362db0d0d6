"""`python -m normplug.native build|status`."""

from __future__ import annotations

import argparse
import sys

from normplug import native
from normplug.native import building


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m normplug.native", description=__doc__)
    parser.add_argument(
        "command",
        choices=("build", "status"),
        help="build: compile the host path and wait for it; status: say whether it is compiled",
    )
    command = parser.parse_args(arguments).command
    try:
        if command == "build":
            print(native.build())
        else:
            library = building.library()
            print(library if library.exists() else f"Not compiled yet: {library}")
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
