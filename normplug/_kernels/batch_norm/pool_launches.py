"""BatchNorm, relu and max pooling by kernel: from sizes and flags to launches."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import triton.language as tl

from normplug._kernels.batch_norm import windows
from normplug._kernels.launch import Launch, number
from normplug._kernels.schedule import Pixels

_UNROLLED = 25  # steps through a window, up to which their loads are all under way at once
# Kernel, stride and padding, by height and width each.
Window: TypeAlias = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]


def forward_launch(
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    size: tuple[int, int],
    pooled: tuple[int, int],
    training: bool,
    weight: bool,
    bias: bool,
    keep: bool,
    eps: float,
    tv: float,
) -> Launch:
    """Set up the forward over the rows of the output; keep: what the backward needs as well.

    size, pooled: height and width of the input and of the output.
    """
    constants = {"TRAINING": training, "WEIGHT": weight, "BIAS": bias, "KEEP": keep}
    steps = math.prod(window[0])
    numbers = (eps, math.sqrt(tv))
    return _launch(
        windows.batch_norm_pool_forward,
        shape,
        dtype,
        window,
        size,
        pooled,
        numbers,
        constants,
        steps,
    )


def backward_launch(
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    size: tuple[int, int],
    pooled: tuple[int, int],
    training: bool,
    weight: bool,
    tv: float,
) -> Launch:
    """Set up the backward over the input, in squares of the stride; sizes as above."""
    constants = {"TRAINING": training, "WEIGHT": weight}
    steps = max(math.prod(window[0]), math.prod(window[1]))
    numbers = (math.sqrt(tv),)
    return _launch(
        windows.batch_norm_pool_backward,
        shape,
        dtype,
        window,
        size,
        pooled,
        numbers,
        constants,
        steps,
    )


def _launch(
    kernel: Any,
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    size: tuple[int, int],
    pooled: tuple[int, int],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    steps: int,
) -> Launch:
    double = dtype == torch.float64
    sizes = (*size, *pooled, shape.c // shape.unit, shape.slabs)
    head = {
        "UNIT": shape.unit,
        "BP": shape.bp,
        "BC": shape.bc,
        **dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), sum(window, ()), strict=True)),
        "ACC": tl.float64 if double else tl.float32,
    }
    constants = {**head, **constants, "EVEN": shape.even, "UNROLL": steps <= _UNROLLED}
    scalars = tuple(number(v, double) for v in numbers)
    return Launch(kernel, shape.grid, sizes + scalars, constants, shape.warps)
