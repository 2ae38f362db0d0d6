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
from normplug._kernels.group_norm.shared import (
    gradient_before,
    load_vector,
    save_statistics,
)
from normplug._kernels.merging import (
    after_parts,
    finish_gradients,
    publish_part,
    ready_flag,
)
from normplug._kernels.primitives import kernel, load_both, scalar
from normplug._kernels.tiles import STEP_AXIS, Area, load_tile, write_tile
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
    return sample, slab, k, start, Area(columns, columns < C, end, C)


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
def _lane_sums(x, shift, row, end, T, WHOLE):
    """Each lane's sums of distances from `shift`, and of their squares."""
    d = x - tl.expand_dims(shift, STEP_AXIS)
    if not WHOLE:
        there = tiles.tile_rows(row, T.u, T.bt) < end
        d = tl.where(there[:, :, None], d, 0.0)
    return tl.sum(d, axis=STEP_AXIS), tl.sum(d * d, axis=STEP_AXIS)


@triton.jit
def _first_sums(x_ptr, area, row, T, ACC, WHOLE):
    """The mean of each lane's first rows, and the sums of their distances from it."""
    end = area.end
    x = load_tile(x_ptr, area, row, T, WHOLE, LAST=False).to(ACC)
    if WHOLE:
        mean = tl.sum(x, axis=STEP_AXIS) * (1.0 / T.u)
    else:
        there = (tiles.tile_rows(row, T.u, T.bt) < end)[:, :, None]
        count = tl.maximum(
            tiles.lane_counts(tl.minimum(end - row, T.u * T.bt), T.bt, ACC), 1.0
        )
        mean = tl.sum(tl.where(there, x, 0.0), axis=STEP_AXIS) / count
    a, b = _lane_sums(x, mean, row, end, T, WHOLE)
    return mean, a, b


@triton.jit
def item_moments(x_ptr, area, start, T, ACC):
    """Each column's mean, and sum of squared distances from it, over the rows from `start` on.

    Each lane sums distances from the mean of its first U rows, and their squares. That mean is
    within sqrt(rows / U) standard deviations of the lane's mean, so m2 has little cancellation.
    """
    end = area.end
    R: tl.constexpr = T.u * T.bt
    if start + R <= end:
        shift, a, b = _first_sums(x_ptr, area, start, T, ACC, WHOLE=True)
    else:
        shift, a, b = _first_sums(x_ptr, area, start, T, ACC, WHOLE=False)
    whole = (end - start) // R
    for tile in tl.range(1, whole, num_stages=T.stages):
        row = start + tile * R
        x = load_tile(x_ptr, area, row, T, WHOLE=True, LAST=False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, T, WHOLE=True)
        a += more_a
        b += more_b
    row = start + whole * R
    if (row < end) & (whole > 0):
        x = load_tile(x_ptr, area, row, T, WHOLE=False, LAST=False).to(ACC)
        more_a, more_b = _lane_sums(x, shift, row, end, T, WHOLE=False)
        a += more_a
        b += more_b
    counts = tiles.lane_counts(end - start, T.bt, ACC)
    mean = a / tl.maximum(counts, 1.0)
    m2 = tl.maximum(b - a * mean, 0.0)
    return tiles.column_totals(shift + mean, m2, counts, (end - start).to(ACC))


@triton.jit
def _norm(mean, rstd, vectors, channels, live, F):
    """Each column's mean, scale and bias: the norm is (x - mean) * scale + bias."""
    weight_ptr, bias_ptr, root = vectors
    weight = load_vector(weight_ptr, channels, live, 1.0, F.acc, F.weight)
    bias = load_vector(bias_ptr, channels, live, 0.0, F.acc, F.bias)
    return mean, weight * rstd * scalar(root, F.acc), bias


@triton.jit
def _normalise(tensors, before, area, row, norm, T, F, WHOLE):
    """Write a tile of y. WHOLE: all its rows exist."""
    x_ptr, y_ptr = tensors
    mean, scale, bias = norm
    x_ptr += before
    y_ptr += before
    x = load_tile(x_ptr, area, row, T, WHOLE, LAST=True)
    z = (x.to(F.acc) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    y = activate(z, F.activation)
    write_tile(y, y_ptr, area, row, T, WHOLE)


@triton.jit
def _write_item(tensors, vectors, stats, moments_ptr, item, sizes, eps, T, F):
    """Write an item's rows of y, the last tile first.

    A slab's first item also saves the statistics of its groups. A group that lies in two slabs is
    saved twice, with the same bits.

    tensors: the addresses of x and y. vectors: of weight and bias, and root. stats: the address of
    the statistics, and how many groups all samples have. moments_ptr: the address of the moments of
    the sample's channels. item: from `item_of`. sizes: rows of a sample, groups, and channels of a
    group.
    """
    ACC: tl.constexpr = F.acc
    stats_ptr, GROUPS = stats
    sample, slab, _, start, area = item
    S, G, CHANNELS = sizes
    columns, live, end, C = area
    groups = slab * T.bc // CHANNELS + tl.arange(0, T.gb)  # that the slab touches
    exist = groups < G
    # Merge the moments of their channels, of which `count` are merged so far.
    n = S.to(ACC)
    count = tl.full([], 0.0, ACC)
    mean = tl.zeros([T.gb], ACC)
    m2 = tl.zeros([T.gb], ACC)
    for channel in range(0, CHANNELS, T.cb):
        at, there = channels_of_groups(groups, exist, channel, CHANNELS, T.cb)
        means = tl.load(moments_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        m2s = tl.load(moments_ptr + C + at, mask=there, other=0.0, cache_modifier=".cg")
        more = tl.minimum(CHANNELS - channel, T.cb).to(ACC)
        chunk_mean = tl.sum(means, axis=1) / more
        spread = tl.where(there, means - chunk_mean[:, None], 0.0)
        fraction = more / (count + more)
        difference = chunk_mean - mean
        m2 += tl.sum(m2s + n * spread * spread, axis=1)
        m2 += n * difference * difference * count * fraction
        mean += difference * fraction
        count += more
    places = sample * G + groups
    first = exist & (groups * 0 == start)  # of the sample's items
    values = S.to(ACC) * CHANNELS
    rstd = save_statistics(stats_ptr, places, first, GROUPS, mean, m2, values, eps, ACC)
    mean = of_columns(mean, groups, columns, CHANNELS, T.each)
    rstd = of_columns(rstd, groups, columns, CHANNELS, T.each)
    norm = _norm(mean, rstd, vectors, columns, live, F)
    R: tl.constexpr = T.u * T.bt
    before = sample.to(tl.int64) * S * C
    whole = (end - start) // R
    if start + whole * R < end:
        row = start + whole * R
        _normalise(tensors, before, area, row, norm, T, F, WHOLE=False)
    for tile in tl.range(0, whole, num_stages=T.stages):
        row = start + (whole - 1 - tile) * R
        _normalise(tensors, before, area, row, norm, T, F, WHOLE=True)


@kernel
def group_norm_columns_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, G, CHANNELS, S, C_UNITS, SLABS, K, ROWS_EACH, LAG, eps, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias); stats = (mean, rstd) of all groups.

    Program t gathers item t. If T.solo, it also writes item t; otherwise it writes item t - LAG,
    counting each sample's items in reverse.
    """
    t = tl.program_id(0)
    C = C_UNITS * T.unit
    GROUPS = N * G
    UNITS = N * SLABS
    tensors = x_ptr, y_ptr
    vectors = weight_ptr, bias_ptr, root
    stats = stats_ptr, GROUPS
    sizes = S, G, CHANNELS
    moments_ptr = partial_ptr if T.single else after_parts(partial_ptr, UNITS, K, T.bc)
    if t < UNITS * K:
        item = item_of(t, SLABS, K, S, ROWS_EACH, C, T.bc, REVERSE=False)
        sample, slab, k, start, area = item
        columns, live, end, C = area
        mean, m2 = item_moments(
            x_ptr + sample.to(tl.int64) * S * C, area, start, T, F.acc
        )
        scratch = partial_ptr, counters_ptr
        unit = sample * SLABS + slab
        unit_sizes = UNITS, K, S, ROWS_EACH, 1
        mean, m2, last = publish_part(
            mean, m2, scratch, unit, k, unit_sizes, T.bc, F.acc, T.single, MOMENTS=True
        )
        own_ptr = moments_ptr + sample.to(tl.int64) * (2 * C)
        if last:
            tl.store(own_ptr + columns, mean, mask=live)
            tl.store(own_ptr + C + columns, m2, mask=live)
            if not T.solo:
                arrive(ready_flag(counters_ptr, sample, UNITS, K))
        if T.solo:
            tl.debug_barrier()  # all threads see the moments just stored
            _write_item(tensors, vectors, stats, own_ptr, item, sizes, eps, T, F)
    if not T.solo:
        if t >= LAG:
            item = item_of(t - LAG, SLABS, K, S, ROWS_EACH, C, T.bc, REVERSE=True)
            sample, slab, k, start, area = item
            wait(ready_flag(counters_ptr, sample, UNITS, K), SLABS, SLABS * K)
            own_ptr = moments_ptr + sample.to(tl.int64) * (2 * C)
            _write_item(tensors, vectors, stats, own_ptr, item, sizes, eps, T, F)


@triton.jit
def _gradient(tensors, area, row, norm, T, F, WHOLE, LAST):
    """Load a tile; compute dz, the gradient of the activation's input, and x - mean."""
    dy_ptr, x_ptr = tensors
    mean, scale, bias = norm
    dy = load_tile(dy_ptr, area, row, T, WHOLE, LAST)
    x = load_tile(x_ptr, area, row, T, WHOLE, LAST)
    centred = x.to(F.acc) - mean[None, None, :]
    dz = gradient_before(dy, centred, scale[None, None, :], bias[None, None, :], F)
    return dz, centred


@triton.jit
def _write_dx(tensors, before, area, row, norm, terms, T, F, WHOLE):
    """Write a tile of dx. terms: each column's constant, and the slope of dx in x - mean."""
    dy_ptr, x_ptr, dx_ptr = tensors
    mean, scale, bias = norm
    constant, slope = terms
    dy_ptr += before
    x_ptr += before
    dx_ptr += before
    dz, centred = _gradient((dy_ptr, x_ptr), area, row, norm, T, F, WHOLE, LAST=True)
    dx = dz * scale[None, None, :] - (
        centred * slope[None, None, :] + constant[None, None, :]
    )
    write_tile(dx, dx_ptr, area, row, T, WHOLE)


@triton.jit
def _write_item_dx(tensors, vectors, sums_ptr, before, item, sizes, norm, rstd, T, F):
    """Write an item's rows of dx from the sums of its sample's channels, the last tile first.

    tensors: the addresses of dy, x and dx. before: how many values come before the sample. norm,
    rstd: of the item's columns. vectors, item, sizes: as in `_write_item`.
    """
    ACC: tl.constexpr = F.acc
    weight_ptr, _, root = vectors
    _, slab, _, start, area = item
    S, G, CHANNELS = sizes
    columns, live, end, C = area
    groups = slab * T.bc // CHANNELS + tl.arange(0, T.gb)
    exist = groups < G
    # The means of g and of g * xhat over each group, where g = dz * weight.
    g = tl.zeros([T.gb], ACC)
    gx = tl.zeros([T.gb], ACC)
    for channel in range(0, CHANNELS, T.cb):
        at, there = channels_of_groups(groups, exist, channel, CHANNELS, T.cb)
        weight = load_vector(weight_ptr, at, there, 1.0, ACC, F.weight)
        dz_xhat = tl.load(sums_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
        dz = tl.load(sums_ptr + C + at, mask=there, other=0.0, cache_modifier=".cg")
        g += tl.sum(dz * weight, axis=1)
        gx += tl.sum(dz_xhat * weight, axis=1)
    n = (S * CHANNELS).to(ACC)
    mean_g = g / n
    mean_gx = gx / n
    rstd_root = rstd * scalar(root, ACC)
    constant = rstd_root * of_columns(mean_g, groups, columns, CHANNELS, T.each)
    slope = rstd_root * rstd * of_columns(mean_gx, groups, columns, CHANNELS, T.each)
    terms = constant, slope
    R: tl.constexpr = T.u * T.bt
    whole = (end - start) // R
    if start + whole * R < end:
        _write_dx(
            tensors, before, area, start + whole * R, norm, terms, T, F, WHOLE=False
        )
    for tile in tl.range(0, whole, num_stages=T.stages):
        row = start + (whole - 1 - tile) * R
        _write_dx(tensors, before, area, row, norm, terms, T, F, WHOLE=True)


@kernel
def group_norm_columns_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    counters_ptr,
    N, G, CHANNELS, S, C_UNITS, SLABS, K, ROWS_EACH, LAG, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients of `group_norm_columns_forward`.

    `partial` has two rows of C sums for each sample: the sums of dz * xhat, and the sums of dz.
    """
    BC: tl.constexpr = T.bc
    DX: tl.constexpr = F.dx
    t = tl.program_id(0)
    C = C_UNITS * T.unit
    GROUPS = N * G
    UNITS = N * SLABS
    R: tl.constexpr = T.u * T.bt
    tensors = dy_ptr, x_ptr, dx_ptr
    vectors = weight_ptr, bias_ptr, root
    sizes = S, G, CHANNELS
    sums_ptr = partial_ptr if T.single else after_parts(partial_ptr, UNITS, K, BC)
    done_ptr = ready_flag(counters_ptr, UNITS, UNITS, K)
    if t < UNITS * K:
        item = item_of(t, SLABS, K, S, ROWS_EACH, C, BC, REVERSE=False)
        sample, slab, k, start, area = item
        columns, live, end, C = area
        groups = sample * G + columns // CHANNELS
        mean, rstd = load_both(stats_ptr, groups, live, GROUPS)
        norm = _norm(mean, rstd, vectors, columns, live, F)
        before = sample.to(tl.int64) * S * C
        sum_dz = tl.zeros([T.bt, BC], F.acc)
        sum_dz_centred = tl.zeros([T.bt, BC], F.acc)
        whole = (end - start) // R
        for tile in tl.range(0, whole, num_stages=T.stages):
            inputs = dy_ptr + before, x_ptr + before
            row = start + tile * R
            dz, centred = _gradient(
                inputs, area, row, norm, T, F, WHOLE=True, LAST=not DX
            )
            sum_dz += tl.sum(dz, axis=STEP_AXIS)
            sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
        if start + whole * R < end:
            inputs = dy_ptr + before, x_ptr + before
            row = start + whole * R
            dz, centred = _gradient(
                inputs, area, row, norm, T, F, WHOLE=False, LAST=not DX
            )
            sum_dz += tl.sum(dz, axis=STEP_AXIS)
            sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
        dz = tl.sum(sum_dz, axis=0)
        dz_xhat = tl.sum(sum_dz_centred, axis=0) * rstd
        scratch = partial_ptr, counters_ptr
        unit = sample * SLABS + slab
        unit_sizes = UNITS, K, S, ROWS_EACH, 1
        dz, dz_xhat, last = publish_part(
            dz, dz_xhat, scratch, unit, k, unit_sizes, BC, F.acc, T.single, MOMENTS=False
        )
        own_ptr = sums_ptr + sample.to(tl.int64) * (2 * C)
        if last:
            tl.store(own_ptr + columns, dz_xhat, mask=live)
            tl.store(own_ptr + C + columns, dz, mask=live)
            if DX and not T.solo:
                arrive(ready_flag(counters_ptr, sample, UNITS, K))
            if F.dweight or F.dbias:
                arrive(done_ptr)
        if T.solo and DX:
            tl.debug_barrier()  # all threads see the sums just stored
            _write_item_dx(
                tensors, vectors, own_ptr, before, item, sizes, norm, rstd, T, F
            )
    u = t - LAG
    if DX and not T.solo:
        if (u >= 0) & (u < UNITS * K):
            item = item_of(u, SLABS, K, S, ROWS_EACH, C, BC, REVERSE=True)
            sample, slab, k, start, area = item
            columns, live, end, C = area
            groups = sample * G + columns // CHANNELS
            mean, rstd = load_both(stats_ptr, groups, live, GROUPS)
            norm = _norm(mean, rstd, vectors, columns, live, F)
            wait(ready_flag(counters_ptr, sample, UNITS, K), SLABS, SLABS * K)
            own_ptr = sums_ptr + sample.to(tl.int64) * (2 * C)
            before = sample.to(tl.int64) * S * C
            _write_item_dx(
                tensors, vectors, own_ptr, before, item, sizes, norm, rstd, T, F
            )
    if F.dweight or F.dbias:
        f = u - UNITS * K
        if f >= 0:
            wait(done_ptr, UNITS, tl.cdiv(C, T.finish))
            gradients = dweight_ptr, dbias_ptr, dbias_ptr
            parts = sums_ptr, f, C, N
            finish_gradients(gradients, parts, root, T.finish, SUMS=2, ROOT=True, F=F)
