"""BatchNorm over rows of adjacent channels: (N, C), channels_last, and small contiguous planes.

The tensor is ROWS rows of W columns. A channel is HW adjacent columns: one for (N, C) and for
channels_last; a whole plane for a contiguous tensor with small planes. A slab is CHANNELS adjacent
channels. Its columns are padded to BC, of which the first LIVE exist. A tile of a slab is U * BT
rows of BC columns: BT lanes, each of which takes every BT-th row, in U steps (see `tiles`).

The sums of a slab come from GATHERS items of ROWS_EACH rows, one program per item. The programs
publish their parts. The last one to arrive merges them, in the order of the rows and in two levels
(`merging.publish_part`).

Each slab is read twice. Forward, the first read gives its moments, and the second normalises it.
Backward, the first gives two sums per channel, and the second writes dx. There are two ways to
order the reads, described for the forward:

- In phases. GATHERS items gather a slab's moments, and WRITES items of one tile each normalise it.
  Slabs are taken GROUP at a time: first all the items that gather a group, then the items that
  normalise it. These go in *reverse* order, since the L2 cache still holds what was read last. The
  first HEAD items of the next group come before them, so that the GPU has work while the last
  moments are merged.
- OWN: each program writes the rows that it has read. It reads them downwards for the moments, and
  back upwards to normalise. The programs of a slab wait for each other, so they must all run at
  once (a cooperative launch). SOLO: a single program takes each slab, and none waits.
"""

import triton
import triton.language as tl

from normplug._kernels import activation, tiles
from normplug._kernels.batch_norm.exchange import joined_moments, joined_sums
from normplug._kernels.merging import after_parts, publish_part, ready_flag
from normplug._kernels.primitives import is_finite, kernel, load_both, scalar, update_running
from normplug._kernels.tiles import STEP_AXIS, load_tile, write_tile
from normplug._kernels.waiting import arrive, wait

# The arguments that `schedule.Columns` and `primitives` do not explain.
#   OWN                  a program writes the rows that it gathered
#   BITS                 relu's mask is saved, one bit per value
#   WORLD, PEERS         processes that join their batches; the address of a table: see `exchange`


@triton.jit
def assignment(t, GATHERS, WRITES, GROUP, HEAD):
    """Program t's slab and item, and whether it writes the item or gathers it.

    First come the gathers of the first group. Then, for each group: HEAD gathers of the next group,
    the writes of this one in reverse order, and the other gathers of the next. A slab may
    come out as SLABS or more: there is none, and nothing to do.
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
def columns_of(slab, LIVE, W, HW, CHANNELS, BC, SEGMENTS):
    """A slab's columns, which of them exist, and their channels: in the slab, or -1, and in all."""
    places = tl.arange(0, BC)
    columns = slab * LIVE + places
    live = (places < LIVE) & (columns < W)
    channel = tl.where(live, places // HW, -1) if SEGMENTS else places
    return columns, live, channel, slab * CHANNELS + channel


@triton.jit
def bit_columns(slab, BC):
    """Columns of a slab in relu's mask, whose rows have BC / 8 bytes per slab."""
    return slab * (BC // 8) + tl.arange(0, BC // 8)


@triton.jit
def column_moments(x_ptr, area, start, U, BT, BC, STAGES, ACC, EVEN, WIDE):
    """Each column's mean, and sum of squared distances from it, over the rows from `start` on.

    Each lane takes U rows at a time, and merges their moments with its earlier rows' moments. The
    first row is subtracted from all values, so that no sum rounds at the size of the mean.
    """
    columns, live, end, W = area
    top = load_tile(x_ptr, area, start, 1, 1, EVEN, False, WIDE, False).to(ACC)
    mean = tl.zeros([BT, BC], ACC)
    m2 = tl.zeros([BT, BC], ACC)
    n = tl.full([], 0.0, ACC)
    whole = (end - start) // (U * BT)
    for tile in tl.range(0, whole, num_stages=STAGES):
        row = start + tile * (U * BT)
        x = load_tile(x_ptr, area, row, U, BT, EVEN, True, WIDE, False).to(ACC) - top
        tile_mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
        x = x - tl.expand_dims(tile_mean, STEP_AXIS)
        difference = tile_mean - mean
        fraction = U / (n + U)
        mean += difference * fraction
        m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
        n += U
    row = start + whole * (U * BT)
    counts = n + tl.zeros([BT, 1], ACC)
    if row < end:
        x = load_tile(x_ptr, area, row, U, BT, EVEN, False, WIDE, False).to(ACC) - top
        there = (tiles.tile_rows(row, U, BT) < end)[:, :, None]
        more = tiles.lane_counts(end - row, BT, ACC)
        tile_mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / tl.maximum(more, 1.0)
        x = tl.where(there, x - tl.expand_dims(tile_mean, STEP_AXIS), 0.0)
        difference = tile_mean - mean
        fraction = more / tl.maximum(n + more, 1.0)
        mean += difference * fraction
        m2 += tl.sum(x * x, axis=STEP_AXIS) + difference * difference * (n * fraction)
        counts += more
    mean, m2 = tiles.column_totals(mean, m2, counts, end - start)
    return tl.sum(tl.sum(top, axis=0), axis=0) + mean, m2


@triton.jit
def channel_moments(mean, m2, rows, own, HW):
    """Merge the moments of each channel's `own` HW columns, which are over `rows` rows each."""
    average = tl.sum(tl.where(own, mean[None, :], 0.0), axis=1) / HW
    # The sum above rounds at the size of the mean. The mean distance from it corrects that.
    average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1) / HW
    spread = mean[None, :] - average[:, None]
    m2 = tl.sum(tl.where(own, m2[None, :] + rows * spread * spread, 0.0), axis=1)
    return average, m2


@triton.jit
def affine(mean, rstd, vectors, channels, live, ACC, WEIGHT, BIAS):
    """Each column's mean, scale and bias: the norm is (x - mean) * scale + bias."""
    weight_ptr, bias_ptr, root = vectors
    scale = rstd * scalar(root, ACC)
    if WEIGHT:
        scale *= tl.load(weight_ptr + channels, mask=live, other=0.0).to(ACC)
    bias = tl.zeros_like(scale)
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=live, other=0.0).to(ACC)
    return mean, scale, bias


@triton.jit
def coefficients(stats_ptr, vectors, channels, live, C, ACC, WEIGHT, BIAS):
    """Each column's mean, scale and bias; another program may have written the statistics."""
    mean, rstd = load_both(stats_ptr, channels, live, C)
    return affine(mean, rstd, vectors, channels, live, ACC, WEIGHT, BIAS)


@triton.jit
def finish_forward(
    mean, m2, slab, C, ROWS, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr, HW,
    CHANNELS, PEERS, momentum, eps, BCH, ACC, VARIANCE, RUNNING, CUMULATIVE, TRACKED, SAFE, WORLD,
):  # fmt: skip
    """Save a slab's statistics, update its running statistics, and count the batch.

    A batch is joined by the exchange if WORLD > 1, and was joined before if WORLD is 0. A joined
    batch with fewer than two values per channel updates nothing, and is not counted. With SAFE,
    neither does a channel whose moments are not finite; the first channel's decide whether the
    batch is counted.
    """
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    n = ROWS.to(ACC) * HW
    updated = there
    counted = 1
    if WORLD > 1:
        n, mean, m2 = joined_moments(mean, m2, ROWS * HW, channels, there, C, PEERS, WORLD, ACC)
    if WORLD != 1:
        updated = there & (n > 1)
        counted = tl.where(tl.max(n, axis=0) > 1, 1, 0)
        tl.store(stats_ptr + 2 * C + 0 * channels, n, mask=channels == 0)
        n = tl.maximum(n, 1.0)
    if SAFE:
        finite = is_finite(mean, m2)
        updated = updated & finite
        counted = counted * tl.max(tl.where((places == 0) & finite, 1, 0), axis=0)
    var = m2 / n
    rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
    tl.store(stats_ptr + channels, mean, mask=there)
    tl.store(stats_ptr + C + channels, var if VARIANCE else rstd, mask=there)
    if RUNNING:
        step = scalar(momentum, ACC)
        if CUMULATIVE:
            step = 1.0 / tl.load(tracked_ptr).to(ACC)
            if WORLD != 1:
                if slab == 0:  # the host has counted the batch
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + counted - 1)
        old_mean = tl.load(running_mean_ptr + channels, mask=updated, other=0.0)
        update_running(running_mean_ptr + channels, old_mean, mean, step, updated)
        old_var = tl.load(running_var_ptr + channels, mask=updated, other=0.0)
        update_running(running_var_ptr + channels, old_var, m2 / (n - 1.0), step, updated)
    if TRACKED:
        if slab == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + counted)


@kernel
def batch_norm_merge(
    x_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr, C, PROCESSES, momentum, eps,
    BCH: tl.constexpr, ACC: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    TRACKED: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of PROCESSES processes: stats = (mean, var, n) of the joined batch.

    x has the mean and var of all channels, and the number of values, of each process in turn.
    """
    slab = tl.program_id(0)
    channels = slab * BCH + tl.arange(0, BCH)
    there = channels < C
    n = tl.zeros([BCH], ACC)
    mean = tl.zeros([BCH], ACC)
    m2 = tl.zeros([BCH], ACC)
    for process in range(PROCESSES):
        own_ptr = x_ptr + process * (2 * C + 1)
        count = tl.load(own_ptr + 2 * C)
        fraction = count / tl.maximum(n + count, 1.0)
        own_mean, own_var = load_both(own_ptr, channels, there, C)
        difference = own_mean - mean
        m2 += own_var * count + difference * difference * (n * fraction)
        mean += difference * fraction
        n += count
    finish_forward(
        mean, m2, slab, C, n, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr, 1, BCH, 0,
        momentum, eps, BCH, ACC, True, RUNNING, CUMULATIVE, TRACKED, False, 0,
    )  # fmt: skip


@triton.jit
def _normalise(
    x, y_ptr, residual_ptr, bits_ptr, area, row, norm, slab, SLABS, U, BT, BC, ACC, RESIDUAL, BITS,
    ACTIVATION, EVEN, WHOLE, WIDE,
):  # fmt: skip
    """Write a tile of y and, if BITS, of relu's mask."""
    mean, scale, bias = norm
    z = (x.to(ACC) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    if RESIDUAL:
        z += load_tile(residual_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, True).to(ACC)
    if BITS:
        at = bit_columns(slab, BC)
        packed = tiles.as_tile(activation.pack_mask(z, BT * U * BC), BT, U, BC // 8)
        bits_area = at, at >= 0, area[2], SLABS * (BC // 8)
        write_tile(packed, bits_ptr, bits_area, row, U, BT, True, WHOLE, WIDE)
    y = activation.activate(z, ACTIVATION)
    write_tile(y, y_ptr, area, row, U, BT, EVEN, WHOLE, WIDE)


@kernel
def batch_norm_columns_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    y_ptr, bits_ptr, stats_ptr, partial_ptr, counters_ptr,
    ROWS, C, HW, CHANNELS, LIVE_UNITS, WIDTH_UNITS, SLABS, GATHERS, WRITES, ROWS_EACH, GROUP, HEAD,
    PEERS, momentum, eps, root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BCH: tl.constexpr,
    STAGES: tl.constexpr, OWN: tl.constexpr, SOLO: tl.constexpr, ACC: tl.constexpr,
    TRAINING: tl.constexpr, GIVEN: tl.constexpr, NORMALIZE: tl.constexpr, VARIANCE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr,
    ACTIVATION: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    TRACKED: tl.constexpr, SAFE: tl.constexpr, SEGMENTS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias + residual); stats = (mean, rstd).

    TRAINING: mean and rstd are the batch's. Otherwise they come from the running statistics or, if
    GIVEN, from stats. Without NORMALIZE, only statistics are written. VARIANCE: stats are (mean,
    var). If WORLD > 1, the number of values per channel follows them. RUNNING: the running
    statistics are updated, with CUMULATIVE as averages over `tracked` batches (the host has counted
    this one), and otherwise by momentum. TRACKED: `tracked` is incremented. SAFE: see
    `finish_forward`.
    """
    t = tl.program_id(0)
    W = WIDTH_UNITS * UNIT
    if (TRAINING and NORMALIZE) and not OWN:
        slab, item, late = assignment(t, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, not TRAINING
    LIVE = LIVE_UNITS * UNIT
    columns, live, channel, channels = columns_of(slab, LIVE, W, HW, CHANNELS, BC, SEGMENTS)
    flag_ptr = ready_flag(counters_ptr, slab, SLABS, GATHERS)
    vectors = weight_ptr, bias_ptr, root
    R: tl.constexpr = U * BT
    if slab < SLABS:
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            area = columns, live, end, W
            mean, m2 = column_moments(x_ptr, area, start, U, BT, BC, STAGES, ACC, EVEN, WIDE)
            if SEGMENTS:
                rows = end - start
                own = channel[None, :] == tl.arange(0, BCH)[:, None]
                mean, m2 = channel_moments(mean, m2, rows, own, HW)
            mean, m2, last = publish_part(
                mean, m2, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH,
                HW, BCH, ACC, MOMENTS=True, SINGLE=SOLO,
            )  # fmt: skip
            if last:
                finish_forward(
                    mean, m2, slab, C, ROWS, running_mean_ptr, running_var_ptr, tracked_ptr,
                    stats_ptr, HW, CHANNELS, PEERS, momentum, eps, BCH, ACC, VARIANCE, RUNNING,
                    CUMULATIVE, TRACKED, SAFE, WORLD,
                )  # fmt: skip
                if NORMALIZE and not SOLO:
                    arrive(flag_ptr)
            if OWN and NORMALIZE:
                if SOLO:
                    tl.debug_barrier()  # all threads see the statistics just stored
                else:
                    wait(flag_ptr, 1, GATHERS)
                # Back up: first the rows after the last whole tile, then the tiles in reverse.
                norm = coefficients(stats_ptr, vectors, channels, live, C, ACC, WEIGHT, BIAS)
                whole = (end - start) // R
                if start + whole * R < end:
                    row = start + whole * R
                    x = load_tile(x_ptr, area, row, U, BT, EVEN, False, WIDE, True)
                    _normalise(
                        x, y_ptr, residual_ptr, bits_ptr, area, row, norm, slab, SLABS, U, BT, BC,
                        ACC, RESIDUAL, BITS, ACTIVATION, EVEN, False, WIDE,
                    )  # fmt: skip
                for tile in tl.range(0, whole, num_stages=STAGES):
                    row = start + (whole - 1 - tile) * R
                    x = load_tile(x_ptr, area, row, U, BT, EVEN, True, WIDE, True)
                    _normalise(
                        x, y_ptr, residual_ptr, bits_ptr, area, row, norm, slab, SLABS, U, BT, BC,
                        ACC, RESIDUAL, BITS, ACTIVATION, EVEN, True, WIDE,
                    )  # fmt: skip
        else:
            row = item * R
            area = columns, live, ROWS, W
            x = load_tile(x_ptr, area, row, U, BT, EVEN, False, WIDE, True)
            if TRAINING:
                wait(flag_ptr, 1, WRITES)
            if TRAINING or GIVEN:
                norm = coefficients(stats_ptr, vectors, channels, live, C, ACC, WEIGHT, BIAS)
            else:
                average = tl.load(running_mean_ptr + channels, mask=live, other=0.0).to(ACC)
                var = tl.load(running_var_ptr + channels, mask=live, other=1.0).to(ACC)
                rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
                if item == 0:
                    tl.store(stats_ptr + channels, average, mask=live)
                    tl.store(stats_ptr + C + channels, rstd, mask=live)
                norm = affine(average, rstd, vectors, channels, live, ACC, WEIGHT, BIAS)
            _normalise(
                x, y_ptr, residual_ptr, bits_ptr, area, row, norm, slab, SLABS, U, BT, BC, ACC,
                RESIDUAL, BITS, ACTIVATION, EVEN, False, WIDE,
            )  # fmt: skip


@triton.jit
def finish_backward(
    sum_dz, sum_dz_centred, slab, C, ROWS, HW, CHANNELS, PEERS, stats_ptr, dweight_ptr, dbias_ptr,
    means_ptr, root, BCH, ACC, DWEIGHT, DBIAS, TERMS, WORLD,
):  # fmt: skip
    """Write a slab's dweight and dbias and, if TERMS, the mean of dz and the slope for its dx."""
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    rstd = tl.load(stats_ptr + C + channels, mask=there, other=0.0)
    if DWEIGHT:
        dweight = (sum_dz_centred * rstd * scalar(root, ACC)).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + channels, dweight, mask=there)
    if DBIAS:
        tl.store(dbias_ptr + channels, sum_dz.to(dbias_ptr.dtype.element_ty), mask=there)
    n = ROWS.to(ACC) * HW
    if WORLD > 1:  # dweight and dbias remain sums over this process's batch
        sum_dz, sum_dz_centred = joined_sums(
            sum_dz, sum_dz_centred, channels, there, C, PEERS, WORLD, ACC
        )
        n = tl.maximum(tl.load(stats_ptr + 2 * C), 1.0)
    if TERMS:
        tl.store(means_ptr + channels, sum_dz / n, mask=there)
        tl.store(means_ptr + C + channels, sum_dz_centred * rstd * rstd / n, mask=there)


@triton.jit
def _tile_gradients(
    sum_dz, sum_dz_centred, terms, tensors, area, row, norm, slab, SLABS, U, BT, BC, ACC, RESIDUAL,
    BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE, WHOLE, SUM, LATE, WRITE, WAIT,
):  # fmt: skip
    """Read a tile of dy and x, add its dz to the sums, write its gradients; return the two sums.

    WHOLE: all its rows exist. SUM: add to the sums. WRITE: write dx and dresidual. LATE: dx has the
    terms that depend on the sums. WAIT: another program stores these terms, and `terms` says where;
    wait for them after the tile's loads, which then overlap with the wait.
    """
    dy_ptr, x_ptr, residual_ptr, bits_ptr, dx_ptr, dresidual_ptr = tensors
    mean, scale, bias = norm
    dy = load_tile(dy_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, WRITE)
    x = load_tile(x_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, WRITE)
    if BITS:
        at = bit_columns(slab, BC)
        bits_area = at, at >= 0, area[2], SLABS * (BC // 8)
        bits = load_tile(bits_ptr, bits_area, row, U, BT, True, WHOLE, WIDE, WRITE)
    elif RESIDUAL:
        residual = load_tile(residual_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, WRITE)
    if WAIT:
        flag_ptr, writes, means_ptr, channels, C = terms
        wait(flag_ptr, 1, writes)
        terms = load_both(means_ptr, channels, area[1], C)
    centred = x.to(ACC) - mean[None, None, :]
    dz = dy.to(ACC)  # 0 out of bounds, and so is all that is computed from it
    if BITS:
        positive_z = activation.unpack_mask(tl.reshape(bits, [BT * U * BC // 8]), BT * U * BC)
        dz = tl.where(tiles.as_tile(positive_z, BT, U, BC) != 0, dz, 0.0)
    elif ACTIVATION != 0:
        z = centred * scale[None, None, :] + bias[None, None, :]
        if RESIDUAL:
            z += residual.to(ACC)
        dz = activation.activation_gradient(dz, z, ACTIVATION)
    if SUM:
        sum_dz += tl.sum(dz, axis=STEP_AXIS)
        sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
    if WRITE and DX:
        dx = dz
        if LATE:
            mean_dz, slope = terms
            dx = dz - mean_dz[None, None, :] - centred * slope[None, None, :]
        dx *= scale[None, None, :]
        write_tile(dx, dx_ptr, area, row, U, BT, EVEN, WHOLE, WIDE)
    if WRITE and DRESIDUAL:
        write_tile(dz, dresidual_ptr, area, row, U, BT, EVEN, WHOLE, WIDE)
    return sum_dz, sum_dz_centred


@kernel
def batch_norm_columns_backward(
    dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dresidual_ptr,
    dweight_ptr, dbias_ptr, partial_ptr, counters_ptr,
    ROWS, C, HW, CHANNELS, LIVE_UNITS, WIDTH_UNITS, SLABS, GATHERS, WRITES, ROWS_EACH, GROUP, HEAD,
    PEERS, root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BCH: tl.constexpr,
    STAGES: tl.constexpr, OWN: tl.constexpr, SOLO: tl.constexpr, ACC: tl.constexpr,
    SUMS: tl.constexpr, SHARE: tl.constexpr, LATE: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr,
    DX: tl.constexpr, DRESIDUAL: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr,
    SEGMENTS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """The gradients of `batch_norm_columns_forward` that DX, DRESIDUAL, DWEIGHT, DBIAS ask for.

    With dz, the gradient of the activation's input, and scale = weight * root * rstd:
    dx = scale * (dz - mean(dz) - (x - mean) * slope), slope = rstd^2 * mean(dz * (x - mean)).

    LATE: dx depends on these means over the batch, so it is written after them. Otherwise the
    statistics are constants, and the first read gives dx = scale * dz. SHARE: another kernel writes
    dx, from mean(dz) and slope, which this one stores in place of dx, in ACC. SUMS: the sums are
    needed, for LATE, SHARE, dweight or dbias.
    """
    t = tl.program_id(0)
    W = WIDTH_UNITS * UNIT
    if LATE and not OWN:
        slab, item, late = assignment(t, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, False
    LIVE = LIVE_UNITS * UNIT
    columns, live, channel, channels = columns_of(slab, LIVE, W, HW, CHANNELS, BC, SEGMENTS)
    # For each channel: the mean of dz, and the slope of dx in x - mean.
    means_ptr = dx_ptr if SHARE else after_parts(partial_ptr, SLABS, GATHERS, BCH)
    flag_ptr = ready_flag(counters_ptr, slab, SLABS, GATHERS)
    R: tl.constexpr = U * BT
    tensors = dy_ptr, x_ptr, residual_ptr, bits_ptr, dx_ptr, dresidual_ptr
    vectors = weight_ptr, bias_ptr, root
    if slab < SLABS:
        norm = coefficients(stats_ptr, vectors, channels, live, C, ACC, WEIGHT, BIAS)
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            area = columns, live, end, W
            sum_dz = tl.zeros([BT, BC], ACC)
            sum_dz_centred = tl.zeros([BT, BC], ACC)
            whole = (end - start) // R
            for tile in tl.range(0, whole, num_stages=STAGES):
                sum_dz, sum_dz_centred = _tile_gradients(
                    sum_dz, sum_dz_centred, 0, tensors, area, start + tile * R, norm, slab, SLABS,
                    U, BT, BC, ACC, RESIDUAL, BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE,
                    WHOLE=True, SUM=SUMS, LATE=False, WRITE=not LATE, WAIT=False,
                )  # fmt: skip
            row = start + whole * R
            if row < end:
                sum_dz, sum_dz_centred = _tile_gradients(
                    sum_dz, sum_dz_centred, 0, tensors, area, row, norm, slab, SLABS, U, BT, BC,
                    ACC, RESIDUAL, BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE,
                    WHOLE=False, SUM=SUMS, LATE=False, WRITE=not LATE, WAIT=False,
                )  # fmt: skip
            if SUMS:
                a = tl.sum(sum_dz, axis=0)
                b = tl.sum(sum_dz_centred, axis=0)
                if SEGMENTS:
                    own = channel[None, :] == tl.arange(0, BCH)[:, None]
                    a = tl.sum(tl.where(own, a[None, :], 0.0), axis=1)
                    b = tl.sum(tl.where(own, b[None, :], 0.0), axis=1)
                a, b, last = publish_part(
                    a, b, partial_ptr, counters_ptr, slab, item, SLABS, GATHERS, ROWS, ROWS_EACH,
                    HW, BCH, ACC, MOMENTS=False, SINGLE=SOLO,
                )  # fmt: skip
                if last:
                    finish_backward(
                        a, b, slab, C, ROWS, HW, CHANNELS, PEERS, stats_ptr, dweight_ptr,
                        dbias_ptr, means_ptr, root, BCH, ACC, DWEIGHT, DBIAS, LATE or SHARE, WORLD,
                    )  # fmt: skip
                    if LATE and not SOLO:
                        arrive(flag_ptr)
            if OWN and LATE:
                if SOLO:
                    tl.debug_barrier()  # all threads see the terms just stored
                else:
                    wait(flag_ptr, 1, GATHERS)
                terms = load_both(means_ptr, channels, live, C)
                if start + whole * R < end:
                    _tile_gradients(
                        0, 0, terms, tensors, area, start + whole * R, norm, slab, SLABS, U, BT, BC,
                        ACC, RESIDUAL, BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE,
                        WHOLE=False, SUM=False, LATE=True, WRITE=True, WAIT=False,
                    )  # fmt: skip
                for tile in tl.range(0, whole, num_stages=STAGES):
                    row = start + (whole - 1 - tile) * R
                    _tile_gradients(
                        0, 0, terms, tensors, area, row, norm, slab, SLABS, U, BT, BC, ACC,
                        RESIDUAL, BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE,
                        WHOLE=True, SUM=False, LATE=True, WRITE=True, WAIT=False,
                    )  # fmt: skip
        else:
            later = flag_ptr, WRITES, means_ptr, channels, C
            area = columns, live, ROWS, W
            _tile_gradients(
                0, 0, later, tensors, area, item * R, norm, slab, SLABS, U, BT, BC, ACC, RESIDUAL,
                BITS, ACTIVATION, DX, DRESIDUAL, EVEN, WIDE,
                WHOLE=False, SUM=False, LATE=True, WRITE=True, WAIT=True,
            )  # fmt: skip
