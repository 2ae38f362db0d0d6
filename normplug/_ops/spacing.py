"""How the rows of a tensor lie in memory, if the kernels can address them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from normplug._kernels.layer_norm.launches import Levels, Spacing
from normplug._layouts import is_contiguous


def row_spacing(shape: Sequence[int], stride: Sequence[int], row_dims: int) -> Spacing | None:
    """The spacing of rows; None if a row is not dense, or the kernels cannot express it."""
    outer = len(shape) - row_dims
    if not is_contiguous(shape[outer:], stride[outer:]):
        return None
    levels: list[tuple[int, int]] = []  # (count, stride), the innermost first
    for size, step in zip(reversed(shape[:outer]), reversed(stride[:outer]), strict=True):
        if size == 1:
            continue
        if levels and step == math.prod(levels[-1]):
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, step))
    if len(levels) == 3:
        (inner, step), (heads, middle), (_, apart) = levels
        # Only heads within a token: `heads` and `middle` are compiled into the kernel, and others
        # may change from call to call.
        return Levels(inner, apart, step, heads, middle) if 0 < middle < step else None
    if len(levels) == 2:
        (inner, step), (_, apart) = levels
        return Levels(inner, apart, step)
    if levels[2:]:
        return None
    return levels[0][1] if levels else math.prod(shape[outer:])


_row_spacing = lru_cache(maxsize=4096)(row_spacing)  # cannot take symbolic sizes


def lies_dense(spacing: Spacing | None, rows: int, width: int) -> bool:
    """Whether rows, in any order, have no gaps between them. Their gradient then has none."""
    if isinstance(spacing, Levels):
        return spacing.dense(rows, width)
    return spacing == width


def spacing_of(t: Tensor, row_dims: int) -> Spacing:
    """The row spacing of a tensor that the kernels can read."""
    if t.is_contiguous():
        return math.prod(t.shape[t.dim() - row_dims :])
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    assert spacing is not None
    return spacing


def spacing_after(t: Tensor, row_dims: int, width: int, *before: Spacing) -> Spacing | None:
    """The row spacing; None if no launch can take it together with those `before`."""
    if t.is_contiguous():
        return width
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    if isinstance(spacing, Levels):
        for other in before:
            if isinstance(other, Levels) and not spacing.goes_with(other):
                return None
    return spacing
