"""How a tensor is cut into work for the kernels: a table from measurements, no search at run time.

A search at run time would make results differ between ranks and runs, and cost a training loop its
first seconds. The numbers come from sweeps over tile, warps, live set and items on an H100, told of
in docs/kernels.md; any choice is right, only not as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch

FAN_IN = 32  # partial results of `columns` that one program merges


@dataclass(frozen=True)
class Planes:
    """N * HW values a channel, in tiles of `block`; written `lag` tiles after they were read."""

    n: int
    c: int
    hw: int
    unit: int
    block: int
    warps: int
    tiles_a_channel: int
    lag: int

    @property
    def tiles(self) -> int:
        return self.c * self.tiles_a_channel

    @property
    def wide(self) -> bool:
        return self.n * self.c * self.hw > _INT32


@dataclass(frozen=True)
class Columns:
    """`rows` rows of c * hw columns, in slabs of `channels`; see `columns`.

    With `programs`, that many share a slab and each writes the rows that it read first.
    """

    rows: int
    c: int
    hw: int
    unit: int
    channels: int
    bc: int
    bt: int
    u: int
    warps: int
    stages: int
    programs: int = 0
    gather_rows: int = 0
    group: int = 1
    head: int = 0

    @property
    def slabs(self) -> int:
        return -(-self.c // self.channels)

    @property
    def tile(self) -> int:
        return self.u * self.bt

    @property
    def rows_each(self) -> int:
        """Rows that a program gathers."""
        return self.gather_rows or -(-self.rows // (self.programs * self.tile)) * self.tile

    @property
    def gathers(self) -> int:
        return -(-self.rows // self.rows_each)

    @property
    def solo(self) -> bool:
        """Whether each slab is one program's."""
        return self.programs > 0 and self.gathers == 1

    @property
    def writes(self) -> int:
        return -(-self.rows // self.tile)

    @property
    def batches(self) -> int:
        return -(-self.gathers // FAN_IN)

    @property
    def bch(self) -> int:
        return self.bc if self.hw == 1 else power_of_2(self.channels)

    @property
    def grid(self) -> int:
        """Programs where each slab is gathered and then written."""
        if self.programs:
            return self.slabs * self.gathers
        groups = -(-self.slabs // self.group)
        gathers, writes = self.group * self.gathers, self.group * self.writes
        return gathers + groups * (gathers + writes) - (gathers - self.head)

    @property
    def even(self) -> bool:
        """Whether slabs fill their padding."""
        return self.c % self.channels == 0 and self.channels * self.hw == self.bc

    @property
    def wide(self) -> bool:
        return self.rows * self.c * self.hw > _INT32


Geometry = Planes | Columns

_INT32 = 2**31 - 2**24  # leaves room for what the padding of the last tile adds
_SMALL_PLANE = 100  # contiguous planes of up to so many values are taken as columns
_LAG_BYTES = 24 << 10  # a multiprocessor, between a tile's first read and its second
_PHASED_SLAB = 64 << 20  # bytes from which items are faster than programs with rows of their own
_ITEM_BYTES = 128 << 10  # times the itemsize: what an item gathers
_SOLO_SLAB = 1 << 20  # bytes up to which one program is enough for a slab, if there are many
_SEGMENT_COLUMNS = 256  # columns of a slab of small planes, at most
_GROUP_BYTES = 12 << 20  # of slabs that are gathered before the first of them is written
_FEW_ROWS = 2048
_MANY_ROWS = 1 << 17


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def _floor_2(n: int) -> int:
    """The largest power of two that is at most n, and at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


def unit_of(*sizes: int) -> int:
    """The largest of 8, 4, 2, 1 that divides every size: what the compiler may take as aligned."""
    return math.gcd(8, *sizes)


def geometry(
    n: int, c: int, hw: int, innermost: bool, itemsize: int, tensors: int, sms: int, together: bool
) -> Geometry:
    """How the kernels take (N, C, *space) of hw values a plane, reading `tensors` like it at once.

    innermost: channels are adjacent in memory. sms: the GPU's multiprocessors. together: programs
    that all run at once can be had.
    """
    if innermost:
        return _columns(n * hw, c, 1, itemsize, tensors, sms, together)
    if hw <= _SMALL_PLANE:
        return _columns(n, c, hw, itemsize, tensors, sms, together)
    return _planes(n, c, hw, itemsize, tensors, sms)


def mask_bytes(n: int, c: int, hw: int, innermost: bool, itemsize: int) -> int:
    """Bytes of the bit mask that a forward with residual and relu saves; sizes may be symbols."""
    if not innermost and hw > _SMALL_PLANE:
        return c * ((n * hw + 7) // 8)
    rows, hw = (n * hw, 1) if innermost else (n, hw)
    channels, bc = _slab(rows, c, hw, itemsize)
    return rows * -(-c // channels) * bc // 8


def _planes(n: int, c: int, hw: int, itemsize: int, tensors: int, sms: int) -> Planes:
    total = n * hw
    block = 8192 if itemsize * tensors <= 4 else 4096 if itemsize * tensors <= 8 else 2048
    while block > 1024 and (block >= 2 * total or c * -(-total // block) < 2 * sms):
        block //= 2
    warps = max(min(block // 1024, 4), 1)
    tiles = -(-total // block)
    lag = min(max(sms * _LAG_BYTES // (block * itemsize), tiles), c * tiles)
    return Planes(n, c, hw, unit_of(hw), block, warps, tiles, lag)


def _slab(rows: int, c: int, hw: int, itemsize: int) -> tuple[int, int]:
    """Channels of a slab and columns, padded; the same forward and backward, for the mask."""
    if hw > 1:
        channels = min(_floor_2(_SEGMENT_COLUMNS // hw), power_of_2(c))
        return channels, max(power_of_2(channels * hw), 8)
    width = 128 if itemsize == 2 or (itemsize == 4 and rows > _MANY_ROWS) else 64
    if rows <= _FEW_ROWS:  # narrow slabs, so that there is one for each multiprocessor
        width = min(max(_floor_2(c * itemsize // 128), 32), 128) // itemsize
    channels = max(min(width, power_of_2(c)), 8)
    return channels, channels


def _columns(
    rows: int, c: int, hw: int, itemsize: int, tensors: int, sms: int, together: bool
) -> Columns:
    channels, bc = _slab(rows, c, hw, itemsize)
    unit = unit_of(c * hw, channels * hw)
    vector = min(16 // itemsize, unit)
    slabs = -(-c // channels)
    u = 4 if itemsize == 8 else 8

    def cut(warps: int, stages: int, **rest: int) -> Columns:
        bt = max(warps * 32 * vector // bc, 1)
        return Columns(rows, c, hw, unit, channels, bc, bt, u, warps, stages, **rest)

    few = slabs < 8 * sms
    if few and hw == 1 and rows <= _FEW_ROWS:
        return cut(8, 1, programs=1)
    slab_bytes = rows * channels * hw * itemsize
    if few and slabs >= sms // 2 and slab_bytes < _SOLO_SLAB:
        return cut(4, 3, programs=1)
    if few and together and (slabs == 1 or slab_bytes < _PHASED_SLAB):
        return cut(4, 3, programs=max(sms // slabs, 1))
    shape = cut(4, 2)
    row_bytes = channels * hw * itemsize * tensors
    items = max(1, _ITEM_BYTES * itemsize // row_bytes // shape.tile) * shape.tile
    group = max(1, min(slabs, _GROUP_BYTES // (slab_bytes * tensors)))
    head = min(4 * sms, group * -(-rows // items))
    return replace(shape, gather_rows=items, group=group, head=head)


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H100 where there is none."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
