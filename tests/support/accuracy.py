"""The yardstick of the numeric tests: torch's own error against float64, not a magic number.

The bound is that of `normplug.bench.op`. Tests with random inputs must also know how much
cancels: the errors of two equally good implementations may differ by far more than a factor of two
where one of them is small by chance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normplug.bench.op import ROUNDINGS_OF_SUMS, bound, error
from normplug.reference import accumulator_dtype


def assert_no_worse(
    name: str,
    ours: Tensor,
    theirs: Tensor,
    truth: Tensor,
    terms: Tensor | None = None,
    spare: float = 0.0,
) -> None:
    """Assert that our error is at most twice theirs, plus a few roundings.

    terms: where sums may cancel, the elementwise sum of the absolute values of their terms, each of
    which may have been rounded. spare: a relative error to allow beyond that.
    """
    assert ours.shape == theirs.shape, name
    assert ours.dtype == theirs.dtype, name
    allowed = bound(error(theirs, truth), ours.dtype) + spare
    if terms is not None:
        limits = torch.finfo(ours.dtype)
        rounding = ROUNDINGS_OF_SUMS * torch.finfo(accumulator_dtype(ours.dtype)).eps
        # Below the smallest normal number, a rounding error no longer shrinks with the value.
        subnormal = limits.smallest_normal * limits.eps * math.sqrt(ours.numel())
        size = truth.detach().double().norm()
        allowed += float(
            (rounding * terms.norm() + subnormal) / (size if size > 0 else 1.0)
        )
    assert error(ours, truth) <= allowed, (
        f"{name}: {error(ours, truth):.3g} > {allowed:.3g}"
    )


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A detached copy that requires a gradient."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
