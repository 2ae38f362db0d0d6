"""Measure what norms cost on a GPU, and show what was measured."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from normplug.bench.kernels import OPS, PROVIDERS, run
from normplug.bench.results import write_at_once
from normplug.bench.suites import DTYPES, SUITES, select
from normplug.bench.table import render
from normplug.bench.trace import trace


def kernels(arguments: argparse.Namespace) -> None:
    """Measure a suite."""
    if not torch.cuda.is_available():
        raise SystemExit("normplug.bench needs a CUDA device; torch.cuda.is_available() is False.")
    cases = select(arguments.suite, arguments.op, arguments.dtype, arguments.only)
    if not cases:
        raise SystemExit(f"normplug.bench: no case of the suite {arguments.suite} is left.")
    results = run(cases, arguments.provider or PROVIDERS, arguments.json)
    if arguments.markdown:
        write_at_once(arguments.markdown, render(results.content))
    if arguments.trace:
        trace(cases, arguments.trace, "cuda")


def table(arguments: argparse.Namespace) -> None:
    """Show the rows of a file."""
    try:
        content = json.loads(arguments.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"normplug.bench: {arguments.file} cannot be read: {error}") from None
    markdown = render(content)
    if arguments.out:
        write_at_once(arguments.out, markdown)
    else:
        print(markdown, end="")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("kernels", help="time the norms next to torch's own")
    command.set_defaults(command=kernels)
    command.add_argument("--suite", choices=SUITES, default="headline")
    for name, choices in (("op", OPS), ("dtype", DTYPES), ("provider", PROVIDERS)):
        command.add_argument(
            f"--{name}", choices=choices, action="append", help="may be repeated; default: all"
        )
    command.add_argument(
        "--only", metavar="SUBSTRING", default="", help="of a case, such as 'NHWC 256x512x28x28'"
    )
    command.add_argument("--json", metavar="FILE", type=Path, help="every row, as it is measured")
    command.add_argument("--markdown", metavar="FILE", type=Path, help="the table, at the end")
    command.add_argument("--trace", metavar="FILE", type=Path, help="a Chrome trace of normplug")

    command = commands.add_parser("table", help="make the Markdown table of a JSON file")
    command.set_defaults(command=table)
    command.add_argument("file", metavar="FILE.json", type=Path)
    command.add_argument("-o", "--out", metavar="FILE.md", type=Path, help="default: print it")
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = parser().parse_args(argv)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
