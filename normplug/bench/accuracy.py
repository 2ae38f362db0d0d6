"""No wrong result is timed: the yardstick is torch's own error against float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from normplug.reference import accumulator_dtype

Tensors = Mapping[str, Tensor]

# Roundings in the accumulator dtype: of mean, rstd, weight * sqrt(tv) and the gradients' sums, and
# as many again in a truth that is itself float64.
ROUNDINGS_OF_SUMS = 8


def bound(theirs: float, dtype: torch.dtype) -> float:
    """The largest relative error to allow: twice torch's, plus half a rounding to the dtype.

    And a few roundings to the accumulator dtype: with few channels `theirs` may be small by chance.
    """
    if not dtype.is_floating_point:
        return 0.0
    sums = torch.finfo(accumulator_dtype(dtype)).eps
    return 2.0 * theirs + 0.5 * torch.finfo(dtype).eps + ROUNDINGS_OF_SUMS * sums


def error(value: Tensor, truth: Tensor) -> float:
    """Relative error in the Euclidean norm; absolute if the truth is zero."""
    truth = truth.double()
    size = truth.norm()
    return float((value.double() - truth).norm() / (size if size > 0 else 1.0))


def require_accurate(
    what: str, found: Tensors, truth: Tensors, yardstick: Mapping[str, float]
) -> None:
    """Raise an AssertionError if an error is above `bound`, or NaN; the yardstick is torch's."""
    for name, value in found.items():
        wrong, allowed = error(value, truth[name]), bound(yardstick[name], value.dtype)
        if not wrong <= allowed:
            raise AssertionError(
                f"normplug.bench: {what}: {name} is wrong: its relative error to float64 is "
                f"{wrong:.3g}, above {allowed:.3g} (torch has {yardstick[name]:.3g})."
            )


def differences(found: Tensors, theirs: Tensors) -> dict[str, float]:
    """The largest differences of any element from torch's: absolute, and in parts of the output's.

    `max_rel` is relative to the largest element of the same output.
    """
    away = [(value.double() - theirs[name].double()).abs().max() for name, value in found.items()]
    sizes = [theirs[name].double().abs().max() for name in found]
    absolute, size = torch.stack(away), torch.stack(sizes)
    relative = absolute / torch.where(size > 0, size, 1)
    return {"max_abs": absolute.max().item(), "max_rel": relative.max().item()}  # NaN if any is
