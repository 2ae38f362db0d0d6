"""Measure what norms cost on a GPU; make tables and pictures of the results."""

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from normplug._extras import needs
from normplug._report.files import write_file
from normplug.bench import models as steps
from normplug.bench import nets, rivals
from normplug.bench.kernels import OPS, PROVIDERS, run
from normplug.bench.results import KERNELS, MODELS, PROFILE, Kind, read
from normplug.bench.suites import DTYPES, SUITES, select
from normplug.bench.sync import add_command
from normplug.bench.table import render
from normplug.bench.trace import trace

Shown = TypeVar("Shown")


def kernels(arguments: argparse.Namespace) -> None:
    """Measure a suite."""
    there = rivals.installed()
    for provider in arguments.provider or ():
        if (package := rivals.PACKAGES.get(provider)) and provider not in there:
            raise SystemExit(f"normplug.bench: {provider} needs the package {package}.")
    _require_cuda()
    cases = select(arguments.suite, arguments.op, arguments.dtype, arguments.only)
    if not cases:
        raise SystemExit(f"normplug.bench: no case of suite {arguments.suite} passes the filters.")
    results = run(cases, arguments.provider or (*PROVIDERS, *there), arguments.json)
    if arguments.markdown:
        write_file(arguments.markdown, render(results.content))
    if arguments.trace:
        trace(cases, arguments.trace, "cuda")


def models(arguments: argparse.Namespace) -> None:
    """Measure whole training steps."""
    with needs("normplug.bench models", "bench", SystemExit):
        import torchvision  # noqa: F401
    _require_cuda()
    arms = [arm for arm in steps.ARMS if arm in (arguments.arm or steps.ARMS)]
    cases = nets.select(arguments.model, arguments.batch)
    results = steps.run(cases, arms, arguments.json, arguments.profile)
    if not results.content["rows"]:
        raise SystemExit("normplug.bench: every arm was left out.")
    if arguments.markdown:
        write_file(arguments.markdown, render(results.content))


def table(arguments: argparse.Namespace) -> None:
    """Print or write the Markdown table of a JSON file."""
    markdown = _shown("table", arguments.file, (KERNELS, MODELS, PROFILE), render)
    if arguments.out:
        write_file(arguments.out, markdown)
    else:
        print(markdown, end="")


def plot(arguments: argparse.Namespace) -> None:
    """Draw the picture of a JSON file."""
    with needs("normplug.bench plot", "bench", SystemExit):
        from normplug._report.figures import save_figure
        from normplug.bench.plot import draw
    figure = _shown("plot", arguments.file, (KERNELS, MODELS), draw)
    save_figure(figure, arguments.out or arguments.file.with_suffix(".png"))


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("normplug.bench needs a CUDA device; torch.cuda.is_available() is False.")


def number(text: str) -> int:
    """A positive integer of the command line."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def _add_choices(command: argparse.ArgumentParser, **options: Iterable[str]) -> None:
    for name, choices in options.items():
        command.add_argument(
            f"--{name}",
            choices=tuple(choices),
            action="append",
            help="may be repeated; default: all",
        )


def _add_outputs(command: argparse.ArgumentParser) -> None:
    for name, what in (("json", "all rows, written after each"), ("markdown", "the table")):
        command.add_argument(f"--{name}", metavar="FILE", type=Path, help=what)


def _shown(
    command: str, path: Path, kinds: Collection[Kind], show: Callable[[dict[str, Any]], Shown]
) -> Shown:
    caller = f"normplug.bench {command}"
    try:
        content = read(path, kinds)
    except ValueError as error:
        raise SystemExit(f"{caller}: {error}") from None
    try:
        return show(content)
    except KeyError as error:
        raise SystemExit(f"{caller}: {path} lacks {error}.") from None
    except ValueError as error:
        raise SystemExit(f"{caller}: {path}: {error}") from None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("kernels", help="time the norms next to torch's own")
    command.set_defaults(command=kernels)
    command.add_argument("--suite", choices=SUITES, default="headline")
    providers = (*PROVIDERS, *rivals.PACKAGES)
    _add_choices(command, op=OPS, dtype=DTYPES, provider=providers)
    command.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="only cases whose name contains this, such as 'NHWC 256x512x28x28'",
    )
    _add_outputs(command)
    command.add_argument("--trace", metavar="FILE", type=Path, help="a Chrome trace of our calls")

    command = commands.add_parser("models", help="time whole training steps, swapped and not")
    command.set_defaults(command=models)
    _add_choices(command, model=nets.MODELS, arm=steps.ARMS)
    command.add_argument(
        "--batch", metavar="N", type=number, help="images a step; default: each model's own"
    )
    _add_outputs(command)
    command.add_argument(
        "--profile", metavar="FILE.json", type=Path, help="GPU time by kind of kernel; see `table`"
    )

    command = commands.add_parser("table", help="make the Markdown table of a JSON file")
    command.set_defaults(command=table)
    command.add_argument("file", metavar="FILE.json", type=Path)
    command.add_argument("-o", "--out", metavar="FILE.md", type=Path, help="default: print it")

    command = commands.add_parser("plot", help="draw the speed of LayerNorm or of training steps")
    command.set_defaults(command=plot)
    command.add_argument("file", metavar="FILE.json", type=Path)
    command.add_argument(
        "-o", "--out", metavar="FILE.png", type=Path, help="default: beside the JSON file"
    )

    add_command(commands, number)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = parser().parse_args(argv)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
