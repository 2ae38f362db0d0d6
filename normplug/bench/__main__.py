"""Measure what norms cost, and make tables and plots of the results."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from normplug._extras import needs
from normplug._results import write_file
from normplug.bench import models, op, show, targets, timing
from normplug.bench.ops import OPS, Case, Problem
from normplug.bench.rows import add_to_file, read_file

WIDTHS, ROWS = [2**n for n in range(8, 16)], 4096  # of a sweep: 256 to 32768
SMALL_WIDTHS, FEW_ROWS = [256, 1024, 4096], 512  # on a CPU
LAST = torch.channels_last
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _model(arguments: argparse.Namespace) -> None:
    device = _device(arguments)
    name = arguments.autocast or ("bfloat16" if device.type == "cuda" else "none")
    with _one_line("model"):
        model, batch, step = targets.load(
            arguments.target, arguments.batch, dict(map(_option, arguments.option))
        )
    if arguments.channels_last:
        model, batch = model.to(memory_format=LAST), pytree.tree_map_only(Tensor, _last, batch)
    measured = models.measure(
        model.to(device),
        batch,
        step,
        mode=_mode(arguments.mode),
        autocast=None if name == "none" else getattr(torch, name),
        rounds=arguments.rounds,
    )
    print(measured)
    if arguments.json:
        facts = {"model": arguments.target, "batch": arguments.batch}
        with _one_line("model"):
            add_to_file(arguments.json, [facts | row for row in measured])


def _last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=LAST) if tensor.dim() == 4 else tensor


def _op(arguments: argparse.Namespace) -> None:
    device, chosen = _device(arguments), OPS[arguments.name]
    for shape in arguments.shape:
        if refusal := chosen.refusal(shape):
            shown = "x".join(map(str, shape))
            raise SystemExit(f"normplug.bench op: {arguments.name} {refusal}; got {shown}.")
    cases = [
        Case(arguments.name, layout, shape, dtype)
        for shape in arguments.shape
        for layout in chosen.layouts(shape)
        for dtype in arguments.dtype or ["float32"]
    ]
    mode = _mode(arguments.mode)
    with _one_line("op"):
        for rows in op.run(cases, device, arguments.json, eps=arguments.eps, mode=mode):
            print(rows, flush=True)


def _sweep(arguments: argparse.Namespace) -> None:
    device = _device(arguments)
    small = device.type == "cpu"
    if small:
        print("normplug.bench sweep: a small sweep, as it runs on the CPU", file=sys.stderr)
    height = arguments.rows or (FEW_ROWS if small else ROWS)
    widths = arguments.width or (SMALL_WIDTHS if small else WIDTHS)
    cases = [Case("layer_norm", "rows", (height, width), arguments.dtype) for width in widths]
    with needs("normplug.bench sweep", "bench", SystemExit):
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401
    folder: Path = arguments.out
    (folder / "sweep.json").unlink(missing_ok=True)
    found = [row for rows in op.run(cases, device, folder / "sweep.json") for row in _told(rows)]
    show.draw(found, folder / "sweep.png")
    problem = Problem(cases[-1], device)
    for name, function in (("normplug", problem.op.ours), ("torch", problem.op.theirs)):
        call = problem.calls(function)["F+B"]
        call()
        timing.trace(call, folder / f"trace_{name}.json", steps=3)
    print(f"{folder}: sweep.json, sweep.png, trace_normplug.json, trace_torch.json")


def _told(rows: Any) -> Any:
    print(rows, flush=True)
    return rows


def _table(arguments: argparse.Namespace) -> None:
    with needs("normplug.bench table", "bench", SystemExit), _one_line("table", arguments.file):
        text = show.render(read_file(arguments.file))
    if arguments.out:
        write_file(arguments.out, text)
    else:
        print(text, end="")


def _plot(arguments: argparse.Namespace) -> None:
    path = arguments.out or arguments.file.with_suffix(".png")
    with needs("normplug.bench plot", "bench", SystemExit), _one_line("plot", arguments.file):
        show.draw(read_file(arguments.file), path)
    print(path)


@contextmanager
def _one_line(command: str, path: Path | None = None) -> Iterator[None]:
    """End the command with one line if its input is wrong."""
    try:
        yield
    except (ValueError, TypeError) as error:
        told = "" if path is None or str(path) in str(error) else f"{path}: "
        raise SystemExit(f"normplug.bench {command}: {told}{error}") from None


def _device(arguments: argparse.Namespace) -> torch.device:
    """The device to measure on; a host path in C++ is built before, as calls do not wait for it."""
    if arguments.device is None and not torch.cuda.is_available():
        print("normplug.bench: no CUDA device, so it runs on the CPU", file=sys.stderr, flush=True)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("normplug.bench: --device cuda, but there is no CUDA device.")
        subprocess.run([sys.executable, "-m", "normplug.native", "build"])  # it says if it fails
    return device


def _mode(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _option(text: str) -> tuple[str, Any]:
    key, is_one, value = text.partition("=")
    if not is_one:
        raise SystemExit(f"normplug.bench model: an option is NAME=VALUE; got {text!r}.")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be sizes joined by x, as 512x8192; got {text!r}")
    return tuple(map(int, parts))


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    path: Any = partial(dict, metavar="FILE", type=Path)

    def command(name: str, run: Any, text: str) -> Any:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(command=run)
        return made.add_argument

    add = command("model", _model, "time training steps of a model, swapped and stock")
    add("target", help="a name of torchvision, timm or transformers, or file.py:function")
    add("option", nargs="*", help="NAME=VALUE, for the model or the function")
    add("--batch", metavar="N", type=int, help="samples; default: 8, or the function's own")
    add("--mode", default="standard", help="default: standard")
    add("--autocast", choices=("none", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    add("--channels-last", action="store_true", help="channels_last memory")
    add("--rounds", metavar="N", type=int, help="turns of each arm; default: 10, slow models 3")
    add("--device", help="default: cuda if there is one")
    add("--json", **path(help="append the rows to this file"))

    add = command("op", _op, "time one operation, and compare it with PyTorch's")
    add("name", choices=OPS, metavar="NAME", help=", ".join(OPS))
    add("--shape", metavar="SIZES", type=_shape, action="append", required=True, help="512x8192")
    add("--dtype", choices=DTYPES, action="append", help="may be repeated; default: float32")
    add("--eps", type=float, help="default: 1e-6 for RMSNorm, 1e-5 for others")
    add("--mode", default="golden", help="default: golden")
    add("--device", help="default: cuda if there is one")
    add("--json", **path(help="append the rows to this file"))

    add = command("sweep", _sweep, "LayerNorm over widths: rows, plot and both traces")
    add("--rows", metavar="N", type=int, help=f"default: {ROWS}; on a CPU {FEW_ROWS}")
    add("--width", metavar="N", type=int, action="append", help="default: 256, 512, ..., 32768")
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add("--device", help="default: cuda if there is one")
    add("-o", "--out", **path(default=Path("sweep"), help="a folder; default: sweep"))

    for name, run, text in (
        ("table", _table, "make a Markdown table of a file of rows"),
        ("plot", _plot, "plot a file of rows"),
    ):
        add = command(name, run, text)
        add("file", **path())
        add("-o", "--out", **path(help="default: print it" if name == "table" else "a PNG"))
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments = _parser().parse_args(argv)
    arguments.command(arguments)


if __name__ == "__main__":
    main()
