"""How a program of `columns` finds its item, and computes the moments of the item's channels.

`columns` explains the sizes and constants.
"""

import triton
import triton.language as tl

from normplug._kernels.merging import after_parts
from normplug._kernels.tiles import STEP_AXIS, column_totals, lane_counts, load_tile, tile_rows


@triton.jit
def item_of(
    turn, SLABS, K, S, ROWS_EACH, C, BC: tl.constexpr, REVERSE: tl.constexpr
):  # fmt: skip
    """Item number `turn`: its sample, slab and place k, its rows, and the slab's channels and mask.

    With REVERSE, the items of each sample are counted from the last.
    """
    sample = turn // (SLABS * K)
    place = turn - sample * (SLABS * K)
    if REVERSE:
        place = SLABS * K - 1 - place
    k = place // SLABS
    slab = place - k * SLABS
    start = k * ROWS_EACH
    columns = slab * BC + tl.arange(0, BC)
    return sample, slab, k, start, tl.minimum(start + ROWS_EACH, S), columns, columns < C


@triton.jit
def behind_parts(partial_ptr, UNITS, K, BC: tl.constexpr, SINGLE: tl.constexpr):
    """The address in `partial` after the parts of items; with SINGLE there are no parts."""
    if SINGLE:
        behind_ptr = partial_ptr
    else:
        behind_ptr = after_parts(partial_ptr, UNITS, K, BC)
    return behind_ptr


@triton.jit
def groups_of_slab(slab, G, CHANNELS, BC: tl.constexpr, GB: tl.constexpr):
    """GB groups, from the first that a slab touches on, and which of them exist."""
    groups = slab * BC // CHANNELS + tl.arange(0, GB)
    return groups, groups < G


@triton.jit
def channels_of_groups(groups, live, channel, CHANNELS, CB: tl.constexpr):
    """CB channels of each group, from its `channel`-th on, and which of them exist."""
    within = channel + tl.arange(0, CB)
    there = live[:, None] & (within < CHANNELS)[None, :]
    return groups[:, None] * CHANNELS + within[None, :], there


@triton.jit
def of_columns(values, groups, columns, CHANNELS, EACH: tl.constexpr):
    """The value of each column's group, from the values of a slab's groups."""
    if EACH > 0:
        GB: tl.constexpr = groups.shape[0]
        chosen = tl.reshape(tl.broadcast_to(values[:, None], [GB, EACH]), [GB * EACH])
    else:
        own = (columns // CHANNELS)[:, None] == groups[None, :]
        chosen = tl.sum(tl.where(own, values[None, :], 0.0), axis=1)
    return chosen


@triton.jit
def _lane_sums(
    x, shift, row, end, U: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Each lane's sums of distances from `shift`, and of their squares."""
    d = x - tl.expand_dims(shift, STEP_AXIS)
    if not WHOLE:
        d = tl.where((tile_rows(row, U, BT) < end)[:, :, None], d, 0.0)
    return tl.sum(d, axis=STEP_AXIS), tl.sum(d * d, axis=STEP_AXIS)


@triton.jit
def _first_sums(
    x_ptr, columns, live, row, end, C, U: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The mean of each lane's first rows, and the sums of their distances from it."""
    x = load_tile(x_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE, False).to(ACC)
    if WHOLE:
        mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
    else:
        there = (tile_rows(row, U, BT) < end)[:, :, None]
        count = tl.maximum(lane_counts(tl.minimum(end - row, U * BT), BT, ACC), 1.0)
        mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / count
    a, b = _lane_sums(x, mean, row, end, U, BT, WHOLE)
    return mean, a, b


@triton.jit
def item_moments(
    x_ptr, columns, live, start, end, C, U: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
    ACC: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each column's mean, and sum of squared distances from it, over rows start to end.

    Each lane sums distances from the mean of its first U rows, and their squares. That mean is
    within sqrt(rows / U) standard deviations of the lane's mean, so hardly anything cancels in m2.
    """
    R: tl.constexpr = U * BT
    if start + R <= end:
        shift, a, b = _first_sums(x_ptr, columns, live, start, end, C, U, BT, ACC, EVEN, WIDE, True)
    else:
        shift, a, b = _first_sums(
            x_ptr, columns, live, start, end, C, U, BT, ACC, EVEN, WIDE, False
        )
    whole = (end - start) // R
    for tile in tl.range(1, whole, num_stages=STAGES):
        row = start + tile * R
        x = load_tile(x_ptr, columns, live, row, end, C, U, BT, EVEN, True, WIDE, False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, U, BT, True)
        a += more_a
        b += more_b
    row = start + whole * R
    if (row < end) & (whole > 0):
        x = load_tile(x_ptr, columns, live, row, end, C, U, BT, EVEN, False, WIDE, False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, U, BT, False)
        a += more_a
        b += more_b
    counts = lane_counts(end - start, BT, ACC)
    mean = a / tl.maximum(counts, 1.0)
    m2 = tl.maximum(b - a * mean, 0.0)
    return column_totals(shift + mean, m2, counts, (end - start).to(ACC))
