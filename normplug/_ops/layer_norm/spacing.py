"""How the rows of a tensor lie in memory, where the kernels can find them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from normplug._kernels.layer_norm.launches import Levels, Spacing
from normplug._layouts import is_contiguous


def row_spacing(shape: Sequence[int], stride: Sequence[int], row_dims: int) -> Spacing | None:
    """How rows lie; None where they are not dense, or lie on more levels than kernels know."""
    outer = len(shape) - row_dims
    if not is_contiguous(shape[outer:], stride[outer:]):
        return None
    levels: list[tuple[int, int]] = []  # how many, how far apart; the innermost first
    for size, step in zip(reversed(shape[:outer]), reversed(stride[:outer]), strict=True):
        if size == 1:
            continue
        if levels and step == math.prod(levels[-1]):
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, step))
    if len(levels) == 3:
        (inner, step), (heads, middle), (_, apart) = levels
        # Heads within a token. Other middles may change from call to call, and are compiled in.
        return Levels(inner, apart, step, heads, middle) if 0 < middle < step else None
    if len(levels) == 2:
        (inner, step), (_, apart) = levels
        return Levels(inner, apart, step)
    if levels[2:]:
        return None
    return levels[0][1] if levels else math.prod(shape[outer:])


_row_spacing = lru_cache(maxsize=4096)(row_spacing)  # not for a compiler's symbolic sizes


def lies_dense(spacing: Spacing | None, rows: int, width: int) -> bool:
    """Whether rows, in whatever order, have nothing between them: so does their gradient then."""
    if isinstance(spacing, Levels):
        return spacing.dense(rows, width)
    return spacing == width


def spacing_of(t: Tensor, row_dims: int) -> Spacing:
    """How the rows of a tensor lie that has been laid out."""
    if t.is_contiguous():
        return math.prod(t.shape[t.dim() - row_dims :])
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    assert spacing is not None
    return spacing


def spacing_after(t: Tensor, row_dims: int, width: int, *before: Spacing) -> Spacing | None:
    """How rows lie; None where no launch could take them with those `before`."""
    if t.is_contiguous():
        return width
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    if isinstance(spacing, Levels):
        for other in before:
            if isinstance(other, Levels) and not spacing.goes_with(other):
                return None
    return spacing
