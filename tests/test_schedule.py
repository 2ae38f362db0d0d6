"""How tensors are cut into work: every value once, and no program waits for a later one."""

import itertools
import math

import pytest

from normplug._kernels import schedule
from normplug._kernels.schedule import FAN_IN, Columns, Planes

# (N, C, HW), and whether channels are adjacent in memory (or planes are).
SHAPES = [
    ((2, 1, 1), False),
    ((1, 1, 2), False),
    ((1, 64, 49), False),
    ((33, 7, 1), False),
    ((64, 1000, 1), False),
    ((4096, 64, 1), False),
    ((1024, 100_000, 1), False),
    ((200_000, 16, 1), False),
    ((5_000_000, 33, 1), False),
    ((8, 512, 49), False),
    ((32, 2048, 49), False),
    ((3, 33, 100), False),
    ((3, 33, 101), False),
    ((16, 256, 196), False),
    ((32, 64, 784), False),
    ((2, 3, 40_000), False),
    ((128, 64, 3136), False),
    ((1, 1, 3_000_000), False),
    ((8, 512, 49), True),
    ((16, 256, 196), True),
    ((32, 64, 784), True),
    ((2, 3, 40_000), True),
    ((128, 256, 3136), True),
    ((100, 33, 323), True),
    ((1, 1, 7), True),
    # 2^31 values and more.
    ((700, 1000, 3136), False),
    ((700, 1000, 3136), True),
    ((2_200_000, 1000, 1), False),
    ((60_000, 750, 49), False),
    ((1, 3, 2**30), False),
    ((1, 3, 2**30), True),
    ((2, 2**30 + 7, 1), False),
]
MACHINES = [(132, True), (132, False), (16, True), (1, False)]
GEOMETRIES = {
    (shape, innermost, itemsize, tensors, sms, together): schedule.geometry(
        *shape, innermost, itemsize, tensors, sms, together
    )
    for shape, innermost in SHAPES
    for itemsize, tensors, (sms, together) in itertools.product((2, 4, 8), (1, 2), MACHINES)
}
PLANES = {key: shape for key, shape in GEOMETRIES.items() if isinstance(shape, Planes)}
COLUMNS = {key: shape for key, shape in GEOMETRIES.items() if isinstance(shape, Columns)}


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


def test_the_shapes_meet_every_way_to_cut_them():
    assert PLANES
    columns = list(COLUMNS.values())
    assert any(s.solo for s in columns)
    assert any(s.programs and not s.solo for s in columns)
    assert any(not s.programs for s in columns)
    assert any(s.group > 1 for s in columns)
    assert any(s.batches > 1 for s in columns)
    assert {s.hw > 1 for s in columns} == {True, False}
    for shapes in (PLANES, COLUMNS):
        assert {shape.wide for shape in shapes.values()} == {True, False}


def test_tiles_cover_a_channel():
    for key, shape in PLANES.items():
        n, c, hw = key[0]
        assert (shape.n, shape.c, shape.hw) == (n, c, hw), key
        assert (shape.tiles_a_channel - 1) * shape.block < n * hw, key
        assert n * hw <= shape.tiles_a_channel * shape.block, key
        assert shape.tiles == c * shape.tiles_a_channel, key
        assert is_power_of_2(shape.block), key
        assert shape.block % 8 == 0, key
        assert hw % shape.unit == 0, key
        assert is_power_of_2(shape.warps), key


def test_a_tile_is_written_after_its_whole_channel_was_read():
    # Program t writes tile t - lag, of a channel whose last tile is at most K - 1 tiles further on,
    # and which program t itself or an earlier one has read.
    for key, shape in PLANES.items():
        assert shape.tiles_a_channel - 1 <= shape.lag <= shape.tiles, key


def test_slabs_cover_the_channels_and_items_the_rows():
    for key, shape in COLUMNS.items():
        (n, c, hw), innermost = key[:2]
        rows, hw = (n * hw, 1) if innermost else (n, hw)
        assert (shape.rows, shape.c, shape.hw) == (rows, c, hw), key
        assert (shape.slabs - 1) * shape.channels < c <= shape.slabs * shape.channels, key
        assert shape.channels * hw <= shape.bc, key
        assert shape.channels <= shape.bch <= shape.bc, key
        assert (shape.gathers - 1) * shape.rows_each < rows <= shape.gathers * shape.rows_each, key
        assert (shape.writes - 1) * shape.tile < rows <= shape.writes * shape.tile, key
        for size in (shape.bc, shape.bch, shape.bt, shape.u, shape.warps):
            assert is_power_of_2(size), key
        assert shape.bc % 8 == 0, key
        assert shape.channels * hw % shape.unit == 0, key
        assert c * hw % shape.unit == 0, key
        assert shape.batches == math.ceil(shape.gathers / FAN_IN), key
        assert 0 <= shape.head <= shape.group * shape.gathers, key


def test_programs_that_wait_for_each_other_all_run_at_once():
    for key, shape in COLUMNS.items():
        sms, together = key[-2:]
        if shape.programs and not shape.solo:
            assert together, key
            assert shape.slabs * shape.gathers <= sms, key


def test_nobody_indexes_by_32_bits_what_does_not_fit():
    for key, shape in GEOMETRIES.items():
        assert shape.wide or math.prod(key[0]) < 2**31, key


def test_the_mask_has_a_bit_for_every_value_and_what_the_kernels_pad():
    for key, shape in GEOMETRIES.items():
        (n, c, hw), innermost, itemsize = key[:3]
        size = schedule.mask_bytes(n, c, hw, innermost, itemsize)
        if isinstance(shape, Planes):
            assert size == c * math.ceil(n * hw / 8), key
        else:
            assert size == shape.rows * shape.slabs * (shape.bc // 8), key
        assert size * 8 >= n * c * hw, key


def test_forward_and_backward_agree_on_the_mask():
    for key, shape in COLUMNS.items():
        other = GEOMETRIES[(*key[:3], 3 - key[3], *key[4:])]
        assert (shape.channels, shape.bc) == (other.channels, other.bc), key


FLAGS = [
    {"training": training, "normalize": normalize, "residual": residual, "activation": "relu"}
    for training, normalize, residual in itertools.product((True, False), repeat=3)
    if training or normalize
]


def launches(key, shape):
    """Every launch that calls of a geometry may make: its flags, and the launch."""
    kernels = pytest.importorskip("normplug._kernels.batch_norm")
    dtype = {2: kernels.torch.bfloat16, 4: kernels.torch.float32, 8: kernels.torch.float64}[key[2]]
    for options in FLAGS:
        flags = kernels.Flags(**options)
        yield options, kernels.forward_launch(shape, dtype, flags, 0.1, 1e-5, 1.0)
        for needs in itertools.product((True, False), repeat=4):
            if any(needs):
                yield needs, kernels.backward_launch(shape, dtype, flags, needs, 1.0)


def test_a_cooperative_launch_is_no_larger_than_the_gpu():
    pytest.importorskip("triton")
    for key, shape in COLUMNS.items():
        for options, launch in launches(key, shape):
            if launch._constants.get("launch_cooperative_grid"):
                assert launch._grid <= key[-2], (key, options)


def test_there_are_programs_for_all_that_is_written():
    pytest.importorskip("triton")
    for key, shape in GEOMETRIES.items():
        for options, launch in launches(key, shape):
            assert 0 < launch._grid < 2**31, (key, options)
            if isinstance(shape, Planes):
                assert launch._grid >= shape.tiles, (key, options)
            else:
                assert launch._grid >= shape.slabs * shape.gathers, (key, options)


def test_the_workspace_has_room_for_all_that_programs_tell_each_other():
    kernels = pytest.importorskip("normplug._kernels.batch_norm")
    for key, shape in GEOMETRIES.items():
        counters, room = kernels.scratch(shape)
        if isinstance(shape, Planes):
            assert counters >= shape.c, key
            assert room >= 2 * shape.tiles, key
        else:
            # A counter a batch, one a slab of batches, one a slab that is done.
            assert counters >= shape.slabs * (shape.batches + 2), key
            # Two numbers a channel: of each item, each batch, and for dx.
            parts = shape.slabs * (shape.gathers + shape.batches) * 2 * shape.bch
            assert room >= parts + 2 * shape.c, key
