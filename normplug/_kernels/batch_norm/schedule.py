"""How BatchNorm cuts a tensor into work: rules from measurements, without autotuning at run time.

Autotuning would make results differ between ranks and runs, and slow down the first seconds of
training. The numbers come from sweeps over tile, warps, live set and items on an H100, described in
docs/notebook.md. Any choice gives correct results; only speed depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from normplug._kernels import at_once, floor_2, needs_int64, power_of_2, tile_of, unit_of

_SMALL_PLANE = 100  # values; contiguous planes of at most this size are columns
_LAG_BYTES = 24 << 10  # read per multiprocessor between a tile's first read and its second
_PHASED_SLAB = 64 << 20  # bytes from which items are faster than programs with rows of their own
_ITEM_BYTES = 128 << 10  # times the itemsize: bytes that an item gathers
_SOLO_SLAB = 1 << 20  # bytes up to which one program is enough for a slab, if there are many
_SEGMENT_COLUMNS = 256  # most columns of a slab of small planes
_GROUP_BYTES = 12 << 20  # of the slabs that are gathered before the first of them is written
_FEW_ROWS = 2048  # up to which one program takes a slab, and slabs are narrow
_MANY_ROWS = 1 << 17  # beyond which slabs of float32 are wide


@dataclass
class Planes:
    """The n * hw values of each of `c` channels, cut into tiles of `block`; see `planes`.

    A tile is written `lag` programs after it was first read. `unit` divides hw.
    """

    n: int
    c: int
    hw: int
    unit: int
    block: int
    warps: int
    tiles_a_channel: int
    lag: int

    def __post_init__(self) -> None:
        self.tiles = self.c * self.tiles_a_channel
        self.kp = min(power_of_2(self.tiles_a_channel), 1024)  # tiles that are merged at a time
        self.wide = needs_int64(self.n * self.c, self.hw)


@dataclass
class Columns:
    """`rows` rows of `c` channels of `hw` columns, in slabs of `channels`; see `columns`.

    A slab has `bc` columns with its padding; `unit` divides its width and the tensor's. A tile is
    `u` steps of `bt` rows, and `stages` tiles are in flight in a loop. If `programs` is not 0, so
    many programs share a slab, and each writes the rows that it gathered. Otherwise a program
    gathers one item of `gather_rows` rows. Then slabs are taken `group` at a time, and `head` items
    of the next group come before the writes.
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

    def __post_init__(self) -> None:
        self.slabs = -(-self.c // self.channels)
        self.live = self.channels * self.hw  # columns of a slab without its padding
        self.width = self.c * self.hw  # columns of the tensor
        self.segments = self.hw > 1  # whether channels have more than one column
        self.bch = power_of_2(self.channels) if self.segments else self.bc  # channels, padded
        self.tile = self.u * self.bt  # rows of a tile
        # Programs that write a slab, a tile each, if other programs gather it.
        self.writes = -(-self.rows // self.tile)
        # Rows that a program gathers, and programs that gather a slab.
        each = self.gather_rows or -(-self.writes // self.programs) * self.tile
        self.rows_each = max(each, 1)
        self.gathers = max(-(-self.rows // self.rows_each), 1)
        self.solo = self.programs > 0 and self.gathers == 1  # a single program takes each slab
        self.even = self.c % self.channels == 0 and self.live == self.bc
        self.wide = needs_int64(self.rows, self.width)

    @property
    def grid(self) -> int:
        """Programs of a launch that gathers each slab and then writes it."""
        if self.programs:
            return self.slabs * self.gathers
        groups = -(-self.slabs // self.group)
        gathers, writes = self.group * self.gathers, self.group * self.writes
        # See `columns.assignment`. Of the group after the last, only the idle `head` remains.
        return gathers + groups * (gathers + writes) - (gathers - self.head)


@dataclass
class Pixels:
    """`rows` rows of `width` pixels of `c` adjacent channels; see `windows`.

    A program handles `bc` channels of one row, `bp` pixels at a time; `unit` divides c. Backward, a
    pixel is a block of the input, as large as windows are apart.
    """

    rows: int
    width: int
    c: int
    unit: int
    bc: int
    bp: int
    warps: int

    def __post_init__(self) -> None:
        self.slabs = -(-self.c // self.bc)
        self.grid = self.rows * self.slabs
        self.even = self.c % self.bc == 0


Geometry = Planes | Columns


def geometry(
    n: int,
    c: int,
    hw: int,
    channels_last: bool,
    itemsize: int,
    tensors: int,
    sms: int,
    cooperative: bool,
) -> Geometry:
    """Choose how the kernels cut (N, C, *space) with planes of hw values.

    itemsize: bytes of a value. tensors: those of this size that are read, besides a residual: 1
    forward, 2 backward. sms: the GPU's multiprocessors. cooperative: a cooperative launch is
    possible, whose programs all run at once.
    """
    if channels_last or n * hw == 0:  # nothing is read of an empty batch
        return _columns(n * hw, c, 1, itemsize, tensors, sms, cooperative)
    if hw <= _SMALL_PLANE:
        return _columns(n, c, hw, itemsize, tensors, sms, cooperative)
    return _planes(n, c, hw, itemsize, tensors, sms)


def mask_bytes(n: int, c: int, hw: int, channels_last: bool, itemsize: int) -> int:
    """Bytes of the bit mask that a forward with residual and relu saves; sizes may be symbolic."""
    if not channels_last and hw > _SMALL_PLANE:
        return c * ((n * hw + 7) // 8)
    rows, hw = (n * hw, 1) if channels_last else (n, hw)
    channels, bc = _slab(rows, c, hw, itemsize)
    return rows * -(-c // channels) * bc // 8


def _planes(n: int, c: int, hw: int, itemsize: int, tensors: int, sms: int) -> Planes:
    total = n * hw
    block = tile_of(itemsize * tensors)
    while block > 1024 and (block >= 2 * total or c * -(-total // block) < 2 * sms):
        block //= 2
    warps = max(min(block // 1024, 4), 1)
    tiles = -(-total // block)
    lag = min(max(sms * _LAG_BYTES // (block * itemsize), tiles), c * tiles)
    return Planes(n, c, hw, unit_of(hw), block, warps, tiles, lag)


def _slab(rows: int, c: int, hw: int, itemsize: int) -> tuple[int, int]:
    """Channels and padded columns of a slab, equal forward and backward: the mask's layout."""
    if hw > 1:
        channels = min(floor_2(_SEGMENT_COLUMNS // hw), power_of_2(c))
        return channels, max(power_of_2(channels * hw), 8)
    width = 128 if itemsize == 2 or (itemsize == 4 and rows > _MANY_ROWS) else 64
    if rows <= _FEW_ROWS:  # narrow slabs, so that there is one for each multiprocessor
        width = min(max(floor_2(c * itemsize // 128), 32), 128) // itemsize
    channels = max(min(width, power_of_2(c)), 8)
    return channels, channels


def _columns(
    rows: int, c: int, hw: int, itemsize: int, tensors: int, sms: int, cooperative: bool
) -> Columns:
    channels, bc = _slab(rows, c, hw, itemsize)
    unit = unit_of(c * hw, channels * hw)
    slabs = -(-c // channels)
    u = 4 if itemsize == 8 else 8

    def cut(warps: int, stages: int, **rest: int) -> Columns:
        bt = at_once(warps, bc, itemsize, unit)
        return Columns(rows, c, hw, unit, channels, bc, bt, u, warps, stages, **rest)

    few = slabs < 8 * sms
    if hw == 1 and rows <= _FEW_ROWS:
        return cut(8, 1, programs=1)
    slab_bytes = rows * channels * hw * itemsize
    if few and slabs >= sms // 2 and slab_bytes < _SOLO_SLAB:
        return cut(4, 3, programs=1)
    if few and cooperative and (slabs == 1 or slab_bytes < _PHASED_SLAB):
        return cut(4, 3, programs=max(sms // slabs, 1))
    tile = u * at_once(4, bc, itemsize, unit)
    row_bytes = channels * hw * itemsize * tensors
    items = max(1, _ITEM_BYTES * itemsize // row_bytes // tile) * tile
    group = max(1, min(slabs, _GROUP_BYTES // (slab_bytes * tensors)))
    head = min(4 * sms, group * -(-rows // items))
    return cut(4, 2, gather_rows=items, group=group, head=head)


def pixels(rows: int, width: int, c: int, itemsize: int) -> Pixels:
    """Choose how the max-pooling kernels cut rows of pixels, with 16 bytes per thread."""
    unit = unit_of(c)
    bc = max(min(power_of_2(c), 128 // itemsize), 8)
    sizes = {warps: at_once(warps, bc, itemsize, unit) for warps in (4, 2)}
    # The choice that wastes the fewest pixels past the end of a row.
    warps = min(sizes, key=lambda warps: -width % sizes[warps])
    return Pixels(rows, width, c, unit, bc, sizes[warps], warps)
