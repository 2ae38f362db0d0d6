"""Set up BatchNorm's launches from a geometry and the flags of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from normplug._activations import ActivationLike, backward_reads_input, kernel_code
from normplug._kernels.batch_norm import columns, planes
from normplug._kernels.batch_norm.schedule import Columns, Geometry, Planes
from normplug._kernels.device import power_of_2
from normplug._kernels.launch import Launch, scalars
from normplug._kernels.merging import room_for_parts

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
    """What a call has and asks for, besides its shape and dtype.

    given: without training, mean and rstd are passed in. running, cumulative, tracked: as the
    kernel's RUNNING, CUMULATIVE, TRACKED. normalize: without it, only statistics are computed.
    variance: these are saved as (mean, var), not as (mean, rstd).

    peers, world: over how many processes the kernels join the batch, and the address of this
    process's table: see `exchange`.

    share: a backward without dx saves the terms by which another kernel computes it.
    """

    training: bool = True
    given: bool = False
    weight: bool = True
    bias: bool = True
    residual: bool = False
    activation: ActivationLike = None
    running: bool = False
    cumulative: bool = False
    tracked: bool = False
    normalize: bool = True
    variance: bool = False
    share: bool = False
    world: int = 1
    peers: int = 0

    @property
    def bits(self) -> bool:
        """Whether the forward saves relu's signs, so that the residual need not be kept."""
        return self.residual and self.activation == "relu" and not self.given


def forward_launch(
    shape: Geometry, dtype: torch.dtype, flags: Flags, momentum: float, eps: float, tv: float
) -> Launch:
    """Set up the forward kernel of a geometry."""
    # With cumulative, the host increments `tracked` before the launch.
    assert not (flags.cumulative and flags.tracked)
    double = dtype == torch.float64
    numbers = scalars(double, momentum=momentum, eps=eps, root=math.sqrt(tv))
    both = flags.training and flags.normalize
    constants: dict[str, Any] = {
        "ACC": tl.float64 if double else tl.float32,
        "TRAINING": flags.training,
        "GIVEN": flags.given,
        "NORMALIZE": flags.normalize,
        "VARIANCE": flags.variance,
        "WEIGHT": flags.weight,
        "BIAS": flags.bias,
        "RESIDUAL": flags.residual,
        "BITS": flags.bits,
        "ACTIVATION": kernel_code(flags.activation),
        "RUNNING": flags.running and flags.training,
        "CUMULATIVE": flags.cumulative,
        "TRACKED": flags.tracked,
    }
    group = (flags.peers, flags.world)
    if isinstance(shape, Planes):
        lag = shape.lag if both else 0
        grid = shape.tiles + lag
        if not flags.normalize:
            lag, grid = shape.tiles, shape.tiles + shape.c
        return _planes(
            planes.batch_norm_planes_forward, _FORWARD, shape, lag, grid, numbers, constants, group
        )
    alone = shape.gathers if flags.training else shape.writes
    grid = shape.grid if both else shape.slabs * alone
    return _columns(
        columns.batch_norm_columns_forward, _FORWARD, shape, grid, both, numbers, constants, group
    )


def backward_launch(
    shape: Geometry,
    dtype: torch.dtype,
    flags: Flags,
    needs: tuple[bool, bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs`: which of dx, dweight, dbias, dresidual are wanted."""
    double = dtype == torch.float64
    dx, dweight, dbias, dresidual = needs
    late = flags.training and dx
    sums = late or dweight or dbias or flags.share
    numbers = scalars(double, root=math.sqrt(tv))
    constants: dict[str, Any] = {
        "ACC": tl.float64 if double else tl.float32,
        "SUMS": sums,
        "SHARE": flags.share,
        "LATE": late,
        "WEIGHT": flags.weight,
        "BIAS": flags.bias,
        "RESIDUAL": flags.residual and backward_reads_input(flags.activation),
        "BITS": flags.bits,
        "ACTIVATION": kernel_code(flags.activation),
        "DX": dx,
        "DRESIDUAL": dresidual,
        "DWEIGHT": dweight,
        "DBIAS": dbias,
    }
    group = (flags.peers, flags.world) if late or flags.share else (0, 1)
    if isinstance(shape, Planes):
        del constants["SHARE"]  # the windows of a pooling are columns
        if late:
            lag, grid = shape.lag, shape.tiles + shape.lag
        else:
            lag, grid = shape.tiles, shape.tiles + (shape.c if sums else 0)
        return _planes(
            planes.batch_norm_planes_backward,
            _BACKWARD,
            shape,
            lag,
            grid,
            numbers,
            constants,
            group,
        )
    grid = shape.grid if late else shape.slabs * shape.gathers
    return _columns(
        columns.batch_norm_columns_backward, _BACKWARD, shape, grid, late, numbers, constants, group
    )


def _planes(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Planes,
    lag: int,
    grid: int,
    numbers: dict[str, float | int],
    constants: dict[str, Any],
    group: tuple[int, int],
) -> Launch:
    sizes = {
        "N": shape.n,
        "C": shape.c,
        "HW_UNITS": shape.hw // shape.unit,
        "TILES_A_CHANNEL": shape.tiles_a_channel,
        "TILES": shape.tiles,
        "LAG": lag,
        "PEERS": group[0],
    }
    head = {
        "UNIT": shape.unit,
        "BLOCK": shape.block,
        "KP": min(power_of_2(shape.tiles_a_channel), 1024),
    }
    constants = {**head, **constants, "WIDE": shape.wide, "WORLD": group[1]}
    return Launch(
        kernel,
        grid,
        pointers=pointers,
        sizes=sizes,
        scalars=numbers,
        constants=constants,
        warps=shape.warps,
    )


def _columns(
    kernel: Any,
    pointers: tuple[str, ...],
    shape: Columns,
    grid: int,
    both: bool,
    numbers: dict[str, float | int],
    constants: dict[str, Any],
    group: tuple[int, int],
) -> Launch:
    """Set up a kernel of `columns`. both: it gathers each slab and then writes it."""
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
        "PEERS": group[0],
    }
    own = both and shape.programs > 0
    head = {
        "UNIT": shape.unit,
        "U": shape.u,
        "BT": shape.bt,
        "BC": shape.bc,
        "BCH": shape.bch,
        "STAGES": shape.stages,
        "OWN": own,
        "SOLO": shape.solo,
    }
    tail = {
        "SEGMENTS": shape.hw > 1,
        "EVEN": shape.even,
        "WIDE": shape.wide,
        "WORLD": group[1],
    }
    return Launch(
        kernel,
        grid,
        pointers=pointers,
        sizes=sizes,
        scalars=numbers,
        constants={**head, **constants, **tail},
        warps=shape.warps,
        cooperative=own and not shape.solo,
    )


def scratch(shape: Geometry) -> tuple[int, int]:
    """How many counters and partial results a launch needs."""
    if isinstance(shape, Planes):
        return shape.c, 2 * shape.tiles + 2 * shape.c
    counters, parts = room_for_parts(shape.slabs, shape.gathers, shape.bch)
    return counters, parts + 2 * shape.c  # and the terms of dx that depend on sums
