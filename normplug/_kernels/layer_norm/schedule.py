"""How norms of rows are cut into work: rules from measurements, without autotuning."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from normplug._kernels import at_once, cdiv, lag_of, power_of_2
from normplug._kernels.constants import KernelConstant, Work

# Most bytes of a row, as float32 or wider, that a program holds forward.
_HELD_BYTES = 128 << 10
_SUMMED_BYTES = 32 << 10  # the same backward, together with the sums for weight and bias
_SHARED_WIDTH = 65536  # values up to which programs share rows backward, where they can
# Bytes per multiprocessor that are read between a wide row's first read and its second.
_WIDE_FORWARD_LAG, _WIDE_BACKWARD_LAG = 24 << 10, 32 << 10
_MANY_ROWS_EACH = 128  # rows per multiprocessor, above which two programs on it beat one
_MOST_PROGRAMS = 1 << 17  # with running statistics each has two words of its own
# Parts of the running statistics that a program adds at a time, for each warp.
_FAN_IN = 64


@dataclass(frozen=True, kw_only=True)
class RowLayout(KernelConstant):
    """How rows lie in memory, as far as it is compiled in; see `shared.row_places`.

    unit: a divisor of the width and of all strides, and so the alignment. heads: groups of rows in
    a set; 0 if rows have one level of strides. x_middle and so on: how far the groups of a set are
    apart, in values, or 0. wide: offsets need 64 bits.

    vectors: the rows that share a weight and a bias: "all"; the INNER adjacent ones of a "sample";
    a "group", every INNER-th one; or none, where each "token" has them. step: how far these weights
    are apart, in values.
    """

    unit: int
    heads: int
    wide: bool
    x_middle: int = 0
    residual_middle: int = 0
    dy_middle: int = 0
    dtotal_middle: int = 0
    vectors: str = "all"
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class RowsTile(RowLayout):
    """A tile of `r` rows of `u` steps of `bc` columns.

    vector: adjacent values of a thread. keep: weight and bias stay in registers. even: no tile has
    padding. Forward, `fan_in` parts of the running statistics are added at a time. Backward,
    `stages` tiles are in flight, `lanes` sums per column are kept until the last tile, `k` programs
    share a row (`k_padded`: the next power of two), and a program adds up `finish` columns. A set
    of rows may be of a `single` program, whose sums are then the gradients.
    """

    r: int
    u: int
    bc: int
    vector: int
    keep: bool
    even: bool
    fan_in: int = 0
    stages: int = 0
    lanes: int = 0
    k: int = 0
    k_padded: int = 0
    finish: int = 0
    single: bool = False


@dataclass(frozen=True, kw_only=True)
class WideTile(RowLayout):
    """A tile of `cw` columns of a row or, backward, of a block of `rb` rows.

    kp: tiles whose results are merged at a time. even: no tile has padding. Forward, `fan_in` parts
    of the running statistics are added at a time. Backward, a block may be `single`: the sums of a
    tile are the gradients.
    """

    cw: int
    kp: int
    even: bool
    fan_in: int = 0
    rb: int = 0
    single: bool = False


@dataclass
class RowTiles:
    """Rows of `width` values that a program holds, `r` at a time in u * bc columns; see `rows`.

    `programs` programs take tiles in turn, `stages` of them in flight, and `k` programs share a
    row. A thread takes `vector` adjacent values at a time. With `keep`, weight and bias stay in
    registers. Sums over rows are kept as `lanes` sums per column until the last tile; then one
    program adds up `finish` columns of them. Backward, the rows may form `sets` that have a weight
    each: then a program takes the tiles of one set, and no tile has rows of two.
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
    sets: int = 1

    def __post_init__(self) -> None:
        members = self.rows // self.sets
        self.tiles = self.sets * cdiv(members, self.r)
        # Groups of `k` programs that take tiles in turn.
        self.groups = self.programs // self.k
        # Whether a program has all rows of a set.
        self.single = self.programs == self.sets > 1
        self.parts = self.programs  # from which the running statistics are added up
        self.even = self.k * self.u * self.bc == self.width and members % self.r == 0

    def forward_scratch(self, running: bool) -> tuple[int, int]:
        """How many counters and partial results a forward needs."""
        return 2 * (self.parts + _finishers(self)) if running else 0, 0

    def backward_scratch(self, sums: int) -> tuple[int, int]:
        """How many counters and partial results a backward with this number of sums needs."""
        met = self.tiles if self.k > 1 else 0
        parts = 0 if self.single else self.groups * sums * self.width
        return 1 + met, 2 * met * self.k * self.r + parts

    def forward(
        self, strides: dict[str, int], layout: RowLayout, running: bool, given: bool
    ) -> Work:
        """The launch of a forward. strides: the kernel's sizes that say where rows are."""
        finishers = _finishers(self) if running else 0
        sizes = {"ROWS": self.rows, **strides, "FINISHERS": finishers}
        tile = self._tile(layout, fan_in=_FAN_IN * self.warps)
        return Work(self.programs + finishers, self.warps, tile, sizes)

    def backward(
        self, strides: dict[str, int], layout: RowLayout, late: bool, sums: int
    ) -> Work:
        """The launch of a backward that computes `sums` sums over the rows."""
        finishes = sums and self.k == 1 and not self.single
        finishers = self.sets * cdiv(self.width, self.finish) if finishes else 0
        sizes = {"ROWS": self.rows, **strides, "PROGRAMS": self.programs}
        tile = self._tile(
            layout,
            stages=self.stages,
            lanes=self.lanes,
            k=self.k,
            k_padded=power_of_2(self.k),
            finish=self.finish,
            single=self.single,
        )
        return Work(
            self.programs + finishers, self.warps, tile, sizes, cooperative=self.k > 1
        )

    def _tile(self, layout: RowLayout, **more: Any) -> RowsTile:
        return RowsTile(
            **asdict(layout),
            r=self.r,
            u=self.u,
            bc=self.bc,
            vector=self.vector,
            keep=self.keep,
            even=self.even,
            **more,
        )


@dataclass
class Wide:
    """Blocks of `rb` rows in tiles of `cw` columns, written `lag` programs after a first read.

    Forward, a block is a row.
    """

    rows: int
    width: int
    rb: int
    cw: int
    warps: int
    lag: int

    def __post_init__(self) -> None:
        self.k = cdiv(self.width, self.cw)  # tiles of a block
        self.blocks = cdiv(self.rows, self.rb)
        self.parts = self.rows  # from which the running statistics are added up
        self.even = self.width % self.cw == 0 and self.rows % self.rb == 0

    def forward_scratch(self, running: bool) -> tuple[int, int]:
        """How many counters and partial results a forward needs."""
        words = 2 * (self.parts + _finishers(self)) if running else 0
        return self.rows + words, 2 * self.rows * self.k

    def backward_scratch(self, sums: int) -> tuple[int, int]:
        """How many counters and partial results a backward with this number of sums needs."""
        rows_room = self.blocks * (self.k + 1) * 2 * self.rb
        parts = 0 if self.blocks == 1 else self.blocks * sums * self.width
        return 2 * self.blocks + self.k, rows_room + parts

    def forward(
        self, strides: dict[str, int], layout: RowLayout, running: bool, given: bool
    ) -> Work:
        """The launch of a forward; if its statistics are given, it does not wait for any.

        strides: the kernel's sizes that say where rows are.
        """
        lag = 0 if given else self.lag
        finishers = _finishers(self) if running else 0
        sizes = {
            "ROWS": self.rows,
            **strides,
            "K": self.k,
            "LAG": lag,
            "FINISHERS": finishers,
        }
        tile = WideTile(
            **asdict(layout),
            cw=self.cw,
            kp=min(power_of_2(self.k), 1024),
            even=self.even,
            fan_in=_FAN_IN * self.warps,
        )
        return Work(self.rows * self.k + lag + finishers, self.warps, tile, sizes)

    def backward(
        self, strides: dict[str, int], layout: RowLayout, late: bool, sums: int
    ) -> Work:
        """The launch of a backward that computes `sums` sums over the rows.

        late: it writes what depends on sums over each row.
        """
        lag = self.lag if late else 0
        single = self.blocks == 1
        finishers = self.k if sums and not single else 0
        sizes = {"ROWS": self.rows, **strides, "K": self.k, "LAG": lag}
        tile = WideTile(
            **asdict(layout),
            cw=self.cw,
            kp=min(power_of_2(self.k), max(4096 // (2 * self.rb), 1)),
            even=self.even,
            rb=self.rb,
            single=single,
        )
        return Work(self.blocks * self.k + lag + finishers, self.warps, tile, sizes)


def _finishers(shape: RowTiles | Wide) -> int:
    """Programs that add up the parts: at most about the square root of the number of parts."""
    parts, at_a_time = shape.parts, _FAN_IN * shape.warps
    times = cdiv(math.isqrt(parts), at_a_time)
    return cdiv(parts, times * at_a_time)


def layer_norm_forward(
    rows: int, width: int, unit: int, itemsize: int, running: bool, sms: int
) -> RowTiles | Wide:
    """Choose how the forward kernels cut `rows` rows of `width` values.

    unit: a divisor of width and strides. itemsize: bytes of a value of the widest tensor that has
    rows. running: there are running statistics, to which each program adds its part. sms: the GPU's
    multiprocessors. How a row is spread over threads, and so the order of its sums, does not depend
    on the number of rows.
    """
    padded = power_of_2(width)
    if padded > _HELD_BYTES // max(itemsize, 4) or (
        width > 8192 and 5 * width <= 4 * padded
    ):
        cw = 4096 if itemsize <= 4 else 2048
        lag = lag_of(sms * _WIDE_FORWARD_LAG, cw * itemsize, cdiv(width, cw), rows)
        return Wide(rows, width, rb=1, cw=cw, warps=4, lag=lag)
    if padded == 1024 and itemsize <= 4:
        # A row has a warp of its own. Programs of one warp were slower at 4,096 rows of halves.
        if running and itemsize == 2:
            warps = 4
        elif rows > _MANY_ROWS_EACH * sms:
            warps = 1
        else:
            warps = 2
        shape = _row_tile(rows, width, unit, itemsize, warps, 1, 32)
        return replace(shape, keep=itemsize == 4)
    few = itemsize == 8 or padded <= (2048 if itemsize == 4 else 4096)
    needed = max(padded // (512 if few else 1024), 1)
    if itemsize == 4:
        warps = max(needed, min(2 * needed, 8), 4)
        shape = _row_tile(rows, width, unit, itemsize, warps, needed, 16)
        return replace(shape, keep=padded <= 16384)
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
    cooperative: bool,
    sets: int = 1,
) -> RowTiles | Wide:
    """Choose how the backward kernels cut rows; `layer_norm_forward` has the other arguments.

    input_bias: there is one, whose gradient is a third sum over the rows. shared: bytes of shared
    memory that a program can use. cooperative: a cooperative launch is possible, whose programs all
    run at once. sets: how many weights there are, each of as many rows; more than one only for rows
    that are held.
    """
    padded = power_of_2(width)
    if holds_sums(width, itemsize):
        warps = 4 if padded <= 1024 else 8
        together = 2 if warps == 4 and rows > _MANY_ROWS_EACH * sms else 1
        values = 32 if itemsize <= 4 and (padded >= 1024 or together == 2) else 16
        shape = _row_tile(rows, width, unit, itemsize, warps, warps, values)
        # Folding a tile's rows takes time but saves registers, which three sums and masks need.
        if padded <= 512 and not (input_bias and width < padded):
            shape = replace(shape, lanes=shape.r)
        # The programs' published sums should cause no more traffic than the rows do.
        most = max(3 * (rows // sets) * itemsize // 16, 1)
        programs = min(together * sms, most, shape.tiles)
        room = shared // together - (4 << 10)
        if shape.lanes > 1:
            room -= max(itemsize, 4) * shape.lanes * padded  # to add them up at the end
        stages = 4 if together == 1 and padded < 8192 else 3
        stages = max(min(stages, room // (2 * shape.r * padded * itemsize)), 1)
        shape = replace(shape, programs=programs, stages=stages, keep=True, finish=64)
        return shape if sets == 1 else _in_sets(shape, sets, together * sms, most)
    if cooperative and itemsize <= 4 and rows >= sms and width <= _SHARED_WIDTH:
        if padded <= 16384:
            share = _Share(width=4096, r=4, warps=8)
        elif itemsize == 4:
            share = _Share(width=4096, r=2, warps=4)
        else:
            share = _Share(width=padded // 32, r=2**18 // padded, warps=4)
        k = cdiv(width, share.width)
        # Programs of 4 warps run two at a time on any multiprocessor.
        programs = (8 // share.warps) * sms // k * k
        if programs > 0:
            vector = min(16 // itemsize, unit)
            at_a_time = share.warps * 32 * vector
            bc = min(at_a_time, share.width)
            return RowTiles(
                rows=rows,
                width=width,
                r=share.r,
                u=share.width // bc,
                bc=bc,
                warps=share.warps,
                stages=1,
                programs=programs,
                vector=vector,
                lanes=at_a_time // bc,
                k=k,
                finish=64,
            )
    cw, rb = (1024, 8) if itemsize == 2 and width >= 131072 else (512, 16)
    tile_bytes = rb * cw * itemsize
    lag = lag_of(sms * _WIDE_BACKWARD_LAG, tile_bytes, cdiv(width, cw), cdiv(rows, rb))
    return Wide(rows, width, rb=rb, cw=cw, warps=4, lag=lag)


def _in_sets(shape: RowTiles, sets: int, slots: int, most: int) -> RowTiles:
    """The tiles and programs for sets of rows: at most `most` programs for each.

    `slots` programs run at once. A program's work besides its tiles takes as long as a few tiles.
    """
    members = shape.rows // sets
    r = min(shape.r, power_of_2(members))
    tiles = cdiv(members, r)

    def time(each: int) -> int:
        return cdiv(sets * each, slots) * (cdiv(tiles, each) + shape.stages)

    each = min(range(1, min(tiles, most, slots) + 1), key=time)
    # Few parts are added up by few programs.
    finish = 64 if sets * cdiv(shape.width, 64) <= 2 * slots else 256
    lanes = min(shape.lanes, r)
    return replace(
        shape, r=r, lanes=lanes, sets=sets, programs=sets * each, finish=finish
    )


def holds_sums(width: int, itemsize: int) -> bool:
    """Whether a program holds a row together with the sums for weight and bias."""
    return power_of_2(width) * max(itemsize, 4) <= _SUMMED_BYTES


class _Share(NamedTuple):
    """What a program holds of rows that several programs share: `r` rows of `width` columns."""

    width: int
    r: int
    warps: int


def _row_tile(
    rows: int, width: int, unit: int, itemsize: int, warps: int, needed: int, values: int
) -> RowTiles:
    """Tiles of rows, with one program per tile, up to the maximum number of programs.

    A row is spread over at most `needed` warps, with about `values` values per thread.
    """
    padded = power_of_2(width)
    vector = min(16 // itemsize, unit)
    bc = min(padded, needed * 32 * vector)
    side_by_side = at_once(warps, bc, itemsize, unit)
    u = padded // bc
    r = side_by_side * max(values // (vector * u), 1)
    programs = min(cdiv(rows, r), _MOST_PROGRAMS)
    vector = min(vector, bc)
    return RowTiles(
        rows=rows,
        width=width,
        r=r,
        u=u,
        bc=bc,
        warps=warps,
        stages=1,
        programs=programs,
        vector=vector,
        lanes=side_by_side,
    )
