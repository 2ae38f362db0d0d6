"""GroupNorm, alone and with SiLU as in diffusion models, and InstanceNorm of volumes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import functional, reference
from normplug.bench import rivals
from normplug.bench.accuracy import Piece
from normplug.bench.op import CHUNK_ELEMENTS, Function, Op, Problem, laid_out
from normplug.bench.suites import Case, Shape

EPS = 1e-5
GROUPS = 32


def groups_of(x: Tensor) -> int:
    """The number of groups: the greatest common divisor of `GROUPS` and the channels."""
    return _groups(x.shape)


def _groups(shape: Sequence[int]) -> int:
    return math.gcd(GROUPS, shape[1])


def refusal(shape: Shape) -> str | None:
    """Why a GroupNorm cannot take the shape; None if it can."""
    if not 3 <= len(shape) <= 5:
        return "takes (N, C, *space) of 3 to 5 dimensions"
    per_group = math.prod(shape[1:]) // _groups(shape)
    return None if per_group > 1 else "needs more than one value per group"


def refusal_3d(shape: Shape) -> str | None:
    """Why an InstanceNorm of volumes cannot take the shape; None if it can."""
    if len(shape) != 5:
        return "takes (N, C, D, H, W)"
    return None if math.prod(shape[2:]) > 1 else "needs more than one value per channel"


def make(case: Case, device: str) -> Problem:
    """Random tensors of the case's dtype, the same in every call, with a mean away from 0."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)
    normal = partial(torch.randn, generator=generator, device=device, dtype=dtype)

    def image() -> Tensor:
        return laid_out(normal(case.shape), case.layout)

    c = case.shape[1]
    leaves = {
        "x": image().mul_(2).add_(3),
        "weight": normal(c).abs_().add_(0.5),
        "bias": normal(c),
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    return Problem(leaves, {}, {"y": image()})


def normplug_gn(
    x: Tensor, weight: Tensor, bias: Tensor, *, mode: str = "golden", **others: Any
) -> Tensor:
    """Run normplug's norm in one call, with the activation if any."""
    return functional.group_norm(x, groups_of(x), weight, bias, EPS, mode=mode, **others)


def normplug_in(
    x: Tensor, weight: Tensor, bias: Tensor, *, mode: str = "golden", backend: str
) -> Tensor:
    """Run normplug's norm in one call."""
    return functional.instance_norm(
        x, weight=weight, bias=bias, eps=EPS, mode=mode, backend=backend
    )


def eager_gn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What `nn.GroupNorm` does."""
    return F.group_norm(x, groups_of(x), weight, bias, EPS)


def eager_gn_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The norm and a SiLU, as in residual blocks of diffusion models."""
    return F.silu(eager_gn(x, weight, bias))


def eager_in(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What `nn.InstanceNorm3d` does."""
    return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)


def truth(
    problem: Problem, variance: float, activation: str | None, by_channel: bool
) -> Iterator[Piece]:
    """Yield the exact outputs, some samples at a time; sums over samples come last."""
    x = problem.leaves["x"].detach()
    groups = x.shape[1] if by_channel else groups_of(x)
    weight, bias = (problem.leaves[name].detach().double() for name in ("weight", "bias"))
    options = {"eps": EPS, "target_variance": variance}
    sums: dict[str, Tensor] = {}
    samples = max(1, CHUNK_ELEMENTS * x.shape[0] // x.numel())
    for first in range(0, x.shape[0], samples):
        part = slice(first, first + samples)
        exact, dy = x[part].double(), problem.gradients["y"][part].double()
        pre = reference.group_norm(exact, groups, weight, bias, **options).y
        dpre = reference.activation_backward(dy, pre, activation)
        dx, *summed = reference.group_norm_backward(dpre, exact, groups, weight, **options)
        yield Piece("y", (part,), reference.activation(pre, activation))
        yield Piece("dx", (part,), dx)
        for name, value in zip(("dweight", "dbias"), summed, strict=True):
            sums[name] = sums.get(name, 0) + value
    for name, value in sums.items():
        yield Piece(name, (), value)


def _op(
    name: str,
    ours: Function,
    eager: Function,
    activation: str | None = None,
    by_channel: bool = False,
    refusal: Callable[[Shape], str | None] = refusal,
    **others: Any,
) -> Op:
    # Forward reads x and writes y; backward reads dy and x, and writes dx.
    return Op(
        name,
        {"F": 2, "F+B": 5},
        make,
        ours,
        eager,
        truth=partial(truth, activation=activation, by_channel=by_channel),
        refusal=refusal,
        **others,
    )


RIVALS = {
    "liger": partial(rivals.liger_group_norm, EPS, groups_of),
    "timm": partial(rivals.timm_group_norm, EPS, groups_of),
}
OPS = (
    _op("gn", normplug_gn, eager_gn, rivals=RIVALS),
    _op("gn_silu", partial(normplug_gn, activation="silu"), eager_gn_silu, "silu"),
    _op("in3d", normplug_in, eager_in, by_channel=True, refusal=refusal_3d),
)
