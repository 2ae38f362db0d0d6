"""What the scripts have in common: options, and where their rows go."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from normplug.bench.rows import Rows, report
from normplug.bench.timing import ready


def main(
    about: str,
    measure: Callable[[Namespace], Iterable[Rows]],
    options: Mapping[str, Mapping[str, Any]],
    argv: Sequence[str] | None = None,
) -> None:
    """Run the command line of a script: print the rows, and append them to the file.

    Args:
        about: the docstring of the script; its first line is shown.
        measure: yields rows for the values of the options.
        options: the name of an option -> the keyword arguments of `add_argument`.
        argv: the words of the command line.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    for name, how in options.items():
        parser.add_argument(name, **how)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file"
    )
    a = parser.parse_args(argv)
    a.device = ready(a.device)
    report(measure(a), a.json)
