"""Set up BatchNorm's launches from a geometry and the flags of a call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from normplug._activations import ActivationLike, backward_reads_input, kernel_code
from normplug._kernels.batch_norm import columns, planes
from normplug._kernels.batch_norm.schedule import Geometry, Pixels, Planes
from normplug._kernels.launch import Launch, accumulator
from normplug._kernels.merging import room_for_parts


@dataclass(frozen=True)
class Flags:
    """What a call has and asks for, besides its shape and dtype.

    given: without training, mean and rstd are passed in. running, cumulative, tracked, safe: the
    kernels' constants of these names. normalize: without it, only statistics are computed.
    variance: they are saved as (mean, var), not as (mean, rstd). share: a backward without dx saves
    the terms by which another kernel computes it. constant: only dx and the residual's gradient are
    ever wanted, and training is off. world, peers: how many processes join their batches, and the
    address of this process's table: see `exchange`.
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
    safe: bool = False
    normalize: bool = True
    variance: bool = False
    share: bool = False
    constant: bool = False
    world: int = 1
    peers: int = 0

    @property
    def bits(self) -> bool:
        """Whether the forward saves relu's signs, so that residual or x need not be saved."""
        reads_less = self.residual or self.constant
        return reads_less and self.activation == "relu" and not self.given


def forward_launch(
    shape: Geometry, dtype: torch.dtype, flags: Flags, momentum: float, eps: float, tv: float
) -> Launch:
    """Set up the forward kernel of a geometry."""
    # With cumulative, the host increments `tracked` before the launch, whatever the batch holds.
    assert not (flags.cumulative and (flags.tracked or flags.safe))
    given: dict[str, Any] = {
        "momentum": momentum,
        "eps": eps,
        "root": math.sqrt(tv),
        "ACC": accumulator(dtype),
        "ACTIVATION": kernel_code(flags.activation),
        "RUNNING": flags.running and flags.training,
    }
    if isinstance(shape, Planes):
        lag = shape.tiles if not flags.normalize else shape.lag if flags.training else 0
        grid = shape.tiles + (lag if flags.normalize else shape.c)
        kernel = planes.batch_norm_planes_forward
        return Launch(kernel, grid, shape.warps, shape, flags, LAG=lag, **given)
    both = flags.training and flags.normalize
    alone = shape.gathers if flags.training else shape.writes
    grid = shape.grid if both else shape.slabs * alone
    own = both and shape.programs > 0
    given |= {"OWN": own, "cooperative": own and not shape.solo}
    return Launch(columns.batch_norm_columns_forward, grid, shape.warps, shape, flags, **given)


def backward_launch(
    shape: Geometry,
    dtype: torch.dtype,
    flags: Flags,
    needs: tuple[bool, bool, bool, bool],
    tv: float,
) -> Launch:
    """Set up the backward kernel; `needs`: which of dx, dweight, dbias, dresidual are wanted."""
    dx, dweight, dbias, _ = needs
    late = flags.training and dx
    sums = late or dweight or dbias or flags.share
    joins = late or flags.share
    given: dict[str, Any] = {
        "PEERS": flags.peers if joins else 0,
        "WORLD": flags.world if joins else 1,
        "root": math.sqrt(tv),
        "ACC": accumulator(dtype),
        "ACTIVATION": kernel_code(flags.activation),
        "SUMS": sums,
        "LATE": late,
        "RESIDUAL": flags.residual and backward_reads_input(flags.activation),
        **dict(zip(("DX", "DWEIGHT", "DBIAS", "DRESIDUAL"), needs, strict=True)),
    }
    if isinstance(shape, Planes):
        lag = shape.lag if late else shape.tiles
        grid = shape.tiles + (lag if late else shape.c * sums)
        kernel = planes.batch_norm_planes_backward
        return Launch(kernel, grid, shape.warps, shape, flags, LAG=lag, **given)
    grid = shape.grid if late else shape.slabs * shape.gathers
    own = late and shape.programs > 0
    given |= {"OWN": own, "cooperative": own and not shape.solo}
    return Launch(columns.batch_norm_columns_backward, grid, shape.warps, shape, flags, **given)


def merge_launch(
    processes: int, c: int, dtype: torch.dtype, flags: Flags, momentum: float, eps: float
) -> Launch:
    """Set up the kernel that merges the statistics of c channels."""
    return Launch(
        columns.batch_norm_merge, -(-c // 256), 4, flags, C=c, PROCESSES=processes,
        momentum=momentum, eps=eps, BCH=256, ACC=accumulator(dtype),
    )  # fmt: skip


def scratch(shape: Geometry) -> tuple[int, int]:
    """How many counters and partial results a launch needs."""
    if isinstance(shape, Planes):
        return shape.c, 2 * shape.tiles + 2 * shape.c
    counters, parts = room_for_parts(shape.slabs, shape.gathers, shape.bch)
    return counters, parts + 2 * shape.c  # and the terms of dx that depend on sums


def pool_launch(
    kernel: Any,
    shape: Pixels,
    dtype: torch.dtype,
    window: tuple[tuple[int, int], tuple[int, int], tuple[int, int]],
    size: tuple[int, int],
    pooled: tuple[int, int],
    tv: float,
    **given: Any,
) -> Launch:
    """Set up a kernel of `windows`; `given` are its other arguments, by name.

    shape: the rows of the output, forward; blocks of the input, of one stride each, backward.
    window: kernel, stride and padding, each by height and width. size, pooled: height and width of
    the input and of the output.
    """
    given |= dict(zip(("KH", "KW", "SH", "SW", "PH", "PW"), sum(window, ()), strict=True))
    given |= dict(zip(("H", "W", "OH", "OW"), (*size, *pooled), strict=True))
    given |= {"ACC": accumulator(dtype), "root": math.sqrt(tv)}
    return Launch(kernel, shape.grid, shape.warps, shape, **given)
