"""Measure single calls of layers back to back: on small inputs the GPU waits for the host.

The calls of a case take turns. All compute the same function: the weight of eager's layer is the
root of the target variance. BatchNorm's parameters are float32, those of others have the input's
dtype.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normplug
from normplug import target_variance
from normplug.bench import native
from normplug.bench.op import laid_out
from normplug.bench.results import HOST, Results, Row
from normplug.bench.suites import Case, Shape
from normplug.bench.timing import Call, HostTime, back_to_back

MODE = "golden"
EAGER, OURS, PYTHON = "eager", "normplug", "normplug-python"
PROVIDERS = (EAGER, OURS, PYTHON)
CALLS = 2000  # per repeat, at most
SECONDS = 0.1  # per repeat: slow calls are made fewer times
REPEATS = 5
WARM_UPS = 20  # calls
FAR = 0.02  # a relative error that counts as wrong; a few roundings to bfloat16 stay below it

ROWS: tuple[tuple[Shape, str], ...] = (
    ((32, 128), "float32"),
    ((512, 768), "bfloat16"),
    ((2048, 1024), "bfloat16"),
    ((8192, 1280), "bfloat16"),
)
IMAGE: Shape = (16, 384, 14, 14)

Outputs = tuple[Tensor, ...]
Function = Callable[..., Outputs]  # takes the layer and its inputs
Context = Callable[[], contextlib.AbstractContextManager[object]]


class Op(NamedTuple):
    """A layer, and how to call it stock and swapped.

    Attributes:
        layer: makes the stock layer of a case on a device.
        eager: calls the stock layer and the ops around it.
        normplug: calls the swapped layer for the same work.
        inputs: the number of input tensors of both.
    """

    layer: Callable[[Case, str], nn.Module]
    eager: Function
    normplug: Function
    inputs: int = 1


def _layer_norm(case: Case, device: str) -> nn.Module:
    return nn.LayerNorm(case.shape[-1], device=device, dtype=getattr(torch, case.dtype))


def _rms_norm(case: Case, device: str) -> nn.Module:
    return nn.RMSNorm(case.shape[-1], device=device, dtype=getattr(torch, case.dtype))


def _batch_norm(case: Case, device: str) -> nn.Module:
    cls = nn.BatchNorm1d if len(case.shape) == 2 else nn.BatchNorm2d
    return cls(case.shape[1], device=device)


def _group_norm(case: Case, device: str) -> nn.Module:
    dtype = getattr(torch, case.dtype)
    return nn.GroupNorm(32, case.shape[1], device=device, dtype=dtype)


def _call(norm: nn.Module, x: Tensor) -> Outputs:
    return (norm(x),)


def _add(norm: nn.Module, x: Tensor, residual: Tensor) -> Outputs:
    total = x + residual
    return norm(total), total


def _fused_add(norm: Any, x: Tensor, residual: Tensor) -> Outputs:
    return norm._fused_add(x, residual)


def _relu(norm: nn.Module, x: Tensor) -> Outputs:
    return (torch.relu_(norm(x)),)


def _silu(norm: nn.Module, x: Tensor) -> Outputs:
    return (F.silu(norm(x)),)


def _fused_silu(norm: Any, x: Tensor) -> Outputs:
    return (norm._fused(x, activation="silu"),)


def _fused_relu(norm: Any, x: Tensor) -> Outputs:
    return (norm._fused(x, activation="relu"),)


# Fused ops are called as a model calls them after `fuse`.
OPS = {
    "ln": Op(_layer_norm, _call, _call),
    "add_ln": Op(_layer_norm, _add, _fused_add, inputs=2),
    "rms": Op(_rms_norm, _call, _call),
    "add_rms": Op(_rms_norm, _add, _fused_add, inputs=2),
    "bn": Op(_batch_norm, _call, _call),
    "bn_relu": Op(_batch_norm, _relu, _fused_relu),
    "gn_silu": Op(_group_norm, _silu, _fused_silu),
}
CASES = tuple(
    Case(op, layout, shape, dtype)
    for ops, layout, inputs in (
        (("ln", "add_ln", "rms", "add_rms"), "rows", ROWS),
        (("bn", "bn_relu"), "NC", ROWS),
        (("bn", "bn_relu", "gn_silu"), "NHWC", ((IMAGE, "bfloat16"),)),
    )
    for op in ops
    for shape, dtype in inputs
)


def run(
    cases: Sequence[Case], providers: Sequence[str], calls: int, out: Path | None, device: str
) -> Results:
    """Measure and print every case; write the rows to `out`, if it is given."""
    native.build()
    settings = {"mode": MODE, "calls": calls, "seconds": SECONDS, "repeats": REPEATS}
    results = Results(out, HOST, settings=settings)
    content = results.content
    print(f"{content['device']}, {content['versions']}")
    for case in cases:
        for rows in measure(case, providers, calls, device):
            content["native"] = native.status()  # known only after the first call of a kernel
            for row in rows:
                results.add(row)
            print(line(case, rows), flush=True)
    return results


def measure(case: Case, providers: Sequence[str], calls: int, device: str) -> Iterator[list[Row]]:
    """Yield the rows of each direction: one for each provider.

    Raises:
        AssertionError: the results of a provider differ from eager's.
    """
    for direction, ways in prepared(case, providers, device).items():
        facts = {**case._asdict(), "shape": list(case.shape), "direction": direction}
        times = in_turns(ways, calls)
        yield [{**facts, "provider": name, **figures} for name, figures in times.items()]


class Way(NamedTuple):
    """A call, and the context in which it is repeated."""

    call: Call
    context: Context

    def repeat(self, count: int) -> HostTime:
        """Time `count` calls back to back."""
        with self.context():
            return back_to_back(self.call, count)


def prepared(case: Case, providers: Sequence[str], device: str) -> dict[str, dict[str, Way]]:
    """Direction -> provider -> how to call it; F is without gradients.

    Raises:
        AssertionError: as `measure`.
    """
    op = OPS[case.op]
    inputs, gradients = tensors(case, device)
    layers = {EAGER: op.layer(case, device)}
    for name in (OURS, PYTHON):
        layers[name] = normplug.swap(copy.deepcopy(layers[EAGER]), MODE)
    nn.init.constant_(cast(Tensor, layers[EAGER].weight), target_variance(MODE) ** 0.5)

    def forward(name: str) -> Outputs:
        return (op.eager if name == EAGER else op.normplug)(layers[name], *inputs)

    def both(name: str) -> Outputs:
        outputs = forward(name)
        leaves = (*inputs, *layers[name].parameters())
        return outputs + torch.autograd.grad(outputs, leaves, gradients)

    ways: dict[str, dict[str, Way]] = {"F": {}, "F+B": {}}
    # The gradients of parameters come last and are not compared: the weights differ by design.
    compared = -len(list(layers[EAGER].parameters()))
    expected = both(EAGER)[:compared]
    for name in providers:
        context = native.python_way if name == PYTHON else contextlib.nullcontext
        with context():
            require_near(f"{name}, {case}", both(name)[:compared], expected)
        ways["F"][name] = Way(partial(forward, name), partial(_without_gradients, context))
        ways["F+B"][name] = Way(partial(both, name), context)
    return ways


@contextlib.contextmanager
def _without_gradients(context: Context) -> Iterator[None]:
    with torch.no_grad(), context():
        yield


def tensors(case: Case, device: str) -> tuple[Outputs, Outputs]:
    """Random inputs, and gradients of as many outputs; the same in every call."""
    generator = torch.Generator(device).manual_seed(0)

    def make() -> Tensor:
        dtype = getattr(torch, case.dtype)
        tensor = torch.randn(case.shape, generator=generator, device=device, dtype=dtype)
        return laid_out(tensor, case.layout)

    count = OPS[case.op].inputs
    return tuple(make().requires_grad_() for _ in range(count)), tuple(make() for _ in range(count))


def require_near(what: str, found: Outputs, expected: Outputs) -> None:
    """Compare outputs and gradients of inputs in the Euclidean norm.

    Raises:
        AssertionError: the relative error of a tensor is above `FAR`, or NaN.
    """
    for ours, theirs in zip(found, expected, strict=True):
        expected_values = theirs.detach().float()
        error = float((ours.detach().float() - expected_values).norm() / expected_values.norm())
        if not error <= FAR:
            raise AssertionError(
                f"normplug.bench host: {what}: an output or gradient differs from eager's by a "
                f"relative error of {error:.3g}, above {FAR}."
            )


def in_turns(ways: Mapping[str, Way], calls: int) -> dict[str, Row]:
    """Provider -> the measured fields of its row."""
    counts: dict[str, int] = {}
    for name, way in ways.items():
        warm_ups = min(WARM_UPS, calls)
        way.repeat(warm_ups)
        affordable = int(SECONDS * 1e6 / way.repeat(warm_ups).wall_us)
        counts[name] = min(max(affordable, warm_ups), calls)
    times: dict[str, list[HostTime]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, way in ways.items():
            times[name].append(way.repeat(counts[name]))
    return {
        name: {
            "wall_us": min(time.wall_us for time in found),
            "median_wall_us": statistics.median(time.wall_us for time in found),
            "host_us": min(time.host_us for time in found),
            "calls": counts[name],
        }
        for name, found in times.items()
    }


def line(case: Case, rows: Sequence[Row]) -> str:
    """The rows of a case and direction as one line of text."""
    cells = [f"{row['provider']} {row['wall_us']:.1f} us" for row in rows]
    return f"{str(case):<36} {rows[0]['direction']:<3} | {' | '.join(cells)}"
