"""How GroupNorm cuts a tensor into work: rules, without autotuning at run time.

The numbers come from sweeps over tile, warps and lag on an H100, described in docs/notebook.md, and
for small units from LayerNorm's sweeps. Any choice gives correct results; only speed depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from normplug._kernels import (
    at_once,
    cdiv,
    floor_2,
    needs_int64,
    power_of_2,
    room_for_parts,
    shrink_to_fill,
    tile_of,
    unit_of,
)
from normplug._kernels.constants import KernelConstant, Work

# Most bytes of a unit, counted as float32 or wider, that a program holds: 32,768 halves forward, as
# many as LayerNorm. Backward there are two tensors.
_HELD_FORWARD, _HELD_BACKWARD = 128 << 10, 64 << 10
# Bytes up to which a group is held, however much padding it has.
_HELD_HALF_EMPTY = 64 << 10
# Bytes up to which a group is held even if few programs have work.
_HELD_BY_FEW = 16 << 10
# Bytes, counted likewise with padding, of a group that one program reads twice; half as many if
# padding would be a fifth of what it holds.
_SOLO_GROUP = 128 << 10
_SMALL_TILE = 4096  # values of several small units that a program holds together
# Bytes of later units that each multiprocessor reads before a unit is written.
_LAG_FORWARD, _LAG_BACKWARD = 48 << 10, 24 << 10
# Tensors that a backward tile is sized for. Only dy and x are read, but the sweeps (in bfloat16)
# chose half the tile that two tensors would get.
_TENSORS_BACKWARD = 4
_TILE_COST = 512  # the overhead of a tile, in values
# Fewest adjacent values of a plane in a tile that does not span the plane.
_SHORTEST_RUN = 64
# For columns: chosen by sweeps over tile, warps and lag on an H100.
# Bytes of a row that a tile reads; rows of up to twice that are read whole.
_SEGMENT_BYTES = 128
# Bytes up to which most of a tensor is cached at its second read.
_CACHED_TENSOR = 64 << 20
_LAG_COLUMNS = 192 << 10  # read before a write, where programs wait for whole samples
# Bytes of a sample that one program takes, if there are many samples.
_SOLO_SAMPLE = 64 << 10
_MERGED = 1024  # channels, at most, whose moments a program merges at a time
_FINISH = 64  # channels of a gradient that one program adds up


@dataclass
class _Planes:
    """`n` samples of `groups` groups of `channels` planes of `hw` values; see `planes`.

    A tile is written about `lag` programs after it was first read. With a lag of 0, the program
    that reads a group also writes it, and it reads `r` groups at a time.
    """

    n: int
    groups: int
    channels: int
    hw: int
    warps: int
    lag: int
    r: int

    def __post_init__(self) -> None:
        self.width = self.channels * self.hw  # values of a group
        self.wide = needs_int64(self.n * self.groups, self.width)


@dataclass(frozen=True)
class RunsTile(KernelConstant):
    """A tile of `r` groups and `block` adjacent values of each, as runs of `run` values.

    unit: a divisor of a group, and so the alignment. stages: tiles that are in flight in a loop.
    held: a program holds whole groups. even: no tile has padding. wide: offsets need 64 bits.
    """

    unit: int
    r: int
    block: int
    run: int
    stages: int
    held: bool
    even: bool
    wide: bool


@dataclass(frozen=True)
class PlanesTile(KernelConstant):
    """A tile of `r` groups, and of `cb` channels and `sb` places in each plane.

    unit: a divisor of a plane, and so the alignment. finish: channels of a gradient that a program
    adds up. held: a program holds whole groups. even: no tile has padding. wide: offsets need 64
    bits.
    """

    unit: int
    r: int
    cb: int
    sb: int
    finish: int
    held: bool
    even: bool
    wide: bool


@dataclass(frozen=True)
class ColumnsTile(KernelConstant):
    """A tile of a slab of a sample: `u` steps of `bt` rows of `bc` columns.

    unit: a divisor of the channels, and so the alignment. gb: groups that a slab touches, with
    padding. cb: channels of each group that are merged at a time. each: channels of a group if
    slabs are whole groups, or 0. stages: tiles that are in flight in a loop. single: an item is a
    whole slab of a sample. solo: the program that reads an item also writes it. finish: channels of
    a gradient that a program adds up. even: no slab has padding. wide: offsets need 64 bits.
    """

    unit: int
    u: int
    bt: int
    bc: int
    gb: int
    cb: int
    each: int
    stages: int
    single: bool
    solo: bool
    finish: int
    even: bool
    wide: bool


@dataclass
class PlanesForward(_Planes):
    """Tiles of `block` adjacent values of a group, as runs of `run` values of one channel.

    If one program reads a group tile by tile, `stages` tiles are in flight.
    """

    block: int
    run: int
    stages: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        units = self.n * self.groups
        self.unit = unit_of(self.width)
        self.k = cdiv(self.width, self.block)  # tiles of a group
        self.held = self.lag == 0 and self.k == 1
        self.solo = self.lag == 0 and self.k > 1
        self.grid = units * self.k + self.lag if self.lag else cdiv(units, self.r)
        self.even = self.width % self.block == 0 and units % self.r == 0

    @property
    def scratch(self) -> tuple[int, int]:
        """How many counters and partial results a forward needs."""
        return room_for_parts(self.n * self.groups, self.k, 1) if self.lag else (0, 0)

    def forward(self) -> Work:
        """The launch of a forward."""
        sizes = {
            "N": self.n,
            "G": self.groups,
            "CHANNELS": self.channels,
            "HW": self.hw,
            "WIDTH_UNITS": self.width // self.unit,
            "K": self.k,
        }
        if not self.solo:
            sizes["LAG"] = self.lag
        tile = RunsTile(
            unit=self.unit,
            r=self.r,
            block=self.block,
            run=self.run,
            stages=self.stages,
            held=self.held,
            even=self.even,
            wide=self.wide,
        )
        return Work(self.grid, self.warps, tile, sizes)


@dataclass
class PlanesBackward(_Planes):
    """Tiles of `cb` channels and `sb` places in each plane.

    If groups are held, `splits` programs share the samples. At the end, a program adds up `finish`
    channels of a gradient.
    """

    cb: int
    sb: int
    splits: int = 1
    finish: int = _FINISH

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held = self.lag == 0
        self.unit = unit_of(self.hw)
        self.ks = cdiv(self.hw, self.sb)  # tiles across a plane
        self.k = cdiv(self.channels, self.cb) * self.ks  # tiles of a group
        # Programs that read tiles for the first time, and parts of the sums for the gradients of
        # weight and bias.
        if self.held:
            self.programs = cdiv(self.groups, self.r) * self.splits
            self.parts = self.splits
        else:
            self.programs = self.n * self.groups * self.k
            self.parts = self.n * self.ks
        whole = self.channels % self.cb == 0 and self.hw % self.sb == 0
        self.even = whole and self.groups % self.r == 0

    def backward_scratch(self, sums: int) -> tuple[int, int]:
        """How many counters and partial results a backward with this number of sums needs."""
        gradients = self.parts * sums * self.groups * self.channels
        if self.held:
            return 1, gradients
        groups = self.n * self.groups
        counters, parts = room_for_parts(groups, self.k, 1)
        return counters + 1, parts + 2 * groups + gradients

    def backward(self, dx: bool, sums: int) -> Work:
        """The launch of a backward that computes `sums` sums: for dweight and dbias."""
        lag = self.lag if dx else 0
        sizes = {
            "N": self.n,
            "G": self.groups,
            "CHANNELS": self.channels,
            "HW_UNITS": self.hw // self.unit,
            "K": self.k,
            "KS": self.ks,
            "LAG": lag,
            "SPLITS": self.splits,
        }
        tile = PlanesTile(
            unit=self.unit,
            r=self.r,
            cb=self.cb,
            sb=self.sb,
            finish=self.finish,
            held=self.held,
            even=self.even,
            wide=self.wide,
        )
        finishers = cdiv(self.groups * self.channels, self.finish) if sums else 0
        return Work(self.programs + lag + finishers, self.warps, tile, sizes)


@dataclass
class GroupColumns:
    """`n` samples of `s` rows in slabs of `bc` channels, in items of `rows_each` rows.

    A tile is `u` steps of `bt` rows, and `stages` tiles are in flight in a loop. An item is written
    about `lag` programs after it was first read. With a lag of 0, an item is a whole sample, and
    the program that reads it also writes it. A program adds up `finish` channels of a gradient.
    """

    n: int
    groups: int
    channels: int
    s: int
    bc: int
    bt: int
    u: int
    warps: int
    stages: int
    rows_each: int
    lag: int = 0
    finish: int = _FINISH

    def __post_init__(self) -> None:
        self.c = self.groups * self.channels
        self.unit = unit_of(self.c)
        self.slabs = cdiv(self.c, self.bc)
        self.units = self.n * self.slabs
        self.solo = self.lag == 0
        self.k = cdiv(self.s, self.rows_each)  # items of a slab of a sample
        self.single = self.k == 1
        self.programs = self.units * self.k  # that gather items
        self.even = self.c % self.bc == 0
        self.wide = needs_int64(self.s, self.c)
        whole = self.bc % self.channels == 0
        touched = (self.bc + (0 if whole else 2 * self.channels - 2)) // self.channels
        self.gb = power_of_2(touched)
        self.cb = max(min(power_of_2(self.channels), _MERGED // self.gb), 1)
        self.each = self.channels if whole else 0

    @property
    def scratch(self) -> tuple[int, int]:
        """How many counters and partial results a forward needs."""
        counters, parts = room_for_parts(self.units, self.k, self.bc)
        return counters, (0 if self.single else parts) + 2 * self.n * self.c

    def backward_scratch(self, sums: int) -> tuple[int, int]:
        """How many counters and partial results a backward needs."""
        counters, parts = self.scratch
        return counters + 1, parts

    def forward(self) -> Work:
        """The launch of a forward."""
        return self._work(self.lag, 0)

    def backward(self, dx: bool, sums: int) -> Work:
        """The launch of a backward that computes `sums` sums: for dweight and dbias."""
        finishers = cdiv(self.c, self.finish) if sums else 0
        return self._work(self.lag if dx else 0, finishers)

    def _work(self, lag: int, finishers: int) -> Work:
        sizes = {
            "N": self.n,
            "G": self.groups,
            "CHANNELS": self.channels,
            "S": self.s,
            "C_UNITS": self.c // self.unit,
            "SLABS": self.slabs,
            "K": self.k,
            "ROWS_EACH": self.rows_each,
            "LAG": lag,
        }
        tile = ColumnsTile(
            unit=self.unit,
            u=self.u,
            bt=self.bt,
            bc=self.bc,
            gb=self.gb,
            cb=self.cb,
            each=self.each,
            stages=self.stages,
            single=self.single,
            solo=self.solo,
            finish=self.finish,
            even=self.even,
            wide=self.wide,
        )
        return Work(self.programs + lag + finishers, self.warps, tile, sizes)


def group_norm_forward(
    n: int,
    groups: int,
    channels: int,
    space: int,
    channels_last: bool,
    itemsize: int,
    sms: int,
) -> PlanesForward | GroupColumns:
    """Choose how the forward kernels cut (N, groups * channels, *space), of `space` values.

    itemsize: bytes of a value of the widest tensor. sms: the GPU's multiprocessors.
    """
    if channels_last:
        return _columns(n, groups, channels, space, itemsize, 1, sms)
    units, width = n * groups, channels * space
    padded = power_of_2(width)
    held = max(itemsize, 4) * padded
    dense = 5 * width > 4 * padded
    few = held > _HELD_BY_FEW and 4 * units < sms
    tile = max(padded // 8, 1)
    fits = cdiv(width, tile) * tile <= width + width // 8
    solo = held == _SOLO_GROUP or (2 * held == _SOLO_GROUP and not dense)
    if solo and fits and 2 * units >= 3 * sms:
        block, lag, r, warps = tile, 0, 1, tile // 256
    elif held <= _HELD_FORWARD and (dense or held <= _HELD_HALF_EMPTY) and not few:
        block, lag, r = padded, 0, _held_at_once(padded, units, 1, sms)
        warps = _held_warps(r * block, 1)
    else:
        block, r = tile_of(itemsize), 1
        if cdiv(width, block) * block > width + width // 8:
            block //= 2
        block = shrink_to_fill(block, units, width, sms)
        warps = max(min(block // 1024, 8), 1)
        k = cdiv(width, block)
        lag = min(sms * _LAG_FORWARD // (block * itemsize) + k, units * k)
    run = min(space & -space, block)  # the largest power of two that divides the plane
    return PlanesForward(n, groups, channels, space, warps, lag, r, block, run)


def group_norm_backward(
    n: int,
    groups: int,
    channels: int,
    space: int,
    channels_last: bool,
    itemsize: int,
    sms: int,
) -> PlanesBackward | GroupColumns:
    """Choose how the backward kernels cut x, from the arguments of `group_norm_forward`."""
    if channels_last:
        return _columns(n, groups, channels, space, itemsize, 2, sms)
    padded = power_of_2(channels), power_of_2(space)
    values = padded[0] * padded[1]
    held = max(itemsize, 4) * values
    most = _HELD_BACKWARD if 5 * channels * space > 4 * values else _HELD_BACKWARD // 2
    if held <= most and not (held > _HELD_BY_FEW and 4 * n * groups < sms):
        r = _held_at_once(values, groups, n, sms)
        # 8 programs per multiprocessor, or a few more, unless each sample has its own already.
        splits = cdiv(n, max(n * cdiv(groups, r) // (8 * sms), 1))
        warps = _held_warps(r * values, 2)
        return PlanesBackward(n, groups, channels, space, warps, 0, r, *padded, splits)
    units = n * groups
    block = tile_of(_TENSORS_BACKWARD * itemsize)
    block = shrink_to_fill(block, units, channels * space, sms)
    cb, sb = _tile_of_planes(channels, space, block)
    warps = max(min(cb * sb // 1024, 4), 1)
    k = cdiv(channels, cb) * cdiv(space, sb)
    lag = min(sms * _LAG_BACKWARD // (cb * sb * itemsize) + k, units * k)
    return PlanesBackward(n, groups, channels, space, warps, lag, 1, cb, sb)


def _held_at_once(values: int, units: int, times: int, sms: int) -> int:
    """How many units of `values` values a program holds at a time, if there are times * units."""
    r = max(min(_SMALL_TILE // values, power_of_2(units)), 1)
    while r > 1 and times * cdiv(units, r) < 4 * sms:
        r //= 2
    return r


def _held_warps(values: int, tensors: int) -> int:
    """Warps to hold `values` values of each of `tensors` tensors, 32 values per thread."""
    return max(min(floor_2(values * tensors // 1024), 32 // tensors), 1)


def _tile_of_planes(channels: int, space: int, block: int) -> tuple[int, int]:
    """Channels and places of the cheapest tile; of equally cheap tiles, the longest.

    Padding costs, and so does each tile. A tile has `block` values or half as many.
    """

    def cost(tile: tuple[int, int]) -> int:
        cb, sb = tile
        return cdiv(channels, cb) * cdiv(space, sb) * (cb * sb + _TILE_COST)

    longest = min(power_of_2(space), block)
    shortest = min(longest, _SHORTEST_RUN)
    lengths = [longest >> i for i in range(8) if longest >> i >= shortest]
    tiles = []
    for values in (block, block // 2):
        for sb in lengths:
            if sb <= values:
                tiles.append((min(values // sb, power_of_2(channels)), sb))
    return min(tiles, key=cost)


def _columns(
    n: int, groups: int, channels: int, s: int, itemsize: int, tensors: int, sms: int
) -> GroupColumns:
    c = groups * channels
    bc = _slab(c, itemsize)
    cached = n * s * c * itemsize <= _CACHED_TENSOR
    if tensors == 1:
        warps, u, stages, tiles = (4, 8, 1, 2) if cached else (4, 8, 1, 8)
    else:
        warps, u, stages, tiles = (2, 4, 1, 4) if cached else (4, 4, 3, 8)
    if itemsize == 8:
        u //= 2
    bt = at_once(warps, bc, itemsize, unit_of(c))

    def cut(rows_each: int, lag: int) -> GroupColumns:
        return GroupColumns(
            n, groups, channels, s, bc, bt, u, warps, stages, rows_each, lag
        )

    slabs, tile = cdiv(c, bc), u * bt
    if slabs == 1 and (s <= tile or (n >= sms and s * bc * itemsize <= _SOLO_SAMPLE)):
        return cut(s, 0)
    while tiles > 1 and n * slabs * cdiv(s, tiles * tile) < sms:
        tiles //= 2
    rows_each = tiles * tile
    items = slabs * cdiv(s, rows_each)  # per sample
    lag = min(sms * _LAG_COLUMNS // (rows_each * bc * itemsize) + items, n * items)
    return cut(rows_each, lag)


def _slab(c: int, itemsize: int) -> int:
    """Channels of a slab: all, if there are few; else the widest slab with the least padding."""
    most = _SEGMENT_BYTES // itemsize
    if c <= 2 * most:
        return max(power_of_2(c), 8)
    widths = [max(most >> i, 8) for i in range(4)]
    return min(widths, key=lambda bc: (cdiv(c, bc) * bc, -bc))
