"""Swap the norms of other libraries' architectures, and compare each with the stock model.

The exit status is 1 if a comparison fails, or if a library that was asked for is not installed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

# `zoo` and the checkout's normplug.
sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])

from normplug._files import write_file  # noqa: E402
from zoo.run import LIBRARIES, run  # noqa: E402
from zoo.table import render, summary  # noqa: E402


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(prog="python benchmarks/zoo", description=__doc__)
    top.add_argument(
        "--library",
        choices=LIBRARIES,
        action="append",
        help="may be repeated; default: all",
    )
    top.add_argument("--only", metavar="GLOB", default="*", help="only names that match")
    top.add_argument("--all", action="store_true", help="include large architectures")
    top.add_argument(
        "--device",
        default="cpu",
        help="any but cpu computes in float64, deterministically",
    )
    top.add_argument(
        "--json", metavar="FILE", type=Path, help="all rows, rewritten after each one"
    )
    top.add_argument("--markdown", metavar="FILE", type=Path, help="the table")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parser().parse_args(argv)
    libraries = arguments.library or list(LIBRARIES)
    if arguments.device != "cpu":
        _make_deterministic()
    rows, missing = run(
        libraries,
        only=arguments.only,
        large=arguments.all,
        device=torch.device(arguments.device),
        path=arguments.json,
    )
    if not rows:
        if missing != set(libraries):
            print(f"zoo: no architecture matches {arguments.only!r}", file=sys.stderr)
        return 1
    if arguments.markdown:
        write_file(arguments.markdown, render(rows))
    print(summary(rows))
    lacking = bool(arguments.library and missing)
    return int(lacking or any(row["result"] == "failed" for row in rows))


def _make_deterministic() -> None:
    """Make two runs on a GPU give the same bits, so that their digests can be compared."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # some models read it


if __name__ == "__main__":
    sys.exit(main())
