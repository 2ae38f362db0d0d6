"""Measure what norms cost, and make tables and plots of the results."""

from __future__ import annotations

import argparse
import ast
import copy
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from normplug._checks import needs
from normplug._run.command import mode
from normplug.bench import devices, models, op, timing
from normplug.bench.op import OPS, Problem, cases, measure_op
from normplug.bench.rows import Rows, add_to_file, draw, read_file, report

# The shapes of a sweep; on a CPU a few small ones.
SWEEPS = {
    "cuda": [(4096, 2**n) for n in range(8, 16)],
    "cpu": [(512, 4**n) for n in (4, 5, 6)],
}
DTYPES = ("bfloat16", "float16", "float32", "float64")


def _model(a: Namespace) -> None:
    size = a.batch or (None if ".py:" in a.target else 8)
    words = (word.partition("=") for word in a.option)
    options = {key: _value(value) for key, _, value in words}
    model, batch, step = models.load(a.target, size, options)
    if a.channels_last:
        model = model.to(memory_format=torch.channels_last)
    name = a.autocast or ("bfloat16" if a.device.type == "cuda" else "none")
    how = {
        "mode": a.mode,
        "autocast": getattr(torch, name, None),
        "rounds": a.rounds,
        "verbose": True,
    }
    measured = models.measure(model.to(a.device), batch, step, **how)
    print(measured)
    add_to_file(a.json, [{"model": a.target, "batch": size, **row} for row in measured])


def _op(a: Namespace) -> None:
    if a.devices:
        _on_devices(a)
        return
    if a.name is None or a.shape is None:
        raise ValueError(
            "it needs NAME and --shape; only --devices has defaults for them."
        )
    if a.markdown:
        raise ValueError("--markdown is for the table of --devices.")
    chosen = cases([a.name], a.shape, a.dtype or ["float32"])
    report((measure_op(case, a.device, eps=a.eps) for case in chosen), a.json)


def _on_devices(a: Namespace) -> None:
    chosen = devices.cases_of(a.name, a.shape, a.dtype or ["float32"])
    both = dict.fromkeys((devices.CPU, a.device))  # without a GPU, one
    json = a.json or Path("devices.json")
    page = a.markdown or json.with_suffix(".md")
    devices.report((devices.measure(case, both, a.eps) for case in chosen), json, page)


def _sweep(a: Namespace) -> None:
    chosen = cases(["layer_norm"], SWEEPS[a.device.type], [a.dtype])
    file = a.out / "sweep.json"
    file.unlink(missing_ok=True)
    report((measure_op(case, a.device) for case in chosen), file)
    draw(read_file(file), a.out / "sweep.png")
    problem = Problem(chosen[-1], a.device)
    ours = op.ours(copy.deepcopy(problem.layer))
    for name, layer in (("normplug", ours), ("torch", problem.layer)):
        call = problem.calls(layer)["F+B"]
        call()
        timing.traced(call).export_chrome_trace(str(a.out / f"trace_{name}.json"))
    print(f"{a.out}: sweep.json, sweep.png, trace_normplug.json, trace_torch.json")


def _table(a: Namespace) -> None:
    times = models.COLUMNS[:4]  # before the speeds, which both kinds of rows have
    names = ("model", "batch", *times, *op.COLUMNS, *devices.COLUMNS, *models.COLUMNS)
    columns = dict.fromkeys(names)
    print(Rows(read_file(a.file), tuple(columns)))


def _plot(a: Namespace) -> None:
    draw(read_file(a.file), a.out or a.file.with_suffix(".png"))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) < 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(
            f"must be sizes joined by x, as 512x8192; got {text!r}"
        )
    return tuple(map(int, parts))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a wrong input ends it with one line."""
    top = argparse.ArgumentParser(prog="python -m normplug.bench", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(run: Any, text: str, measures: bool = True) -> Any:
        made = commands.add_parser(run.__name__[1:], help=text, description=text)
        made.set_defaults(run=run)
        if measures:
            made.add_argument("--device", help="default: cuda if there is one")
        return made.add_argument

    add = command(_model, "time training steps, swapped and stock")
    add("target", help="a name of torchvision, timm or transformers, or file.py:function")
    add("option", nargs="*", help="NAME=VALUE, for the model or the function")
    add(
        "--batch",
        metavar="N",
        type=int,
        help="samples; default: 8, or the function's own",
    )
    add("--autocast", choices=("none", *DTYPES[:2]), help="default: bfloat16 on a GPU")
    add("--channels-last", action="store_true", help="for weights and convolutions")
    add("--rounds", metavar="N", type=int, default=models.ROUNDS, help="turns per arm")
    add("--mode", type=mode, default="standard", help="normplug's; default: standard")
    add("--json", metavar="FILE", type=Path, help="append the rows to this file")

    add = command(_op, "time one operation, and compare it with PyTorch's")
    add("name", nargs="?", choices=OPS, metavar="NAME", help=", ".join(OPS))
    add(
        "--shape",
        metavar="SIZES",
        type=_shape,
        action="append",
        help="512x8192; may be repeated",
    )
    add(
        "--dtype",
        choices=DTYPES,
        action="append",
        help="may be repeated; default: float32",
    )
    add("--eps", type=float, help="default: 1e-6 for RMSNorm, 1e-5 for others")
    add("--json", metavar="FILE", type=Path, help="append the rows to this file")
    add(
        "--devices",
        choices=("cpu,cuda",),
        help="time normplug on both, in one table; NAME and --shape are then optional",
    )
    add(
        "--markdown",
        metavar="FILE",
        type=Path,
        help="write the table of --devices here; default: FILE.md for --json FILE.json",
    )

    add = command(_sweep, "LayerNorm over widths: rows, plot and both traces")
    add("--dtype", choices=DTYPES, default="bfloat16", help="default: bfloat16")
    add("-o", "--out", type=Path, default=Path("sweep"), help="a folder; default: sweep")

    command(_table, "print a file of rows as a table", measures=False)("file", type=Path)
    add = command(_plot, "plot GB/s over the width", measures=False)
    add("file", type=Path)
    add("-o", "--out", metavar="FILE", type=Path, help="default: FILE.png")
    a = top.parse_args(argv)
    if getattr(a, "devices", None) and a.device:
        top.error("--device and --devices exclude each other")
    if a.run in (_sweep, _plot):  # before hours of measurements
        with needs(f"normplug.bench {a.command}", "bench", SystemExit):
            import matplotlib  # noqa: F401
            import pandas  # noqa: F401
    if "device" in a:
        gpu = torch.cuda.is_available()
        if not gpu and a.device is None:
            timing.say("no CUDA device, so it runs on the CPU")
        elif not gpu and a.device.startswith("cuda"):
            raise SystemExit(
                f"normplug.bench: --device {a.device}, but there is no CUDA device."
            )
        a.device = timing.ready(a.device or ("cuda" if gpu else "cpu"))
    try:
        a.run(a)
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(f"normplug.bench {a.command}: {error}") from None


if __name__ == "__main__":
    main()
