"""The yardstick of the numeric tests: torch's own error against float64, not a magic number."""

from __future__ import annotations

import torch
from torch import Tensor


def error(value: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm; absolute where the truth is zero."""
    difference = (value.double() - truth.double()).norm()
    scale = truth.double().norm()
    return float(difference / scale if scale > 0 else difference)


def assert_no_worse(name: str, ours: Tensor, theirs: Tensor, truth: Tensor, factor: float = 2.0):
    """Ours may be `factor` times as far from the truth as theirs, and one rounding more."""
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    # A float64 truth has a few roundings of its own, where the others have half of one at most.
    roundings = 8.0 if ours.dtype == torch.float64 else 0.5
    allowed = factor * error(theirs, truth) + roundings * torch.finfo(ours.dtype).eps
    assert error(ours, truth) <= allowed, f"{name}: {error(ours, truth):.3g} > {allowed:.3g}"


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A copy that gradients end in."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()
