"""Time single calls of layers back to back: on small inputs the GPU waits for the host.

    python benchmarks/host.py --json host.json

All calls of a case compute the same function: the weight of eager's layer is the root of the
target variance. normplug-python is normplug without the host path in C++.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normplug
from normplug import native, target_variance
from normplug._results import stamp
from normplug.bench.ops import Case
from normplug.bench.rows import Row, Rows, add_to_file
from normplug.bench.timing import ready, spread, wall_us

MODE = "golden"
EAGER, OURS, PYTHON = "eager", "normplug", "normplug-python"
FAR = 0.02  # a relative error that counts as wrong; a few roundings to bfloat16 stay below it
ROWS = (
    ((32, 128), "float32"),
    ((512, 768), "bfloat16"),
    ((2048, 1024), "bfloat16"),
    ((8192, 1280), "bfloat16"),
)
IMAGE = (((16, 384, 14, 14), "bfloat16"),)
COLUMNS = {
    **{key: (key, "{}") for key in ("op", "layout", "shape", "dtype", "direction", "provider")},
    "median us": ("wall_us", "{:.1f}"),
    "20%": ("wall_us_p20", "{:.1f}"),
    "80%": ("wall_us_p80", "{:.1f}"),
    "over eager": ("over_eager", "{:.2f}"),
}


class Layer(NamedTuple):
    """A stock layer, and how it is called stock and swapped for the same work."""

    make: Callable[[int], nn.Module]
    eager: Callable[..., Any] = lambda norm, x: norm(x)
    ours: Callable[..., Any] = lambda norm, x: norm(x)
    inputs: int = 1


def _add(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return norm(total), total


def _fused(activation: str) -> Callable[..., Tensor]:
    return lambda norm, x: norm._fused(x, activation=activation)


def _fused_add(norm: Any, x: Tensor, residual: Tensor) -> Any:
    return norm._fused_add(x, residual)


LAYERS = {  # fused calls are those of a model after `fuse`
    "ln": Layer(nn.LayerNorm),
    "add_ln": Layer(nn.LayerNorm, _add, _fused_add, 2),
    "rms": Layer(nn.RMSNorm),
    "add_rms": Layer(nn.RMSNorm, _add, _fused_add, 2),
    "bn": Layer(nn.BatchNorm2d),
    "bn_relu": Layer(nn.BatchNorm2d, lambda norm, x: torch.relu_(norm(x)), _fused("relu")),
    "gn_silu": Layer(partial(nn.GroupNorm, 32), lambda norm, x: F.silu(norm(x)), _fused("silu")),
}
CASES = [
    Case(op, layout, shape, dtype)
    for ops, layout, inputs in (
        (("ln", "add_ln", "rms", "add_rms"), "rows", ROWS),
        (("bn", "bn_relu"), "NC", ROWS),
        (("bn", "bn_relu", "gn_silu"), "NHWC", IMAGE),
    )
    for op in ops
    for shape, dtype in inputs
]


def measure(case: Case, device: torch.device) -> Iterator[Row]:
    """A row for each direction (F is without gradients) and provider.

    Raises:
        AssertionError: an output, or a gradient of an input, differs from eager's.
    """
    layer = LAYERS[case.op]
    dtype: torch.dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)

    def tensor() -> Tensor:
        x = torch.randn(case.shape, device=device, dtype=dtype)
        return x.contiguous(memory_format=torch.channels_last) if case.layout == "NHWC" else x

    inputs = [tensor().requires_grad_() for _ in range(layer.inputs)]
    gradients = [tensor() for _ in range(layer.inputs)]
    make = nn.BatchNorm1d if case.layout == "NC" else layer.make
    stock = make(case.shape[-1 if case.layout == "rows" else 1]).to(device)
    if not case.op.startswith("bn"):  # BatchNorm's parameters are float32, as under autocast
        stock = stock.to(dtype)
    ours = normplug.swap(copy.deepcopy(stock), MODE)
    nn.init.constant_(cast(Tensor, stock.weight), target_variance(MODE) ** 0.5)
    calls = {EAGER: partial(layer.eager, stock), OURS: partial(layer.ours, ours)}
    calls[PYTHON] = partial(layer.ours, copy.deepcopy(ours))

    def forward(name: str) -> Any:
        return calls[name](*inputs)

    def both(name: str) -> list[Tensor]:
        made = calls[name](*inputs)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        leaves = [*inputs, *calls[name].args[0].parameters()]  # type: ignore[attr-defined]
        return outputs + list(torch.autograd.grad(outputs, leaves, gradients))

    compared = 2 * layer.inputs  # outputs and the inputs' gradients: the weights differ by design
    expected = both(EAGER)[:compared]
    for name in (OURS, PYTHON):
        for found, theirs in zip(both(name)[:compared], expected, strict=True):
            error = float((found - theirs).detach().float().norm() / theirs.detach().float().norm())
            assert error <= FAR, f"{name}, {case}: a result differs from eager's by {error:.3g}"
    for direction, call in (("F", forward), ("F+B", both)):
        facts: Row = {**case._asdict(), "shape": "x".join(map(str, case.shape))}
        yield from _in_turns({**facts, "direction": direction}, call, device)


def _in_turns(facts: Row, call: Callable[[str], Any], device: torch.device) -> Iterator[Row]:
    samples: dict[str, list[float]] = {EAGER: [], OURS: [], PYTHON: []}
    for _ in range(5):
        for name, times in samples.items():
            way = native.python_way if name == PYTHON else contextlib.nullcontext
            gradient = facts["direction"] == "F+B"
            with way(), torch.set_grad_enabled(gradient):
                times += wall_us({name: partial(call, name)}, 1)[name]
    eager = statistics.median(samples[EAGER])
    for name, times in samples.items():
        yield {
            **facts,
            "provider": name,
            "mode": MODE,
            **spread("wall_us", times),
            "over_eager": eager / statistics.median(times) if name != EAGER else None,
            "native": native.status().way,
            **stamp(device.type == "cuda"),
        }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    a = parser.parse_args(argv)
    device = ready(a.device)
    for case in [case for case in CASES if a.only in str(case)]:
        rows = list(measure(case, device))
        print(Rows(rows, COLUMNS), flush=True)
        add_to_file(a.json, rows)


if __name__ == "__main__":
    main()
