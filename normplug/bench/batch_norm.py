"""BatchNorm in training, alone and with the ops that follow it in a residual network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import functional, reference, target_variance
from normplug._torch import select_batch_norm_backend
from normplug.bench.accuracy import Piece
from normplug.bench.op import CHUNK_ELEMENTS, Function, Op, Problem, laid_out
from normplug.bench.suites import Case, Shape

EPS = 1e-5
MOMENTUM = 0.1

Norm = Callable[..., Tensor]


def make(case: Case, device: str, activation: str | None, has_residual: bool) -> Problem:
    """Random tensors, the same in every call, with a mean away from 0.

    For a half-precision x, weight, bias and statistics are float32. With an activation, dy is 0
    where rounding may decide the sign of the activation's input, so that all implementations have
    the same gradients.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    def image() -> Tensor:
        return laid_out(normal(*case.shape, dtype=dtype), case.layout)

    vector = partial(normal, case.shape[1], dtype=reference.accumulator_dtype(dtype))
    leaves = {"x": image().mul_(2).add_(3), "weight": vector().abs_().add_(0.5), "bias": vector()}
    if has_residual:
        leaves["residual"] = image()
    state = {
        "running_mean": vector(),
        "running_var": vector().abs_().add_(0.5),
        "num_batches_tracked": torch.zeros((), dtype=torch.long, device=device),
    }
    problem = Problem(leaves, state, {"y": image()})
    if activation is not None:
        _mask_undecided_signs(problem)
    for leaf in leaves.values():
        leaf.requires_grad_()
    return problem


def refusal(shape: Shape) -> str | None:
    """Why a BatchNorm in training cannot take the shape; None if it can."""
    if not 2 <= len(shape) <= 5:
        return "takes (N, C, *space) of 2 to 5 dimensions"
    return None if math.prod(shape) > shape[1] else "needs more than one value per channel"


def normplug_bn(x: Tensor, *, mode: str = "golden", **others: Any) -> Tensor:
    """Run normplug's norm in one call, with the residual and the activation if any."""
    return functional.batch_norm(x, training=True, momentum=MOMENTUM, eps=EPS, mode=mode, **others)


def eager_bn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor,
    cudnn: bool = False,
) -> Tensor:
    """What `nn.BatchNorm2d` does; `cudnn`: through cuDNN, which torch picks in some dtypes only."""
    num_batches_tracked.add_(1)
    running = (running_mean, running_var)
    if cudnn:
        return torch.cudnn_batch_norm(x, weight, bias, *running, True, MOMENTUM, EPS)[0]
    return F.batch_norm(x, *running, weight, bias, True, MOMENTUM, EPS)


def relu_after(norm: Norm, **tensors: Tensor) -> Tensor:
    """The norm and an in-place ReLU, as inside torchvision's residual blocks."""
    return torch.relu_(norm(**tensors))


def add_relu_after(norm: Norm, residual: Tensor, **tensors: Tensor) -> Tensor:
    """The norm, then addition and ReLU in place, as at the end of torchvision's residual blocks."""
    out = norm(**tensors)
    out += residual
    return torch.relu_(out)


def truth(problem: Problem, variance: float, activation: str | None) -> Iterator[Piece]:
    """Yield the exact outputs, one group of channels at a time."""
    for part in _channel_groups(problem.leaves["x"]):
        exact = _exact(problem, part)
        x, weight = exact["x"], exact["weight"]
        normalized, pre = _forward(exact, variance)
        mean, var = normalized.mean, normalized.var
        dpre = reference.activation_backward(exact["dy"], pre, activation)
        dx, dweight, dbias = reference.batch_norm_backward(
            dpre, x, weight, mean, var, eps=EPS, target_variance=variance
        )
        n = x.numel() // x.shape[1]
        images = {"y": reference.activation(pre, activation), "dx": dx}
        if "residual" in exact:
            images["dresidual"] = dpre
        vectors = {
            "dweight": dweight,
            "dbias": dbias,
            "running_mean": reference.running_average(exact["running_mean"], mean, MOMENTUM, 1),
            "running_var": reference.running_average(
                exact["running_var"], var * n / (n - 1), MOMENTUM, 1
            ),
        }
        for name, value in images.items():
            yield Piece(name, (slice(None), part), value)
        for name, value in vectors.items():
            yield Piece(name, (part,), value)
    yield Piece("num_batches_tracked", (), problem.leaves["x"].new_ones((), dtype=torch.float64))


def aten_backend(problem: Problem) -> dict[str, str]:
    """The ATen backend that eager dispatches to; it depends on shape, layout and dtype."""
    x, weight, bias = (problem.leaves[name] for name in ("x", "weight", "bias"))
    running = (problem.state["running_mean"], problem.state["running_var"])
    chosen = select_batch_norm_backend(x, weight, bias, *running, True, EPS)
    return {"aten_backend": chosen.name}


def _mask_undecided_signs(problem: Problem) -> None:
    dy = problem.gradients["y"]
    margin = math.sqrt(torch.finfo(dy.dtype).eps)  # far above any rounding of the input
    for part in _channel_groups(problem.leaves["x"]):
        exact = _exact(problem, part)
        for mode in ("standard", "golden"):
            _, pre = _forward(exact, target_variance(mode))
            dy[:, part].masked_fill_(pre.abs() < margin, 0)


def _forward(exact: dict[str, Tensor], variance: float) -> tuple[reference.Normalized, Tensor]:
    """The norm, and the input of the activation."""
    normalized = reference.batch_norm(
        exact["x"], exact["weight"], exact["bias"], eps=EPS, target_variance=variance
    )
    return normalized, normalized.y + exact["residual"] if "residual" in exact else normalized.y


def _channel_groups(x: Tensor) -> Iterator[slice]:
    width = max(1, CHUNK_ELEMENTS * x.shape[1] // x.numel())
    for first in range(0, x.shape[1], width):
        yield slice(first, first + width)


def _exact(problem: Problem, part: slice) -> dict[str, Tensor]:
    tensors = {**problem.leaves, **problem.state, "dy": problem.gradients["y"]}
    del tensors["num_batches_tracked"]
    return {
        name: (tensor[part] if tensor.dim() == 1 else tensor[:, part]).detach().double()
        for name, tensor in tensors.items()
    }


def _op(
    name: str,
    passes: dict[str, int],
    around: Callable[[Norm], Function],
    activation: str | None = None,
    has_residual: bool = False,
) -> Op:
    """Make the operation; `around` wraps a norm with the ops that follow it."""
    return Op(
        name,
        passes,
        make=partial(make, activation=activation, has_residual=has_residual),
        normplug=partial(normplug_bn, activation=activation),
        eager=around(eager_bn),
        truth=partial(truth, activation=activation),
        refusal=refusal,
        eager_facts=aten_backend,
        rivals={"cudnn": lambda: around(partial(eager_bn, cudnn=True))},
    )


# Forward reads x and writes y; backward reads dy and x, and writes dx. A residual adds a read, and
# its gradient a write.
OPS = (
    _op("bn", {"F": 2, "F+B": 5}, lambda norm: norm),
    _op("bn_relu", {"F": 2, "F+B": 5}, partial(partial, relu_after), "relu"),
    _op("bn_add_relu", {"F": 3, "F+B": 7}, partial(partial, add_relu_after), "relu", True),
)
