"""Schedules cover each value once, and no program waits for a later one."""

import itertools
import math

import pytest
import torch

from normplug._kernels.batch_norm import schedule as bn
from normplug._kernels.batch_norm.schedule import BatchColumns, Planes
from normplug._kernels.group_norm import schedule as gn
from normplug._kernels.layer_norm import schedule as ln
from normplug._kernels.layer_norm.schedule import RowTiles, Wide

# (N, C, HW), and whether channels are adjacent in memory.
TINY = [(2, 1, 1), (1, 1, 2), (1, 64, 49), (33, 7, 1)]
FLAT = [
    (64, 1000, 1),
    (4096, 64, 1),
    (1024, 100_000, 1),
    (200_000, 16, 1),
    (5_000_000, 33, 1),
]
SPACE = [(32, 2048, 49), (3, 33, 100), (3, 33, 101), (128, 64, 3136), (1, 1, 3_000_000)]
OF_BOTH = [(8, 512, 49), (16, 256, 196), (32, 64, 784), (2, 3, 40_000)]
ADJACENT = [(128, 256, 3136), (100, 33, 323), (1, 1, 7)]
# 2^31 values and more.
HUGE = [(2_200_000, 1000, 1), (60_000, 750, 49), (2, 2**30 + 7, 1)]
HUGE_OF_BOTH = [(700, 1000, 3136), (1, 3, 2**30)]
SHAPES = [
    *((shape, False) for shape in [*TINY, *FLAT, *SPACE, *HUGE, *OF_BOTH, *HUGE_OF_BOTH]),
    *((shape, True) for shape in [*OF_BOTH, *ADJACENT, *HUGE_OF_BOTH]),
]
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
MACHINES = [(132, True), (132, False), (16, True), (1, False)]
GEOMETRIES = {
    (shape, innermost, itemsize, tensors, sms, together): bn.geometry(
        *shape, innermost, itemsize, tensors, sms, together
    )
    for shape, innermost in SHAPES
    for itemsize, tensors, (sms, together) in itertools.product(DTYPES, (1, 2), MACHINES)
}
PLANES = {key: shape for key, shape in GEOMETRIES.items() if isinstance(shape, Planes)}
COLUMNS = {
    key: shape for key, shape in GEOMETRIES.items() if isinstance(shape, BatchColumns)
}


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


def test_tiles_cover_a_channel_and_are_written_after_all_of_it_was_read():
    for key, shape in PLANES.items():
        n, _, hw = key[0]
        assert (shape.tiles_a_channel - 1) * shape.block < n * hw, key
        assert n * hw <= shape.tiles_a_channel * shape.block, key
        assert is_power_of_2(shape.block), key
        assert shape.block % 8 == 0, key
        assert hw % shape.unit == 0, key
        assert is_power_of_2(shape.warps), key
        # Program t writes tile t - lag, of a channel whose last tile is at most K - 1 tiles further
        # on, and which program t itself or an earlier one has read.
        assert shape.tiles_a_channel - 1 <= shape.lag <= shape.tiles, key


def test_slabs_cover_the_channels_and_items_the_rows():
    for key, shape in COLUMNS.items():
        (n, c, hw), innermost = key[:2]
        rows, hw = (n * hw, 1) if innermost else (n, hw)
        assert (shape.rows, shape.c, shape.hw) == (rows, c, hw), key
        assert (shape.slabs - 1) * shape.channels < c <= shape.slabs * shape.channels, key
        assert shape.channels * hw <= shape.bc, key
        assert shape.channels <= shape.bch <= shape.bc, key
        assert (
            (shape.gathers - 1) * shape.rows_each
            < rows
            <= shape.gathers * shape.rows_each
        ), key
        assert (shape.writes - 1) * shape.tile < rows <= shape.writes * shape.tile, key
        for size in (shape.bc, shape.bch, shape.bt, shape.u, shape.warps):
            assert is_power_of_2(size), key
        assert shape.bc % 8 == 0, key
        assert shape.channels * hw % shape.unit == 0, key
        assert c * hw % shape.unit == 0, key
        assert 0 <= shape.head <= shape.group * shape.gathers, key


def test_programs_that_wait_for_each_other_all_run_at_once():
    for key, shape in COLUMNS.items():
        sms, together = key[-2:]
        if shape.programs and not shape.solo:
            assert together, key
            assert shape.slabs * shape.gathers <= sms, key


def test_offsets_fit_and_the_mask_has_a_bit_for_every_value_and_for_the_padding():
    for key, shape in GEOMETRIES.items():
        (n, c, hw), innermost, itemsize, tensors, *machine = key
        assert shape.wide or n * c * hw < 2**31, key
        size = bn.mask_bytes(n, c, hw, innermost, itemsize)
        assert size * 8 >= n * c * hw, key
        if isinstance(shape, Planes):
            assert size == c * math.ceil(n * hw / 8), key
        else:
            assert size == shape.rows * shape.slabs * (shape.bc // 8), key
            # Forward and backward agree on it.
            other = GEOMETRIES[((n, c, hw), innermost, itemsize, 3 - tensors, *machine)]
            assert (shape.channels, shape.bc) == (other.channels, other.bc), key


def works(shape):
    """Every launch that a call of this geometry may make."""
    for training, normalize in ((True, True), (True, False), (False, True)):
        yield shape.forward(training, normalize)
    for sums, late in ((True, True), (True, False), (False, False)):
        yield shape.backward(sums, late)


def test_launches_have_a_program_for_every_tile_and_cooperative_ones_fit_the_gpu():
    for key, shape in GEOMETRIES.items():
        tiles = shape.tiles if isinstance(shape, Planes) else shape.slabs * shape.gathers
        for work in works(shape):
            assert max(tiles, 1) <= work.grid < 2**31, (key, work)
            if work.cooperative:
                assert work.grid <= key[-2], (key, work)


# LayerNorm: rows and widths, what is aligned, and the machine.
HEIGHTS = [1, 2, 3, 7, 64, 131, 132, 133, 300, 4096, 50_432, 200_000, 3_000_000]
WIDTHS = [
    *range(1, 10), 24, 31, 32, 33, 96, 100, 127, 128, 255, 257, 511, 768, 1000, 1023, 1024, 1025,
    2047, 2049, 3000, 4095, 4096, 4097, 5120, 6143, 6554, 8191, 8192, 8193, 9000, 10_240, 12_288,
    13_107, 13_108, 16_383, 16_384, 16_385, 20_480, 26_214, 26_215, 32_767, 32_768, 32_769, 40_000,
    52_428, 52_429, 65_535, 65_536, 65_537, 100_000, 131_071, 131_072, 131_073, 262_144, 300_000,
]  # fmt: skip


# Processors, shared memory, and whether programs may wait for each other.
ROW_MACHINES = [
    (132, 227 << 10, True),
    (132, 227 << 10, False),
    (108, 163 << 10, True),
    (14, 163 << 10, True),
    (1, 99 << 10, True),
]
ROW_CALLS = [
    (rows, width, unit, itemsize, machine)
    for rows, width, itemsize, machine in itertools.product(
        HEIGHTS, WIDTHS, DTYPES, ROW_MACHINES
    )
    for unit in (1, 2, 4, 8)
    if width % unit == 0  # since a unit divides a width and its strides
]
ROW_FORWARD = {
    (*call, running): ln.layer_norm_forward(*call[:4], running, call[4][0])
    for call in ROW_CALLS
    for running in (False, True)
}
ROW_BACKWARD = {
    (*call, input_bias): ln.layer_norm_backward(*call[:4], input_bias, *call[4])
    for call in ROW_CALLS
    for input_bias in (False, True)
}
EVERY_ROW = (*ROW_FORWARD.items(), *ROW_BACKWARD.items())
HELD = [(key, shape) for key, shape in EVERY_ROW if isinstance(shape, RowTiles)]


def test_tiles_of_rows_cover_all_fit_the_registers_and_are_written_after_their_row_was_read():
    for key, shape in EVERY_ROW:
        rows, width = key[:2]
        assert (shape.rows, shape.width) == (rows, width), key
        if isinstance(shape, RowTiles):
            height, tiles, sizes = shape.r, shape.tiles, (shape.u, shape.bc)
        else:
            height, tiles, sizes = shape.rb, shape.blocks, (shape.cw,)
            # Program t writes tile t - lag. The last tile of its row, or of its block of rows, is
            # at most k - 1 further.
            assert shape.k - 1 <= shape.lag <= shape.k * shape.blocks, key
        across = math.prod(sizes)
        assert (shape.k - 1) * across < width <= shape.k * across, key
        assert (tiles - 1) * height < rows <= tiles * height, key
        assert all(is_power_of_2(size) for size in (height, *sizes, shape.warps)), key
        assert shape.warps * 32 <= 1024, key
        # A thread has 255 registers, which must hold more than a tile's values.
        assert height * across <= shape.warps * 32 * 64, key


def test_every_program_has_a_tile_that_fits_and_those_that_share_a_row_all_run_at_once():
    for key, shape in HELD:
        sms, shared, together = key[4]
        assert shape.programs >= 1, key
        assert shape.programs % shape.k == 0, key
        assert shape.groups >= 1, key
        assert shape.stages >= 1, key
        tile = shape.r * shape.u * shape.bc * key[3]
        assert shape.stages == 1 or 2 * shape.stages * tile <= shared, key  # prefetched
        if shape.k == 1:
            assert shape.programs <= shape.tiles, key
            continue
        assert together, key
        assert shape.programs <= 2 * sms, key
        assert shape.programs <= sms or shape.warps <= 4, key
    for key, shape in ROW_FORWARD.items():
        assert shape.rb == 1 if isinstance(shape, Wide) else shape.k == 1, key


def test_launches_for_rows_fit_the_grid_and_only_sharing_programs_are_cooperative():
    layout = ln.RowLayout(unit=1, heads=0, wide=False)
    for key, shape in (*list(ROW_FORWARD.items())[::7], *list(ROW_BACKWARD.items())[::7]):
        if ROW_FORWARD[key] is shape:
            work = shape.forward({}, layout, running=True, given=False)
        else:
            work = shape.backward({}, layout, late=True, sums=3)
        assert 0 < work.grid < 2**31, key
        assert work.cooperative == (isinstance(shape, RowTiles) and shape.k > 1), key


SET_CALLS = [
    (sets, members, width, itemsize, machine)
    for sets, members, width, itemsize, machine in itertools.product(
        (1, 2, 3, 8, 64, 100, 4096),
        (1, 2, 5, 64, 1000, 4096),
        (1, 24, 768, 1000, 4096, 8192),
        (2, 4),
        ROW_MACHINES[1::2],
    )
]


def test_a_program_takes_tiles_of_one_set_of_rows():
    for key in SET_CALLS:
        sets, members, width, itemsize, machine = key
        rows = sets * members
        call = (rows, width, math.gcd(width, 8), itemsize, False, *machine)
        shape = ln.layer_norm_backward(*call, sets)
        assert shape.sets == sets, key
        assert shape.programs % sets == 0, key
        assert shape.tiles == sets * math.ceil(members / shape.r), key
        assert shape.programs <= shape.tiles, key
        assert sets == 1 or shape.r < 2 * members, key
        assert shape.r % shape.lanes == 0, key
        layout = ln.RowLayout(unit=1, heads=0, wide=False)
        work = shape.backward({}, layout, late=True, sums=2)
        finishers = work.grid - shape.programs
        assert finishers == (
            0 if shape.single else sets * math.ceil(width / shape.finish)
        ), key
        assert shape.single == (sets > 1 and shape.programs == sets), key


# GroupNorm: N, groups, channels per group, values per plane.
GROUP_SHAPES = [
    (16, 32, 10, 4096), (16, 32, 40, 256), (4, 32, 4, 2**18), (2, 32, 1, 2**21), (1, 1, 2, 1),
    (64, 32, 2, 3136), (8, 1, 512, 196), (128, 512, 1, 49), (3, 7, 5, 323), (2, 1, 3000, 7),
    (70_000, 1, 2, 6), (1, 3, 1, 2**30), (3, 5, 250, 9), (2, 2, 37, 1000), (15, 20, 30, 420),
]  # fmt: skip
GROUP_CUTS = [
    cut(*shape, last, itemsize, sms)
    for cut in (gn.group_norm_forward, gn.group_norm_backward)
    for shape in GROUP_SHAPES
    for last, itemsize, sms in itertools.product((False, True), (2, 4, 8), (132, 1))
]


def test_tiles_of_groups_cover_a_unit_and_are_written_after_all_of_it_was_read():
    for cut in GROUP_CUTS:
        if isinstance(cut, gn.GroupColumns):
            assert cut.slabs == 1 or not cut.solo, cut
            assert cut.c % cut.unit == cut.bc % cut.unit == 0, cut
            assert cut.k == 1 or cut.rows_each % (cut.u * cut.bt) == 0, cut
            sizes, first, units = (cut.u, cut.bt, cut.bc), cut.slabs * cut.k, cut.units
        elif isinstance(cut, gn.PlanesBackward):
            sizes, first, units = (cut.cb, cut.sb, cut.r), cut.k, cut.n * cut.groups
        else:
            assert cut.hw % cut.run == cut.block % cut.run == 0, cut
            sizes, first, units = (cut.block, cut.run, cut.r), cut.k, cut.n * cut.groups
        assert all(is_power_of_2(size) for size in (*sizes, cut.warps)), cut
        assert cut.warps <= 32, cut
        # The tiles of a unit are written in reverse: the first to be written is the last.
        if cut.lag:
            assert first <= cut.lag <= units * cut.k, cut
        else:  # the one program of a group that is not held takes no other
            assert cut.k == 1 or (isinstance(cut, gn.PlanesForward) and cut.r == 1), cut


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("channels", "space"), [(20, 1024), (30, 1024), (40, 256), (1, 12_001)]
)
def test_one_program_reads_a_group_twice_where_holding_it_is_slower(
    channels, space, itemsize
):
    call = (channels, space, False, itemsize, 132)
    for n in (7, 16):
        cut = gn.group_norm_forward(n, 32, *call)
        assert cut.solo
        assert cut.grid == 32 * n
        assert cut.k * cut.block <= 1.125 * cut.width
        assert cut.even == (channels in (20, 40))
    assert not gn.group_norm_forward(
        6, 32, *call
    ).solo  # too few groups for the multiprocessors
