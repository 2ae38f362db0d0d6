"""Memory layouts: contiguous, channels_last, or one that has to be copied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor of this shape and stride is contiguous."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def is_channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor is dense with dimension 1 innermost, for any number of dimensions."""
    last = (shape[0], *shape[2:], shape[1])
    return is_contiguous(last, (stride[0], *stride[2:], stride[1]))


def readable(t: Tensor) -> Tensor:
    """Return a gradient with its values in memory: no lazy negation, no ZeroTensor."""
    if t._is_zerotensor():
        return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    return t.resolve_neg()


def dense(x: Tensor) -> Tensor:
    """Return x, copied if it is neither contiguous nor channels_last."""
    if x.is_contiguous() or is_channels_last(x.shape, x.stride()):
        return x
    return x.contiguous()


def lies_like(tensor: Tensor, x: Tensor) -> bool:
    """Whether `tensor` has the memory layout of `x`, which is dense and of the same shape."""
    if x.is_contiguous():
        return tensor.is_contiguous()
    return tensor.shape == x.shape and is_channels_last(tensor.shape, tensor.stride())


def laid_out_like(tensor: Tensor, x: Tensor) -> Tensor:
    """Return `tensor`, copied if its layout is not the layout of the dense `x`."""
    if lies_like(tensor, x):
        return tensor
    return tensor.contiguous() if x.is_contiguous() else torch.empty_like(x).copy_(tensor)


class Levels(NamedTuple):
    """Where row r begins, in values, if rows have strides on two levels or on three.

        (g // heads) * outer + (g % heads) * middle + (r % inner) * step        g = r // inner

    `heads` and `middle` describe the heads of an attention. They are compiled into a kernel; the
    rest is not.
    """

    inner: int
    outer: int
    step: int
    heads: int = 1
    middle: int = 0

    def goes_with(self, other: Levels) -> bool:
        """Whether one launch can take both."""
        return self.inner == other.inner and (
            self.heads == other.heads or 1 in (self.heads, other.heads)
        )

    def dense(self, rows: int, width: int) -> bool:
        """Whether `rows` rows of `width` values leave no gaps."""
        if self.heads == 1:
            return self.outer == width and self.step == rows // self.inner * width
        within = self.heads * width
        return (
            self.middle == width
            and self.step == within
            and self.outer == self.inner * within
        )


Spacing = int | Levels  # of rows: one stride from each to the next, or strides on levels


def row_spacing(
    shape: Sequence[int], stride: Sequence[int], row_dims: int
) -> Spacing | None:
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
    match levels:
        case []:
            return math.prod(shape[outer:])
        case [(_, step)]:
            return step
        case [(inner, step), (_, apart)]:
            return Levels(inner, apart, step)
        # Only heads within a token: the two are compiled into the kernel, and other layouts may
        # change them from call to call.
        case [(inner, step), (heads, middle), (_, apart)] if 0 < middle < step:
            return Levels(inner, apart, step, heads, middle)
    return None


def spread(shape: Sequence[int], dims: int, row_dims: int) -> tuple[int, ...]:
    """The shape of a value per sample, (samples, *row), that broadcasts to `dims` dimensions."""
    outer = len(shape) - row_dims
    return (*shape[:outer], *[1] * (dims - len(shape)), *shape[outer:])


def lies_dense(spacing: Spacing | None, rows: int, width: int) -> bool:
    """Whether rows, in any order, have no gaps between them. Their gradient then has none."""
    if isinstance(spacing, Levels):
        return spacing.dense(rows, width)
    return spacing == width


def spacing_after(
    t: Tensor, row_dims: int, width: int, *before: Spacing
) -> Spacing | None:
    """The row spacing of t; None if no launch can take it together with the spacings `before`."""
    if t.is_contiguous():
        return width
    spacing = row_spacing(t.shape, t.stride(), row_dims)
    others = [each for each in before if isinstance(each, Levels)]
    if isinstance(spacing, Levels) and not all(map(spacing.goes_with, others)):
        return None
    return spacing
