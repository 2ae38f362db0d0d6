"""RMSNorm in training, alone and with the addition before it in a transformer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from normplug import functional, reference
from normplug.bench import layer_norm, rivals
from normplug.bench.accuracy import Piece
from normplug.bench.layer_norm import PASSES, PASSES_OF_SUM, normalised, row_groups
from normplug.bench.op import Op, Problem
from normplug.bench.suites import Case

EPS = 1e-6  # Llama's


def make(extra: str | None, case: Case, device: str) -> Problem:
    """The tensors of a LayerNorm, without a bias."""
    problem = layer_norm.make(extra, case, device)
    del problem.leaves["bias"]
    return problem


def normplug_rms(x: Tensor, weight: Tensor, *, mode: str = "golden", backend: str) -> Tensor:
    """Run normplug's norm in one call."""
    return functional.rms_norm(x, x.shape[-1:], weight, EPS, mode=mode, backend=backend)


def normplug_add_rms(
    x: Tensor, residual: Tensor, weight: Tensor, *, mode: str = "golden", backend: str
) -> tuple[Tensor, Tensor]:
    """Run normplug's sum and norm in one call."""
    return functional.add_rms_norm(
        x, residual, x.shape[-1:], weight, EPS, mode=mode, backend=backend
    )


def eager_rms(x: Tensor, weight: Tensor) -> Tensor:
    """What `nn.RMSNorm` does."""
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def eager_add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The residual addition and the next norm of a pre-norm block."""
    total = x + residual
    return eager_rms(total, weight), total


def truth(problem: Problem, variance: float) -> Iterator[Piece]:
    """Yield the exact outputs, one group of rows at a time; the sum over rows comes last."""
    leaves = {name: leaf.detach() for name, leaf in problem.leaves.items()}
    weight = leaves["weight"].double()
    total = weight.new_zeros(weight.shape)
    for part in row_groups(leaves["x"]):
        h, dy = normalised(leaves, part), problem.gradients["y"][part].double()
        shape, options = h.shape[-1:], {"eps": EPS, "target_variance": variance}
        yield Piece("y", (part,), reference.rms_norm(h, shape, weight, **options).y)
        dx, dweight = reference.rms_norm_backward(dy, h, shape, weight, **options)
        if "residual" in leaves:
            dx = dx + problem.gradients["total"][part].double()
            yield Piece("total", (part,), h)
            yield Piece("dresidual", (part,), dx)
        yield Piece("dx", (part,), dx)
        total += dweight
    yield Piece("dweight", (), total)


OPS = (
    Op(
        "rms",
        PASSES,
        partial(make, None),
        normplug_rms,
        eager_rms,
        truth,
        layer_norm.refusal,
        rivals={
            "liger": partial(rivals.liger_rms_norm, EPS),
            "flaggems": partial(rivals.flaggems_rms_norm, EPS),
            "quack": partial(rivals.quack_rms_norm, EPS),
            "timm": partial(rivals.timm_rms_norm, EPS),
        },
    ),
    Op(
        "add_rms",
        PASSES_OF_SUM,
        partial(make, "residual"),
        normplug_add_rms,
        eager_add_rms,
        truth,
        layer_norm.refusal,
        rivals={
            "liger": partial(rivals.liger_add_rms_norm, EPS),
            "quack": partial(rivals.quack_add_rms_norm, EPS),
        },
    ),
)
