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
        return needs_int64(self.n * self.c, self.hw)


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
        return needs_int64(self.rows, self.c * self.hw)


@dataclass(frozen=True)
class Rows:
    """Rows of `width` values that a program holds, `r` at a time as (r, u, bc); see `rows`.

    A thread takes `vector` adjacent values at a time. With `keep`, weight and bias stay in
    registers. Of what is summed over rows, `lanes` sums a column are kept apart until the last
    tile; `finish` columns of them are added up by one program.
    """

    rows: int
    width: int
    r: int
    u: int
    bc: int
    warps: int
    stages: int
    programs: int
    vector: int = 1
    keep: bool = False
    lanes: int = 1
    k: int = 1
    finish: int = 0

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.r)

    @property
    def groups(self) -> int:
        """Programs, or groups of `k` of them, that take tiles in turn."""
        return self.programs // self.k

    @property
    def even(self) -> bool:
        """Whether all of every tile exists."""
        return self.k * self.u * self.bc == self.width and self.rows % self.r == 0


@dataclass(frozen=True)
class WideForward:
    """Rows of `width` values in tiles of `block`, written `lag` tiles after they were read."""

    rows: int
    width: int
    block: int
    warps: int
    lag: int

    @property
    def k(self) -> int:
        """Tiles of a row."""
        return -(-self.width // self.block)

    @property
    def even(self) -> bool:
        """Whether all of every tile exists."""
        return self.width % self.block == 0


@dataclass(frozen=True)
class WideBackward:
    """Blocks of `rb` rows in tiles of `cw` columns, written `lag` tiles after they were read."""

    rows: int
    width: int
    rb: int
    cw: int
    warps: int
    lag: int

    @property
    def k(self) -> int:
        """Tiles of a block."""
        return -(-self.width // self.cw)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.rb)

    @property
    def even(self) -> bool:
        """Whether all of every tile exists."""
        return self.width % self.cw == 0 and self.rows % self.rb == 0


@dataclass(frozen=True)
class Pixels:
    """`rows` rows of `width` pixels of `c` adjacent channels: a program takes `bc` channels of one.

    It goes through the row by `bp` pixels; see `pool`.
    """

    rows: int
    width: int
    c: int
    unit: int
    bc: int
    bp: int
    warps: int

    @property
    def slabs(self) -> int:
        return -(-self.c // self.bc)

    @property
    def grid(self) -> int:
        return self.rows * self.slabs

    @property
    def even(self) -> bool:
        """Whether slabs fill their padding."""
        return self.c % self.bc == 0


Geometry = Planes | Columns

_INT32 = 2**31 - 2**24  # leaves room for what the padding of the last tile adds
MOST_PLACES = _INT32  # along one axis, whose places are int32
_SMALL_PLANE = 100  # contiguous planes of up to so many values are taken as columns
_LAG_BYTES = 24 << 10  # a multiprocessor, between a tile's first read and its second
_PHASED_SLAB = 64 << 20  # bytes from which items are faster than programs with rows of their own
_ITEM_BYTES = 128 << 10  # times the itemsize: what an item gathers
_SOLO_SLAB = 1 << 20  # bytes up to which one program is enough for a slab, if there are many
_SEGMENT_COLUMNS = 256  # columns of a slab of small planes, at most
_GROUP_BYTES = 12 << 20  # of slabs that are gathered before the first of them is written
_FEW_ROWS = 2048
_HELD_BYTES = 128 << 10  # of a row as float32 or wider, that a program holds forward
_SUMMED_BYTES = 32 << 10  # the same backward, beside the sums for weight and bias
_SHARED_WIDTH = 65536  # up to which programs share rows backward, where they can
# A multiprocessor, between a wide row's first read and its second.
_WIDE_FORWARD_LAG, _WIDE_BACKWARD_LAG = 24 << 10, 32 << 10  # bytes
_MANY_ROWS_EACH = 128  # rows a multiprocessor, from which two programs on it are faster than one
_MANY_ROWS = 1 << 17
_MOST_PROGRAMS = 1 << 17  # with running statistics each has two words of its own


def needs_int64(rows: int, stride: int) -> bool:
    """Whether offsets into so many rows outgrow an int32."""
    return rows * stride > _INT32


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
    if hw == 1 and rows <= _FEW_ROWS:
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


def pixels(rows: int, width: int, c: int, itemsize: int) -> Pixels:
    """How the kernels with max pooling take rows of pixels, 16 bytes to a thread."""
    unit = unit_of(c)
    bc = max(min(power_of_2(c), 128 // itemsize), 8)

    def at_once(warps: int) -> int:
        return max(warps * 32 * min(16 // itemsize, unit) // bc, 1)

    # Those that take the fewest pixels past the end of a row.
    warps = min((4, 2), key=lambda warps: -width % at_once(warps))
    return Pixels(rows, width, c, unit, bc, at_once(warps), warps)


def layer_norm_forward(
    rows: int, width: int, unit: int, itemsize: int, running: bool, sms: int
) -> Rows | WideForward:
    """How the kernels take `rows` rows of `width` values.

    unit: what divides width and strides. itemsize: of the widest tensor of rows. running: with
    running statistics, to which each program adds its part.
    """
    padded = power_of_2(width)
    if padded > _HELD_BYTES // max(itemsize, 4) or (width > 8192 and 5 * width <= 4 * padded):
        block = 4096 if itemsize <= 4 else 2048
        k = -(-width // block)
        lag = min(max(sms * _WIDE_FORWARD_LAG // (block * itemsize), k), rows * k)
        return WideForward(rows, width, block, 4, lag)
    if padded == 1024 and itemsize <= 4 and rows > _MANY_ROWS_EACH * sms:
        warps = 4 if running and itemsize == 2 else 1
        shape = _row_tile(rows, width, unit, itemsize, warps, 1, 32)
        return replace(shape, keep=itemsize == 4)
    few = itemsize == 8 or padded <= (2048 if itemsize == 4 else 4096)
    needed = max(padded // (512 if few else 1024), 1)
    if itemsize == 4:
        warps = max(needed, min(2 * needed, 8), 4)
        shape = _row_tile(rows, width, unit, itemsize, warps, needed, 16)
        return replace(shape, keep=padded <= 16384)
    if itemsize == 2 and width < padded == 1024:
        return replace(_row_tile(rows, width, unit, itemsize, 2, needed, 16), keep=True)
    values = 32 if itemsize == 2 and padded >= 1024 else 16
    return _row_tile(rows, width, unit, itemsize, max(needed, 2), needed, values)


def layer_norm_backward(
    rows: int,
    width: int,
    unit: int,
    itemsize: int,
    input_bias: bool,
    sms: int,
    shared: int,
    together: bool,
) -> Rows | WideBackward:
    """As `layer_norm_forward`.

    input_bias: there is one, whose gradient is a third sum over the rows. shared: bytes of shared
    memory that a program can have. together: programs that all run at once can be had.
    """
    padded = power_of_2(width)
    if padded * max(itemsize, 4) <= _SUMMED_BYTES:
        warps = 4 if padded <= 1024 else 8
        at_once = 2 if warps == 4 and rows > _MANY_ROWS_EACH * sms else 1
        values = 32 if itemsize <= 4 and (padded >= 1024 or at_once == 2) else 16
        shape = _row_tile(rows, width, unit, itemsize, warps, warps, values)
        # To fold a tile's rows takes time, and saves registers: needed for three sums and masks.
        if padded <= 512 and not (input_bias and width < padded):
            shape = replace(shape, lanes=shape.r)
        programs = min(at_once * sms, _programs_for(rows, itemsize), shape.tiles)
        room = shared // at_once - (4 << 10)
        if shape.lanes > 1:
            room -= max(itemsize, 4) * shape.lanes * padded  # to add them up at the end
        stages = 4 if at_once == 1 and padded < 8192 else 3
        stages = max(min(stages, room // (2 * shape.r * padded * itemsize)), 1)
        return replace(shape, programs=programs, stages=stages, keep=True, finish=64)
    if together and itemsize <= 4 and rows >= sms and width <= _SHARED_WIDTH:
        share, r, warps = 4096, 4, 8
        if padded > 16384:
            share, r, warps = (4096, 2, 4) if itemsize == 4 else (padded // 32, 2**18 // padded, 4)
        k = -(-width // share)
        # Programs of 4 warps run two at a time on any multiprocessor.
        if (programs := (8 // warps) * sms // k * k) > 0:
            vector = min(16 // itemsize, unit)
            lanes = warps * 32 * vector
            bc = min(lanes, share)
            return Rows(
                rows, width, r, share // bc, bc, warps, 1, programs, vector, lanes=lanes // bc, k=k,
                finish=64,
            )  # fmt: skip
    cw, rb = (1024, 8) if itemsize == 2 and width >= 131072 else (512, 16)
    k = -(-width // cw)
    lag = max(sms * _WIDE_BACKWARD_LAG // (rb * cw * itemsize), k)
    return WideBackward(rows, width, rb, cw, 4, min(lag, k * -(-rows // rb)))


def _row_tile(
    rows: int, width: int, unit: int, itemsize: int, warps: int, needed: int, values: int
) -> Rows:
    """One program a tile, as far as there may be so many.

    A row goes to `needed` warps at most, `values` values to a thread.
    """
    padded = power_of_2(width)
    vector = min(16 // itemsize, unit)
    bc = min(padded, needed * 32 * vector)
    side_by_side = max(warps * 32 * vector // bc, 1)
    u = padded // bc
    in_turn = max(values // (vector * u), 1)
    while in_turn > 1 and side_by_side * in_turn > rows:
        in_turn //= 2
    r = side_by_side * in_turn
    programs = min(-(-rows // r), _MOST_PROGRAMS)
    vector = min(vector, bc)
    return Rows(rows, width, r, u, bc, warps, 1, programs, vector, lanes=side_by_side)


def _programs_for(rows: int, itemsize: int) -> int:
    """As many programs as write and read no more sums than the rows are worth."""
    return max(3 * rows * itemsize // 16, 1)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; those of an H100 where there is no GPU."""
    if device.type != "cuda":
        return 227 << 10
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H100 where there is none."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
