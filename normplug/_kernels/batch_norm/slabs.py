"""Slabs: what the kernels of `columns` read, sum and tell each other.

The tensor is ROWS rows of W columns. A channel is HW adjacent columns: one for (N, C) and for
channels_last; a whole plane for a contiguous tensor with few values a plane. A slab is CHANNELS
adjacent channels. Its columns are padded to BC, of which the first LIVE exist.

A tile of a slab is U * BT rows of BC columns: BT lanes, each of which takes every BT-th row, in U
steps (see `primitives`).

The sums of a slab come from GATHERS items of ROWS_EACH rows each, one program an item. The programs
publish their parts. Whichever arrives last merges them, in the order of the rows and in two levels.
"""

import triton
import triton.language as tl

from normplug._kernels.batch_norm.schedule import FAN_IN
from normplug._kernels.primitives import LANE_AXIS, STEP_AXIS, affine
from normplug._kernels.waiting import arrive

_FAN_IN = tl.constexpr(FAN_IN)


@triton.jit
def assignment(t, SLABS, GATHERS, WRITES, GROUP, HEAD):
    """What program t does: its slab, its item, and whether it writes (or gathers)."""
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
    """A slab's columns, which of them exist, and each one's channel: in the slab and in all."""
    places = tl.arange(0, BC)
    columns = slab * LIVE + places
    live = (places < LIVE) & (columns < W)
    if SEGMENTS:
        own = tl.where(live, places // HW, -1)
    else:
        own = places
    return columns, live, own, slab * CHANNELS + own


@triton.jit
def tile_rows(row, U: tl.constexpr, BT: tl.constexpr):
    """Rows of a tile from `row` on: of BT lanes, each takes every BT-th row, in U steps."""
    lanes = tl.expand_dims(tl.arange(0, BT), STEP_AXIS)
    return row + lanes + tl.expand_dims(tl.arange(0, U), LANE_AXIS) * BT


@triton.jit
def _places(row, end, columns, live, W, U: tl.constexpr, BT: tl.constexpr, WIDE: tl.constexpr):
    """Offsets and mask of a tile: its rows' two axes (see `primitives`), then its columns."""
    rows = tile_rows(row, U, BT)
    mask = (rows < end)[:, :, None] & live[None, None, :]
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, :, None] * W + columns[None, None, :], mask


@triton.jit
def load_tile(
    pointer, columns, live, row, end, W, U: tl.constexpr, BT: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A tile. WHOLE: all its rows exist. EVEN: all its columns do. LAST: it is not read again."""
    offsets, mask = _places(row, end, columns, live, W, U, BT, WIDE)
    policy: tl.constexpr = "evict_first" if LAST else ""
    if WHOLE and EVEN:
        tile = tl.load(pointer + offsets, eviction_policy=policy)
    else:
        tile = tl.load(pointer + offsets, mask=mask, other=0, eviction_policy=policy)
    return tile


@triton.jit
def write_tile(
    value, pointer, columns, live, row, end, W, U: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Store a tile; WHOLE and EVEN as in `load_tile`."""
    offsets, mask = _places(row, end, columns, live, W, U, BT, WIDE)
    value = value.to(pointer.dtype.element_ty)
    if WHOLE and EVEN:
        tl.store(pointer + offsets, value, eviction_policy="evict_first")
    else:
        tl.store(pointer + offsets, value, mask=mask, eviction_policy="evict_first")


@triton.jit
def bit_columns(slab, BC: tl.constexpr):
    """Columns of a slab in the mask of bits, whose rows have BC / 8 bytes a slab."""
    return slab * (BC // 8) + tl.arange(0, BC // 8)


@triton.jit
def lane_counts(rows, BT: tl.constexpr, ACC: tl.constexpr):
    """How many of `rows` rows each lane gets, if they are dealt to BT lanes in turn."""
    return tl.maximum((rows - tl.arange(0, BT) + BT - 1) // BT, 0).to(ACC)[:, None]


@triton.jit
def _merge_tile(x, mean, m2, n, U: tl.constexpr):
    """Merge the moments of a tile, U rows a lane, into those of the n rows a lane before it."""
    tile_mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
    x = x - tl.expand_dims(tile_mean, STEP_AXIS)
    difference = tile_mean - mean
    fraction = U / (n + U)
    mean += difference * fraction
    m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
    return mean, m2, n + U


@triton.jit
def column_totals(mean, m2, counts, rows):
    """Moments of columns from those of their lanes."""
    column_mean = tl.sum(mean * counts, axis=0) / rows
    spread = mean - column_mean[None, :]
    return column_mean, tl.sum(m2 + counts * spread * spread, axis=0)


@triton.jit
def column_moments(
    x_ptr, columns, live, start, end, W, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each column's mean, and sum of squared distances from it, over rows start to end.

    Each lane takes U rows at a time and merges their moments into those of its rows before. Values
    are distances from the first row, so that no sum rounds at the size of the mean.
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
    """Moments of channels from those of their HW columns; `channel` is each column's, or -1.

    `rows`: what each column's moments were taken over.
    """
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    average = tl.sum(tl.where(own, mean[None, :], 0.0), axis=1) / HW
    average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1) / HW
    spread = mean[None, :] - average[:, None]
    m2 = tl.sum(tl.where(own, m2[None, :] + rows * spread * spread, 0.0), axis=1)
    return average, m2


@triton.jit
def channel_sums(value, channel, BCH: tl.constexpr):
    """Sums of channels from those of their columns."""
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    return tl.sum(tl.where(own, value[None, :], 0.0), axis=1)


@triton.jit
def merge_part_moments(
    partial_ptr, items, rows_each, rows, BCH: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr
):
    """Moments of `rows` rows from those of `items` parts of at most `rows_each`, F at a time."""
    places = tl.arange(0, BCH)
    count = tl.full([], 0.0, ACC)
    mean = tl.zeros([BCH], ACC)
    m2 = tl.zeros([BCH], ACC)
    first = tl.load(partial_ptr + places, cache_modifier=".cg")
    for start in range(0, items, F):
        item = start + tl.arange(0, F)
        there = (item < items)[:, None]
        counts = tl.minimum(tl.maximum(rows - item * rows_each, 0), rows_each).to(ACC)
        counts = tl.where(item < items, counts, 0.0)
        base = partial_ptr + item[:, None] * (2 * BCH) + places[None, :]
        means = tl.load(base, mask=there, other=0.0, cache_modifier=".cg")
        m2s = tl.load(base + BCH, mask=there, other=0.0, cache_modifier=".cg")
        means = tl.where(there, means - first[None, :], 0.0)
        chunk_count = tl.sum(counts)
        chunk_mean = tl.sum(means * counts[:, None], axis=0) / chunk_count
        spread = means - chunk_mean[None, :]
        chunk_m2 = tl.sum(tl.where(there, m2s + counts[:, None] * spread * spread, 0.0), axis=0)
        fraction = chunk_count / (count + chunk_count)
        difference = chunk_mean - mean
        m2 += chunk_m2 + difference * difference * count * fraction
        mean += difference * fraction
        count += chunk_count
    return first + mean, m2


@triton.jit
def merge_part_sums(partial_ptr, items, BCH: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr):
    """Two sums from those of `items` parts, F at a time."""
    places = tl.arange(0, BCH)
    a = tl.zeros([BCH], ACC)
    b = tl.zeros([BCH], ACC)
    for start in range(0, items, F):
        item = start + tl.arange(0, F)
        there = (item < items)[:, None]
        base = partial_ptr + item[:, None] * (2 * BCH) + places[None, :]
        a += tl.sum(tl.load(base, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
        b += tl.sum(tl.load(base + BCH, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
    return a, b


@triton.jit
def publish_part(
    a, b, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH, HW,
    BCH: tl.constexpr, ACC: tl.constexpr, MOMENTS: tl.constexpr, SOLO: tl.constexpr,
):  # fmt: skip
    """Publish an item's part of a slab; the last program to do so gets the whole, and True.

    Parts are merged in two levels: _FAN_IN items to a batch, then the batches. `partial` holds two
    rows of BCH numbers for each item, then for each batch. `counters` holds one counter for each
    batch, then one for each slab's batches.
    """
    places = tl.arange(0, BCH)
    batches = tl.cdiv(GATHERS, _FAN_IN)
    last = GATHERS == 1
    if not SOLO:
        parts_ptr = partial_ptr + slab * GATHERS * (2 * BCH)
        tl.store(parts_ptr + item * (2 * BCH) + places, a)
        tl.store(parts_ptr + item * (2 * BCH) + BCH + places, b)
        batch = item // _FAN_IN
        start = batch * _FAN_IN
        items = tl.minimum(GATHERS - start, _FAN_IN)
        counter = counters_ptr + slab * batches + batch
        last = arrive(counter) == items - 1
        if last:
            tl.atomic_xchg(counter, 0, sem="relaxed")
            if MOMENTS:
                rows = tl.minimum(ROWS - start * ROWS_EACH, _FAN_IN * ROWS_EACH) * HW
                a, b = merge_part_moments(
                    parts_ptr + start * (2 * BCH), items, ROWS_EACH * HW, rows, BCH, _FAN_IN, ACC
                )
            else:
                a, b = merge_part_sums(parts_ptr + start * (2 * BCH), items, BCH, _FAN_IN, ACC)
            if batches > 1:
                batches_ptr = partial_ptr + (SLABS * GATHERS + slab * batches) * (2 * BCH)
                tl.store(batches_ptr + batch * (2 * BCH) + places, a)
                tl.store(batches_ptr + batch * (2 * BCH) + BCH + places, b)
                whole = counters_ptr + SLABS * batches + slab
                last = arrive(whole) == batches - 1
                if last:
                    tl.atomic_xchg(whole, 0, sem="relaxed")
                    if MOMENTS:
                        each = _FAN_IN * ROWS_EACH * HW
                        a, b = merge_part_moments(
                            batches_ptr, batches, each, ROWS * HW, BCH, _FAN_IN, ACC
                        )
                    else:
                        a, b = merge_part_sums(batches_ptr, batches, BCH, _FAN_IN, ACC)
    return a, b, last


@triton.jit
def after_parts(partial_ptr, SLABS, GATHERS, BCH: tl.constexpr):
    """What lies in `partial` behind all parts."""
    return partial_ptr + (SLABS * (GATHERS + tl.cdiv(GATHERS, _FAN_IN))) * (2 * BCH)


@triton.jit
def ready_flag(counters_ptr, slab, SLABS, GATHERS):
    """The counter that says that a slab is merged; it lies behind those of `publish_part`."""
    return counters_ptr + SLABS * (tl.cdiv(GATHERS, _FAN_IN) + 1) + slab


@triton.jit
def coefficients(
    stats_ptr, weight_ptr, bias_ptr, channels, live, C, root,
    BC: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Each column's mean and `affine`, from statistics that another program may have written."""
    mean = tl.load(stats_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    scale, bias = affine(rstd, weight_ptr, bias_ptr, channels, live, root, BC, ACC, WEIGHT, BIAS)
    return mean, scale, bias


@triton.jit
def dx_terms(means_ptr, channels, live, C):
    """What the end of the sums found, for each column."""
    mean_dz = tl.load(means_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    slope = tl.load(means_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    return mean_dz, slope


@triton.jit
def joined_dx_terms(sums_ptr, stats_ptr, channels, live, C):
    """The same for several processes, from the sums and the number of values of all of them."""
    each = 1.0 / tl.load(stats_ptr + 2 * C)
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0)
    mean_dz = tl.load(sums_ptr + channels, mask=live, other=0.0) * each
    slope = tl.load(sums_ptr + C + channels, mask=live, other=0.0) * rstd * rstd * each
    return mean_dz, slope
