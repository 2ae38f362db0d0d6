"""BatchNorm by kernel: from a tensor's shape and layout to launches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from normplug._kernels.activation import ACTIVATIONS
from normplug._kernels.batch_norm import columns, planes
from normplug._kernels.batch_norm.schedule import Columns, Geometry, Planes
from normplug._kernels.device import power_of_2
from normplug._kernels.launch import Launch, number

_FORWARD = (
    "x", "residual", "weight", "bias", "running_mean", "running_var", "tracked", "y", "bits",
    "stats", "partial", "counters",
)  # fmt: skip
_BACKWARD = (
    "dy", "x", "residual", "bits", "weight", "bias", "stats", "dx", "dresidual", "dweight", "dbias",
    "partial", "counters",
)  # fmt: skip


@dataclass(frozen=True)
class Flags:
    """What a call asks for, beside its shape."""

    training: bool = True
    given: bool = False  # the statistics, where it is no training
    weight: bool = True
    bias: bool = True
    residual: bool = False
    activation: str | None = None
    running: bool = False
    cumulative: bool = False
    tracked: bool = False
    normalize: bool = True
    variance: bool = False  # saved in place of rstd

    @property
    def bits(self) -> bool:
        """Whether the forward saves relu's signs, which the residual would have to be kept for."""
        return self.residual and self.activation == "relu" and not self.given


def forward_launch(
    shape: Geometry, dtype: torch.dtype, flags: Flags, momentum: float, eps: float, tv: float
) -> Launch:
    """Set up the forward kernel of a geometry."""
    double = dtype == torch.float64
    given = {"momentum": momentum, "eps": eps, "root": math.sqrt(tv)}
    scalars = {name: number(value, double) for name, value in given.items()}
    constants: dict[str, Any] = {
        "ACC": tl.float64 if double else tl.float32,
        "OWN": flags.training and flags.normalize,
        "SOLO": False,
        "TRAINING": flags.training,
        "GIVEN": flags.given,
        "NORMALIZE": flags.normalize,
        "VARIANCE": flags.variance,
        "WEIGHT": flags.weight,
        "BIAS": flags.bias,
        "RESIDUAL": flags.residual,
        "BITS": flags.bits,
        "ACTIVATION": ACTIVATIONS[flags.activation],
        "RUNNING": flags.running and flags.training,
        "CUMULATIVE": flags.cumulative,
        "TRACKED": flags.tracked,
    }
    if isinstance(shape, Planes):
        del constants["OWN"], constants["SOLO"]
        lag = shape.lag if flags.training and flags.normalize else 0
        grid = shape.tiles + lag
        if not flags.normalize:
            lag, grid = shape.tiles, shape.tiles + shape.c
        return _planes(
            planes.batch_norm_planes_forward, _FORWARD, shape, lag, grid, scalars, constants
        )
    constants["SOLO"] = shape.solo
    if flags.training and flags.normalize:
        grid = shape.grid
    else:
        grid = shape.slabs * (shape.gathers if flags.training else shape.writes)
    return _columns(columns.batch_norm_columns_forward, _FORWARD, shape, grid, scalars, constants)


def backward_launch(
    shape: Geometry,
    dtype: torch.dtype,
    flags: Flags,
    needs: tuple[bool, bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs` are those of dx, dweight, dbias and dresidual."""
    double = dtype == torch.float64
    dx, dweight, dbias, dresidual = needs
    late = flags.training and dx
    sums = late or dweight or dbias
    scalars = {"root": number(math.sqrt(tv), double)}
    constants: dict[str, Any] = {
        "ACC": tl.float64 if double else tl.float32,
        "OWN": late,
        "SOLO": False,
        "SUMS": sums,
        "LATE": late,
        "WEIGHT": flags.weight,
        "BIAS": flags.bias,
        "RESIDUAL": flags.residual and flags.activation not in (None, "relu"),
        "BITS": flags.bits,
        "ACTIVATION": ACTIVATIONS[flags.activation],
        "DX": dx,
        "DRESIDUAL": dresidual,
        "DWEIGHT": dweight,
        "DBIAS": dbias,
    }
    if isinstance(shape, Planes):
        del constants["OWN"], constants["SOLO"]
        if late:
            lag, grid = shape.lag, shape.tiles + shape.lag
        else:
            lag, grid = shape.tiles, shape.tiles + (shape.c if sums else 0)
        return _planes(
            planes.batch_norm_planes_backward, _BACKWARD, shape, lag, grid, scalars, constants
        )
    constants["SOLO"] = shape.solo
    grid = shape.grid if late else shape.slabs * shape.gathers
    return _columns(columns.batch_norm_columns_backward, _BACKWARD, shape, grid, scalars, constants)


def _planes(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Planes,
    lag: int,
    grid: int,
    scalars: dict[str, float | int],
    constants: dict[str, Any],
) -> Launch:
    sizes = {
        "N": shape.n,
        "C": shape.c,
        "HW_UNITS": shape.hw // shape.unit,
        "TILES_A_CHANNEL": shape.tiles_a_channel,
        "TILES": shape.tiles,
        "LAG": lag,
    }
    head = {
        "UNIT": shape.unit,
        "BLOCK": shape.block,
        "KP": min(power_of_2(shape.tiles_a_channel), 1024),
    }
    constants = {**head, **constants, "WIDE": shape.wide}
    return Launch(
        kernel,
        grid,
        pointers=pointers,
        sizes=sizes,
        scalars=scalars,
        constants=constants,
        warps=shape.warps,
    )


def _columns(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Columns,
    grid: int,
    scalars: dict[str, float | int],
    constants: dict[str, Any],
) -> Launch:
    sizes = {
        "ROWS": shape.rows,
        "C": shape.c,
        "HW": shape.hw,
        "CHANNELS": shape.channels,
        "LIVE_UNITS": shape.channels * shape.hw // shape.unit,
        "WIDTH_UNITS": shape.c * shape.hw // shape.unit,
        "SLABS": shape.slabs,
        "GATHERS": shape.gathers,
        "WRITES": shape.writes,
        "ROWS_EACH": shape.rows_each,
        "GROUP": shape.group,
        "HEAD": shape.head,
    }
    head = {"UNIT": shape.unit, "U": shape.u, "BT": shape.bt, "BC": shape.bc, "BCH": shape.bch}
    head["STAGES"] = shape.stages
    tail = {"SEGMENTS": shape.hw > 1, "EVEN": shape.even, "WIDE": shape.wide}
    own = constants["OWN"] and shape.programs > 0
    return Launch(
        kernel,
        grid,
        pointers=pointers,
        sizes=sizes,
        scalars=scalars,
        constants={**head, **constants, "OWN": own, **tail},
        warps=shape.warps,
        cooperative=own and not shape.solo,
    )


def scratch(shape: Geometry) -> tuple[int, int]:
    """Counters and partial results that a launch needs."""
    if isinstance(shape, Planes):
        return shape.c, 2 * shape.tiles
    items = shape.slabs * (shape.gathers + shape.batches)
    return shape.slabs * (shape.batches + 2), items * 2 * shape.bch + 2 * shape.c
