"""BatchNorm, relu and max pooling by kernel: from sizes and flags to launches."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
import triton.language as tl

from normplug._kernels.batch_norm import windows
from normplug._kernels.batch_norm.schedule import Pixels
from normplug._kernels.launch import Launch, number

_UNROLLED = 25  # steps through a window, up to which their loads are all under way at once
_FORWARD = (
    "x", "weight", "bias", "running_mean", "running_var", "y", "peaks", "places", "stats",
)  # fmt: skip
_BACKWARD = ("dy", "x", "places", "weight", "stats", "dweight", "dbias", "dx")
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
    scalars = {"eps": eps, "root": math.sqrt(tv)}
    return _launch(
        windows.batch_norm_pool_forward,
        _FORWARD,
        shape,
        dtype,
        window,
        size,
        pooled,
        scalars,
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
    scalars = {"root": math.sqrt(tv)}
    return _launch(
        windows.batch_norm_pool_backward,
        _BACKWARD,
        shape,
        dtype,
        window,
        size,
        pooled,
        scalars,
        constants,
        steps,
    )


def _launch(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    size: tuple[int, int],
    pooled: tuple[int, int],
    scalars: dict[str, float],
    constants: dict[str, Any],
    steps: int,
) -> Launch:
    double = dtype == torch.float64
    height, width, pooled_height, pooled_width = (*size, *pooled)
    head = {
        "UNIT": shape.unit,
        "BP": shape.bp,
        "BC": shape.bc,
        **dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), sum(window, ()), strict=True)),
        "ACC": tl.float64 if double else tl.float32,
    }
    return Launch(
        kernel,
        shape.grid,
        pointers=pointers,
        sizes={
            "H": height,
            "W": width,
            "OH": pooled_height,
            "OW": pooled_width,
            "C_UNITS": shape.c // shape.unit,
            "SLABS": shape.slabs,
        },
        scalars={name: number(value, double) for name, value in scalars.items()},
        constants={**head, **constants, "EVEN": shape.even, "UNROLL": steps <= _UNROLLED},
        warps=shape.warps,
    )
