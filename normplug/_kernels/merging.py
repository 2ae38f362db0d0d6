"""Merge partial results of programs, always in the order of the data, so runs agree bit for bit.

- `merge_tile_*`: each program that needs the result of K tiles merges their results itself. The
  result of a tile is one or two numbers.
- `publish_part`: programs publish their parts of a unit, which is whatever has statistics of its
  own. The last program to arrive merges them. A part has two numbers for each of BC columns: first
  one number of every column, then the other.
- `finish_gradients`: programs at the end of the grid add up the parts of gradients.

Moments are a mean and m2, the sum of squared distances from it. Chan's formula merges them:
doi:10.1080/00031305.1983.10483115. Other programs' results are loaded with ".cg": from L2, not L1.
"""

import triton
import triton.language as tl

from normplug import _kernels
from normplug._kernels.primitives import as_stored, scalar
from normplug._kernels.waiting import arrive

FAN_IN = tl.constexpr(_kernels.FAN_IN)


@triton.jit
def tile_counts(k, total, BLOCK, ACC):
    """Number of values in tile k, where `total` values are cut into tiles of BLOCK."""
    return tl.minimum(tl.maximum(total - k * BLOCK, 0), BLOCK).to(ACC)


@triton.jit
def _with_chunk(count, mean, m2, chunk_count, chunk_mean, chunk_m2):
    """Merge a chunk's moments into the moments of the `count` values before it."""
    fraction = chunk_count / (count + chunk_count)
    difference = chunk_mean - mean
    m2 += chunk_m2 + difference * difference * count * fraction
    return count + chunk_count, mean + difference * fraction, m2


@triton.jit
def merge_tile_moments(partial_ptr, K, total, BLOCK, KP, ACC):
    """Merge the moments of K tiles of BLOCK values, `total` values in all.

    It takes KP tiles at a time, in order. Means are relative to the first tile's mean, so that a
    large mean costs no precision.
    """
    count = tl.full([], 0.0, ACC)
    mean = tl.full([], 0.0, ACC)
    m2 = tl.full([], 0.0, ACC)
    first = tl.load(partial_ptr, cache_modifier=".cg")
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        counts = tl.where(k < K, tile_counts(k, total, BLOCK, ACC), 0.0)
        means = tl.load(partial_ptr + 2 * k, mask=k < K, other=0.0, cache_modifier=".cg")
        m2s = tl.load(
            partial_ptr + 2 * k + 1, mask=k < K, other=0.0, cache_modifier=".cg"
        )
        means = tl.where(k < K, means - first, 0.0)
        chunk_count = tl.sum(counts)
        chunk_mean = tl.sum(means * counts) / chunk_count
        spread = means - chunk_mean
        chunk_m2 = tl.sum(tl.where(k < K, m2s + counts * spread * spread, 0.0))
        count, mean, m2 = _with_chunk(count, mean, m2, chunk_count, chunk_mean, chunk_m2)
    return first + mean, m2


@triton.jit
def merge_tile_sum(partial_ptr, K, KP, ACC):
    """Add up the sums of K tiles, KP at a time, in order."""
    total = tl.full([], 0.0, ACC)
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        total += tl.sum(
            tl.load(partial_ptr + k, mask=k < K, other=0.0, cache_modifier=".cg")
        )
    return total


@triton.jit
def merge_tile_sums(partial_ptr, K, KP, ACC):
    """Add up the pairs of sums of K tiles, KP at a time, in order."""
    a = tl.full([], 0.0, ACC)
    b = tl.full([], 0.0, ACC)
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        a += tl.sum(
            tl.load(partial_ptr + 2 * k, mask=k < K, other=0.0, cache_modifier=".cg")
        )
        b += tl.sum(
            tl.load(partial_ptr + 2 * k + 1, mask=k < K, other=0.0, cache_modifier=".cg")
        )
    return a, b


@triton.jit
def _merge_column_moments(partial_ptr, items, rows_each, rows, BC, ACC):
    """Merge each column's moments of `items` parts, FAN_IN at a time, in order.

    A part has `rows_each` rows, or the last one fewer; all together have `rows`.
    """
    places = tl.arange(0, BC)
    count = tl.full([], 0.0, ACC)
    mean = tl.zeros([BC], ACC)
    m2 = tl.zeros([BC], ACC)
    first = tl.load(partial_ptr + places, cache_modifier=".cg")
    for start in range(0, items, FAN_IN):
        item = start + tl.arange(0, FAN_IN)
        there = (item < items)[:, None]
        counts = tl.minimum(tl.maximum(rows - item * rows_each, 0), rows_each).to(ACC)
        counts = tl.where(item < items, counts, 0.0)
        base = partial_ptr + item[:, None] * (2 * BC) + places[None, :]
        means = tl.load(base, mask=there, other=0.0, cache_modifier=".cg")
        m2s = tl.load(base + BC, mask=there, other=0.0, cache_modifier=".cg")
        means = tl.where(there, means - first[None, :], 0.0)
        chunk_count = tl.sum(counts)
        chunk_mean = tl.sum(means * counts[:, None], axis=0) / chunk_count
        spread = means - chunk_mean[None, :]
        chunk_m2 = tl.sum(
            tl.where(there, m2s + counts[:, None] * spread * spread, 0.0), axis=0
        )
        count, mean, m2 = _with_chunk(count, mean, m2, chunk_count, chunk_mean, chunk_m2)
    return first + mean, m2


@triton.jit
def _merge_column_sums(partial_ptr, items, BC, ACC):
    """Add up each column's pairs of sums of `items` parts, FAN_IN at a time, in order."""
    places = tl.arange(0, BC)
    a = tl.zeros([BC], ACC)
    b = tl.zeros([BC], ACC)
    for start in range(0, items, FAN_IN):
        item = start + tl.arange(0, FAN_IN)
        there = (item < items)[:, None]
        base = partial_ptr + item[:, None] * (2 * BC) + places[None, :]
        a += tl.sum(tl.load(base, mask=there, other=0.0, cache_modifier=".cg"), axis=0)
        b += tl.sum(
            tl.load(base + BC, mask=there, other=0.0, cache_modifier=".cg"), axis=0
        )
    return a, b


@triton.jit
def publish_part(a, b, scratch, unit, item, sizes, BC, ACC, SINGLE, MOMENTS):
    """Publish an item's part of a unit; return the whole, and True, to the last program to arrive.

    The others get False, and no result. There are UNITS units of ITEMS items. A unit is ROWS rows
    of BC columns, and an item ROWS_EACH of these rows; a row has HW values per column. a and b are
    two numbers per column: mean and m2 if MOMENTS, else two sums. Parts are merged in two levels:
    FAN_IN items are a batch, which its last program merges; the last of these programs merges the
    unit's batches. `scratch` has two addresses. The first holds a and b of each item, then of each
    batch. The other holds one counter per batch, then one for each unit's batches; the last to
    arrive clears them. SINGLE: the one item is the whole unit.
    """
    partial_ptr, counters_ptr = scratch
    UNITS, ITEMS, ROWS, ROWS_EACH, HW = sizes
    places = tl.arange(0, BC)
    batches = tl.cdiv(ITEMS, FAN_IN)
    last = ITEMS == 1
    if not SINGLE:
        parts_ptr = partial_ptr + unit * ITEMS * (2 * BC)
        tl.store(parts_ptr + item * (2 * BC) + places, a)
        tl.store(parts_ptr + item * (2 * BC) + BC + places, b)
        batch = item // FAN_IN
        start = batch * FAN_IN
        items = tl.minimum(ITEMS - start, FAN_IN)
        counter = counters_ptr + unit * batches + batch
        last = arrive(counter) == items - 1
        if last:
            tl.atomic_xchg(counter, 0, sem="relaxed")
            if MOMENTS:
                rows = tl.minimum(ROWS - start * ROWS_EACH, ROWS_EACH * FAN_IN) * HW
                first_ptr = parts_ptr + start * (2 * BC)
                a, b = _merge_column_moments(
                    first_ptr, items, ROWS_EACH * HW, rows, BC, ACC
                )
            else:
                a, b = _merge_column_sums(parts_ptr + start * (2 * BC), items, BC, ACC)
            if batches > 1:
                batches_ptr = partial_ptr + (UNITS * ITEMS + unit * batches) * (2 * BC)
                tl.store(batches_ptr + batch * (2 * BC) + places, a)
                tl.store(batches_ptr + batch * (2 * BC) + BC + places, b)
                whole = counters_ptr + UNITS * batches + unit
                last = arrive(whole) == batches - 1
                if last:
                    tl.atomic_xchg(whole, 0, sem="relaxed")
                    if MOMENTS:
                        each = ROWS_EACH * FAN_IN * HW
                        a, b = _merge_column_moments(
                            batches_ptr, batches, each, ROWS * HW, BC, ACC
                        )
                    else:
                        a, b = _merge_column_sums(batches_ptr, batches, BC, ACC)
    return a, b, last


@triton.jit
def after_parts(partial_ptr, UNITS, ITEMS, BC):
    """The address in `partial` after the parts of all items and batches."""
    return partial_ptr + (UNITS * (ITEMS + tl.cdiv(ITEMS, FAN_IN))) * (2 * BC)


@triton.jit
def ready_flag(counters_ptr, unit, UNITS, ITEMS):
    """The counter that signals that a unit is merged; it follows `publish_part`'s."""
    return counters_ptr + UNITS * (tl.cdiv(ITEMS, FAN_IN) + 1) + unit


@triton.jit
def _finish_columns(gradient_ptr, parts, which, factor, SUMS, FINISH, ACC):
    """Store a stretch of FINISH columns of a gradient: row `which` of all parts, times `factor`."""
    parts_ptr, stretch, WIDTH, PARTS = parts
    columns = stretch * FINISH + tl.arange(0, FINISH)
    live = columns < WIDTH
    total = tl.zeros([FAN_IN, FINISH], ACC)
    for start in range(0, PARTS, FAN_IN):
        part = start + tl.arange(0, FAN_IN)
        offsets = ((part * SUMS + which).to(tl.int64) * WIDTH)[:, None] + columns[None, :]
        mask = (part < PARTS)[:, None] & live[None, :]
        total += tl.load(parts_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    gradient = as_stored(tl.sum(total, axis=0) * factor, gradient_ptr)
    tl.store(gradient_ptr + columns, gradient, mask=live)


@triton.jit
def finish_gradients(gradients, parts, root, FINISH, SUMS, ROOT, F):
    """Store a stretch of FINISH columns of each wanted gradient.

    gradients: the addresses of dweight, dbias and dinput_bias. parts: the address of the parts, the
    stretch, the width of a part, and how many there are. A part has SUMS rows of sums, in the order
    of the gradients. ROOT: the sums for dweight lack the factor root.
    """
    dweight_ptr, dbias_ptr, dinput_bias_ptr = gradients
    if F.dweight:
        factor = scalar(root, F.acc) if ROOT else 1.0
        _finish_columns(dweight_ptr, parts, 0, factor, SUMS, FINISH, F.acc)
    if F.dbias:
        row: tl.constexpr = SUMS - 1 - F.dinput_bias
        _finish_columns(dbias_ptr, parts, row, 1.0, SUMS, FINISH, F.acc)
    if F.dinput_bias:
        _finish_columns(dinput_bias_ptr, parts, SUMS - 1, 1.0, SUMS, FINISH, F.acc)
