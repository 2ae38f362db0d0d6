"""GroupNorm over channels_last (N, C, *space), where a sample is S rows of C adjacent channels.

What a unit is, and how programs wait for each other, `shared` explains. Here a unit is a slab of a
sample: whole groups, LIVE adjacent channels, padded to BC columns. A tile is U * BT rows of a slab:
BT lanes, each of which takes every BT-th row, in U steps (see `primitives`). An item of a slab is
ROWS_EACH rows, one or more tiles, that a program reads one after the other. Sums over rows are
taken for each column first, and then over the columns of each group.

The items of ABREAST slabs of a sample are taken in turn, all of them or one: rows of several slabs
are read together as they lie in memory, and one slab at a time stays in the cache. Where the cache
holds the whole tensor, each program keeps to its OWN item. It reads the item down, waits for the
unit's other programs, and goes back up to write; all programs run at once (a cooperative launch).
"""

import triton
import triton.language as tl

from normplug._kernels.activation import activate
from normplug._kernels.batch_norm.slabs import (
    after_parts,
    column_moments,
    load_tile,
    publish_part,
    ready_flag,
    slab_columns,
    write_tile,
)
from normplug._kernels.group_norm.shared import (
    finish_sums,
    gradient_before,
    load_statistics,
    load_vector,
    publish_sums,
    save_statistics,
)
from normplug._kernels.primitives import SCALARS, STEP_AXIS, as_stored, scalar
from normplug._kernels.waiting import arrive, wait

# The arguments that `shared` does not explain.
# Sizes.
#   S, WIDTH_UNITS       rows of a sample; C / UNIT
#   TOGETHER, LIVE_UNITS groups of a slab; its channels / UNIT
#   SLABS, ABREAST       slabs of a sample; how many are taken in turn
#   ROWS_EACH            rows of an item
# Constants.
#   U, BT, BC            a tile: U steps of BT rows, of BC columns
#   GB                   groups of a slab, padded to a power of two
#   STAGES               tiles under way at once in a loop over tiles
#   OWN                  a program writes the item that it gathered, and none that lies LAG before
#   SOLO                 such an item is a whole unit
#   EXACT                the columns are GB times CHANNELS, which is a power of two
_SIZES = [
    "N", "G", "CHANNELS", "S", "WIDTH_UNITS", "TOGETHER", "LIVE_UNITS", "SLABS", "ABREAST", "K",
    "ROWS_EACH", "LAG",
]  # fmt: skip


@triton.jit
def _item(turn, SLABS, ABREAST, K, S, ROWS_EACH, REVERSE: tl.constexpr):
    """Whose turn it is: a unit, its sample and slab, its item k, and the item's rows.

    Of ABREAST units, in REVERSE the last item comes first.
    """
    lot = turn // (ABREAST * K)
    place = turn - lot * (ABREAST * K)
    if REVERSE:
        place = ABREAST * K - 1 - place
    k = place // ABREAST
    unit = lot * ABREAST + (place - k * ABREAST)
    sample = unit // SLABS
    start = k * ROWS_EACH
    return unit, sample, unit - sample * SLABS, k, start, tl.minimum(start + ROWS_EACH, S)


@triton.jit
def _slab_groups(sample, slab, G, TOGETHER, GB: tl.constexpr):
    """A slab's groups, counted over all samples, and which of them exist."""
    places = tl.arange(0, GB)
    groups = slab * TOGETHER + places
    return sample * G + groups, (places < TOGETHER) & (groups < G)


@triton.jit
def _by_group(values, own, GB: tl.constexpr, EXACT: tl.constexpr):
    """Sums of groups from those of their columns; `own` is the group of each, or -1."""
    BC: tl.constexpr = values.shape[0]
    if EXACT:
        grouped = tl.reshape(values, [GB, BC // GB])
    else:
        mine = own[None, :] == tl.arange(0, GB)[:, None]
        grouped = tl.where(mine, values[None, :], 0.0)
    return tl.sum(grouped, axis=1)


@triton.jit
def _moments_by_group(mean, m2, rows, own, CHANNELS, GB: tl.constexpr, EXACT: tl.constexpr):
    """Moments of groups from those of their columns, each over so many rows."""
    BC: tl.constexpr = mean.shape[0]
    average = _by_group(mean, own, GB, EXACT) / CHANNELS
    if EXACT:
        spread = tl.reshape(mean, [GB, BC // GB]) - average[:, None]
        m2 = tl.reshape(m2, [GB, BC // GB]) + rows * spread * spread
    else:
        mine = own[None, :] == tl.arange(0, GB)[:, None]
        spread = mean[None, :] - average[:, None]
        m2 = tl.where(mine, m2[None, :] + rows * spread * spread, 0.0)
    return average, tl.sum(m2, axis=1)


@triton.jit
def _affine(
    rstd, weight_ptr, bias_ptr, channels, live, root, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The weight of each column, what x - mean is multiplied by, and what is added."""
    weight = load_vector(weight_ptr, channels, live, 1.0, ACC, WEIGHT)
    bias = load_vector(bias_ptr, channels, live, 0.0, ACC, BIAS)
    return weight, weight * rstd * scalar(root, ACC), bias


@triton.jit
def _normalise(
    x_ptr, y_ptr, row, end, columns, live, C, mean, scale, bias,
    U: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of y. WHOLE: all its rows exist."""
    x = load_tile(x_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE, True)
    z = (x.to(ACC) - mean[None, None, :]) * scale[None, None, :] + bias[None, None, :]
    y = as_stored(activate(z, ACTIVATION), y_ptr)
    write_tile(y, y_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE)


@triton.jit
def _write_item(
    x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, sample, start, end, S, C, G, columns,
    live, group, GROUPS, root,
    U: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Write an item's rows of y, the last tile first."""
    mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
    _, scale, bias = _affine(rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS)
    R: tl.constexpr = U * BT
    before = sample.to(tl.int64) * S * C
    whole = (end - start) // R
    if start + whole * R < end:
        _normalise(
            x_ptr + before, y_ptr + before, start + whole * R, end, columns, live, C, mean, scale,
            bias, U, BT, ACC, ACTIVATION, EVEN, False, WIDE,
        )  # fmt: skip
    for tile in tl.range(0, whole, num_stages=STAGES):
        row = start + (whole - 1 - tile) * R
        _normalise(
            x_ptr + before, y_ptr + before, row, end, columns, live, C, mean, scale, bias, U, BT,
            ACC, ACTIVATION, EVEN, True, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*_SIZES, *SCALARS])
def group_norm_columns_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, G, CHANNELS, S, WIDTH_UNITS, TOGETHER, LIVE_UNITS, SLABS, ABREAST, K, ROWS_EACH, LAG,
    eps, root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, OWN: tl.constexpr, SOLO: tl.constexpr,
    ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias); stats = (mean, rstd) of all groups.

    Program t gathers item t, and writes item t - LAG, or its OWN.
    """
    t = tl.program_id(0)
    C = WIDTH_UNITS * UNIT
    LIVE = LIVE_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    if t < UNITS * K:
        unit, sample, slab, k, start, end = _item(t, SLABS, ABREAST, K, S, ROWS_EACH, False)
        columns, live, own, group = slab_columns(slab, LIVE, C, CHANNELS, TOGETHER, BC, True)
        mean, m2 = column_moments(
            x_ptr + sample.to(tl.int64) * S * C, columns, live, start, end, C, U, BT, BC, STAGES,
            ACC, EVEN, WIDE,
        )  # fmt: skip
        rows = (end - start).to(ACC)
        mean, m2 = _moments_by_group(mean, m2, rows, own, CHANNELS, GB, EXACT)
        mean, m2, last = publish_part(
            mean, m2, partial_ptr, counters_ptr, unit, k, UNITS, K, S, ROWS_EACH, CHANNELS, GB, ACC,
            True, SOLO,
        )  # fmt: skip
        if last:
            groups, there = _slab_groups(sample, slab, G, TOGETHER, GB)
            n = (S * CHANNELS).to(ACC)
            save_statistics(stats_ptr, groups, there, GROUPS, mean, m2, n, eps, ACC)
            if not SOLO:
                arrive(ready_flag(counters_ptr, unit, UNITS, K))
        if OWN:
            if SOLO:
                tl.debug_barrier()
            else:
                wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
            _write_item(
                x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, sample, start, end, S, C, G,
                columns, live, group, GROUPS, root, U, BT, STAGES, ACC, WEIGHT, BIAS, ACTIVATION,
                EVEN, WIDE,
            )  # fmt: skip
    if not OWN:
        if t >= LAG:
            unit, sample, slab, k, start, end = _item(
                t - LAG, SLABS, ABREAST, K, S, ROWS_EACH, True
            )
            columns, live, own, group = slab_columns(slab, LIVE, C, CHANNELS, TOGETHER, BC, True)
            wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
            _write_item(
                x_ptr, y_ptr, weight_ptr, bias_ptr, stats_ptr, sample, start, end, S, C, G,
                columns, live, group, GROUPS, root, U, BT, STAGES, ACC, WEIGHT, BIAS, ACTIVATION,
                EVEN, WIDE,
            )  # fmt: skip


@triton.jit
def _save_means(
    means_ptr, unit, sum_dz, sum_dz_xhat, weight, n, own, GB: tl.constexpr, EXACT: tl.constexpr
):
    """Save the means of g and of g * xhat over each group of a slab, where g = dz * weight."""
    unit_ptr = means_ptr + unit * (2 * GB) + tl.arange(0, GB)
    tl.store(unit_ptr, _by_group(sum_dz * weight, own, GB, EXACT) / n)
    tl.store(unit_ptr + GB, _by_group(sum_dz_xhat * weight, own, GB, EXACT) / n)


@triton.jit
def _gradient(
    dy_ptr, x_ptr, row, end, columns, live, C, mean, scale, bias,
    U: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """A tile's gradient before the activation, and its distances from the mean."""
    dy = load_tile(dy_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE, LAST)
    x = load_tile(x_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE, LAST)
    centred = x.to(ACC) - mean[None, None, :]
    dz = gradient_before(dy, centred, scale[None, None, :], bias[None, None, :], ACC, ACTIVATION)
    return dz, centred


@triton.jit
def _add_tile(
    sum_dz, sum_dz_centred, dy_ptr, x_ptr, row, end, columns, live, C, mean, scale, bias,
    U: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add a tile to the sums of each lane."""
    dz, centred = _gradient(
        dy_ptr, x_ptr, row, end, columns, live, C, mean, scale, bias, U, BT, ACC, ACTIVATION, EVEN,
        WHOLE, WIDE, LAST,
    )  # fmt: skip
    sum_dz += tl.sum(dz, axis=STEP_AXIS)
    sum_dz_centred += tl.sum(dz * centred, axis=STEP_AXIS)
    return sum_dz, sum_dz_centred


@triton.jit
def _write_dx(
    dy_ptr, x_ptr, dx_ptr, row, end, columns, live, C, mean, scale, bias, constant, slope,
    U: tl.constexpr, BT: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write a tile of dx."""
    dz, centred = _gradient(
        dy_ptr, x_ptr, row, end, columns, live, C, mean, scale, bias, U, BT, ACC, ACTIVATION, EVEN,
        WHOLE, WIDE, True,
    )  # fmt: skip
    dx = dz * scale[None, None, :] - (centred * slope[None, None, :] + constant[None, None, :])
    write_tile(as_stored(dx, dx_ptr), dx_ptr, columns, live, row, end, C, U, BT, EVEN, WHOLE, WIDE)


@triton.jit
def _write_item_dx(
    dy_ptr, x_ptr, dx_ptr, means_ptr, unit, own, before, start, end, columns, live, C, mean, rstd,
    scale, bias, root,
    U: tl.constexpr, BT: tl.constexpr, GB: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
    ACTIVATION: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write an item's rows of dx from its groups' saved means, the last tile first."""
    unit_ptr = means_ptr + unit * (2 * GB) + own
    mean_g = tl.load(unit_ptr, mask=live, other=0.0, cache_modifier=".cg")
    mean_gx = tl.load(unit_ptr + GB, mask=live, other=0.0, cache_modifier=".cg")
    rstd_root = rstd * scalar(root, ACC)
    constant = rstd_root * mean_g
    slope = rstd_root * rstd * mean_gx
    R: tl.constexpr = U * BT
    whole = (end - start) // R
    if start + whole * R < end:
        _write_dx(
            dy_ptr + before, x_ptr + before, dx_ptr + before, start + whole * R, end, columns, live,
            C, mean, scale, bias, constant, slope, U, BT, ACC, ACTIVATION, EVEN, False, WIDE,
        )  # fmt: skip
    for tile in tl.range(0, whole, num_stages=STAGES):
        row = start + (whole - 1 - tile) * R
        _write_dx(
            dy_ptr + before, x_ptr + before, dx_ptr + before, row, end, columns, live, C, mean,
            scale, bias, constant, slope, U, BT, ACC, ACTIVATION, EVEN, True, WIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*_SIZES, *SCALARS])
def group_norm_columns_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    counters_ptr,
    N, G, CHANNELS, S, WIDTH_UNITS, TOGETHER, LIVE_UNITS, SLABS, ABREAST, K, ROWS_EACH, LAG,
    root,
    UNIT: tl.constexpr, U: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    STAGES: tl.constexpr, EXACT: tl.constexpr, OWN: tl.constexpr, SOLO: tl.constexpr,
    FINISH: tl.constexpr, PARTS: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, DX: tl.constexpr, DWEIGHT: tl.constexpr,
    DBIAS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of `group_norm_columns_forward` that DX, DWEIGHT and DBIAS ask for."""
    t = tl.program_id(0)
    C = WIDTH_UNITS * UNIT
    LIVE = LIVE_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    SUMS: tl.constexpr = DWEIGHT or DBIAS
    R: tl.constexpr = U * BT
    means_ptr = after_parts(partial_ptr, UNITS, K, BC)
    sums_ptr = means_ptr + UNITS * (2 * GB)
    done_ptr = ready_flag(counters_ptr, UNITS, UNITS, K)
    if t < UNITS * K:
        unit, sample, slab, k, start, end = _item(t, SLABS, ABREAST, K, S, ROWS_EACH, False)
        columns, live, own, group = slab_columns(slab, LIVE, C, CHANNELS, TOGETHER, BC, True)
        mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
        weight, scale, bias = _affine(
            rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS
        )
        before = sample.to(tl.int64) * S * C
        sum_dz = tl.zeros([BT, BC], ACC)
        sum_dz_centred = tl.zeros([BT, BC], ACC)
        whole = (end - start) // R
        for tile in tl.range(0, whole, num_stages=STAGES):
            sum_dz, sum_dz_centred = _add_tile(
                sum_dz, sum_dz_centred, dy_ptr + before, x_ptr + before, start + tile * R, end,
                columns, live, C, mean, scale, bias, U, BT, ACC, ACTIVATION, EVEN, True, WIDE,
                not DX,
            )  # fmt: skip
        if start + whole * R < end:
            sum_dz, sum_dz_centred = _add_tile(
                sum_dz, sum_dz_centred, dy_ptr + before, x_ptr + before, start + whole * R, end,
                columns, live, C, mean, scale, bias, U, BT, ACC, ACTIVATION, EVEN, False, WIDE,
                not DX,
            )  # fmt: skip
        dz, dz_xhat, last = publish_part(
            tl.sum(sum_dz, axis=0), tl.sum(sum_dz_centred, axis=0) * rstd, partial_ptr,
            counters_ptr, unit, k, UNITS, K, S, ROWS_EACH, 1, BC, ACC, False, SOLO,
        )  # fmt: skip
        if last:
            if DX:
                n = (S * CHANNELS).to(ACC)
                _save_means(means_ptr, unit, dz, dz_xhat, weight, n, own, GB, EXACT)
                if not SOLO:
                    arrive(ready_flag(counters_ptr, unit, UNITS, K))
            if SUMS:
                publish_sums(sums_ptr, sample, columns, live, C, dz, dz_xhat, DWEIGHT, DBIAS)
                arrive(done_ptr)
        if OWN and DX:
            if SOLO:
                tl.debug_barrier()
            else:
                wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
            _write_item_dx(
                dy_ptr, x_ptr, dx_ptr, means_ptr, unit, own, before, start, end, columns, live, C,
                mean, rstd, scale, bias, root, U, BT, GB, STAGES, ACC, ACTIVATION, EVEN, WIDE,
            )  # fmt: skip
    u = t - LAG
    if DX and not OWN:
        if (u >= 0) & (u < UNITS * K):
            unit, sample, slab, k, start, end = _item(u, SLABS, ABREAST, K, S, ROWS_EACH, True)
            columns, live, own, group = slab_columns(slab, LIVE, C, CHANNELS, TOGETHER, BC, True)
            mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
            _, scale, bias = _affine(
                rstd, weight_ptr, bias_ptr, columns, live, root, ACC, WEIGHT, BIAS
            )
            wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
            _write_item_dx(
                dy_ptr, x_ptr, dx_ptr, means_ptr, unit, own, sample.to(tl.int64) * S * C, start,
                end, columns, live, C, mean, rstd, scale, bias, root, U, BT, GB, STAGES, ACC,
                ACTIVATION, EVEN, WIDE,
            )  # fmt: skip
    if SUMS:
        f = u - UNITS * K
        if f >= 0:
            finish_sums(
                dweight_ptr, dbias_ptr, sums_ptr, done_ptr, f, UNITS, N, C,
                root, FINISH, PARTS, ACC, DWEIGHT, DBIAS,
            )  # fmt: skip
