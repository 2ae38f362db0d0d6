"""Measure what norms cost, and make tables and plots of the results."""

from __future__ import annotations

import argparse
import ast
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normplug import _torch
from normplug._checks import needs
from normplug._results import write_file
from normplug.bench import models, op, targets, timing
from normplug.bench.ops import OPS, Problem, cases
from normplug.bench.rows import add_to_file, read_file

WIDTHS, ROWS = [2**n for n in range(8, 16)], 4096  # of a sweep: 256 to 32768
SMALL_WIDTHS, FEW_ROWS = [256, 1024, 4096], 512  # on a CPU
LAST = torch.channels_last
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _model(a: Namespace) -> None:
    model, batch, step = targets.load(a.target, a.batch, dict(map(_option, a.option)))
    if a.channels_last:
        model = model.to(memory_format=LAST)
        batch = _torch.tree_map_only(
            Tensor, lambda t: t.contiguous(memory_format=LAST) if t.dim() == 4 else t, batch
        )
    name = a.autocast or ("bfloat16" if a.device.type == "cuda" else "none")
    autocast = None if name == "none" else getattr(torch, name)
    how = {"mode": a.mode, "autocast": autocast, "rounds": a.rounds}
    measured = models.measure(model.to(a.device), batch, step, **how)
    print(measured)
    add_to_file(a.json, [{"model": a.target, "batch": a.batch, **row} for row in measured])


def _op(a: Namespace) -> None:
    chosen = cases([a.name], a.shape, a.dtype or ["float32"])
    for rows in op.run(chosen, a.device, a.json, eps=a.eps, mode=a.mode):
        print(rows, flush=True)


def _sweep(a: Namespace) -> None:
    show = _show(a)  # before hours of measurements
    small = a.device.type == "cpu"
    if small:
        print("normplug.bench sweep: a small sweep, as it runs on the CPU", file=sys.stderr)
    height, widths = (FEW_ROWS, SMALL_WIDTHS) if small else (ROWS, WIDTHS)
    shapes = [(a.rows or height, width) for width in a.width or widths]
    chosen = cases(["layer_norm"], shapes, [a.dtype])
    file = a.out / "sweep.json"
    file.unlink(missing_ok=True)
    for rows in op.run(chosen, a.device, file):
        print(rows, flush=True)
    show.draw(read_file(file), a.out / "sweep.png")
    problem = Problem(chosen[-1], a.device)
    for name, function in (("normplug", problem.op.ours), ("torch", problem.op.theirs)):
        call = problem.calls(function)["F+B"]
        call()
        timing.trace(call, a.out / f"trace_{name}.json", steps=3)
    print(f"{a.out}: sweep.json, sweep.png, trace_normplug.json, trace_torch.json")


def _table(a: Namespace) -> None:
    text = _show(a).render(read_file(a.file))
    if a.out:
        write_file(a.out, text)
    else:
        print(text, end="")


def _plot(a: Namespace) -> None:
    _show(a).draw(read_file(a.file), a.out or a.file.with_suffix(".png"))


def _show(a: Namespace) -> Any:
    """The module of tables and plots, which needs pandas and matplotlib."""
    with needs(f"normplug.bench {a.command}", "bench", SystemExit):
        from normplug.bench import show
    return show


def _device(name: str | None) -> torch.device:
    there = torch.cuda.is_available()
    if name is None and not there:
        print("normplug.bench: no CUDA device, so it runs on the CPU", file=sys.stderr, flush=True)
    device = name or ("cuda" if there else "cpu")
    if device.startswith("cuda") and not there:
        raise SystemExit(f"normplug.bench: --device {name}, but there is no CUDA device.")
    return timing.ready(device)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _option(text: str) -> tuple[str, Any]:
    key, is_one, value = text.partition("=")
    if not is_one:
        raise ValueError(f"an option is NAME=VALUE; got {text!r}.")
    return key, _value(value)


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"must be sizes joined by x, as 512x8192; got {text!r}")
    return tuple(map(int, parts))


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Any, text: str, mode: str | None = None) -> Any:
        made = commands.add_parser(run.__name__[1:], help=text, description=text)
        made.set_defaults(run=run)
        if run not in (_table, _plot):
            made.add_argument("--device", help="default: cuda if there is one")
        if mode:
            told = "of normplug; default: %(default)s"
            made.add_argument("--mode", type=_value, default=mode, help=told)
            told = "append the rows to this file"
            made.add_argument("--json", metavar="FILE", type=Path, help=told)
        return made.add_argument

    add = command(_model, "time training steps, swapped and stock", "standard")
    add("target", help="a name of torchvision, timm or transformers, or file.py:function")
    add("option", nargs="*", help="NAME=VALUE, for the model or the function")
    add("--batch", metavar="N", type=int, help="samples; default: 8, or the function's own")
    add("--autocast", choices=("none", "bfloat16", "float16"), help="default: bfloat16 on a GPU")
    add("--channels-last", action="store_true", help="channels_last memory")
    add("--rounds", metavar="N", type=int, default=models.ROUNDS, help="turns of each arm")

    add = command(_op, "time one operation, and compare it with PyTorch's", "golden")
    add("name", choices=OPS, metavar="NAME", help=", ".join(OPS))
    add("--shape", metavar="SIZES", type=_shape, action="append", required=True, help="512x8192")
    add("--dtype", choices=DTYPES, action="append", help="may be repeated; default: float32")
    add("--eps", type=float, help="default: 1e-6 for RMSNorm, 1e-5 for others")

    add = command(_sweep, "LayerNorm over widths: rows, plot and both traces")
    add("--rows", metavar="N", type=int, help=f"default: {ROWS}; on a CPU {FEW_ROWS}")
    add("--width", metavar="N", type=int, action="append", help="default: 256, 512, ..., 32768")
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add("-o", "--out", type=Path, default=Path("sweep"), help="a folder; default: sweep")

    for run, what, default in ((_table, "table", "print it"), (_plot, "plot", "FILE.png")):
        add = command(run, f"make a {what} of a file of rows")
        add("file", metavar="FILE", type=Path)
        add("-o", "--out", metavar="FILE", type=Path, help=f"default: {default}")
    return top


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong input ends it with one line."""
    a = _parser().parse_args(argv)
    if "device" in a:
        a.device = _device(a.device)
    try:
        a.run(a)
    except (OSError, ValueError, TypeError) as error:
        path = str(getattr(a, "file", ""))
        told = "" if path in str(error) else f"{path}: "
        raise SystemExit(f"normplug.bench {a.command}: {told}{error}") from None


if __name__ == "__main__":
    main()
