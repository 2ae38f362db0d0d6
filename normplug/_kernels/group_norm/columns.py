"""GroupNorm over channels_last (N, C, *space), where a sample is S rows of C adjacent channels.

`shared` explains how programs wait for each other; here a unit is a sample, and programs read and
write items of it. A sample is cut into slabs of BC adjacent channels, which may begin or end inside
a group. A slab is cut into K items of ROWS_EACH rows. A tile is U * BT rows of a slab: BT lanes,
each of which takes every BT-th row, in U steps (see `tiles`). A program reads the tiles of an item
one after the other, and publishes the moments of each channel. The last program of a slab merges
the slab's items (for `publish_part`, a unit is a slab of a sample). A program that writes an item
computes the statistics of the slab's groups from the moments of their channels.
"""

import triton
import triton.language as tl

from normplug._kernels import tiles
from normplug._kernels.activation import activate
from normplug._kernels.group_norm.shared import gradient_before, load_vector, save_statistics
from normplug._kernels.merging import after_parts, finish_gradients, publish_part, ready_flag
from normplug._kernels.primitives import kernel, load_both, scalar
from normplug._kernels.tiles import STEP_AXIS, load_tile, write_tile
from normplug._kernels.waiting import arrive, wait


@triton.jit
def item_of(turn, SLABS, K, S, ROWS_EACH, C, BC, REVERSE):
    """Item number `turn`: its sample, slab and place k, its first row, and its area of the sample.

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
    end = tl.minimum(start + ROWS_EACH, S)
    return sample, slab, k, start, (columns, columns < C, end, C)


@triton.jit
def channels_of_groups(groups, live, channel, CHANNELS, CB):
    """CB channels of each group, from its `channel`-th on, and which of them exist."""
    within = channel + tl.arange(0, CB)
    there = live[:, None] & (within < CHANNELS)[None, :]
    return groups[:, None] * CHANNELS + within[None, :], there


@triton.jit
def of_columns(values, groups, columns, CHANNELS, EACH):
    """The value of each column's group, from the values of a slab's groups."""
    if EACH > 0:
        GB: tl.constexpr = groups.shape[0]
        return tl.reshape(tl.broadcast_to(values[:, None], [GB, EACH]), [GB * EACH])
    else:
        own = (columns // CHANNELS)[:, None] == groups[None, :]
        return tl.sum(tl.where(own, values[None, :], 0.0), axis=1)


@triton.jit
def _lane_sums(x, shift, row, end, U, BT, WHOLE):
    """Each lane's sums of distances from `shift`, and of their squares."""
    d = x - tl.expand_dims(shift, STEP_AXIS)
    if not WHOLE:
        d = tl.where((tiles.tile_rows(row, U, BT) < end)[:, :, None], d, 0.0)
    return tl.sum(d, axis=STEP_AXIS), tl.sum(d * d, axis=STEP_AXIS)


@triton.jit
def _first_sums(x_ptr, area, row, U, BT, ACC, EVEN, WIDE, WHOLE):
    """The mean of each lane's first rows, and the sums of their distances from it."""
    columns, live, end, C = area
    x = load_tile(x_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, False).to(ACC)
    if WHOLE:
        mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / U)
    else:
        there = (tiles.tile_rows(row, U, BT) < end)[:, :, None]
        count = tl.maximum(tiles.lane_counts(tl.minimum(end - row, U * BT), BT, ACC), 1.0)
        mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / count
    a, b = _lane_sums(x, mean, row, end, U, BT, WHOLE)
    return mean, a, b


@triton.jit
def item_moments(x_ptr, area, start, U, BT, STAGES, ACC, EVEN, WIDE):
    """Each column's mean, and sum of squared distances from it, over the rows from `start` on.

    Each lane sums distances from the mean of its first U rows, and their squares. That mean is
    within sqrt(rows / U) standard deviations of the lane's mean, so hardly anything cancels in m2.
    """
    columns, live, end, C = area
    R: tl.constexpr = U * BT
    if start + R <= end:
        shift, a, b = _first_sums(x_ptr, area, start, U, BT, ACC, EVEN, WIDE, True)
    else:
        shift, a, b = _first_sums(x_ptr, area, start, U, BT, ACC, EVEN, WIDE, False)
    whole = (end - start) // R
    for tile in tl.range(1, whole, num_stages=STAGES):
        row = start + tile * R
        x = load_tile(x_ptr, area, row, U, BT, EVEN, True, WIDE, False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, U, BT, True)
        a += more_a
        b += more_b
    row = start + whole * R
    if (row < end) & (whole > 0):
        x = load_tile(x_ptr, area, row, U, BT, EVEN, False, WIDE, False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, U, BT, False)
        a += more_a
        b += more_b
    counts = tiles.lane_counts(end - start, BT, ACC)
    mean = a / tl.maximum(counts, 1.0)
    m2 = tl.maximum(b - a * mean, 0.0)
    return tiles.column_totals(shift + mean, m2, counts, (end - start).to(ACC))


@triton.jit
def _norm(mean, rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS):
    """Each column's mean, scale and bias: the norm is (x - mean) * scale + bias."""
    weight = load_vector(weight_ptr, channels, live, 1.0, ACC, WEIGHT)
    bias = load_vector(bias_ptr, channels, live, 0.0, ACC, BIAS)
    return mean, weight * rstd * scalar(root, ACC), bias


@triton.jit
def _normalise(x_ptr, y_ptr, before, area, row, norm, U, BT, ACC, ACTIVATION, EVEN, WHOLE, WIDE):
    """Write a tile of y. WHOLE: all its rows exist."""
    mean, scale, bias = norm
    x_ptr += before
    y_ptr += before
    x = load_tile(x_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, True)
    z = (x.to(ACC) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    y = activate(z, ACTIVATION)
    write_tile(y, y_ptr, area, row, U, BT, EVEN, WHOLE, WIDE)


@triton.jit
def _write_item(
    x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, moments_ptr, sample, slab, area, start, S, G,
    CHANNELS, GROUPS, eps, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT, BIAS, ACTIVATION,
    EVEN, WIDE,
):  # fmt: skip
    """Write an item's rows of y, the last tile first.

    A slab's first item also saves the statistics of its groups. A group that lies in two slabs is
    saved twice, with the same bits.
    """
    columns, live, end, C = area
    groups = slab * BC // CHANNELS + tl.arange(0, GB)  # that the slab touches
    exist = groups < G
    # Merge the moments of their channels, of which `count` are merged so far.
    n = S.to(ACC)
    count = tl.full([], 0.0, ACC)
    mean = tl.zeros([GB], ACC)
    m2 = tl.zeros([GB], ACC)
    for channel in range(0, CHANNELS, CB):
        at, there = channels_of_groups(groups, exist, channel, CHANNELS, CB)
        means = tl.load(moments_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        m2s = tl.load(moments_ptr + C + at, mask=there, other=0.0, cache_modifier=".cg")
        more = tl.minimum(CHANNELS - channel, CB).to(ACC)
        chunk_mean = tl.sum(means, axis=1) / more
        spread = tl.where(there, means - chunk_mean[:, None], 0.0)
        fraction = more / (count + more)
        difference = chunk_mean - mean
        m2 += tl.sum(m2s + n * spread * spread, axis=1)
        m2 += n * difference * difference * count * fraction
        mean += difference * fraction
        count += more
    rstd = save_statistics(
        stats_ptr, sample * G + groups, exist & (groups * 0 == start), GROUPS, mean, m2,
        S.to(ACC) * CHANNELS, eps, ACC,
    )  # fmt: skip
    mean = of_columns(mean, groups, columns, CHANNELS, EACH)
    rstd = of_columns(rstd, groups, columns, CHANNELS, EACH)
    norm = _norm(mean, rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS)
    R: tl.constexpr = U * BT
    before = sample.to(tl.int64) * S * C
    whole = (end - start) // R
    if start + whole * R < end:
        row = start + whole * R
        _normalise(x_ptr, y_ptr, before, area, row, norm, U, BT, ACC, ACTIVATION, EVEN, False, WIDE)
    for tile in tl.range(0, whole, num_stages=STAGES):
        row = start + (whole - 1 - tile) * R
        _normalise(x_ptr, y_ptr, before, area, row, norm, U, BT, ACC, ACTIVATION, EVEN, True, WIDE)


@kernel
def group_norm_columns_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, G, CHANNELS, S, C_UNITS, SLABS, K, ROWS_EACH, LAG, eps, root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    CB: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr,
    SOLO: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias); stats = (mean, rstd) of all groups.

    Program t gathers item t. If SOLO, it also writes item t; otherwise it writes item t - LAG,
    counting each sample's items in reverse.
    """
    t = tl.program_id(0)
    C = C_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    moments_ptr = partial_ptr if SINGLE else after_parts(partial_ptr, UNITS, K, BC)
    if t < UNITS * K:
        sample, slab, k, start, area = item_of(t, SLABS, K, S, ROWS_EACH, C, BC, False)
        columns, live, end, C = area
        mean, m2 = item_moments(
            x_ptr + sample.to(tl.int64) * S * C, area, start, U, BT, STAGES, ACC, EVEN, WIDE
        )
        mean, m2, last = publish_part(
            mean, m2, partial_ptr, counters_ptr, sample * SLABS + slab, k, UNITS, K, S, ROWS_EACH,
            1, BC, ACC, MOMENTS=True, SINGLE=SINGLE,
        )  # fmt: skip
        own_ptr = moments_ptr + sample.to(tl.int64) * (2 * C)
        if last:
            tl.store(own_ptr + columns, mean, mask=live)
            tl.store(own_ptr + C + columns, m2, mask=live)
            if not SOLO:
                arrive(ready_flag(counters_ptr, sample, UNITS, K))
        if SOLO:
            tl.debug_barrier()  # all threads see the moments just stored
            _write_item(
                x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, own_ptr, sample, slab, area, start,
                S, G, CHANNELS, GROUPS, eps, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT,
                BIAS, ACTIVATION, EVEN, WIDE,
            )  # fmt: skip
    if not SOLO:
        if t >= LAG:
            sample, slab, k, start, area = item_of(t - LAG, SLABS, K, S, ROWS_EACH, C, BC, True)
            wait(ready_flag(counters_ptr, sample, UNITS, K), SLABS, SLABS * K)
            own_ptr = moments_ptr + sample.to(tl.int64) * (2 * C)
            _write_item(
                x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, own_ptr, sample, slab, area, start,
                S, G, CHANNELS, GROUPS, eps, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT,
                BIAS, ACTIVATION, EVEN, WIDE,
            )  # fmt: skip


@triton.jit
def _gradient(
    dy_ptr, x_ptr, area, row, norm, U, BT, ACC, ACTIVATION, EVEN, WHOLE, WIDE, LAST
):  # fmt: skip
    """Load a tile; compute dz, the gradient of the activation's input, and x - mean."""
    mean, scale, bias = norm
    dy = load_tile(dy_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, LAST)
    x = load_tile(x_ptr, area, row, U, BT, EVEN, WHOLE, WIDE, LAST)
    centred = x.to(ACC) - mean[None, None, :]
    dz = gradient_before(dy, centred, scale[None, None, :], bias[None, None, :], ACC, ACTIVATION)
    return dz, centred


@triton.jit
def _write_dx(
    dy_ptr, x_ptr, dx_ptr, before, area, row, norm, constant, slope, U, BT, ACC, ACTIVATION, EVEN,
    WHOLE, WIDE,
):  # fmt: skip
    """Write a tile of dx."""
    mean, scale, bias = norm
    dy_ptr += before
    x_ptr += before
    dx_ptr += before
    dz, centred = _gradient(
        dy_ptr, x_ptr, area, row, norm, U, BT, ACC, ACTIVATION, EVEN, WHOLE, WIDE, True
    )
    dx = dz * scale[None, None, :] - (centred * slope[None, None, :] + constant[None, None, :])
    write_tile(dx, dx_ptr, area, row, U, BT, EVEN, WHOLE, WIDE)


@triton.jit
def _write_item_dx(
    dy_ptr, x_ptr, dx_ptr, weight_ptr, sums_ptr, slab, before, area, start, S, G, CHANNELS, norm,
    rstd, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT, ACTIVATION, EVEN, WIDE,
):  # fmt: skip
    """Write an item's rows of dx from the sums of its sample's channels, the last tile first."""
    columns, live, end, C = area
    groups = slab * BC // CHANNELS + tl.arange(0, GB)
    exist = groups < G
    # The means of g and of g * xhat over each group, where g = dz * weight.
    g = tl.zeros([GB], ACC)
    gx = tl.zeros([GB], ACC)
    for channel in range(0, CHANNELS, CB):
        at, there = channels_of_groups(groups, exist, channel, CHANNELS, CB)
        weight = load_vector(weight_ptr, at, there, 1.0, ACC, WEIGHT)
        dz_xhat = tl.load(sums_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        dz = tl.load(sums_ptr + C + at, mask=there, other=0.0, cache_modifier=".cg")
        g += tl.sum(dz * weight, axis=1)
        gx += tl.sum(dz_xhat * weight, axis=1)
    n = (S * CHANNELS).to(ACC)
    mean_g = g / n
    mean_gx = gx / n
    rstd_root = rstd * scalar(root, ACC)
    constant = rstd_root * of_columns(mean_g, groups, columns, CHANNELS, EACH)
    slope = rstd_root * rstd * of_columns(mean_gx, groups, columns, CHANNELS, EACH)
    R: tl.constexpr = U * BT
    whole = (end - start) // R
    if start + whole * R < end:
        _write_dx(
            dy_ptr, x_ptr, dx_ptr, before, area, start + whole * R, norm, constant, slope, U, BT,
            ACC, ACTIVATION, EVEN, False, WIDE,
        )  # fmt: skip
    for tile in tl.range(0, whole, num_stages=STAGES):
        row = start + (whole - 1 - tile) * R
        _write_dx(
            dy_ptr, x_ptr, dx_ptr, before, area, row, norm, constant, slope, U, BT, ACC, ACTIVATION,
            EVEN, True, WIDE,
        )  # fmt: skip


@kernel
def group_norm_columns_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    counters_ptr,
    N, G, CHANNELS, S, C_UNITS, SLABS, K, ROWS_EACH, LAG, root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    CB: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, SINGLE: tl.constexpr,
    SOLO: tl.constexpr, FINISH: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DX: tl.constexpr, DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of `group_norm_columns_forward` that DX, DWEIGHT and DBIAS ask for.

    `partial` has two rows of C sums for each sample: the sums of dz * xhat, and the sums of dz.
    """
    t = tl.program_id(0)
    C = C_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    R: tl.constexpr = U * BT
    sums_ptr = partial_ptr if SINGLE else after_parts(partial_ptr, UNITS, K, BC)
    done_ptr = ready_flag(counters_ptr, UNITS, UNITS, K)
    if t < UNITS * K:
        sample, slab, k, start, area = item_of(t, SLABS, K, S, ROWS_EACH, C, BC, False)
        columns, live, end, C = area
        groups = sample * G + columns // CHANNELS
        mean, rstd = load_both(stats_ptr, groups, live, GROUPS)
        norm = _norm(mean, rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS)
        before = sample.to(tl.int64) * S * C
        sum_dz = tl.zeros([BT, BC], ACC)
        sum_dz_centred = tl.zeros([BT, BC], ACC)
        whole = (end - start) // R
        for tile in tl.range(0, whole, num_stages=STAGES):
            dz, centred = _gradient(
                dy_ptr + before, x_ptr + before, area, start + tile * R, norm, U, BT, ACC,
                ACTIVATION, EVEN, True, WIDE, not DX,
            )  # fmt: skip
            sum_dz += tl.sum(dz, axis=STEP_AXIS)
            sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
        if start + whole * R < end:
            dz, centred = _gradient(
                dy_ptr + before, x_ptr + before, area, start + whole * R, norm, U, BT, ACC,
                ACTIVATION, EVEN, False, WIDE, not DX,
            )  # fmt: skip
            sum_dz += tl.sum(dz, axis=STEP_AXIS)
            sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
        dz, dz_xhat, last = publish_part(
            tl.sum(sum_dz, axis=0), tl.sum(sum_dz_centred, axis=0) * rstd, partial_ptr,
            counters_ptr, sample * SLABS + slab, k, UNITS, K, S, ROWS_EACH, 1, BC, ACC,
            MOMENTS=False, SINGLE=SINGLE,
        )  # fmt: skip
        own_ptr = sums_ptr + sample.to(tl.int64) * (2 * C)
        if last:
            tl.store(own_ptr + columns, dz_xhat, mask=live)
            tl.store(own_ptr + C + columns, dz, mask=live)
            if DX and not SOLO:
                arrive(ready_flag(counters_ptr, sample, UNITS, K))
            if DWEIGHT or DBIAS:
                arrive(done_ptr)
        if SOLO and DX:
            tl.debug_barrier()  # all threads see the sums just stored
            _write_item_dx(
                dy_ptr, x_ptr, dx_ptr, weight_ptr, own_ptr, slab, before, area, start, S, G,
                CHANNELS, norm, rstd, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT,
                ACTIVATION, EVEN, WIDE,
            )  # fmt: skip
    u = t - LAG
    if DX and not SOLO:
        if (u >= 0) & (u < UNITS * K):
            sample, slab, k, start, area = item_of(u, SLABS, K, S, ROWS_EACH, C, BC, True)
            columns, live, end, C = area
            groups = sample * G + columns // CHANNELS
            mean, rstd = load_both(stats_ptr, groups, live, GROUPS)
            norm = _norm(mean, rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS)
            wait(ready_flag(counters_ptr, sample, UNITS, K), SLABS, SLABS * K)
            own_ptr = sums_ptr + sample.to(tl.int64) * (2 * C)
            before = sample.to(tl.int64) * S * C
            _write_item_dx(
                dy_ptr, x_ptr, dx_ptr, weight_ptr, own_ptr, slab, before, area, start, S, G,
                CHANNELS, norm, rstd, root, U, BT, BC, GB, CB, STAGES, EACH, ACC, WEIGHT,
                ACTIVATION, EVEN, WIDE,
            )  # fmt: skip
    if DWEIGHT or DBIAS:
        f = u - UNITS * K
        if f >= 0:
            wait(done_ptr, UNITS, tl.cdiv(C, FINISH))
            finish_gradients(
                dweight_ptr, dbias_ptr, dbias_ptr, sums_ptr, f, C, N, root, FINISH, ACC,
                DWEIGHT, DBIAS, False, SUMS=2, ROOT=True,
            )  # fmt: skip
