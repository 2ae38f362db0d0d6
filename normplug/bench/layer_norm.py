"""LayerNorm in training, alone and with the ops that precede it in a transformer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import functional, reference
from normplug.bench import rivals
from normplug.bench.accuracy import Piece
from normplug.bench.op import CHUNK_ELEMENTS, Op, Problem
from normplug.bench.suites import Case, Shape

EPS = 1e-5
MOMENTUM = 0.1


def make(extra: str | None, case: Case, device: str) -> Problem:
    """Random tensors of the case's dtype, the same in every call, with a mean away from 0."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    normal = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    rows, vector = partial(normal, case.shape), partial(normal, case.shape[-1:])

    leaves = {"x": rows().mul_(2).add_(3), "weight": vector().abs_().add_(0.5), "bias": vector()}
    gradients = {"y": rows()}
    if extra == "residual":
        leaves["residual"] = rows()
        gradients["total"] = rows()
    if extra == "input_bias":
        leaves["input_bias"] = vector()
    for leaf in leaves.values():
        leaf.requires_grad_()
    return Problem(leaves, _state(dtype, device) if extra == "state" else {}, gradients)


def refusal(shape: Shape) -> str | None:
    """Why a norm of rows cannot take the shape; None if it can."""
    return None if len(shape) >= 2 else "takes (*rows, width) of 2 or more dimensions"


def normplug_ln(
    x: Tensor, weight: Tensor, bias: Tensor, *, mode: str = "golden", **others: Any
) -> Tensor:
    """Run normplug's norm in one call, with running statistics or the input bias if any."""
    return functional.layer_norm(
        x, x.shape[-1:], weight, bias, EPS, mode=mode, momentum=MOMENTUM, **others
    )


def normplug_add_ln(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, mode: str = "golden", backend: str
) -> tuple[Tensor, Tensor]:
    """Run normplug's sum and norm in one call."""
    return functional.add_layer_norm(
        x, residual, x.shape[-1:], weight, bias, EPS, mode=mode, backend=backend
    )


def eager_ln(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What `nn.LayerNorm` does."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def eager_ln_stats(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
) -> Tensor:
    """`eager_ln`, plus moving averages of the rows' mean and variance."""
    with torch.no_grad():
        var, mean = torch.var_mean(x, -1, correction=0)
        running_mean.lerp_(mean.mean(dtype=running_mean.dtype), MOMENTUM)
        running_var.lerp_(var.mean(dtype=running_var.dtype), MOMENTUM)
        num_batches_tracked.add_(1)
    return eager_ln(x, weight, bias)


def eager_add_ln(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """The residual addition and the next norm of a pre-norm block."""
    total = x + residual
    return eager_ln(total, weight, bias), total


def eager_bias_ln(x: Tensor, weight: Tensor, bias: Tensor, input_bias: Tensor) -> Tensor:
    """The norm of the previous layer's output, whose bias is added here."""
    return eager_ln(x + input_bias, weight, bias)


def truth(problem: Problem, variance: float) -> Iterator[Piece]:
    """Yield the exact outputs, one group of rows at a time; sums over rows come last."""
    x = problem.leaves["x"]
    sums: dict[str, Tensor] = {}
    for part in row_groups(x):
        by_row, summed = _exact(problem, part, variance)
        for name, value in by_row.items():
            yield Piece(name, (part,), value)
        for name, value in summed.items():
            sums[name] = sums.get(name, 0) + value
    for name, value in sums.items():
        if name in problem.state:
            running = problem.state[name].double()
            value = reference.running_average(running, value / x.shape[0], MOMENTUM, 1)
        yield Piece(name, (), value)
    if problem.state:
        yield Piece("num_batches_tracked", (), x.new_ones((), dtype=torch.float64))


def _state(dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    zeros = partial(torch.zeros, (), device=device)
    running = reference.accumulator_dtype(dtype)
    return {
        "running_mean": zeros(dtype=running),
        "running_var": zeros(dtype=running) + 1,
        "num_batches_tracked": zeros(dtype=torch.long),
    }


def row_groups(x: Tensor) -> Iterator[slice]:
    """The rows of x in groups of about `CHUNK_ELEMENTS` values."""
    height = max(1, CHUNK_ELEMENTS // math.prod(x.shape[1:]))
    for first in range(0, x.shape[0], height):
        yield slice(first, first + height)


def _exact(
    problem: Problem, part: slice, variance: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact values of some rows, and their contributions to sums over all rows."""
    leaves = {name: leaf.detach() for name, leaf in problem.leaves.items()}
    weight, bias = leaves["weight"].double(), leaves["bias"].double()
    h = normalised(leaves, part)
    options = {"eps": EPS, "target_variance": variance}
    y, mean, var = reference.layer_norm(h, h.shape[-1:], weight, bias, **options)
    dy = problem.gradients["y"][part].double()
    dx, dweight, dbias = reference.layer_norm_backward(dy, h, h.shape[-1:], weight, **options)
    by_row = {"y": y, "dx": dx}
    summed = {"dweight": dweight, "dbias": dbias}
    if "residual" in leaves:
        dtotal = dx + problem.gradients["total"][part].double()
        by_row |= {"total": h, "dx": dtotal, "dresidual": dtotal}
    if "input_bias" in leaves:
        summed["dinput_bias"] = dx.sum(0)
    if problem.state:
        summed |= {"running_mean": mean.sum(), "running_var": var.sum()}
    return by_row, summed


def normalised(leaves: dict[str, Tensor], part: slice) -> Tensor:
    """The norm's input; a sum that is also an output is rounded before it is normalised."""
    x = leaves["x"][part]
    if "residual" in leaves:
        x = x + leaves["residual"][part]
    return x.double() + leaves["input_bias"].double() if "input_bias" in leaves else x.double()


# Forward reads x and writes y; backward reads dy and x, and writes dx. A residual adds a read, the
# total a write, and the total's gradient a read.
PASSES, PASSES_OF_SUM = {"F": 2, "F+B": 5}, {"F": 4, "F+B": 8}
RIVALS = {
    "liger": partial(rivals.liger_layer_norm, EPS),
    "flaggems": partial(rivals.flaggems_layer_norm, EPS),
    "quack": partial(rivals.quack_layer_norm, EPS),
    "timm": partial(rivals.timm_layer_norm, EPS),
}
OPS = (
    Op("ln", PASSES, partial(make, None), normplug_ln, eager_ln, truth, refusal, rivals=RIVALS),
    Op("ln_stats", PASSES, partial(make, "state"), normplug_ln, eager_ln_stats, truth, refusal),
    Op(
        "add_ln",
        PASSES_OF_SUM,
        partial(make, "residual"),
        normplug_add_ln,
        eager_add_ln,
        truth,
        refusal,
    ),
    Op("bias_ln", PASSES, partial(make, "input_bias"), normplug_ln, eager_bias_ln, truth, refusal),
)
