"""Measure what norms cost, and make tables and plots of the results."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from normplug._extras import MissingPackage, needs
from normplug._report.files import write_file
from normplug.bench import first_step, host, nets, rivals
from normplug.bench import models as steps
from normplug.bench.kernels import CPU, OPS, PROVIDERS, own_cases, run
from normplug.bench.results import HOST, KERNELS, MODELS, PROFILE, Kind, Results, read
from normplug.bench.suites import DTYPES, NORMS, SUITES, WITH_CPU, Case, Shape, select
from normplug.bench.sync import add_command
from normplug.bench.table import TABLES, render
from normplug.bench.trace import trace

ALL = "all"
SUITE = "headline"  # the default
Shown = TypeVar("Shown")


def kernels(arguments: argparse.Namespace) -> None:
    """Measure a suite, or the shapes of the command line."""
    cases = _cases(arguments)
    if not cases:
        raise SystemExit(f"normplug.bench: no case of {_source(arguments)} passes the filters.")
    providers = _providers(arguments)
    _require_cuda()
    results = run(cases, providers, arguments.json)
    if arguments.markdown:
        write_file(arguments.markdown, render(KERNELS, results.content))
    if arguments.trace:
        trace(cases, arguments.trace, "cuda")


def _source(arguments: argparse.Namespace) -> str:
    return "--shape" if arguments.shape else f"suite {arguments.suite or SUITE}"


def _cases(arguments: argparse.Namespace) -> list[Case]:
    if not arguments.shape:
        suite = arguments.suite or SUITE
        return select(suite, arguments.op, arguments.dtype, arguments.only)
    if arguments.suite:
        raise SystemExit("normplug.bench: --shape and --suite exclude each other; give only one.")
    try:
        cases = own_cases(arguments.shape, arguments.op, arguments.dtype)
    except ValueError as error:
        raise SystemExit(f"normplug.bench: {error}") from None
    return [case for case in cases if arguments.only in str(case)]


def _providers(arguments: argparse.Namespace) -> list[str]:
    """The providers to measure; print those that are left out because they are not installed."""
    usual = (*PROVIDERS, *rivals.PACKAGES, *((CPU,) if arguments.suite in WITH_CPU else ()))
    asked = arguments.provider or usual
    missing = rivals.missing(asked)
    if missing:
        named = ", ".join(f"{name} ({package.distribution})" for name, package in missing.items())
        print(f"normplug.bench: not installed, and left out: {named}", file=sys.stderr)
    if len(missing) == len(asked):
        raise SystemExit("normplug.bench: none of the providers is installed.")
    return [name for name in asked if name not in missing]


def models(arguments: argparse.Namespace) -> None:
    """Measure whole training steps, or only the first."""
    others = {"--profile": arguments.profile, "--rounds": arguments.rounds}
    given = ", ".join(f"{option} {value}" for option, value in others.items() if value)
    if arguments.first_step and given:
        raise SystemExit(
            "normplug.bench models: --first-step times one step, without rounds or a profile; got "
            f"{given}. Leave that out, or leave out --first-step."
        )
    names = nets.MODELS if ALL in arguments.rows else arguments.rows
    cases = _with_library(nets.select(list(names), arguments.batch))
    arms = [arm for arm in steps.ARMS if arm in arguments.arms or ALL in arguments.arms]
    _require_cuda()
    results = _resumed(arguments.json, MODELS)
    if arguments.first_step:
        done = first_step.run(cases, arms, results)
    else:
        profiles = _resumed(arguments.profile, PROFILE) if arguments.profile else None
        done = steps.run(cases, arms, arguments.rounds or steps.ROUNDS, results, profiles)
    if not done:
        raise SystemExit("normplug.bench: every arm was left out.")
    if arguments.markdown:
        write_file(arguments.markdown, render(MODELS, results.content))


def _with_library(cases: Sequence[nets.Case]) -> list[nets.Case]:
    """The cases whose library is installed; print what the others need."""
    for library, extra in nets.EXTRAS.items():
        need = [case for case in cases if nets.MODELS[case.model].library == library]
        if not need:
            continue
        try:
            with needs("normplug.bench models", extra):
                import_module(library)
        except MissingPackage as missing:
            cases = [case for case in cases if case not in need]
            if not cases:
                raise SystemExit(str(missing)) from None
            print(f"{missing} (left out: {'; '.join(map(str, need))})", file=sys.stderr)
    return list(cases)


def _resumed(path: Path | None, kind: Kind) -> Results:
    try:
        return Results(path, kind, steps.PACKAGES, resume=True, settings=steps.SETTINGS)
    except ValueError as error:
        raise SystemExit(f"normplug.bench models: {error}") from None


def single_calls(arguments: argparse.Namespace) -> None:
    """Measure single calls back to back."""
    cases = [case for case in host.CASES if arguments.only in str(case)]
    if not cases:
        raise SystemExit(f"normplug.bench host: no case has {arguments.only!r} in its name.")
    providers = arguments.provider or host.PROVIDERS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = host.run(cases, providers, arguments.calls, arguments.out, device)
    print(render(HOST, results.content))


def table(arguments: argparse.Namespace) -> None:
    """Print or write the Markdown table of a JSON file."""
    markdown = _shown("table", arguments.file, TABLES, render)
    if arguments.out:
        write_file(arguments.out, markdown)
    else:
        print(markdown, end="")


def plot(arguments: argparse.Namespace) -> None:
    """Plot a JSON file."""
    with needs("normplug.bench plot", "bench", SystemExit):
        from normplug._report.figures import save_figure
        from normplug.bench.plot import draw
    show = partial(draw, norm=arguments.norm, dtypes=arguments.dtype or ())
    figure = _shown("plot", arguments.file, (KERNELS, MODELS, HOST), show)
    save_figure(figure, arguments.out or arguments.file.with_suffix(".png"))


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("normplug.bench needs a CUDA device; torch.cuda.is_available() is False.")


def number(text: str) -> int:
    """Parse a positive integer."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def sizes(text: str) -> Shape:
    """Parse a shape, such as 512x8192."""
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be sizes of at least 1, joined by x, such as 512x8192; got {text!r}"
        )
    return tuple(map(int, parts))


def _add_choices(
    command: argparse.ArgumentParser, default: str = "all", **options: Iterable[str]
) -> None:
    for name, choices in options.items():
        command.add_argument(
            f"--{name}",
            choices=tuple(choices),
            action="append",
            help=f"only this {name}; may be repeated; default: {default}",
        )


def _add_outputs(command: argparse.ArgumentParser) -> None:
    for name, what in (("json", "all rows, rewritten after each one"), ("markdown", "the table")):
        command.add_argument(f"--{name}", metavar="FILE", type=Path, help=f"output: {what}")


def _shown(
    command: str, path: Path, kinds: Collection[Kind], show: Callable[[Kind, dict[str, Any]], Shown]
) -> Shown:
    caller = f"normplug.bench {command}"
    try:
        kind, content = read(path, kinds)
    except ValueError as error:
        raise SystemExit(f"{caller}: {error}") from None
    if not content["rows"]:
        raise SystemExit(f"{caller}: {path} has no rows: its run ended before the first one.")
    try:
        return show(kind, content)
    except KeyError as error:
        raise SystemExit(f"{caller}: {path} lacks {error}.") from None
    except ValueError as error:
        raise SystemExit(f"{caller}: {path}: {error}") from None


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("kernels", help="time each norm against other implementations")
    command.set_defaults(command=kernels)
    command.add_argument("--suite", choices=SUITES, help=f"the cases to time; default: {SUITE}")
    command.add_argument(
        "--shape",
        metavar="SIZES",
        type=sizes,
        action="append",
        help="time this shape, such as 512x8192, instead of a suite; may be repeated",
    )
    _add_choices(command, op=OPS, dtype=DTYPES)
    usual = f"all that are installed; {CPU} only with --suite {' or '.join(WITH_CPU)}"
    _add_choices(command, usual, provider=(*PROVIDERS, *rivals.PACKAGES, CPU))
    command.add_argument(
        "--only",
        metavar="TEXT",
        default="",
        help="only cases whose name contains this, such as 'NHWC 256x512x28x28'",
    )
    _add_outputs(command)
    command.add_argument(
        "--trace",
        metavar="FILE",
        type=Path,
        help="output: a Chrome trace, with one call of torch and one of normplug per case",
    )

    command = commands.add_parser("models", help="time whole training steps, swapped and stock")
    command.set_defaults(command=models)
    for name, choices, default in (
        ("rows", nets.MODELS, (ALL,)),
        ("arms", steps.ARMS, steps.USUAL),
    ):
        command.add_argument(
            f"--{name}",
            nargs="+",
            metavar="NAME",
            choices=(ALL, *choices),
            default=default,
            help=f"{ALL}, or some of {', '.join(choices)}; default: {' '.join(default)}",
        )
    command.add_argument(
        "--batch", metavar="N", type=number, help="samples per step; default: each model's own"
    )
    command.add_argument(
        "--rounds",
        metavar="N",
        type=number,
        help=f"rounds, with a turn of every arm in each; default: {steps.ROUNDS}",
    )
    command.add_argument(
        "--first-step",
        action="store_true",
        help="time only the first step of each arm, in a new process with an empty kernel cache",
    )
    _add_outputs(command)
    command.add_argument(
        "--profile",
        metavar="FILE.json",
        type=Path,
        help="output: GPU time by group of kernels, for the command table",
    )

    command = commands.add_parser("host", help="time single calls back to back")
    command.set_defaults(command=single_calls)
    _add_choices(command, provider=host.PROVIDERS)
    command.add_argument(
        "--only", metavar="TEXT", default="", help="only cases whose name contains this"
    )
    command.add_argument(
        "--calls",
        metavar="N",
        type=number,
        default=host.CALLS,
        help=f"at most this many calls per repeat; default: {host.CALLS}",
    )
    command.add_argument(
        "-o", "--out", metavar="FILE.json", type=Path, help="all rows, rewritten after each one"
    )

    command = commands.add_parser("table", help="make a Markdown table of a JSON file")
    command.set_defaults(command=table)
    command.add_argument("file", metavar="FILE.json", type=Path)
    command.add_argument("-o", "--out", metavar="FILE.md", type=Path, help="default: print it")

    command = commands.add_parser("plot", help="plot a JSON file")
    command.set_defaults(command=plot)
    command.add_argument("file", metavar="FILE.json", type=Path)
    command.add_argument(
        "-o", "--out", metavar="FILE.png", type=Path, help="default: next to the JSON file"
    )
    command.add_argument(
        "--norm", choices=NORMS, help="for a file of kernels; default: the first norm in it"
    )
    _add_choices(command, dtype=DTYPES)

    add_command(commands, number)
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = parser().parse_args(argv)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
