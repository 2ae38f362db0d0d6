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
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normplug
import script
from normplug import native, target_variance
from normplug._results import stamp
from normplug.bench.op import error
from normplug.bench.ops import OPS, Case, Op, Problem, cases
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import back_to_back, in_turns, spread

MODE = "golden"
EAGER, OURS, PYTHON = "eager", "normplug", "normplug-python"
FAR = 0.02  # a relative error that counts as wrong; a few roundings to bfloat16 stay below it
FLAT = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "batch_norm", "batch_norm_relu"]
CASES = [
    *cases(FLAT, [(32, 128)], ["float32"]),
    *cases(FLAT, [(512, 768), (2048, 1024), (8192, 1280)], ["bfloat16"]),
    *cases([*FLAT[-2:], "group_norm_silu"], [(16, 384, 14, 14)], ["bfloat16"], ["NHWC"]),
]
COLUMNS = {
    **{key: (key, "{}") for key in ("op", "layout", "shape", "dtype", "direction", "provider")},
    "median us": ("wall_us", "{:.1f}"),
    "20%": ("wall_us_p20", "{:.1f}"),
    "80%": ("wall_us_p80", "{:.1f}"),
    "over eager": ("over_eager", "{:.2f}"),
}


def _calls(op: Op) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How a stock layer is called, and a swapped one for the same work, as after `fuse`."""
    if op.add:

        def add(norm: nn.Module, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return norm(total), total

        return add, lambda norm, x, residual: norm._fused_add(x, residual)
    if name := op.activation:
        activate = {"relu": torch.relu_, "silu": F.silu}[name]
        return lambda norm, x: activate(norm(x)), lambda norm, x: norm._fused(x, activation=name)
    return (lambda norm, x: norm(x)), (lambda norm, x: norm(x))


def _layer(case: Case, device: torch.device) -> nn.Module:
    norm = OPS[case.op].norm
    width = case.shape[-1 if case.layout == "rows" else 1]
    if norm == "batch_norm":  # its parameters are float32, as under autocast
        return (nn.BatchNorm1d if case.layout == "NC" else nn.BatchNorm2d)(width, device=device)
    rows = {"layer_norm": nn.LayerNorm, "rms_norm": nn.RMSNorm}
    make = rows.get(norm, partial(nn.GroupNorm, 32))
    return make(width, device=device, dtype=getattr(torch, case.dtype))


def measure(case: Case, device: torch.device) -> Iterator[Row]:
    """A row for each direction (F is without gradients) and provider.

    Raises:
        AssertionError: an output, or a gradient of an input, differs from eager's.
    """
    problem = Problem(case, device)
    inputs = [problem.leaves[name] for name in ("x", "residual") if name in problem.leaves]
    stock = _layer(case, device)
    ours = normplug.swap(copy.deepcopy(stock), MODE)
    nn.init.constant_(cast(Tensor, stock.weight), target_variance(MODE) ** 0.5)
    eager_call, our_call = _calls(problem.op)
    calls = {EAGER: partial(eager_call, stock), OURS: partial(our_call, ours)}
    calls[PYTHON] = partial(our_call, copy.deepcopy(ours))

    def forward(name: str) -> Any:
        return calls[name](*inputs)

    def both(name: str) -> list[Tensor]:
        made = calls[name](*inputs)
        outputs = [made] if isinstance(made, Tensor) else list(made)
        leaves = [*inputs, *calls[name].args[0].parameters()]
        return outputs + list(torch.autograd.grad(outputs, leaves, problem.gradients))

    compared = 2 * len(inputs)  # outputs and the inputs' gradients: the weights differ by design
    expected = both(EAGER)[:compared]
    for name in (OURS, PYTHON):
        for found, theirs in zip(both(name)[:compared], expected, strict=True):
            far = error(found, theirs)
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
