"""Set up GroupNorm's launches from a geometry and the flags of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from normplug._activations import ActivationLike, kernel_code
from normplug._kernels.group_norm import columns, planes
from normplug._kernels.group_norm.schedule import Columns, PlanesBackward, PlanesForward
from normplug._kernels.launch import Launch, accumulator
from normplug._kernels.merging import room_for_parts


@dataclass(frozen=True)
class Flags:
    """What a call has, besides its shape and dtypes."""

    weight: bool = True
    bias: bool = True
    activation: ActivationLike = None


def forward_launch(
    shape: PlanesForward | Columns, dtype: torch.dtype, flags: Flags, eps: float, tv: float
) -> Launch:
    """Set up the forward kernel of a geometry; `dtype` is the dtype of the sums."""
    given = {"eps": eps, "root": math.sqrt(tv), "ACC": accumulator(dtype), "G": shape.groups}
    given["ACTIVATION"] = kernel_code(flags.activation)
    if isinstance(shape, Columns):
        kernel, grid = columns.group_norm_columns_forward, shape.programs + shape.lag
    elif shape.solo:
        kernel, grid = planes.group_norm_planes_solo_forward, shape.grid
    else:
        kernel, grid = planes.group_norm_planes_forward, shape.grid
    return Launch(kernel, grid, shape.warps, shape, flags, **given)


def backward_launch(
    shape: PlanesBackward | Columns,
    dtype: torch.dtype,
    flags: Flags,
    needs: tuple[bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs`: which of dx, dweight and dbias are wanted."""
    dx, dweight, dbias = needs
    activated = flags.activation is not None
    lag = shape.lag if dx else 0
    finishers = -(-shape.groups * shape.channels // shape.finish) if dweight or dbias else 0
    given: dict[str, Any] = {
        "G": shape.groups,
        "LAG": lag,
        "root": math.sqrt(tv),
        "ACC": accumulator(dtype),
        "WEIGHT": flags.weight and (dx or activated),
        "BIAS": flags.bias and activated,
        "ACTIVATION": kernel_code(flags.activation),
        **dict(zip(("DX", "DWEIGHT", "DBIAS"), needs, strict=True)),
    }
    if isinstance(shape, Columns):
        kernel = columns.group_norm_columns_backward
    else:
        kernel = planes.group_norm_planes_backward
    return Launch(kernel, shape.programs + lag + finishers, shape.warps, shape, **given)


def forward_scratch(shape: PlanesForward | Columns) -> tuple[int, int]:
    """How many counters and partial results a forward launch needs."""
    if isinstance(shape, Columns):
        counters, parts = room_for_parts(shape.units, shape.k, shape.bc)
        return counters, (0 if shape.single else parts) + 2 * shape.n * shape.c
    return room_for_parts(shape.n * shape.groups, shape.k, 1) if shape.lag else (0, 0)


def backward_scratch(
    shape: PlanesBackward | Columns, needs: tuple[bool, bool, bool]
) -> tuple[int, int]:
    """How many counters and partial results a backward launch needs."""
    if isinstance(shape, Columns):
        counters, parts = forward_scratch(shape)
        return counters + 1, parts
    _, dweight, dbias = needs
    sums = shape.parts * (dweight + dbias) * shape.groups * shape.channels
    if shape.held:
        return 1, sums
    counters, parts = room_for_parts(shape.n * shape.groups, shape.k, 1)
    return counters + 1, parts + 2 * shape.n * shape.groups + sums
