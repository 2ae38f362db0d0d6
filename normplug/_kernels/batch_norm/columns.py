"""BatchNorm over rows of adjacent channels: (N, C), channels_last, and small contiguous planes.

The tensor is ROWS rows of W columns. A channel is HW adjacent columns: one for (N, C) and for
channels_last, all of its plane for a contiguous tensor with few values a plane. A slab is CHANNELS
channels; its columns are LIVE, padded to BC.

A slab's moments come from GATHERS items of rows, each reduced by one program; what the programs
publish is merged in two levels, in the order of the rows, by whoever arrives last. WRITES further
items normalise the slab. Slabs are taken GROUP at a time: all items of moments of a group, then the items
that normalise it in *reverse* order, since what was read last is what the L2 cache still holds. The
first HEAD items of the next group come before those, so that the chip has work while the last
moments are merged.

Where programs that all run at once can be had (a cooperative launch), there is a second way, OWN:
each program keeps to its own rows, reads them down for the moments and back up to normalise.
"""

import triton
import triton.language as tl

from normplug._kernels.primitives import (
    LANE_AXIS,
    STEP_AXIS,
    activate,
    activation_gradient,
    affine,
    arrive,
    as_tile,
    pack_bits,
    positive,
    scalar,
    unpack_bits,
    wait,
)
from normplug._kernels.schedule import FAN_IN

_FAN_IN = tl.constexpr(FAN_IN)
# Sizes are not compiled in: another batch size is no other kernel, and UNIT says what is aligned.
_SIZES = [
    "ROWS", "C", "HW", "CHANNELS", "LIVE_UNITS", "WIDTH_UNITS", "SLABS", "GATHERS", "WRITES",
    "ROWS_EACH", "GROUP", "HEAD",
]  # fmt: skip


@triton.jit
def _schedule(t, SLABS, GATHERS, WRITES, GROUP, HEAD):
    """What program t does: slab, item, and whether it normalises (or gathers moments)."""
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
def _lane_counts(rows, BT: tl.constexpr, ACC: tl.constexpr):
    """How many of `rows` rows, dealt to BT lanes in turn, each lane gets."""
    return tl.maximum((rows - tl.arange(0, BT) + BT - 1) // BT, 0).to(ACC)[:, None]


@triton.jit
def _tile_rows(row, U: tl.constexpr, BT: tl.constexpr):
    """Rows of a tile from `row` on: of BT lanes, each takes every BT-th row, in U steps."""
    lanes = tl.expand_dims(tl.arange(0, BT), STEP_AXIS)
    return row + lanes + tl.expand_dims(tl.arange(0, U), LANE_AXIS) * BT


@triton.jit
def _places(row, end, columns, live, W, U: tl.constexpr, BT: tl.constexpr, WIDE: tl.constexpr):
    """Offsets and mask of a tile: its rows' two axes (see `primitives`), then its columns."""
    rows = _tile_rows(row, U, BT)
    mask = (rows < end)[:, :, None] & live[None, None, :]
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, :, None] * W + columns[None, None, :], mask


@triton.jit
def _load_rows(
    pointer, columns, live, row, end, W, U: tl.constexpr, BT: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A tile. WHOLE: all its rows exist; EVEN: all its columns do; LAST: nobody reads it again."""
    offsets, mask = _places(row, end, columns, live, W, U, BT, WIDE)
    policy: tl.constexpr = "evict_first" if LAST else ""
    if WHOLE and EVEN:
        tile = tl.load(pointer + offsets, eviction_policy=policy)
    else:
        tile = tl.load(pointer + offsets, mask=mask, other=0, eviction_policy=policy)
    return tile


@triton.jit
def _write_rows(
    value, pointer, columns, live, row, end, W, U: tl.constexpr, BT: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    offsets, mask = _places(row, end, columns, live, W, U, BT, WIDE)
    value = value.to(pointer.dtype.element_ty)
    if WHOLE and EVEN:
        tl.store(pointer + offsets, value, eviction_policy="evict_first")
    else:
        tl.store(pointer + offsets, value, mask=mask, eviction_policy="evict_first")


@triton.jit
def _bit_columns(slab, BC: tl.constexpr):
    """Columns of a slab's bits: a row of the mask is BC / 8 bytes a slab."""
    return slab * (BC // 8) + tl.arange(0, BC // 8)


@triton.jit
def _merge_tile(x, mean, m2, n, U: tl.constexpr):
    """Running moments of n rows a lane, (BT, BC), with those of the tile x, U rows a lane."""
    tile_mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
    x = x - tl.expand_dims(tile_mean, STEP_AXIS)
    difference = tile_mean - mean
    fraction = U / (n + U)
    mean += difference * fraction
    m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
    return mean, m2, n + U


@triton.jit
def _column_totals(mean, m2, counts, rows):
    """Moments of columns from those of their lanes."""
    column_mean = tl.sum(mean * counts, axis=0) / rows
    spread = mean - column_mean[None, :]
    return column_mean, tl.sum(m2 + counts * spread * spread, axis=0)


@triton.jit
def _column_moments(
    x_ptr, columns, live, start, end, W, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squares about it of each column over rows start to end.

    Each lane takes U rows at a time, with moments of their own, and merges them into its running
    ones. Values are distances from the first row, so that no sum rounds at the size of the mean.
    """
    top = _load_rows(x_ptr, columns, live, start, end, W, 1, 1, EVEN, False, WIDE, False).to(ACC)
    mean = tl.zeros([BT, BC], ACC)
    m2 = tl.zeros([BT, BC], ACC)
    n = tl.full([], 0.0, ACC)
    tiles = (end - start) // (U * BT)
    for tile in tl.range(0, tiles, num_stages=STAGES):
        row = start + tile * (U * BT)
        x = (
            _load_rows(x_ptr, columns, live, row, end, W, U, BT, EVEN, True, WIDE, False).to(ACC)
            - top
        )
        mean, m2, n = _merge_tile(x, mean, m2, n, U)
    row = start + tiles * (U * BT)
    counts = n + tl.zeros([BT, 1], ACC)
    if row < end:
        x = (
            _load_rows(x_ptr, columns, live, row, end, W, U, BT, EVEN, False, WIDE, False).to(ACC)
            - top
        )
        there = (_tile_rows(row, U, BT) < end)[:, :, None]
        more = _lane_counts(end - row, BT, ACC)
        tile_mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / tl.maximum(more, 1.0)
        x = tl.where(there, x - tl.expand_dims(tile_mean, STEP_AXIS), 0.0)
        difference = tile_mean - mean
        fraction = more / tl.maximum(n + more, 1.0)
        mean += difference * fraction
        m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
        counts += more
    mean, m2 = _column_totals(mean, m2, counts, end - start)
    return tl.sum(tl.sum(top, axis=0), axis=0) + mean, m2


@triton.jit
def _channel_moments(mean, m2, rows, channel, HW, BCH: tl.constexpr):
    """Moments of channels from those of their HW columns; `channel` is each column's, or -1."""
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    average = tl.sum(tl.where(own, mean[None, :], 0.0), axis=1) / HW
    average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1) / HW
    spread = mean[None, :] - average[:, None]
    m2 = tl.sum(tl.where(own, m2[None, :] + rows * spread * spread, 0.0), axis=1)
    return average, m2


@triton.jit
def _channel_sums(value, channel, BCH: tl.constexpr):
    own = channel[None, :] == tl.arange(0, BCH)[:, None]
    return tl.sum(tl.where(own, value[None, :], 0.0), axis=1)


@triton.jit
def _merge_moments(
    partial_ptr, items, rows_each, rows, BCH: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr
):
    """Moments of `rows` rows from those of `items` parts of at most `rows_each`, in order."""
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
def _merge_sums(partial_ptr, items, BCH: tl.constexpr, F: tl.constexpr, ACC: tl.constexpr):
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
def _publish(
    a, b, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH, HW,
    BCH: tl.constexpr, ACC: tl.constexpr, MOMENTS: tl.constexpr, SOLO: tl.constexpr,
):  # fmt: skip
    """Hand in an item's part of a slab; the last to do so gets the whole, and True.

    Parts are merged by fours of eight: _FAN_IN items to a batch, then the batches.
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
                a, b = _merge_moments(
                    parts_ptr + start * (2 * BCH), items, ROWS_EACH * HW, rows, BCH, _FAN_IN, ACC
                )
            else:
                a, b = _merge_sums(parts_ptr + start * (2 * BCH), items, BCH, _FAN_IN, ACC)
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
                        a, b = _merge_moments(
                            batches_ptr, batches, each, ROWS * HW, BCH, _FAN_IN, ACC
                        )
                    else:
                        a, b = _merge_sums(batches_ptr, batches, BCH, _FAN_IN, ACC)
    return a, b, last


@triton.jit
def _finish_forward(
    mean, m2, slab, C, ROWS, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr, HW,
    CHANNELS, momentum, eps, BCH: tl.constexpr, ACC: tl.constexpr, VARIANCE: tl.constexpr,
    RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Save a slab's statistics, move its running ones, count the batch."""
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    n = ROWS.to(ACC) * HW
    var = m2 / n
    rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
    tl.store(stats_ptr + channels, mean, mask=there)
    tl.store(stats_ptr + C + channels, var if VARIANCE else rstd, mask=there)
    if RUNNING:
        step = scalar(momentum, ACC)
        if CUMULATIVE:
            step = 1.0 / tl.load(tracked_ptr).to(ACC)
        old = tl.load(running_mean_ptr + channels, mask=there, other=0.0).to(ACC)
        new = (old + step * (mean - old)).to(running_mean_ptr.dtype.element_ty)
        tl.store(running_mean_ptr + channels, new, mask=there)
        old = tl.load(running_var_ptr + channels, mask=there, other=0.0).to(ACC)
        new = (old + step * (m2 / (n - 1.0) - old)).to(running_var_ptr.dtype.element_ty)
        tl.store(running_var_ptr + channels, new, mask=there)
    if TRACKED:
        if slab == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def _slab(
    slab, LIVE, W, HW, CHANNELS, BC: tl.constexpr, SEGMENTS: tl.constexpr
):  # fmt: skip
    """Columns of a slab, which of them exist, and the channel of each, in the slab and of all."""
    places = tl.arange(0, BC)
    columns = slab * LIVE + places
    live = (places < LIVE) & (columns < W)
    if SEGMENTS:
        own = tl.where(live, places // HW, -1)
    else:
        own = places
    return columns, live, own, slab * CHANNELS + own


@triton.jit
def _coefficients(
    stats_ptr, weight_ptr, bias_ptr, channels, live, C, root,
    BC: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Mean and `affine` of each column, from statistics that another program may have written."""
    mean = tl.load(stats_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    scale, bias = affine(rstd, weight_ptr, bias_ptr, channels, live, root, BC, ACC, WEIGHT, BIAS)
    return mean, scale, bias


@triton.jit
def _normalise(
    x, y_ptr, residual_ptr, bits_ptr, columns, live, row, end, mean, scale, bias, W, slab, SLABS,
    U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
    RESIDUAL: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of y, and its bits."""
    z = (x.to(ACC) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    if RESIDUAL:
        z += _load_rows(
            residual_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE, True
        ).to(ACC)
    if BITS:
        at = _bit_columns(slab, BC)
        packed = as_tile(pack_bits(positive(z), BT * U * BC), BT, U, BC // 8)
        _write_rows(
            packed, bits_ptr, at, at >= 0, row, end, SLABS * (BC // 8), U, BT, True, WHOLE, WIDE
        )
    y = activate(z, ACTIVATION)
    _write_rows(y, y_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE)


@triton.jit(do_not_specialize=_SIZES)
def batch_norm_columns_forward(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    running_mean_ptr,
    running_var_ptr,
    tracked_ptr,
    y_ptr,
    bits_ptr,
    stats_ptr,
    partial_ptr,
    counters_ptr,
    ROWS,
    C,
    HW,
    CHANNELS,
    LIVE_UNITS,
    WIDTH_UNITS,
    SLABS,
    GATHERS,
    WRITES,
    ROWS_EACH,
    GROUP,
    HEAD,
    momentum,
    eps,
    root,
    UNIT: tl.constexpr,
    U: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BCH: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    OWN: tl.constexpr,
    SOLO: tl.constexpr,
    TRAINING: tl.constexpr,
    GIVEN: tl.constexpr,
    NORMALIZE: tl.constexpr,
    VARIANCE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    RUNNING: tl.constexpr,
    CUMULATIVE: tl.constexpr,
    TRACKED: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Y = activation(weight * root * (x - mean) * rstd + bias + residual); stats = (mean, rstd).

    Items of moments have ROWS_EACH rows, items that normalise U * BT. OWN: a program normalises the
    rows whose moments it gathered, from the last to the first; the programs of a slab must then all run
    at once, or be one, SOLO. SEGMENTS: channels have more than one column. Without NORMALIZE y is
    not written. VARIANCE: the stats are (mean, var). GIVEN: they are there already, and are used.
    """
    t = tl.program_id(0)
    W = WIDTH_UNITS * UNIT
    if (TRAINING and NORMALIZE) and not OWN:
        slab, item, late = _schedule(t, SLABS, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, not TRAINING
    columns, live, own, channels = _slab(slab, LIVE_UNITS * UNIT, W, HW, CHANNELS, BC, SEGMENTS)
    flag_ptr = counters_ptr + SLABS * (tl.cdiv(GATHERS, _FAN_IN) + 1) + slab
    R: tl.constexpr = U * BT
    if slab < SLABS:
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            mean, m2 = _column_moments(
                x_ptr, columns, live, start, end, W, U, BT, BC, STAGES, ACC, EVEN, WIDE
            )
            if SEGMENTS:
                mean, m2 = _channel_moments(mean, m2, end - start, own, HW, BCH)
            mean, m2, last = _publish(
                mean, m2, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH, HW,
                BCH, ACC, True, SOLO,
            )  # fmt: skip
            if last:
                _finish_forward(
                    mean, m2, slab, C, ROWS, running_mean_ptr, running_var_ptr, tracked_ptr,
                    stats_ptr, HW, CHANNELS, momentum, eps, BCH, ACC, VARIANCE, RUNNING,
                    CUMULATIVE, TRACKED,
                )  # fmt: skip
                if NORMALIZE and not SOLO:
                    arrive(flag_ptr)
            if OWN and NORMALIZE:
                if SOLO:
                    tl.debug_barrier()
                else:
                    wait(flag_ptr, 1, GATHERS)
                average, scale, bias = _coefficients(
                    stats_ptr, weight_ptr, bias_ptr, channels, live, C, root, BC, ACC, WEIGHT, BIAS
                )
                whole = (end - start) // R
                if start + whole * R < end:
                    row = start + whole * R
                    x = _load_rows(
                        x_ptr, columns, live, row, end, W, U, BT, EVEN, False, WIDE, True
                    )
                    _normalise(
                        x, y_ptr, residual_ptr, bits_ptr, columns, live, row, end, average,
                        scale, bias, W, slab, SLABS, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION,
                        EVEN, False, WIDE,
                    )  # fmt: skip
                for tile in tl.range(0, whole, num_stages=STAGES):
                    row = start + (whole - 1 - tile) * R
                    x = _load_rows(x_ptr, columns, live, row, end, W, U, BT, EVEN, True, WIDE, True)
                    _normalise(
                        x, y_ptr, residual_ptr, bits_ptr, columns, live, row, end, average,
                        scale, bias, W, slab, SLABS, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION,
                        EVEN, True, WIDE,
                    )  # fmt: skip
        else:
            row = item * R
            x = _load_rows(x_ptr, columns, live, row, ROWS, W, U, BT, EVEN, False, WIDE, True)
            if TRAINING:
                wait(flag_ptr, 1, WRITES)
            if TRAINING or GIVEN:
                average, scale, bias = _coefficients(
                    stats_ptr, weight_ptr, bias_ptr, channels, live, C, root, BC, ACC, WEIGHT, BIAS
                )
            else:
                average = tl.load(running_mean_ptr + channels, mask=live, other=0.0).to(ACC)
                var = tl.load(running_var_ptr + channels, mask=live, other=1.0).to(ACC)
                rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
                if item == 0:
                    tl.store(stats_ptr + channels, average, mask=live)
                    tl.store(stats_ptr + C + channels, rstd, mask=live)
                scale, bias = affine(
                    rstd, weight_ptr, bias_ptr, channels, live, root, BC, ACC, WEIGHT, BIAS
                )
            _normalise(
                x, y_ptr, residual_ptr, bits_ptr, columns, live, row, ROWS, average, scale, bias, W,
                slab, SLABS, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION, EVEN, False, WIDE,
            )  # fmt: skip


@triton.jit
def _finish_backward(
    sum_dz, sum_dz_centred, slab, C, ROWS, HW, CHANNELS, stats_ptr, dweight_ptr, dbias_ptr,
    means_ptr, root, BCH: tl.constexpr, ACC: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    LATE: tl.constexpr,
):  # fmt: skip
    """Write a slab's dweight and dbias, and what its dx needs: mean of dz, slope in x - mean."""
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    rstd = tl.load(stats_ptr + C + channels, mask=there, other=0.0)
    if DWEIGHT:
        dweight = (sum_dz_centred * rstd * scalar(root, ACC)).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + channels, dweight, mask=there)
    if DBIAS:
        tl.store(dbias_ptr + channels, sum_dz.to(dbias_ptr.dtype.element_ty), mask=there)
    if LATE:
        n = ROWS.to(ACC) * HW
        tl.store(means_ptr + channels, sum_dz / n, mask=there)
        tl.store(means_ptr + C + channels, sum_dz_centred * rstd * rstd / n, mask=there)


@triton.jit
def _read_gradient(
    dy_ptr, x_ptr, residual_ptr, bits_ptr, row, end, columns, live, W, slab, SLABS,
    U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, RESIDUAL: tl.constexpr,
    BITS: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """A tile of dy, of x, and of the forward's bits or residual, whichever is needed."""
    dy = _load_rows(dy_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE, LAST)
    x = _load_rows(x_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE, LAST)
    extra = 0
    if BITS:
        at = _bit_columns(slab, BC)
        extra = _load_rows(
            bits_ptr, at, at >= 0, row, end, SLABS * (BC // 8), U, BT, True, WHOLE, WIDE, LAST
        )
    elif RESIDUAL:
        extra = _load_rows(residual_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE, LAST)
    return dy, x, extra


@triton.jit
def _gradient(
    dy, x, extra, mean, scale, bias, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    ACC: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """dz, the gradient before the activation, and x - mean."""
    centred = x.to(ACC) - mean[None, None, :]
    dz = dy.to(ACC)  # 0 where there is nothing, and so is all that is made of it
    if BITS:
        bits = unpack_bits(tl.reshape(extra, [BT * U * BC // 8]), BT * U * BC)
        dz = tl.where(as_tile(bits, BT, U, BC) != 0, dz, 0.0)
    elif ACTIVATION:
        z = centred * scale[None, None, :] + bias[None, None, :]
        if RESIDUAL:
            z += extra.to(ACC)
        dz = activation_gradient(dz, z, ACTIVATION)
    return dz, centred


@triton.jit
def _dx_terms(means_ptr, channels, live, C):
    mean_dz = tl.load(means_ptr + channels, mask=live, other=0.0, cache_modifier=".cg")
    slope = tl.load(means_ptr + C + channels, mask=live, other=0.0, cache_modifier=".cg")
    return mean_dz, slope


@triton.jit
def _dx(dz, centred, mean_dz, slope, scale):
    dx = dz - mean_dz[None, None, :] - centred * slope[None, None, :]
    return dx * scale[None, None, :]


@triton.jit
def _write_gradients(
    dx, dz, dx_ptr, dresidual_ptr, columns, live, row, end, W, U: tl.constexpr, BT: tl.constexpr,
    DX: tl.constexpr, DRESIDUAL: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    if DX:
        _write_rows(dx, dx_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE)
    if DRESIDUAL:
        _write_rows(dz, dresidual_ptr, columns, live, row, end, W, U, BT, EVEN, WHOLE, WIDE)


@triton.jit(do_not_specialize=_SIZES)
def batch_norm_columns_backward(
    dy_ptr,
    x_ptr,
    residual_ptr,
    bits_ptr,
    weight_ptr,
    bias_ptr,
    stats_ptr,
    dx_ptr,
    dresidual_ptr,
    dweight_ptr,
    dbias_ptr,
    partial_ptr,
    counters_ptr,
    ROWS,
    C,
    HW,
    CHANNELS,
    LIVE_UNITS,
    WIDTH_UNITS,
    SLABS,
    GATHERS,
    WRITES,
    ROWS_EACH,
    GROUP,
    HEAD,
    root,
    UNIT: tl.constexpr,
    U: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BCH: tl.constexpr,
    STAGES: tl.constexpr,
    ACC: tl.constexpr,
    OWN: tl.constexpr,
    SOLO: tl.constexpr,
    SUMS: tl.constexpr,
    LATE: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DX: tl.constexpr,
    DRESIDUAL: tl.constexpr,
    DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradients of `batch_norm_columns_forward`; those not asked for are not computed.

    LATE: dx depends on the sums (batch statistics), and is written by items of its own or, with
    OWN, by the program that summed those rows. Otherwise the first read gives dx (constant
    statistics), and with SUMS the last of a slab's programs writes dweight and dbias.
    """
    t = tl.program_id(0)
    W = WIDTH_UNITS * UNIT
    if LATE and not OWN:
        slab, item, late = _schedule(t, SLABS, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, False
    columns, live, own, channels = _slab(slab, LIVE_UNITS * UNIT, W, HW, CHANNELS, BC, SEGMENTS)
    # Per channel, in the workspace after all that is merged: mean of dz, slope of x - mean.
    batches = tl.cdiv(GATHERS, _FAN_IN)
    means_ptr = partial_ptr + (SLABS * (GATHERS + batches)) * (2 * BCH)
    flag_ptr = counters_ptr + SLABS * (batches + 1) + slab
    R: tl.constexpr = U * BT
    if slab < SLABS:
        mean, scale, bias = _coefficients(
            stats_ptr, weight_ptr, bias_ptr, channels, live, C, root, BC, ACC, WEIGHT, BIAS
        )
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            sum_dz = tl.zeros([BT, BC], ACC)
            sum_dz_centred = tl.zeros([BT, BC], ACC)
            whole = (end - start) // R
            for tile in tl.range(0, whole, num_stages=STAGES):
                row = start + tile * R
                dy, x, extra = _read_gradient(
                    dy_ptr, x_ptr, residual_ptr, bits_ptr, row, end, columns, live, W, slab, SLABS,
                    U, BT, BC, RESIDUAL, BITS, EVEN, True, WIDE, not LATE,
                )  # fmt: skip
                dz, centred = _gradient(
                    dy, x, extra, mean, scale, bias, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION
                )
                if SUMS:
                    sum_dz += tl.sum(dz, axis=STEP_AXIS)
                    sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
                if not LATE:
                    _write_gradients(
                        dz * scale[None, None, :], dz, dx_ptr, dresidual_ptr, columns, live, row,
                        end, W, U, BT, DX, DRESIDUAL, EVEN, True, WIDE,
                    )  # fmt: skip
            row = start + whole * R
            if row < end:
                dy, x, extra = _read_gradient(
                    dy_ptr, x_ptr, residual_ptr, bits_ptr, row, end, columns, live, W, slab, SLABS,
                    U, BT, BC, RESIDUAL, BITS, EVEN, False, WIDE, not LATE,
                )  # fmt: skip
                dz, centred = _gradient(
                    dy, x, extra, mean, scale, bias, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION
                )
                if SUMS:
                    sum_dz += tl.sum(dz, axis=STEP_AXIS)
                    sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
                if not LATE:
                    _write_gradients(
                        dz * scale[None, None, :], dz, dx_ptr, dresidual_ptr, columns, live, row,
                        end, W, U, BT, DX, DRESIDUAL, EVEN, False, WIDE,
                    )  # fmt: skip
            if SUMS:
                a = tl.sum(sum_dz, axis=0)
                b = tl.sum(sum_dz_centred, axis=0)
                if SEGMENTS:
                    a = _channel_sums(a, own, BCH)
                    b = _channel_sums(b, own, BCH)
                a, b, last = _publish(
                    a, b, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH, HW,
                    BCH, ACC, False, SOLO,
                )  # fmt: skip
                if last:
                    _finish_backward(
                        a, b, slab, C, ROWS, HW, CHANNELS, stats_ptr, dweight_ptr, dbias_ptr,
                        means_ptr, root, BCH, ACC, DWEIGHT, DBIAS, LATE,
                    )  # fmt: skip
                    if LATE and not SOLO:
                        arrive(flag_ptr)
            if OWN and LATE:
                if SOLO:
                    tl.debug_barrier()
                else:
                    wait(flag_ptr, 1, GATHERS)
                mean_dz, slope = _dx_terms(means_ptr, channels, live, C)
                if start + whole * R < end:
                    row = start + whole * R
                    dy, x, extra = _read_gradient(
                        dy_ptr, x_ptr, residual_ptr, bits_ptr, row, end, columns, live, W, slab,
                        SLABS, U, BT, BC, RESIDUAL, BITS, EVEN, False, WIDE, True,
                    )  # fmt: skip
                    dz, centred = _gradient(
                        dy, x, extra, mean, scale, bias, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION
                    )
                    _write_gradients(
                        _dx(dz, centred, mean_dz, slope, scale), dz, dx_ptr, dresidual_ptr, columns,
                        live, row, end, W, U, BT, DX, DRESIDUAL, EVEN, False, WIDE,
                    )  # fmt: skip
                for tile in tl.range(0, whole, num_stages=STAGES):
                    row = start + (whole - 1 - tile) * R
                    dy, x, extra = _read_gradient(
                        dy_ptr, x_ptr, residual_ptr, bits_ptr, row, end, columns, live, W, slab,
                        SLABS, U, BT, BC, RESIDUAL, BITS, EVEN, True, WIDE, True,
                    )  # fmt: skip
                    dz, centred = _gradient(
                        dy, x, extra, mean, scale, bias, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION
                    )
                    _write_gradients(
                        _dx(dz, centred, mean_dz, slope, scale), dz, dx_ptr, dresidual_ptr, columns,
                        live, row, end, W, U, BT, DX, DRESIDUAL, EVEN, True, WIDE,
                    )  # fmt: skip
        else:
            row = item * R
            dy, x, extra = _read_gradient(
                dy_ptr, x_ptr, residual_ptr, bits_ptr, row, ROWS, columns, live, W, slab, SLABS, U,
                BT, BC, RESIDUAL, BITS, EVEN, False, WIDE, True,
            )  # fmt: skip
            wait(flag_ptr, 1, WRITES)
            mean_dz, slope = _dx_terms(means_ptr, channels, live, C)
            dz, centred = _gradient(
                dy, x, extra, mean, scale, bias, U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION
            )
            _write_gradients(
                _dx(dz, centred, mean_dz, slope, scale), dz, dx_ptr, dresidual_ptr, columns, live,
                row, ROWS, W, U, BT, DX, DRESIDUAL, EVEN, False, WIDE,
            )  # fmt: skip
