"""How GroupNorm cuts a tensor into work: rules, without a search at run time.

Tiles, warps and lags are those that sweeps found for the same kind of walk in BatchNorm and
LayerNorm (see `batch_norm.schedule` and `layer_norm.schedule`). Any choice gives correct results;
only speed depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from normplug._kernels.device import floor_2, needs_int64, power_of_2, unit_of

# Bytes of a unit, as float32 or wider, that a program holds at most. LayerNorm holds rows of
# 32,768 halves. Backward there are two tensors.
_HELD_FORWARD, _HELD_BACKWARD = 128 << 10, 64 << 10
_HELD_HALF_EMPTY = 64 << 10  # bytes up to which it does not matter how much is padding
_HELD_BY_FEW = 16 << 10  # bytes up to which a group is held though few programs have work
_SMALL_TILE = 4096  # values that a program takes of small units together
# A multiprocessor: what is read of later units before a unit is written.
_LAG_BYTES = 24 << 10
_TILE_COST = 512  # values: what a tile costs beside them
_SHORTEST_RUN = 64  # values side by side of a plane, of a tile that is not a whole plane
MOST_COLUMNS = 1 << 16  # channels of a group that are adjacent
_SEGMENT_BYTES = 256  # of a row that a tile of columns reads
_FEWEST_BYTES = 64  # the same, of a narrow slab: less than that wastes bandwidth
_CACHED_UNIT = 24 << 20  # bytes of a unit that the L2 cache still holds when it is read again
_ABREAST_SAMPLE = 8 << 20  # bytes of a sample whose slabs are taken in turn
_SOLO_SLAB = 256 << 10  # bytes up to which one program is enough for a slab, if there are many
# Registers of a thread with which a multiprocessor runs 12 warps at once.
_OWN_REGISTERS, _OWN_WARPS = 168, 12
_ITEM_BYTES = 64 << 10  # of a slab that a program reads
_FINISH = 64  # channels of a gradient that one program adds up


@dataclass(frozen=True)
class PlanesForward:
    """Groups of `channels` * `hw` adjacent values in tiles of `block`, or held, `r` at a time.

    A tile is runs of `run` values of one channel. It is written about `lag` programs after it was
    read; a lag of 0 says that programs hold their groups.
    """

    n: int
    groups: int
    channels: int
    hw: int
    block: int
    run: int
    warps: int
    lag: int = 0
    r: int = 1

    @property
    def width(self) -> int:
        """Values of a group."""
        return self.channels * self.hw

    @property
    def held(self) -> bool:
        return self.lag == 0

    @property
    def k(self) -> int:
        """Tiles of a group."""
        return -(-self.width // self.block)

    @property
    def grid(self) -> int:
        units = self.n * self.groups
        return -(-units // self.r) if self.held else units * self.k + self.lag

    @property
    def even(self) -> bool:
        """Whether all of every tile exists."""
        return self.width % self.block == 0 and self.n * self.groups % self.r == 0

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return needs_int64(self.n * self.groups, self.width)


@dataclass(frozen=True)
class PlanesBackward:
    """Groups of `channels` planes of `hw` values in tiles of `cb` channels and `sb` places.

    `lag` as in `PlanesForward`. Held, `r` groups are, and `splits` programs share the samples.
    """

    n: int
    groups: int
    channels: int
    hw: int
    cb: int
    sb: int
    warps: int
    lag: int = 0
    r: int = 1
    splits: int = 1
    finish: int = _FINISH

    @property
    def held(self) -> bool:
        return self.lag == 0

    @property
    def ks(self) -> int:
        """Tiles side by side in a plane."""
        return -(-self.hw // self.sb)

    @property
    def k(self) -> int:
        """Tiles of a group."""
        return -(-self.channels // self.cb) * self.ks

    @property
    def programs(self) -> int:
        """Programs that read tiles first."""
        if self.held:
            return -(-self.groups // self.r) * self.splits
        return self.n * self.groups * self.k

    @property
    def parts(self) -> int:
        """Parts that the sums for weight and bias come in."""
        return self.splits if self.held else self.n * self.ks

    @property
    def even(self) -> bool:
        """Whether all of every tile exists."""
        whole = self.channels % self.cb == 0 and self.hw % self.sb == 0
        return whole and self.groups % self.r == 0

    @property
    def wide(self) -> bool:
        """Whether offsets need 64 bits."""
        return needs_int64(self.n * self.groups, self.channels * self.hw)


@dataclass(frozen=True)
class Columns:
    """`n` samples of `s` rows in slabs of `slab_groups` groups, in items of `rows_each` rows.

    A slab's channels are padded to `bc` columns, of which a tile has `u` * `bt` rows. The items of
    `abreast` slabs are taken in turn. `lag` as in `PlanesBackward`: 0 says that each program writes
    the item that it read.
    """

    n: int
    groups: int
    channels: int
    s: int
    slab_groups: int
    bc: int
    bt: int
    u: int
    warps: int
    stages: int
    rows_each: int
    lag: int = 0
    abreast: int = 1
    finish: int = _FINISH

    @property
    def c(self) -> int:
        """Channels of the tensor."""
        return self.groups * self.channels

    @property
    def live(self) -> int:
        """Channels of a slab."""
        return self.slab_groups * self.channels

    @property
    def gb(self) -> int:
        """Groups of a slab, padded to a power of two."""
        return self.bc // self.channels if self.exact else power_of_2(self.slab_groups)

    @property
    def exact(self) -> bool:
        """Whether the columns of a slab are those of whole groups, padding included."""
        return power_of_2(self.channels) == self.channels

    @property
    def unit(self) -> int:
        """What divides the channels and a slab's: the alignment the compiler may assume."""
        return unit_of(self.c, self.live)

    @property
    def slabs(self) -> int:
        return -(-self.groups // self.slab_groups)

    @property
    def units(self) -> int:
        return self.n * self.slabs

    @property
    def own(self) -> bool:
        """Whether each program writes the item that it read."""
        return self.lag == 0

    @property
    def solo(self) -> bool:
        """Whether one program takes each slab of a sample."""
        return self.own and self.k == 1

    @property
    def registers(self) -> int | None:
        """The most that a thread may have, so that all programs run at once."""
        return _OWN_REGISTERS if self.own and not self.solo else None

    @property
    def k(self) -> int:
        """Items of a slab of a sample."""
        return -(-self.s // self.rows_each)

    @property
    def programs(self) -> int:
        """Programs that gather items."""
        return self.units * self.k

    @property
    def even(self) -> bool:
        """Whether slabs fill their padding."""
        return self.live == self.bc and self.groups % self.slab_groups == 0

    @property
    def wide(self) -> bool:
        """Whether offsets in a sample need 64 bits."""
        return needs_int64(self.s, self.c)


def group_norm_forward(
    n: int, groups: int, channels: int, space: int, channels_last: bool, itemsize: int, sms: int
) -> PlanesForward | Columns:
    """How the kernels take (N, groups * channels, *space).

    Args:
        n: Batch size.
        groups: Groups of a sample.
        channels: Channels of a group.
        space: Values of a plane.
        channels_last: Channels are adjacent in memory.
        itemsize: Bytes of a value of the widest tensor.
        sms: The GPU's multiprocessors.
    """
    if channels_last:
        return _columns(n, groups, channels, space, itemsize, 1, sms)
    units, width = n * groups, channels * space
    padded = power_of_2(width)
    held = max(itemsize, 4) * padded
    dense = 5 * width > 4 * padded
    few = held > _HELD_BY_FEW and 4 * units < sms
    if held <= _HELD_FORWARD and (dense or held <= _HELD_HALF_EMPTY) and not few:
        block, lag, r = padded, 0, _at_once(padded, units, 1, sms)
        warps = _held_warps(r * block, 1)
    else:
        block, r = _tile(itemsize), 1
        if -(-width // block) * block > width + width // 8:
            block //= 2
        while block > 1024 and units * -(-width // block) < 2 * sms:
            block //= 2
        warps = max(min(block // 1024, 4), 1)
        k = -(-width // block)
        lag = min(sms * _LAG_BYTES // (block * itemsize) + k, units * k)
    run = min(space & -space, block)  # the largest power of two that divides the plane
    return PlanesForward(n, groups, channels, space, block, run, warps, lag, r)


def group_norm_backward(
    n: int, groups: int, channels: int, space: int, channels_last: bool, itemsize: int, sms: int
) -> PlanesBackward | Columns:
    """How the kernels take the backward; arguments as in `group_norm_forward`."""
    if channels_last:
        return _columns(n, groups, channels, space, itemsize, 2, sms)
    padded = power_of_2(channels), power_of_2(space)
    values = padded[0] * padded[1]
    held = max(itemsize, 4) * values
    if held <= _HELD_BACKWARD and not (held > _HELD_BY_FEW and 4 * n * groups < sms):
        r = _at_once(values, groups, n, sms)
        splits = _splits(n, -(-groups // r), sms)
        warps = _held_warps(r * values, 2)
        return PlanesBackward(n, groups, channels, space, *padded, warps, 0, r, splits)
    block, units = _tile(2 * itemsize), n * groups
    while block > 1024 and units * -(-channels * space // block) < 2 * sms:
        block //= 2
    cb, sb = _tile_of_planes(channels, space, block)
    warps = max(min(cb * sb // 1024, 4), 1)
    k = -(-channels // cb) * -(-space // sb)
    lag = min(sms * _LAG_BYTES // (cb * sb * itemsize) + k, units * k)
    return PlanesBackward(n, groups, channels, space, cb, sb, warps, lag)


def _tile(bytes_each: int) -> int:
    """Values of a tile that is read twice, of so many bytes in all tensors that are read."""
    return 8192 if bytes_each <= 4 else 4096 if bytes_each <= 8 else 2048


def _at_once(values: int, units: int, times: int, sms: int) -> int:
    """How many units of so many values a program holds; there are `units` for it, so many times."""
    r = max(min(_SMALL_TILE // values, power_of_2(units)), 1)
    while r > 1 and times * -(-units // r) < 4 * sms:
        r //= 2
    return r


def _held_warps(values: int, tensors: int) -> int:
    """Warps that hold so many values of each of the tensors, 32 in each thread."""
    return max(min(floor_2(values * tensors // 1024), 32 // tensors), 1)


def _splits(n: int, programs: int, sms: int) -> int:
    """Programs among which the samples of a held unit are shared, where there are so many units.

    At least about as many programs as the GPU runs at a time.
    """
    each = max(n * programs // (8 * sms), 1)
    return -(-n // each)


def _tile_of_planes(channels: int, space: int, block: int) -> tuple[int, int]:
    """Channels and places of a tile: those that leave the least padding, and then the longest.

    A tile has `block` values or half as many.
    """

    def cost(tile: tuple[int, int]) -> int:
        cb, sb = tile
        return -(-channels // cb) * -(-space // sb) * (cb * sb + _TILE_COST)

    longest = min(power_of_2(space), block)
    lengths = [longest >> i for i in range(8) if longest >> i >= min(longest, _SHORTEST_RUN)]
    sizes = [(block // half // sb, sb) for half in (1, 2) for sb in lengths if half * sb <= block]
    return min(((min(cb, power_of_2(channels)), sb) for cb, sb in sizes), key=cost)


def _columns(
    n: int, groups: int, channels: int, s: int, itemsize: int, tensors: int, sms: int
) -> Columns:
    slab_groups, bc = _slab(groups, channels, _SEGMENT_BYTES // itemsize)
    slab_bytes = s * itemsize * tensors  # of each column
    if slab_bytes * slab_groups * channels > _CACHED_UNIT:
        # One slab after the other, each so narrow that the cache holds it, if there are such.
        narrow = _slab(groups, channels, min(_CACHED_UNIT // slab_bytes, _SEGMENT_BYTES))
        if narrow[0] * channels * itemsize >= _FEWEST_BYTES and narrow[1] < bc:
            slab_groups, bc = narrow
    warps, u, stages = 4, 4 if itemsize == 8 else 8, 1
    vector = min(16 // itemsize, unit_of(groups * channels, slab_groups * channels))
    bt = max(warps * 32 * vector // bc, 1)
    slabs = -(-groups // slab_groups)
    abreast = slabs if slab_bytes * groups * channels <= _ABREAST_SAMPLE else 1

    def cut(rows_each: int, lag: int) -> Columns:
        return Columns(
            n, groups, channels, s, slab_groups, bc, bt, u, warps, stages, rows_each, lag, abreast
        )

    if s <= u * bt or (n * slabs >= sms and slab_bytes * bc <= _SOLO_SLAB):
        return cut(s, 0)
    rows_each = max(_ITEM_BYTES // (itemsize * tensors * bc * u * bt), 1) * u * bt
    while rows_each > u * bt and n * slabs * -(-s // rows_each) < 4 * sms:
        rows_each //= 2
    k = -(-s // rows_each)
    lag = min(sms * _LAG_BYTES // (rows_each * bc * itemsize) + abreast * k, n * slabs * k)
    return cut(rows_each, lag)


def _slab(groups: int, channels: int, columns: int) -> tuple[int, int]:
    """Groups of a slab of at most so many columns, or of one group; and its columns, padded."""
    together = max(min(floor_2(columns) // channels, groups), 1)
    step = 8 // unit_of(channels)  # groups whose channels are a multiple of 8
    if step < together < groups:
        together -= together % step
    return together, max(power_of_2(together * channels), 8)
