"""GroupNorm's schedules cover each value once, and no program waits for a later one."""

import itertools

import pytest

pytest.importorskip("triton")
from normplug._kernels.group_norm import schedule  # noqa: E402
from normplug._kernels.group_norm.schedule import Columns, PlanesBackward  # noqa: E402

# N, groups, channels per group, values per plane.
SHAPES = [
    (16, 32, 10, 4096), (16, 32, 40, 256), (4, 32, 4, 2**18), (2, 32, 1, 2**21), (1, 1, 2, 1),
    (64, 32, 2, 3136), (8, 1, 512, 196), (128, 512, 1, 49), (3, 7, 5, 323), (2, 1, 3000, 7),
    (70_000, 1, 2, 6), (1, 3, 1, 2**30), (3, 5, 250, 9), (2, 2, 37, 1000),
]  # fmt: skip
CUTS = [
    cut(*shape, last, itemsize, sms)
    for cut in (schedule.group_norm_forward, schedule.group_norm_backward)
    for shape in SHAPES
    for last, itemsize, sms in itertools.product((False, True), (2, 4, 8), (132, 1))
]


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


def test_the_shapes_cover_every_branch_of_the_schedules():
    for kind in {type(cut) for cut in CUTS}:
        cuts = [cut for cut in CUTS if type(cut) is kind]
        assert {cut.lag == 0 for cut in cuts} == {cut.even for cut in cuts} == {True, False}
        assert any(cut.wide for cut in cuts)


def test_a_tile_is_written_after_all_of_its_unit_was_read():
    # The tiles of a unit are written in reverse: the first to be written is the last.
    for cut in CUTS:
        if cut.lag == 0:
            assert cut.k == 1, cut
        elif isinstance(cut, Columns):
            assert cut.slabs * cut.k <= cut.lag <= cut.units * cut.k, cut
        else:
            assert cut.k <= cut.lag <= cut.n * cut.groups * cut.k, cut


def test_tiles_cover_a_unit_and_are_powers_of_2():
    for cut in CUTS:
        if isinstance(cut, Columns):
            assert cut.slabs == 1 or not cut.solo, cut
            assert cut.c % cut.unit == cut.bc % cut.unit == 0, cut
            assert cut.k == 1 or cut.rows_each % (cut.u * cut.bt) == 0, cut
            sizes = (cut.u, cut.bt, cut.bc)
        elif isinstance(cut, PlanesBackward):
            sizes = (cut.cb, cut.sb, cut.r)
        else:
            assert cut.hw % cut.run == cut.block % cut.run == 0, cut
            sizes = (cut.block, cut.run, cut.r)
        assert all(is_power_of_2(size) for size in (*sizes, cut.warps)), cut
        assert cut.warps <= 32, cut


def test_no_share_of_the_samples_is_empty():
    for cut in CUTS:
        if hasattr(cut, "splits"):
            each = -(-cut.n // cut.splits)
            assert (cut.splits - 1) * each < cut.n <= cut.splits * each, cut
