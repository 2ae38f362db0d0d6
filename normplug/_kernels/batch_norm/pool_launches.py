"""Set up the launches of BatchNorm with relu and max pooling."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch

from normplug._kernels.batch_norm import windows
from normplug._kernels.batch_norm.schedule import Pixels
from normplug._kernels.launch import Launch, accumulator

_UNROLLED = 25  # most steps of a loop over a window that is unrolled
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
    kernel, steps = windows.batch_norm_pool_forward, math.prod(window[0])
    flags = {"TRAINING": training, "WEIGHT": weight, "BIAS": bias, "KEEP": keep}
    return _launch(kernel, shape, dtype, window, (*size, *pooled), steps, tv, eps=eps, **flags)


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
    kernel = windows.batch_norm_pool_backward
    steps = max(math.prod(window[0]), math.prod(window[1]))
    flags = {"TRAINING": training, "JOINED": joined, "WEIGHT": weight}
    return _launch(kernel, shape, dtype, window, (*size, *pooled), steps, tv, **flags)


def _launch(
    kernel: Any,
    shape: Pixels,
    dtype: torch.dtype,
    window: Window,
    axes: tuple[int, int, int, int],
    steps: int,
    tv: float,
    **given: Any,
) -> Launch:
    given |= dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), sum(window, ()), strict=True))
    given |= dict(zip(("H", "W", "OH", "OW"), axes, strict=True))
    given |= {"ACC": accumulator(dtype), "root": math.sqrt(tv), "UNROLL": steps <= _UNROLLED}
    return Launch(kernel, shape.grid, shape.warps, shape, **given)
