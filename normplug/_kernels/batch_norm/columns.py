"""BatchNorm over rows of adjacent channels: (N, C), channels_last, and small contiguous planes.

The tensor is ROWS rows of W columns. A channel is HW adjacent columns: one for (N, C) and for
channels_last; a whole plane for a contiguous tensor with small planes. A slab is CHANNELS adjacent
channels. Its columns are padded to BC, of which the first LIVE exist. A tile of a slab is U * BT
rows of BC columns: BT lanes, each of which takes every BT-th row, in U steps (see `tiles`).
`schedule.BatchColumns` explains the sizes, and `schedule.ColumnsTile` the tile T.

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
- T.own: each program writes the rows that it has read. It reads them downwards for the moments, and
  back upwards to normalise. The programs of a slab wait for each other, so they must all run at
  once (a cooperative launch). T.solo: a single program takes each slab, and none waits.

The residual may have a norm of its own (F.residual_norm), as the shortcut of a residual block has.
A launch without y (F.for_residual) computes its statistics. The kernels then normalise the residual
as they read it. `stats` has six numbers per channel: mean and rstd; and the residual's mean, rstd,
gain (weight * root) and bias.
"""

import triton
import triton.language as tl

from normplug._kernels import activation, tiles
from normplug._kernels.batch_norm.exchange import joined_moments, joined_sums
from normplug._kernels.merging import after_parts, publish_part, ready_flag
from normplug._kernels.primitives import (
    is_finite,
    kernel,
    load_both,
    scalar,
    update_running,
)
from normplug._kernels.tiles import STEP_AXIS, Area, load_row, load_tile, write_tile
from normplug._kernels.waiting import arrive, wait


@triton.jit
def assignment(t, GATHERS, WRITES, GROUP, HEAD):
    """Program t's slab and item, and whether it writes the item or gathers it.

    First come the gathers of the first group. Then, for each group: HEAD gathers of the next group,
    the writes of this one in reverse order, and the other gathers of the next. If the slab is SLABS
    or more, there is no such slab, and the program does nothing.
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
def columns_of(slab, LIVE, W, HW, CHANNELS, T):
    """A slab's columns, which exist, their channels in the slab (or -1), and in the tensor."""
    places = tl.arange(0, T.bc)
    columns = slab * LIVE + places
    live = (places < LIVE) & (columns < W)
    channel = tl.where(live, places // HW, -1) if T.segments else places
    return columns, live, channel, slab * CHANNELS + channel


@triton.jit
def _bit_columns(slab, BC):
    """Columns of a slab in relu's mask, whose rows have BC / 8 bytes per slab."""
    return slab * (BC // 8) + tl.arange(0, BC // 8)


@triton.jit
def column_moments(x_ptr, area, start, T, ACC):
    """Each column's mean, and sum of squared distances from it, over the rows from `start` on.

    Each lane takes U rows at a time, and merges their moments with its earlier rows' moments. The
    first row is subtracted from all values, so that a large mean costs no precision.
    """
    U: tl.constexpr = T.u
    BT: tl.constexpr = T.bt
    end = area.end
    top = load_row(x_ptr, area, start, T).to(ACC)
    mean = tl.zeros([BT, T.bc], ACC)
    m2 = tl.zeros([BT, T.bc], ACC)
    n = tl.full([], 0.0, ACC)
    whole = (end - start) // (U * BT)
    for tile in tl.range(0, whole, num_stages=T.stages):
        row = start + tile * (U * BT)
        x = load_tile(x_ptr, area, row, T, WHOLE=True, LAST=False).to(ACC) - top
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
        x = load_tile(x_ptr, area, row, T, WHOLE=False, LAST=False).to(ACC) - top
        there = (tiles.tile_rows(row, U, BT) < end)[:, :, None]
        more = tiles.lane_counts(end - row, BT, ACC)
        tile_mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / tl.maximum(
            more, 1.0
        )
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
    # The sum above loses precision if the mean is large. The mean distance from it corrects that.
    average += tl.sum(tl.where(own, mean[None, :] - average[:, None], 0.0), axis=1) / HW
    spread = mean[None, :] - average[:, None]
    m2 = tl.sum(tl.where(own, m2[None, :] + rows * spread * spread, 0.0), axis=1)
    return average, m2


@triton.jit
def affine(mean, rstd, vectors, channels, live, F):
    """Each column's mean, scale and bias: the norm is (x - mean) * scale + bias."""
    weight_ptr, bias_ptr, root = vectors
    scale = rstd * scalar(root, F.acc)
    if F.weight:
        scale *= tl.load(weight_ptr + channels, mask=live, other=0.0).to(F.acc)
    bias = tl.zeros_like(scale)
    if F.bias:
        bias = tl.load(bias_ptr + channels, mask=live, other=0.0).to(F.acc)
    return mean, scale, bias


@triton.jit
def coefficients(stats_ptr, vectors, channels, live, C, F):
    """Each column's mean, scale and bias, and mean and scale of the residual's norm, or zeros.

    The bias includes the residual's. Another program may have written the statistics.
    """
    mean, rstd = load_both(stats_ptr, channels, live, C)
    mean, scale, bias = affine(mean, rstd, vectors, channels, live, F)
    if F.residual_norm:
        residual_mean, rstd = load_both(stats_ptr + 2 * C, channels, live, C)
        gain, residual_bias = load_both(stats_ptr + 4 * C, channels, live, C)
        return mean, scale, bias + residual_bias, residual_mean, gain * rstd
    else:
        return mean, scale, bias, 0, 0


@triton.jit
def place_of_count(C, F):
    """Where a joined batch's number of values per channel is: after all statistics.

    With F.residual_norm these are this norm's mean and rstd, and four vectors of the residual's.
    """
    if F.residual_norm:
        return 6 * C
    elif F.for_residual:
        return 4 * C
    else:
        return 2 * C


@triton.jit
def finish_forward(mean, m2, slab, sizes, running, stats_ptr, eps, PEERS, BCH, F):
    """Save a slab's statistics, update its running statistics, and count the batch.

    A batch is joined by the exchange if F.world > 1. A joined batch with fewer than two values per
    channel updates nothing, and is not counted. With F.safe, a channel whose moments are not finite
    updates nothing; the first channel's moments decide whether the batch is counted.

    sizes: channels, rows and values per row of a channel; channels of a slab. running: the
    addresses of mean, variance and count, and the momentum. BCH: channels of a slab, with padding.
    """
    C, ROWS, HW, CHANNELS = sizes
    running_mean_ptr, running_var_ptr, tracked_ptr, momentum = running
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    n = ROWS.to(F.acc) * HW
    updated = there
    counted = 1
    if F.world > 1:
        n, mean, m2 = joined_moments(mean, m2, ROWS * HW, channels, there, C, PEERS, F)
        updated = there & (n > 1)
        counted = tl.where(tl.max(n, axis=0) > 1, 1, 0)
        count_ptr = stats_ptr + place_of_count(C, F)
        tl.store(count_ptr + 0 * channels, n, mask=channels == 0)
        n = tl.maximum(n, 1.0)
    if F.safe:
        finite = is_finite(mean, m2)
        updated = updated & finite
        counted = counted * tl.max(tl.where((places == 0) & finite, 1, 0), axis=0)
    var = m2 / n
    rstd = 1.0 / tl.sqrt(var + scalar(eps, F.acc))
    tl.store(stats_ptr + channels, mean, mask=there)
    tl.store(stats_ptr + C + channels, var if F.variance else rstd, mask=there)
    if F.running:
        step = scalar(momentum, F.acc)
        if F.cumulative:
            step = 1.0 / tl.load(tracked_ptr).to(F.acc)
            if F.world > 1:
                if slab == 0:  # the host has counted the batch
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + counted - 1)
        old_mean = tl.load(running_mean_ptr + channels, mask=updated, other=0.0)
        update_running(running_mean_ptr + channels, old_mean, mean, step, updated)
        old_var = tl.load(running_var_ptr + channels, mask=updated, other=0.0)
        update_running(running_var_ptr + channels, old_var, m2 / (n - 1.0), step, updated)
    if F.tracked:
        if slab == 0:
            tl.store(tracked_ptr, tl.load(tracked_ptr) + counted)


@triton.jit
def store_residual_norm(stats_ptr, vectors, slab, sizes, BCH, F):
    """Store gain and bias of a slab's channels after the residual's mean and rstd.

    stats_ptr: the address of this mean. sizes, BCH: as in `finish_forward`.
    """
    C, ROWS, HW, CHANNELS = sizes
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    ones = tl.full([BCH], 1.0, F.acc)
    mean, gain, bias = affine(ones, ones, vectors, channels, there, F)
    tl.store(stats_ptr + 2 * C + channels, gain, mask=there)
    tl.store(stats_ptr + 3 * C + channels, bias, mask=there)


@triton.jit
def _normalise(x, tensors, area, row, norm, slabs, T, F, WHOLE):
    """Write a tile of y and, if F.bits, of relu's mask. WHOLE: all its rows exist."""
    residual_ptr, bits_ptr, y_ptr = tensors
    mean, scale, bias, residual_mean, residual_scale = norm
    z = (x.to(F.acc) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    if F.residual:
        residual = load_tile(residual_ptr, area, row, T, WHOLE, LAST=True).to(F.acc)
        if F.residual_norm:
            residual -= residual_mean[None, None, :]
            residual *= residual_scale[None, None, :]
        z += residual
    if F.bits:
        slab, SLABS = slabs
        columns = _bit_columns(slab, T.bc)
        packed = tiles.as_tile(
            activation.pack_mask(z, T.bt * T.u * T.bc), T.bt, T.u, T.bc // 8
        )
        bits_area = Area(columns, columns >= 0, area.end, SLABS * (T.bc // 8))
        offsets, mask = tiles.places(bits_area, row, T)
        tiles.store(bits_ptr, offsets, packed, mask, WHOLE, LAST=True)
    y = activation.activate(z, F.activation)
    write_tile(y, y_ptr, area, row, T, WHOLE)


@kernel
def batch_norm_columns_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    y_ptr, bits_ptr, stats_ptr, partial_ptr, counters_ptr,
    ROWS, C, HW, CHANNELS, LIVE_UNITS, WIDTH_UNITS, SLABS, GATHERS, WRITES, ROWS_EACH, GROUP, HEAD,
    PEERS, momentum, eps, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias + residual); stats = (mean, rstd).

    If F.world > 1, the number of values per channel follows the statistics, as `place_of_count`
    says. If F.residual_norm, the residual in this formula is its norm.
    """
    ACC: tl.constexpr = F.acc
    R: tl.constexpr = T.u * T.bt
    t = tl.program_id(0)
    W = WIDTH_UNITS * T.unit
    if (F.training and F.normalize) and not T.own:
        slab, item, late = assignment(t, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, not F.training
    LIVE = LIVE_UNITS * T.unit
    columns, live, channel, channels = columns_of(slab, LIVE, W, HW, CHANNELS, T)
    flag_ptr = ready_flag(counters_ptr, slab, SLABS, GATHERS)
    vectors = weight_ptr, bias_ptr, root
    tensors = residual_ptr, bits_ptr, y_ptr
    slabs = slab, SLABS
    if F.for_residual:
        stats_ptr += 2 * C
    if slab < SLABS:
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            area = Area(columns, live, end, W)
            mean, m2 = column_moments(x_ptr, area, start, T, ACC)
            if T.segments:
                rows = end - start
                own = channel[None, :] == tl.arange(0, T.bch)[:, None]
                mean, m2 = channel_moments(mean, m2, rows, own, HW)
            scratch = partial_ptr, counters_ptr
            parts = SLABS, GATHERS, ROWS, ROWS_EACH, HW
            mean, m2, last = publish_part(
                mean, m2, scratch, slab, item, parts, T.bch, ACC, T.solo, MOMENTS=True
            )
            if last:
                sizes = C, ROWS, HW, CHANNELS
                running = running_mean_ptr, running_var_ptr, tracked_ptr, momentum
                finish_forward(
                    mean, m2, slab, sizes, running, stats_ptr, eps, PEERS, T.bch, F
                )
                if F.for_residual:
                    store_residual_norm(stats_ptr, vectors, slab, sizes, T.bch, F)
                if F.normalize and not T.solo:
                    arrive(flag_ptr)
            if T.own and F.normalize:
                if T.solo:
                    tl.debug_barrier()  # all threads see the statistics just stored
                else:
                    wait(flag_ptr, 1, GATHERS)
                # Back up: first the rows after the last whole tile, then the tiles in reverse.
                norm = coefficients(stats_ptr, vectors, channels, live, C, F)
                whole = (end - start) // R
                if start + whole * R < end:
                    row = start + whole * R
                    x = load_tile(x_ptr, area, row, T, WHOLE=False, LAST=True)
                    _normalise(x, tensors, area, row, norm, slabs, T, F, WHOLE=False)
                for tile in tl.range(0, whole, num_stages=T.stages):
                    row = start + (whole - 1 - tile) * R
                    x = load_tile(x_ptr, area, row, T, WHOLE=True, LAST=True)
                    _normalise(x, tensors, area, row, norm, slabs, T, F, WHOLE=True)
        else:
            row = item * R
            area = Area(columns, live, ROWS, W)
            x = load_tile(x_ptr, area, row, T, WHOLE=False, LAST=True)
            if F.training:
                wait(flag_ptr, 1, WRITES)
            if F.training or F.given:
                norm = coefficients(stats_ptr, vectors, channels, live, C, F)
            else:
                average = tl.load(running_mean_ptr + channels, mask=live, other=0.0).to(
                    ACC
                )
                var = tl.load(running_var_ptr + channels, mask=live, other=1.0).to(ACC)
                rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
                if item == 0:
                    tl.store(stats_ptr + channels, average, mask=live)
                    tl.store(stats_ptr + C + channels, rstd, mask=live)
                average, scale, bias = affine(average, rstd, vectors, channels, live, F)
                norm = average, scale, bias, 0, 0
            _normalise(x, tensors, area, row, norm, slabs, T, F, WHOLE=False)


@triton.jit
def finish_backward(sums, slab, sizes, stats_ptr, results, root, PEERS, BCH, F):
    """Write a slab's dweight and dbias and, if wanted, the mean of dz and the slope for its dx.

    sums: a of dz; b of dz * (x - mean); and c, if F.residual_norm, of dz * (residual - mean), for
    the slope of dresidual. results: the addresses of dweight and dbias, and of the mean and the
    slopes. sizes, BCH: as in `finish_forward`.
    """
    a, b, c = sums
    C, ROWS, HW, CHANNELS = sizes
    dweight_ptr, dbias_ptr, means_ptr = results
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    rstd = tl.load(stats_ptr + C + channels, mask=there, other=0.0)
    if F.dweight:
        dweight = (b * rstd * scalar(root, F.acc)).to(dweight_ptr.dtype.element_ty)
        tl.store(dweight_ptr + channels, dweight, mask=there)
    if F.dbias:
        tl.store(dbias_ptr + channels, a.to(dbias_ptr.dtype.element_ty), mask=there)
    n = ROWS.to(F.acc) * HW
    if F.world > 1:  # dweight and dbias remain sums over this process's batch
        a, b, c = joined_sums(a, b, c, channels, there, C, PEERS, F)
        n = tl.maximum(tl.load(stats_ptr + place_of_count(C, F)), 1.0)
    if F.late or F.share:
        tl.store(means_ptr + channels, a / n, mask=there)
        tl.store(means_ptr + C + channels, b * rstd * rstd / n, mask=there)
    if F.residual_norm and F.late:
        rstd = tl.load(stats_ptr + 3 * C + channels, mask=there, other=0.0)
        tl.store(means_ptr + 2 * C + channels, c * rstd * rstd / n, mask=there)


@triton.jit
def store_dstats(a, c, slab, sizes, stats_ptr, dstats_ptr, BCH, F):
    """Write the gradient of `stats` if F.dstats: of a slab's gain and bias, and zeros.

    a and c are the sums of dz, and of dz * (residual - mean), over this process's batch. sizes,
    BCH: as in `finish_forward`.
    """
    C, ROWS, HW, CHANNELS = sizes
    places = tl.arange(0, BCH)
    channels = slab * CHANNELS + places
    there = (places < CHANNELS) & (channels < C)
    if F.dstats:
        rstd = tl.load(stats_ptr + 3 * C + channels, mask=there, other=0.0)
        for constant in tl.static_range(4):
            zeros = tl.zeros([BCH], F.acc)
            tl.store(dstats_ptr + constant * C + channels, zeros, mask=there)
        tl.store(dstats_ptr + 4 * C + channels, c * rstd, mask=there)
        tl.store(dstats_ptr + 5 * C + channels, a, mask=there)


@triton.jit
def _load_terms(means_ptr, channels, live, C, F):
    """Each column's mean of dz, slope of dx, and slope of dresidual, or 0."""
    mean_dz, slope = load_both(means_ptr, channels, live, C)
    residual_slope = 0
    if F.residual_norm:
        residual_slope = tl.load(
            means_ptr + 2 * C + channels, mask=live, other=0.0, cache_modifier=".cg"
        )
    return mean_dz, slope, residual_slope


@triton.jit
def _load_gradient(tensors, area, row, slabs, T, F, WHOLE, LAST):
    """Load a tile of dy, x and what else is needed, or 0: relu's mask, and the residual.

    WHOLE: all its rows exist. LAST: it is not read again.
    """
    dy_ptr, x_ptr, residual_ptr, bits_ptr = tensors
    dy = load_tile(dy_ptr, area, row, T, WHOLE, LAST)
    x = load_tile(x_ptr, area, row, T, WHOLE, LAST)
    if F.bits:
        slab, SLABS = slabs
        columns = _bit_columns(slab, T.bc)
        bits_area = Area(columns, columns >= 0, area.end, SLABS * (T.bc // 8))
        offsets, mask = tiles.places(bits_area, row, T)
        bits = tiles.load(bits_ptr, offsets, mask, WHOLE, LAST)
    else:
        bits = 0
    if F.residual:
        residual = load_tile(residual_ptr, area, row, T, WHOLE, LAST)
    else:
        residual = 0
    return dy, x, bits, residual


@triton.jit
def _gradient(tile, norm, T, F):
    """Compute dz, the gradient of the activation's input, from `_load_gradient`.

    Return it with x - mean and, for the residual's norm, residual - mean.
    """
    dy, x, bits, residual = tile
    mean, scale, bias, residual_mean, residual_scale = norm
    centred = x.to(F.acc) - mean[None, None, :]
    if F.residual:
        residual = residual.to(F.acc)
    if F.residual_norm:
        residual -= residual_mean[None, None, :]
    dz = dy.to(F.acc)  # 0 out of bounds, and so is all that is computed from it
    if F.bits:
        positive_z = activation.unpack_mask(
            tl.reshape(bits, [T.bt * T.u * T.bc // 8]), T.bt * T.u * T.bc
        )
        dz = tl.where(tiles.as_tile(positive_z, T.bt, T.u, T.bc) != 0, dz, 0.0)
    elif F.activation != 0:
        z = centred * scale[None, None, :] + bias[None, None, :]
        if F.residual_norm:
            z += residual * residual_scale[None, None, :]
        elif F.residual:
            z += residual
        dz = activation.activation_gradient(dz, z, F.activation)
    return dz, centred, residual


@triton.jit
def _first_read(sums, tensors, results, area, row, norm, slabs, T, F, WHOLE):
    """Read a tile of dy and x, and add it to the sums; unless F.late, write its gradients, too."""
    sum_dz, sum_dz_centred, sum_dz_residual = sums
    dx_ptr, dresidual_ptr = results
    mean, scale, bias, residual_mean, residual_scale = norm
    tile = _load_gradient(tensors, area, row, slabs, T, F, WHOLE, LAST=not F.late)
    dz, centred, residual = _gradient(tile, norm, T, F)
    if F.sums:
        sum_dz += tl.sum(dz, axis=STEP_AXIS)
        sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
        if F.residual_norm:
            sum_dz_residual += tl.sum(dz * residual, axis=STEP_AXIS)
    if F.dx and not F.late:
        write_tile(dz * scale[None, None, :], dx_ptr, area, row, T, WHOLE)
    if F.dresidual and not F.late:
        write_tile(dz, dresidual_ptr, area, row, T, WHOLE)
    return sum_dz, sum_dz_centred, sum_dz_residual


@triton.jit
def _write_gradients(values, terms, results, area, row, norm, T, F, WHOLE):
    """Write a tile of dx and dresidual. values: from `_gradient`. terms: from `_load_terms`."""
    dz, centred, residual = values
    dx_ptr, dresidual_ptr = results
    mean, scale, bias, residual_mean, residual_scale = norm
    mean_dz, slope, residual_slope = terms
    if F.dx:
        dx = dz - mean_dz[None, None, :] - centred * slope[None, None, :]
        dx *= scale[None, None, :]
        write_tile(dx, dx_ptr, area, row, T, WHOLE)
    if F.dresidual:
        dresidual = dz
        if F.residual_norm:
            dresidual -= mean_dz[None, None, :] + residual * residual_slope[None, None, :]
            dresidual *= residual_scale[None, None, :]
        write_tile(dresidual, dresidual_ptr, area, row, T, WHOLE)


@triton.jit
def _second_read(terms, tensors, results, area, row, norm, slabs, T, F, WHOLE):
    """Read a tile of dy and x again, and write its gradients."""
    tile = _load_gradient(tensors, area, row, slabs, T, F, WHOLE, LAST=True)
    values = _gradient(tile, norm, T, F)
    _write_gradients(values, terms, results, area, row, norm, T, F, WHOLE)


@kernel
def batch_norm_columns_backward(
    dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dresidual_ptr,
    dweight_ptr, dbias_ptr, partial_ptr, counters_ptr, dstats_ptr,
    ROWS, C, HW, CHANNELS, LIVE_UNITS, WIDTH_UNITS, SLABS, GATHERS, WRITES, ROWS_EACH, GROUP, HEAD,
    PEERS, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients of `batch_norm_columns_forward`.

    With dz, the gradient of the activation's input, and scale = weight * root * rstd:
    dx = scale * (dz - mean(dz) - (x - mean) * slope), slope = rstd^2 * mean(dz * (x - mean)).

    F.late: dx depends on these means over the batch, so it is written after them. Otherwise the
    statistics are constants, and the first read gives dx = scale * dz. F.share: another kernel
    writes dx, from mean(dz) and slope, which this one stores in place of dx.

    If F.residual_norm, dresidual is the gradient through the residual's norm, as dx through this
    one, and dstats is the gradient of `stats`: of the residual's gain and bias, and zeros.
    """
    R: tl.constexpr = T.u * T.bt
    t = tl.program_id(0)
    W = WIDTH_UNITS * T.unit
    if F.late and not T.own:
        slab, item, late = assignment(t, GATHERS, WRITES, GROUP, HEAD)
    else:
        slab, item, late = t % SLABS, t // SLABS, False
    LIVE = LIVE_UNITS * T.unit
    columns, live, channel, channels = columns_of(slab, LIVE, W, HW, CHANNELS, T)
    # For each channel: the mean of dz, and the slope of dx in x - mean.
    if F.share:
        means_ptr = dx_ptr
    else:
        means_ptr = after_parts(
            partial_ptr, SLABS, GATHERS, T.bch * (1 + F.residual_norm)
        )
    flag_ptr = ready_flag(counters_ptr, slab, SLABS, GATHERS)
    tensors = dy_ptr, x_ptr, residual_ptr, bits_ptr
    results = dx_ptr, dresidual_ptr
    vectors = weight_ptr, bias_ptr, root
    slabs = slab, SLABS
    if slab < SLABS:
        norm = coefficients(stats_ptr, vectors, channels, live, C, F)
        if not late:
            start = tl.minimum(item * ROWS_EACH, ROWS)
            end = tl.minimum(start + ROWS_EACH, ROWS)
            area = Area(columns, live, end, W)
            sum_dz = tl.zeros([T.bt, T.bc], F.acc)
            sum_dz_centred = tl.zeros([T.bt, T.bc], F.acc)
            sum_dz_residual = tl.zeros([T.bt, T.bc], F.acc)
            whole = (end - start) // R
            for tile in tl.range(0, whole, num_stages=T.stages):
                sums = sum_dz, sum_dz_centred, sum_dz_residual
                row = start + tile * R
                sum_dz, sum_dz_centred, sum_dz_residual = _first_read(
                    sums, tensors, results, area, row, norm, slabs, T, F, WHOLE=True
                )
            row = start + whole * R
            if row < end:
                sums = sum_dz, sum_dz_centred, sum_dz_residual
                sum_dz, sum_dz_centred, sum_dz_residual = _first_read(
                    sums, tensors, results, area, row, norm, slabs, T, F, WHOLE=False
                )
            if F.sums:
                a = tl.sum(sum_dz, axis=0)
                b = tl.sum(sum_dz_centred, axis=0)
                if T.segments:
                    own = channel[None, :] == tl.arange(0, T.bch)[:, None]
                    a = tl.sum(tl.where(own, a[None, :], 0.0), axis=1)
                    b = tl.sum(tl.where(own, b[None, :], 0.0), axis=1)
                scratch = partial_ptr, counters_ptr
                parts = SLABS, GATHERS, ROWS, ROWS_EACH, HW
                WIDTH: tl.constexpr = T.bch * (1 + F.residual_norm)
                if F.residual_norm:
                    # A part has two numbers per column, so a channel takes two: (a, b) and (c, b).
                    c = tl.sum(sum_dz_residual, axis=0)
                    if T.segments:
                        c = tl.sum(tl.where(own, c[None, :], 0.0), axis=1)
                    a = tl.reshape(tl.join(a, c), [WIDTH])
                    b = tl.reshape(tl.join(b, b), [WIDTH])
                a, b, last = publish_part(
                    a, b, scratch, slab, item, parts, WIDTH, F.acc, T.solo, MOMENTS=False
                )
                if F.residual_norm:
                    a, c = tl.split(tl.reshape(a, [T.bch, 2]))
                    b, same = tl.split(tl.reshape(b, [T.bch, 2]))
                else:
                    c = a  # not used
                if last:
                    sizes = C, ROWS, HW, CHANNELS
                    finished = dweight_ptr, dbias_ptr, means_ptr
                    if F.residual_norm:
                        store_dstats(a, c, slab, sizes, stats_ptr, dstats_ptr, T.bch, F)
                    merged = a, b, c
                    finish_backward(
                        merged, slab, sizes, stats_ptr, finished, root, PEERS, T.bch, F
                    )
                    if F.late and not T.solo:
                        arrive(flag_ptr)
            if T.own and F.late:
                if T.solo:
                    tl.debug_barrier()  # all threads see the terms just stored
                else:
                    wait(flag_ptr, 1, GATHERS)
                terms = _load_terms(means_ptr, channels, live, C, F)
                row = start + whole * R
                if row < end:
                    _second_read(
                        terms, tensors, results, area, row, norm, slabs, T, F, WHOLE=False
                    )
                for tile in tl.range(0, whole, num_stages=T.stages):
                    row = start + (whole - 1 - tile) * R
                    _second_read(
                        terms, tensors, results, area, row, norm, slabs, T, F, WHOLE=True
                    )
        else:
            row = item * R
            area = Area(columns, live, ROWS, W)
            loaded = _load_gradient(
                tensors, area, row, slabs, T, F, WHOLE=False, LAST=True
            )
            wait(flag_ptr, 1, WRITES)  # after the loads, which overlap with it
            stored = _load_terms(means_ptr, channels, live, C, F)
            values = _gradient(loaded, norm, T, F)
            _write_gradients(values, stored, results, area, row, norm, T, F, WHOLE=False)
