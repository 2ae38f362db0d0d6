"""Time single calls of layers back to back: on small inputs the GPU waits for the host.

    python benchmarks/host.py --json host.json

All calls of a case compute the same function: the weight of eager's layer is the root of the
target variance. normplug-python is normplug without the host path in C++.
"""

from __future__ import annotations

import copy
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normplug
import script
from normplug import native, target_variance
from normplug._results import stamp
from normplug.bench.accuracy import error
from normplug.bench.ops import Case
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import back_to_back, in_turns, spread

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


LAYERS = {  # fused calls are those of a model after `fuse`
    "ln": Layer(nn.LayerNorm),
    "add_ln": Layer(nn.LayerNorm, _add, lambda norm, *x: norm._fused_add(*x), 2),
    "rms": Layer(nn.RMSNorm),
    "add_rms": Layer(nn.RMSNorm, _add, lambda norm, *x: norm._fused_add(*x), 2),
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
            far = error(found.detach(), theirs.detach())
            assert far <= FAR, f"{name}, {case}: a result differs from eager's by {far:.3g}"
    for direction, call in (("F", forward), ("F+B", both)):
        times = in_turns({name: _turn(name, partial(call, name), direction) for name in calls})
        eager = statistics.median(times[EAGER])
        for name, samples in times.items():
            yield {
                **case._asdict(),
                "shape": "x".join(map(str, case.shape)),
                "direction": direction,
                "provider": name,
                "mode": MODE,
                **spread("wall_us", samples),
                "over_eager": eager / statistics.median(samples) if name != EAGER else None,
                "native": native.status().way,
                **stamp(device.type == "cuda"),
            }


def _turn(name: str, call: Callable[[], Any], direction: str) -> Callable[[], list[float]]:
    def turn() -> list[float]:
        way = native.python_way if name == PYTHON else nullcontext
        with way(), torch.set_grad_enabled(direction == "F+B"):
            return back_to_back(call)()

    return turn


def _measure_all(a: Namespace) -> Iterator[Rows]:
    for case in [case for case in CASES if a.only in str(case)]:
        yield Rows(measure(case, a.device), COLUMNS)


OPTIONS = {"--only": {"default": "", "help": "cases whose name has this text"}}
main = partial(script.main, __doc__, _measure_all, OPTIONS)

if __name__ == "__main__":
    main()
