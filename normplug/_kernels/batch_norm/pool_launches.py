"""Set up the launches of BatchNorm with relu and max pooling."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import triton.language as tl

from normplug._kernels.batch_norm import windows
from normplug._kernels.batch_norm.schedule import Pixels
from normplug._kernels.launch import Launch, scalars

_UNROLLED = 25  # most steps of a loop over a window that is unrolled
_FORWARD = (
    "x", "weight", "bias", "running_mean", "running_var", "y", "peaks", "places", "stats",
)  # fmt: skip
_BACKWARD = ("dy", "x", "places", "weight", "stats", "dweight", "dbias", "dx")
# Kernel, stride and padding, each by height and width.
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
    """Set up the forward over the rows of the output.

    size, pooled: height and width of the input and of the output. keep: also write what the
    backward needs.
    """
    constants = {"TRAINING": training, "WEIGHT": weight, "BIAS": bias, "KEEP": keep}
    numbers = scalars(dtype == torch.float64, eps=eps, root=math.sqrt(tv))
    kernel, steps = windows.batch_norm_pool_forward, math.prod(window[0])
    return _launch(
        kernel, _FORWARD, shape, dtype, window, (*size, *pooled), numbers, constants, steps
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
    joined: bool,
) -> Launch:
    """Set up the backward over blocks of the input, of one stride each; sizes as above."""
    constants = {"TRAINING": training, "JOINED": joined, "WEIGHT": weight}
    steps = max(math.prod(window[0]), math.prod(window[1]))
    numbers = scalars(dtype == torch.float64, root=math.sqrt(tv))
    kernel = windows.batch_norm_pool_backward
    return _launch(
        kernel, _BACKWARD, shape, dtype, window, (*size, *pooled), numbers, constants, steps
    )


def _launch(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    axes: tuple[int, int, int, int],
    numbers: dict[str, float | int],
    constants: dict[str, Any],
    steps: int,
) -> Launch:
    head = {
        "UNIT": shape.unit,
        "BP": shape.bp,
        "BC": shape.bc,
        **dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), sum(window, ()), strict=True)),
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
    }
    return Launch(
        kernel,
        shape.grid,
        pointers=pointers,
        sizes={
            **dict(zip(("H", "W", "OH", "OW"), axes, strict=True)),
            "C_UNITS": shape.c // shape.unit,
            "SLABS": shape.slabs,
        },
        scalars=numbers,
        constants={**head, **constants, "EVEN": shape.even, "UNROLL": steps <= _UNROLLED},
        warps=shape.warps,
    )
