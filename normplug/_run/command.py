"""The command line: replace this process by the program, with normplug active in it.

Python imports `site/sitecustomize.py` when the program starts, and again in each Python program
that it starts. Everything else is as without normplug: the command, the process, the input.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from normplug.modes import NormMode

_SITE = os.path.join(os.path.dirname(__file__), "site")
# The options that say which program runs; the others are read in the program.
_COMMAND = ("module", "program", "arguments")


def main(words: Sequence[str]) -> None:
    """Run the program. This function does not return."""
    parser = _parser()
    options = parser.parse_args(words)
    arguments = options.arguments
    if words[-1 - len(arguments)] == "--":  # argparse has removed it
        arguments = ["--", *arguments]
    if sys.flags.ignore_environment or sys.flags.no_site:
        parser.error(
            "normplug cannot take part in the program: omit Python's -E, -I and -S"
        )
    paths = [_SITE, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["NORMPLUG_RUN"] = json.dumps(chosen(words))
    os.environ["NORMPLUG_RUN_PID"] = str(os.getpid())
    command = [*_start(options), *arguments]
    if os.name == "nt":  # where `execv` starts another process, and does not wait for it
        sys.exit(subprocess.call(command))
    try:
        os.execv(command[0], command)
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # a script that names no interpreter
            os.execv(sys.executable, [*_python(), *command])
        parser.error(f"{command[0]}: {error.strerror}")


def chosen(words: Sequence[str] = ("program",)) -> dict[str, Any]:
    """The options that are read in the program, or their defaults."""
    options = vars(_parser().parse_args(words))
    return {name: value for name, value in options.items() if name not in _COMMAND}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m normplug run",
        description="Swap and fuse the models of a program, without editing it.",
    )
    add = parser.add_argument
    add("--mode", type=mode, default="standard", help="standard, golden or a number")
    add("--no-fuse", dest="fuse", action="store_false", help="swap, but do not fuse")
    matches = "norms whose path matches P"
    add("--include", action="append", metavar="P", help=f"only {matches}")
    add("--exclude", action="append", metavar="P", help=f"no {matches}")
    add("--when", choices=("to", "optimizer"), default="to", help=_WHEN)
    add("--devices", choices=("cuda", "any"), default="cuda", help="any: also on the CPU")
    add("--report", type=os.path.abspath, metavar="FILE", help="append the table to FILE")
    add(
        "--check",
        action="store_true",
        help="run normplug.check on the first batch of each model",
    )
    add("--dry-run", action="store_true", help="only report what would be done")
    add("-m", dest="module", action="store_true", help="the program is a module")
    add("program", help="a script, a command, or with -m a module")
    add("arguments", nargs=argparse.REMAINDER, help="arguments of the program")
    return parser


_WHEN = (
    "when a model is swapped; to: when it is moved to a GPU, or when DDP, FSDP, torch.compile or "
    "an optimizer takes it; optimizer: only when one of these takes it"
)


def mode(text: str) -> str | float:
    """Read a mode; a number is returned as one."""
    value: Any = text
    with suppress(ValueError):
        value = float(text)
    try:
        NormMode(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return value


def _start(options: argparse.Namespace) -> list[str]:
    """The first words of the command, as a shell would find them."""
    found = shutil.which(options.program)
    if found and not options.module and not found.endswith(".py"):
        return [found]
    kind = ["-m"] if options.module else []
    return [*_python(), *kind, options.program]


def _python() -> list[str]:
    """Python, with its own options, which stand before `-m normplug`."""
    own = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    flags = own[:-2] if own[-2:] == ["-m", "normplug"] else []
    return [sys.executable, *flags]
