"""Tiles: what a program reads and writes at a time.

The kernels for rows of adjacent columns read tiles of three axes: LANES, STEPS and columns. Columns
and lanes should be spread over threads, and each thread should hold all the steps, so that a sum
over the steps moves nothing between threads. Triton first spreads the axis with the most contiguous
addresses. Lanes and steps tie, and a tie goes to the first axis up to Triton 3.6 and to the last
since 3.7 (triton-lang/triton#7143), so the order of those two axes depends on the version.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from normplug._kernels.primitives import VERSION, as_stored

STEP_AXIS = tl.constexpr(1 if VERSION < (3, 7) else 0)
LANE_AXIS = tl.constexpr(0 if VERSION < (3, 7) else 1)


class Area(NamedTuple):
    """Some columns of rows: which of them are `live`, and how many values the rows are apart.

    The rows end before row `end`.
    """

    columns: Any
    live: Any
    end: Any
    stride: Any


@triton.jit
def tile_of_zeros(LANES, STEPS, COLUMNS, ACC):
    """A tile of zeros."""
    return tl.zeros(
        [LANES, STEPS, COLUMNS] if STEP_AXIS == 1 else [STEPS, LANES, COLUMNS], ACC
    )


@triton.jit
def as_tile(values, LANES, STEPS, COLUMNS):
    """Reshape a tensor of any shape to a tile, its values in order."""
    shape: tl.constexpr = (
        (LANES, STEPS, COLUMNS) if STEP_AXIS == 1 else (STEPS, LANES, COLUMNS)
    )
    return tl.reshape(values, shape)


@triton.jit
def load(pointer, offsets, mask, FULL, LAST):
    """Load a tile of any shape. FULL: all of it is in bounds. LAST: it is not read again."""
    policy: tl.constexpr = "evict_first" if LAST else ""
    if FULL:
        return tl.load(pointer + offsets, eviction_policy=policy)
    else:
        return tl.load(pointer + offsets, mask=mask, other=0, eviction_policy=policy)


@triton.jit
def store(pointer, offsets, value, mask, FULL, LAST):
    """Store a tile of any shape. FULL: all of it is in bounds. LAST: caches evict it first."""
    policy: tl.constexpr = "evict_first" if LAST else ""
    value = as_stored(value, pointer)
    tl.store(
        pointer + offsets, value, mask=None if FULL else mask, eviction_policy=policy
    )


@triton.jit
def tile_rows(row, U, BT):
    """Row numbers of a tile from `row` on: each of BT lanes takes every BT-th row, in U steps."""
    lanes = tl.expand_dims(tl.arange(0, BT), STEP_AXIS)
    return row + lanes + tl.expand_dims(tl.arange(0, U), LANE_AXIS) * BT


@triton.jit
def _places(area, row, U, BT, WIDE):
    """Offsets and mask of a tile: the two axes of its rows, then its columns."""
    rows = tile_rows(row, U, BT)
    mask = (rows < area.end)[:, :, None] & area.live[None, None, :]
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, :, None] * area.stride + area.columns[None, None, :], mask


@triton.jit
def places(area, row, T):
    """Offsets and mask of the tile of an area from `row` on: U * BT rows."""
    return _places(area, row, T.u, T.bt, T.wide)


@triton.jit
def load_tile(pointer, area, row, T, WHOLE, LAST):
    """Load the tile of an area from `row` on.

    WHOLE: all its rows exist. LAST: it is not read again.
    """
    offsets, mask = places(area, row, T)
    return load(pointer, offsets, mask, WHOLE and T.even, LAST)


@triton.jit
def load_row(pointer, area, row, T):
    """Load a row of an area, as a tile."""
    offsets, mask = _places(area, row, 1, 1, T.wide)
    return load(pointer, offsets, mask, False, False)


@triton.jit
def write_tile(value, pointer, area, row, T, WHOLE):
    """Store the tile of an area from `row` on. WHOLE: all its rows exist."""
    offsets, mask = places(area, row, T)
    store(pointer, offsets, value, mask, WHOLE and T.even, True)


@triton.jit
def lane_counts(rows, BT, ACC):
    """How many of `rows` rows each of BT lanes gets, if they take rows in turn."""
    return tl.maximum((rows - tl.arange(0, BT) + BT - 1) // BT, 0).to(ACC)[:, None]


@triton.jit
def column_totals(mean, m2, counts, rows):
    """Merge the moments of the lanes of each column."""
    column_mean = tl.sum(mean * counts, axis=0) / rows
    spread = mean - column_mean[None, :]
    return column_mean, tl.sum(m2 + counts * spread * spread, axis=0)
