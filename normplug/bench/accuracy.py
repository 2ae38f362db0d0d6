"""Refuse to time a wrong result; the yardstick is torch's own error relative to float64."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normplug.reference import accumulator_dtype

# Roundings in the accumulator dtype: of mean, rstd, weight * sqrt(tv) and the gradients' sums, and
# as many again in a truth that is itself float64.
ROUNDINGS_OF_SUMS = 8
# The largest difference from torch that is expected in float32 and float64.
NEAR, NEAR_DTYPES = 1e-7, ("float32", "float64")


class Piece(NamedTuple):
    """A part of the exact result; a float64 copy of the whole may not fit in memory.

    Attributes:
        name: the name of the output.
        where: the index of this part in the output.
        value: the exact values, in float64.
    """

    name: str
    where: tuple[slice, ...]
    value: Tensor


def relative_errors(outputs: Mapping[str, Tensor], truth: Iterable[Piece]) -> dict[str, float]:
    """Name -> relative error in the Euclidean norm; absolute if the truth is zero."""
    squared_error: dict[str, Tensor] = {}
    squared_norm: dict[str, Tensor] = {}
    for name, where, value in truth:
        difference = outputs[name][where].double() - value
        squared_error[name] = squared_error.get(name, 0) + difference.square().sum()
        squared_norm[name] = squared_norm.get(name, 0) + value.square().sum()
    known, expected = sorted(squared_error), sorted(outputs)
    assert known == expected, f"the truth has {known}, and the outputs are {expected}"
    return {
        name: float((error / squared_norm[name] if squared_norm[name] > 0 else error).sqrt())
        for name, error in squared_error.items()
    }


def bound(theirs: float, dtype: torch.dtype) -> float:
    """The largest relative error to allow where torch's is `theirs`.

    Twice `theirs`, plus half a rounding to the result's dtype and a few roundings to the
    accumulator dtype: with few channels `theirs` may be small by chance.
    """
    if not dtype.is_floating_point:
        return 0.0
    sums = torch.finfo(accumulator_dtype(dtype)).eps
    return 2.0 * theirs + 0.5 * torch.finfo(dtype).eps + ROUNDINGS_OF_SUMS * sums


def require_accurate(
    what: str, outputs: Mapping[str, Tensor], truth: Iterable[Piece], yardstick: Mapping[str, float]
) -> None:
    """Raise if an output is too far from the truth.

    Args:
        what: provider and case, for the message.
        outputs: the computed values.
        truth: the exact values.
        yardstick: the errors of torch eager, by output.

    Raises:
        AssertionError: an output's error is above `bound`, or NaN.
    """
    for name, error in relative_errors(outputs, truth).items():
        allowed = bound(yardstick[name], outputs[name].dtype)
        if not error <= allowed:
            raise AssertionError(
                f"normplug.bench: {what}: {name} is wrong: its relative error to float64 is "
                f"{error:.3g}, above {allowed:.3g} (torch eager has {yardstick[name]:.3g})."
            )


def largest_difference(
    outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor], names: Collection[str]
) -> float:
    """The largest elementwise difference of the named outputs from `expected`.

    It is relative to the largest element of the same output, or absolute if that is 0.
    """
    parts = []
    for name in names:
        largest = expected[name].abs().max().double()
        difference = (outputs[name] - expected[name]).abs_().max().double()
        parts.append(difference / largest if largest > 0 else difference)
    return float(torch.stack(parts).max())  # NaN if any part is NaN


def is_far(row: Mapping[str, Any]) -> bool:
    """Whether a row in float32 or float64 differs from torch by more than `NEAR`."""
    return row["dtype"] in NEAR_DTYPES and not row["difference"] <= NEAR
