"""How BatchNorm cuts a tensor into work: rules from measurements, without autotuning at run time.

Autotuning would make results differ between ranks and runs, and slow down the first seconds of
training. The numbers come from sweeps over tile, warps, live set and items on an H100, described in
docs/notebook.md. Any choice gives correct results; only speed depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from normplug._kernels import (
    at_once,
    cdiv,
    floor_2,
    lag_of,
    needs_int64,
    power_of_2,
    room_for_parts,
    shrink_to_fill,
    tile_of,
    unit_of,
)
from normplug._kernels.constants import KernelConstant, Work

_SMALL_PLANE = 100  # values; contiguous planes of at most this size are columns
# Bytes read per multiprocessor between a tile's first read and its second.
_LAG_BYTES = 24 << 10
# Bytes from which items are faster than programs with rows of their own.
_PHASED_SLAB = 64 << 20
_ITEM_BYTES = 128 << 10  # times the itemsize: bytes that an item gathers
# Bytes up to which one program is enough for a slab, if there are many.
_SOLO_SLAB = 1 << 20
_SEGMENT_COLUMNS = 256  # most columns of a slab of small planes
# Bytes of the slabs that are gathered before the first of them is written.
_GROUP_BYTES = 12 << 20
_FEW_ROWS = 2048  # up to which one program takes a slab, and slabs are narrow
_MANY_ROWS = 1 << 17  # beyond which slabs of float32 are wide


@dataclass(frozen=True)
class PlanesTile(KernelConstant):
    """A tile of `block` values of a channel; `kp` tiles are merged at a time.

    unit: a divisor of hw, and so the alignment. wide: offsets need 64 bits.
    """

    unit: int
    block: int
    kp: int
    wide: bool


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
        self.wide = needs_int64(self.n * self.c, self.hw)

    def forward(self, training: bool, normalize: bool) -> Work:
        """The launch of a forward, or of its statistics, finished by one program per channel."""
        if not normalize:
            return self._work(self.tiles, self.c)
        lag = self.lag if training else 0
        return self._work(lag, lag)

    def scratch(self, residual_norm: bool = False) -> tuple[int, int]:
        """How many counters and partial results a launch needs.

        residual_norm: whether it sums the gradient of a residual's norm, too.
        """
        return self.c, (2 + residual_norm) * (self.tiles + self.c)

    def backward(self, sums: bool, late: bool) -> Work:
        """The launch of a backward; unless `late`, one program per channel finishes the sums."""
        if late:
            return self._work(self.lag, self.lag)
        return self._work(self.tiles, self.c if sums else 0)

    def _work(self, lag: int, more: int) -> Work:
        """A launch of a program for each tile, and `more` programs after them."""
        most_merged = 1024
        kp = min(power_of_2(self.tiles_a_channel), most_merged)
        sizes = {
            "N": self.n,
            "C": self.c,
            "HW_UNITS": self.hw // self.unit,
            "TILES_A_CHANNEL": self.tiles_a_channel,
            "TILES": self.tiles,
            "LAG": lag,
        }
        tile = PlanesTile(self.unit, self.block, kp, self.wide)
        return Work(self.tiles + more, self.warps, tile, sizes)


@dataclass(frozen=True)
class ColumnsTile(KernelConstant):
    """A tile of a slab: `u` steps of `bt` rows of `bc` columns.

    unit: a divisor of the slab's width and of the tensor's, and so the alignment. bch: channels of
    a slab, with padding. stages: tiles that are in flight in a loop. own: a program writes the rows
    that it gathered. solo: a single program takes each slab. segments: a channel has more than one
    column. even: no slab has padding. wide: offsets need 64 bits.
    """

    unit: int
    u: int
    bt: int
    bc: int
    bch: int
    stages: int
    own: bool
    solo: bool
    segments: bool
    even: bool
    wide: bool


@dataclass
class BatchColumns:
    """`rows` rows of `c` channels of `hw` columns, in slabs of `channels`; see `columns`.

    A slab has `bc` columns with its padding; `unit` divides its width and the tensor's. A tile is
    `u` steps of `bt` rows, and `stages` tiles are in flight in a loop. If `programs` is not 0, that
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
        self.slabs = cdiv(self.c, self.channels)
        self.live = self.channels * self.hw  # columns of a slab without its padding
        self.width = self.c * self.hw  # columns of the tensor
        self.segments = self.hw > 1
        # Channels, padded.
        self.bch = power_of_2(self.channels) if self.segments else self.bc
        self.tile = self.u * self.bt  # rows of a tile
        # Programs that write a slab, a tile each, if other programs gather it.
        self.writes = cdiv(self.rows, self.tile)
        # Rows that a program gathers, and programs that gather a slab.
        each = self.gather_rows or cdiv(self.writes, self.programs) * self.tile
        self.rows_each = max(each, 1)
        self.gathers = max(cdiv(self.rows, self.rows_each), 1)
        # A single program takes each slab.
        self.solo = self.programs > 0 and self.gathers == 1
        self.even = self.c % self.channels == 0 and self.live == self.bc
        self.wide = needs_int64(self.rows, self.width)

    def forward(self, training: bool, normalize: bool) -> Work:
        """The launch of a forward, or of its statistics."""
        alone = self.gathers if training else self.writes
        return self._work(training and normalize, self.slabs * alone)

    def scratch(self, residual_norm: bool = False) -> tuple[int, int]:
        """How many counters and partial results a launch needs.

        residual_norm: whether it sums the gradient of a residual's norm, too.
        """
        width = self.bch * (1 + residual_norm)
        counters, parts = room_for_parts(self.slabs, self.gathers, width)
        # And the terms of dx and dresidual that depend on sums.
        return counters, parts + (2 + residual_norm) * self.c

    def backward(self, sums: bool, late: bool) -> Work:
        """The launch of a backward."""
        return self._work(late, self.slabs * self.gathers)

    def _work(self, both: bool, alone: int) -> Work:
        """A launch that gathers and writes if `both`; else `alone` programs, which do only one."""
        own = both and self.programs > 0
        sizes = {
            "ROWS": self.rows,
            "C": self.c,
            "HW": self.hw,
            "CHANNELS": self.channels,
            "LIVE_UNITS": self.live // self.unit,
            "WIDTH_UNITS": self.width // self.unit,
            "SLABS": self.slabs,
            "GATHERS": self.gathers,
            "WRITES": self.writes,
            "ROWS_EACH": self.rows_each,
            "GROUP": self.group,
            "HEAD": self.head,
        }
        tile = ColumnsTile(
            unit=self.unit,
            u=self.u,
            bt=self.bt,
            bc=self.bc,
            bch=self.bch,
            stages=self.stages,
            own=own,
            solo=self.solo,
            segments=self.segments,
            even=self.even,
            wide=self.wide,
        )
        grid = self._grid() if both else alone
        return Work(grid, self.warps, tile, sizes, cooperative=own and not self.solo)

    def _grid(self) -> int:
        """Programs of a launch that gathers each slab and then writes it."""
        if self.programs:
            return self.slabs * self.gathers
        groups = cdiv(self.slabs, self.group)
        gathers, writes = self.group * self.gathers, self.group * self.writes
        # See `columns.assignment`. Of the group after the last, only the idle `head` remains.
        return gathers + groups * (gathers + writes) - (gathers - self.head)


@dataclass(frozen=True)
class PixelsTile(KernelConstant):
    """A tile of `bp` pixels of `bc` channels, and the windows that are pooled.

    unit: a divisor of the channels, and so the alignment. even: no slab of channels has padding.
    kh, kw, sh, sw, ph, pw: kernel, stride and padding of the windows, by height and width.
    """

    unit: int
    bp: int
    bc: int
    even: bool
    kh: int
    kw: int
    sh: int
    sw: int
    ph: int
    pw: int


class Window(NamedTuple):
    """The windows of max pooling, and the sizes of its input and output, by height and width."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    size: tuple[int, int]
    pooled: tuple[int, int]


@dataclass
class Pixels:
    """`rows` rows of `width` pixels of `c` adjacent channels; see `windows`.

    A program handles `bc` channels of one row, `bp` pixels at a time; `unit` divides c. Backward, a
    pixel is a block of the input, of the size of the windows' stride.
    """

    rows: int
    width: int
    c: int
    unit: int
    bc: int
    bp: int
    warps: int

    def work(self, window: Window) -> Work:
        """The launch of a kernel of `windows`."""
        slabs = cdiv(self.c, self.bc)
        height, width = window.size
        pooled_height, pooled_width = window.pooled
        sizes = {
            "H": height,
            "W": width,
            "OH": pooled_height,
            "OW": pooled_width,
            "C_UNITS": self.c // self.unit,
            "SLABS": slabs,
        }
        tile = PixelsTile(
            self.unit,
            self.bp,
            self.bc,
            self.c % self.bc == 0,
            *window.kernel,
            *window.stride,
            *window.padding,
        )
        return Work(self.rows * slabs, self.warps, tile, sizes)


Geometry = Planes | BatchColumns


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

    itemsize: bytes of a value. tensors: how many tensors of this size are read, besides a residual:
    1 forward, 2 backward. sms: the GPU's multiprocessors. cooperative: whether a cooperative launch
    is possible, whose programs all run at once.
    """
    if channels_last or n * hw == 0:  # an empty batch is not read
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
    return rows * cdiv(c, channels) * bc // 8


def _planes(n: int, c: int, hw: int, itemsize: int, tensors: int, sms: int) -> Planes:
    total = n * hw
    block = tile_of(itemsize * tensors)
    while block > 1024 and block >= 2 * total:
        block //= 2
    block = shrink_to_fill(block, c, total, sms)
    tiles = cdiv(total, block)
    return Planes(
        n=n,
        c=c,
        hw=hw,
        unit=unit_of(hw),
        block=block,
        warps=max(min(block // 1024, 4), 1),
        tiles_a_channel=tiles,
        lag=lag_of(sms * _LAG_BYTES, block * itemsize, tiles, c),
    )


def _slab(rows: int, c: int, hw: int, itemsize: int) -> tuple[int, int]:
    """Channels and padded columns of a slab; forward and backward agree on the mask's layout."""
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
) -> BatchColumns:
    channels, bc = _slab(rows, c, hw, itemsize)
    unit = unit_of(c * hw, channels * hw)
    slabs = cdiv(c, channels)
    u = 4 if itemsize == 8 else 8

    def cut(warps: int, stages: int, **rest: int) -> BatchColumns:
        bt = at_once(warps, bc, itemsize, unit)
        return BatchColumns(rows, c, hw, unit, channels, bc, bt, u, warps, stages, **rest)

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
    head = min(4 * sms, group * cdiv(rows, items))
    return cut(4, 2, gather_rows=items, group=group, head=head)


def pixels(rows: int, width: int, c: int, itemsize: int) -> Pixels:
    """Choose how the max-pooling kernels cut rows of pixels, with 16 bytes per thread."""
    unit = unit_of(c)
    bc = max(min(power_of_2(c), 128 // itemsize), 8)
    sizes = {warps: at_once(warps, bc, itemsize, unit) for warps in (4, 2)}
    # The choice that wastes the fewest pixels past the end of a row.
    warps = min(sizes, key=lambda warps: -width % sizes[warps])
    return Pixels(rows, width, c, unit, bc, sizes[warps], warps)
