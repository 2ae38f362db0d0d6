"""Set up GroupNorm's launches from a geometry and the flags of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from normplug._activations import ActivationLike, kernel_code
from normplug._kernels.device import unit_of
from normplug._kernels.group_norm import columns, planes
from normplug._kernels.group_norm.schedule import Columns, PlanesBackward, PlanesForward
from normplug._kernels.launch import Launch, scalars
from normplug._kernels.merging import room_for_parts

_FORWARD = ("x", "weight", "bias", "y", "stats", "partial", "counters")
_BACKWARD = (
    "dy", "x", "weight", "bias", "stats", "dx", "dweight", "dbias", "partial", "counters",
)  # fmt: skip
_FAN_IN = 32  # parts of a gradient that a program adds at a time


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
    double = dtype == torch.float64
    numbers = scalars(double, eps=eps, root=math.sqrt(tv))
    constants: dict[str, Any] = {
        "ACC": tl.float64 if double else tl.float32,
        "WEIGHT": flags.weight,
        "BIAS": flags.bias,
        "ACTIVATION": kernel_code(flags.activation),
        "EVEN": shape.even,
        "WIDE": shape.wide,
    }
    if isinstance(shape, Columns):
        return Launch(
            columns.group_norm_columns_forward,
            shape.units * shape.k + shape.lag,
            pointers=_FORWARD,
            sizes={**_column_sizes(shape), "LAG": shape.lag},
            scalars=numbers,
            constants={**_column_tile(shape), **constants},
            warps=shape.warps,
        )
    unit = unit_of(shape.width)
    return Launch(
        planes.group_norm_planes_forward,
        shape.grid,
        pointers=_FORWARD,
        sizes={
            "N": shape.n,
            "G": shape.groups,
            "CHANNELS": shape.channels,
            "HW": shape.hw,
            "WIDTH_UNITS": shape.width // unit,
            "K": shape.k,
            "LAG": shape.lag,
        },
        scalars=numbers,
        constants={
            "UNIT": unit,
            "R": shape.r,
            "BLOCK": shape.block,
            "RUN": shape.run,
            "HELD": shape.held,
            **constants,
        },
        warps=shape.warps,
    )


def backward_launch(
    shape: PlanesBackward | Columns,
    dtype: torch.dtype,
    flags: Flags,
    needs: tuple[bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs`: which of dx, dweight and dbias are wanted."""
    double = dtype == torch.float64
    numbers = scalars(double, root=math.sqrt(tv))
    dx, dweight, dbias = needs
    activated = flags.activation is not None
    lag = shape.lag if dx else 0
    finishers = -(-shape.groups * shape.channels // shape.finish) if dweight or dbias else 0
    constants: dict[str, Any] = {
        "FINISH": shape.finish,
        "FAN_IN": _FAN_IN,
        "ACC": tl.float64 if double else tl.float32,
        "WEIGHT": flags.weight and (dx or activated),
        "BIAS": flags.bias and activated,
        "ACTIVATION": kernel_code(flags.activation),
        "DX": dx,
        "DWEIGHT": dweight,
        "DBIAS": dbias,
        "EVEN": shape.even,
        "WIDE": shape.wide,
    }
    grid = shape.programs + lag + finishers
    if isinstance(shape, Columns):
        return Launch(
            columns.group_norm_columns_backward,
            grid,
            pointers=_BACKWARD,
            sizes={**_column_sizes(shape), "LAG": lag},
            scalars=numbers,
            constants={**_column_tile(shape), **constants},
            warps=shape.warps,
        )
    unit = unit_of(shape.hw)
    return Launch(
        planes.group_norm_planes_backward,
        grid,
        pointers=_BACKWARD,
        sizes={
            "N": shape.n,
            "G": shape.groups,
            "CHANNELS": shape.channels,
            "HW_UNITS": shape.hw // unit,
            "K": shape.k,
            "KS": shape.ks,
            "LAG": lag,
            "SPLITS": shape.splits,
        },
        scalars=numbers,
        constants={
            "UNIT": unit,
            "R": shape.r,
            "CB": shape.cb,
            "SB": shape.sb,
            "HELD": shape.held,
            **constants,
        },
        warps=shape.warps,
    )


def forward_scratch(shape: PlanesForward | Columns) -> tuple[int, int]:
    """How many counters and partial results a forward launch needs."""
    if isinstance(shape, Columns):
        counters, parts = _column_parts(shape)
        return counters, parts + 2 * shape.n * shape.c
    return (0, 0) if shape.held else room_for_parts(shape.n * shape.groups, shape.k, 1)


def backward_scratch(
    shape: PlanesBackward | Columns, needs: tuple[bool, bool, bool]
) -> tuple[int, int]:
    """How many counters and partial results a backward launch needs."""
    if isinstance(shape, Columns):
        counters, parts = _column_parts(shape)
        return counters + 1, parts + 2 * shape.n * shape.c
    _, dweight, dbias = needs
    sums = shape.parts * (dweight + dbias) * shape.groups * shape.channels
    if shape.held:
        return 1, sums
    counters, parts = room_for_parts(shape.n * shape.groups, shape.k, 1)
    return counters + 1, parts + 2 * shape.n * shape.groups + sums


def _column_parts(shape: Columns) -> tuple[int, int]:
    counters, parts = room_for_parts(shape.units, shape.k, shape.bc)
    return counters, 0 if shape.k == 1 else parts


def _column_sizes(shape: Columns) -> dict[str, int]:
    return {
        "N": shape.n,
        "G": shape.groups,
        "CHANNELS": shape.channels,
        "S": shape.s,
        "WIDTH_UNITS": shape.c // shape.unit,
        "SLABS": shape.slabs,
        "K": shape.k,
        "ROWS_EACH": shape.rows_each,
    }


def _column_tile(shape: Columns) -> dict[str, Any]:
    return {
        "UNIT": shape.unit,
        "U": shape.u,
        "BT": shape.bt,
        "BC": shape.bc,
        **shape.groups_of_slab,
        "STAGES": shape.stages,
        "SINGLE": shape.k == 1,
        "SOLO": shape.solo,
    }
