"""Slabs: how the kernels of `columns` cut the tensor, and how they reduce it.

The tensor is ROWS rows of W columns. A channel is HW adjacent columns: one for (N, C) and for
channels_last; a whole plane for a contiguous tensor with small planes. A slab is CHANNELS
adjacent channels. Its columns are padded to BC, of which the first LIVE exist.

A tile of a slab is U * BT rows of BC columns: BT lanes, each of which takes every BT-th row, in U
steps (see `tiles`).

The sums of a slab come from GATHERS items of ROWS_EACH rows, one program per item. The programs
publish their parts. Whichever arrives last merges them, in the order of the rows and in two levels
(`merging.publish_part`).
"""

import triton
import triton.language as tl

from normplug._kernels.primitives import affine
from normplug._kernels.tiles import STEP_AXIS, column_totals, lane_counts, load_tile, tile_rows


@triton.jit
def assignment(t, SLABS, GATHERS, WRITES, GROUP, HEAD):
    """Program t's slab and item, and whether it writes the item (or else gathers it).

    First come the gathers of the first group. Then, for each group: HEAD gathers of the next group,
    the writes of this one in reverse order, and the other gathers of the next. A slab may come out
    as SLABS or more; then there is nothing to do.
    """
    gathers = GROUP * GATHERS
    writes = GROUP * WRITES
    group = (t - gathers) // (gathers + writes)
    place = (t - gathers) - group * (gathers + writes)
    late = (t >= gathers) & (place >= HEAD) & (place < HEAD + writes)
    item = tl.where(place < HEAD, place, place - writes)
    item = tl.where(late, writes - 1 - (place - HEAD), item)
    group = tl.where(late, group, group + 1)
    item = tl.where(t < gathers, t, item)
    group = tl.where(t < gathers, 0, group)
    return group * GROUP + item % GROUP, item // GROUP, late


@triton.jit
def slab_columns(slab, LIVE, W, HW, CHANNELS, BC: tl.constexpr, SEGMENTS: tl.constexpr):
    """A slab's columns, which of them exist, and their channels: in the slab and in the tensor."""
    places = tl.arange(0, BC)
    columns = slab * LIVE + places
    live = (places < LIVE) & (columns < W)
    if SEGMENTS:
        own = tl.where(live, places // HW, -1)
    else:
        own = places
    return columns, live, own, slab * CHANNELS + own


@triton.jit
def bit_columns(slab, BC: tl.constexpr):
    """Columns of a slab in relu's mask, whose rows have BC / 8 bytes per slab."""
    return slab * (BC // 8) + tl.arange(0, BC // 8)


@triton.jit
def _merge_tile(x, mean, m2, n, U: tl.constexpr):
    """Merge a tile's moments, of U rows per lane, into those of the n rows per lane before it."""
    tile_mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
    x = x - tl.expand_dims(tile_mean, STEP_AXIS)
    difference = tile_mean - mean
    fraction = U / (n + U)
    mean += difference * fraction
    m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
    return mean, m2, n + U


@triton.jit
def column_moments(
    x_ptr, columns, live, start, end, W, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each column's mean, and sum of squared distances from it, over rows start to end.

    Each lane takes U rows at a time, and merges their moments into those of its earlier rows. The
    first row is subtracted from all values, so that no sum rounds at the size of the mean.
    """
    top = load_tile(x_ptr, columns, live, start, end, W, 1, 1, EVEN, False, WIDE, False).to(ACC)
    mean = tl.zeros([BT, BC], ACC)
    m2 = tl.zeros([BT, BC], ACC)
    n = tl.full([], 0.0, ACC)
    tiles = (end - start) // (U * BT)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = start + tile * (U * BT)
        x = (
            load_tile(x_ptr, columns, live, row, end, W, U, BT, EVEN, True, WIDE, False).to(ACC)
            - top
        )
        mean, m2, n = _merge_tile(x, mean, m2, n, U)
    row = start + tiles * (U * BT)
    counts = n + tl.zeros([BT, 1], ACC)
    if row < end:
        x = (
            load_tile(x_ptr, columns, live, row, end, W, U, BT, EVEN, False, WIDE, False).to(ACC)
            - top
        )
        there = (tile_rows(row, U, BT) < end)[:, :, None]
        more = lane_counts(end - row, BT, ACC)
        tile_mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / tl.maximum(more, 1.0)
        x = tl.where(there, x - tl.expand_dims(tile_mean, STEP_AXIS), 0.0)
        difference = tile_mean - mean
        fraction = more / tl.maximum(n + more, 1.0)
        mean += difference * fraction
        m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
        counts += more
    mean, m2 = column_totals(mean, m2, counts, end - start)
    return tl.sum(tl.sum(top, axis=0), axis=0) + mean, m2


@triton.jit
def channel_moments(mean, m2, rows, channel, HW, BCH: tl.constexpr):
    """Merge the moments of each channel's HW columns, which are over `rows` rows each.

    `channel` is each column's channel in the slab, or -1 for padding.
    """
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    average = tl.sum(tl.where(own, mean[None, :], 0.0), axis=1) / HW
    # The sum above rounds at the size of the mean. The mean distance from it corrects that.
    average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1) / HW
    spread = mean[None, :] - average[:, None]
    m2 = tl.sum(tl.where(own, m2[None, :] + rows * spread * spread, 0.0), axis=1)
    return average, m2


@triton.jit
def channel_sums(value, channel, BCH: tl.constexpr):
    """Add up the sums of each channel's columns."""
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    return tl.sum(tl.where(own, value[None, :], 0.0), axis=1)


@triton.jit
def coefficients(
    stats_ptr, weight_ptr, bias_ptr, channels, live, C, root,
    BC: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Each column's mean, scale and bias; another program may have written the statistics."""
    mean = tl.load(stats_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    scale, bias = affine(rstd, weight_ptr, bias_ptr, channels, live, root, BC, ACC, WEIGHT, BIAS)
    return mean, scale, bias


@triton.jit
def dx_terms(means_ptr, channels, live, C):
    """Each column's mean of dz, and slope of dx in x - mean, as `finish_backward` stored them."""
    mean_dz = tl.load(means_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    slope = tl.load(means_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    return mean_dz, slope
