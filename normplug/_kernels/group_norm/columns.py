"""GroupNorm over channels_last (N, C, *space), where a sample is S rows of C adjacent channels.

What a unit is, and how programs wait for each other, `shared` explains. Here a unit is a slab of a
sample: whole groups, LIVE adjacent channels, padded to BC columns. A tile is RB rows of a slab.
Sums over rows are taken for each column first, and then over the columns of each group.

The tiles of ABREAST slabs of a sample are taken in turn, all of them or one: rows of several slabs
are read together as they lie in memory, and one slab at a time stays in the cache.
"""

import triton
import triton.language as tl

from normplug._kernels.activation import activate
from normplug._kernels.batch_norm.slabs import after_parts, publish_part, ready_flag
from normplug._kernels.group_norm.shared import (
    finish_sums,
    gradient_before,
    load_statistics,
    load_tile,
    load_vector,
    publish_sums,
    save_statistics,
    store_tile,
)
from normplug._kernels.primitives import SCALARS, scalar
from normplug._kernels.waiting import arrive, wait

# The arguments that `shared` does not explain.
# Sizes.
#   S, WIDTH_UNITS       rows of a sample; C / UNIT
#   LIVE_UNITS           channels of a slab / UNIT
#   SLABS, ABREAST       slabs of a sample; how many are taken in turn
# Constants.
#   RB, BC               a tile: RB rows of BC columns
#   GB                   groups of a slab, padded to a power of two
#   EXACT                the columns are GB times CHANNELS, which is a power of two
_SIZES = [
    "N", "G", "CHANNELS", "S", "WIDTH_UNITS", "LIVE_UNITS", "SLABS", "ABREAST", "K", "LAG",
    "SPLITS",
]  # fmt: skip


@triton.jit
def _slab(slab, CHANNELS, LIVE, C, BC: tl.constexpr):
    """A slab's channels; which of them exist; the group of each in the slab, and in the sample."""
    places = tl.arange(0, BC)
    channels = slab * LIVE + places
    live = (places < LIVE) & (channels < C)
    return channels, live, tl.where(live, places // CHANNELS, -1), channels // CHANNELS


@triton.jit
def _slab_groups(sample, slab, G, CHANNELS, LIVE, GB: tl.constexpr):
    """A slab's groups, counted over all samples, and which of them exist."""
    places = tl.arange(0, GB)
    groups = slab * (LIVE // CHANNELS) + places
    return sample * G + groups, (places < LIVE // CHANNELS) & (groups < G)


@triton.jit
def _turn(turn, K, ABREAST, REVERSE: tl.constexpr):
    """The unit and the tile whose turn it is; of ABREAST units, in REVERSE the last comes first."""
    lot = turn // (ABREAST * K)
    place = turn - lot * (ABREAST * K)
    if REVERSE:
        place = ABREAST * K - 1 - place
    k = place // ABREAST
    return lot * ABREAST + (place - k * ABREAST), k


@triton.jit
def _rows(
    sample, k, S, channels, live, C, RB: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """A tile of a slab: offsets and mask."""
    rows = k * RB + tl.arange(0, RB)
    mask = (rows < S)[:, None] & live[None, :]
    if WIDE:
        S = S.to(tl.int64)
    return (sample * S + rows)[:, None] * C + channels[None, :], mask


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
def _moments(
    x, x_ptr, sample, k, slab, S, C, CHANNELS, LIVE, channels, live, own, group, mask,
    RB: tl.constexpr, GB: tl.constexpr, ACC: tl.constexpr, EXACT: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Mean of each group's part of a tile, and sum of squared distances from it."""
    if WIDE:
        S = S.to(tl.int64)
    row_ptr = x_ptr + (sample * S + k * RB) * C
    # Distances from one of the group's values: their sums do not round at the size of the mean.
    first = tl.load(row_ptr + group * CHANNELS, mask=live, other=0.0).to(ACC)
    rows = tl.minimum(S - k * RB, RB).to(ACC)
    d = x.to(ACC) - first[None, :]
    if not EVEN:
        d = tl.where(mask, d, 0.0)
    mean = tl.sum(d, axis=0) / rows
    d -= mean[None, :]
    if not EVEN:
        d = tl.where(mask, d, 0.0)
    m2 = tl.sum(d * d, axis=0)
    mean, m2 = _moments_by_group(mean, m2, rows, own, CHANNELS, GB, EXACT)
    places = tl.arange(0, GB)
    beginnings = slab * LIVE + places * CHANNELS
    there = (places < LIVE // CHANNELS) & (beginnings < C)
    return tl.load(row_ptr + beginnings, mask=there, other=0.0).to(ACC) + mean, m2


@triton.jit
def _affine(
    rstd, weight_ptr, bias_ptr, channels, live, root, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
):  # fmt: skip
    """The weight of each column, what x - mean is multiplied by, and what is added."""
    weight = load_vector(weight_ptr, channels, live, 1.0, ACC, WEIGHT)
    bias = load_vector(bias_ptr, channels, live, 0.0, ACC, BIAS)
    return weight, weight * rstd * scalar(root, ACC), bias


@triton.jit(do_not_specialize=[*_SIZES, *SCALARS])
def group_norm_columns_forward(
    x_ptr, weight_ptr, bias_ptr, y_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, G, CHANNELS, S, WIDTH_UNITS, LIVE_UNITS, SLABS, ABREAST, K, LAG,
    eps, root,
    UNIT: tl.constexpr, RB: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    EXACT: tl.constexpr, HELD: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias); stats = (mean, rstd) of all groups.

    Held, one program takes a slab of a sample.
    """
    t = tl.program_id(0)
    C = WIDTH_UNITS * UNIT
    LIVE = LIVE_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    n = (S * CHANNELS).to(ACC)
    if t < UNITS * K:
        if HELD:
            unit = t
            k = 0
        else:
            unit, k = _turn(t, K, ABREAST, False)
        sample = unit // SLABS
        slab = unit - sample * SLABS
        channels, live, own, group = _slab(slab, CHANNELS, LIVE, C, BC)
        groups, there = _slab_groups(sample, slab, G, CHANNELS, LIVE, GB)
        offsets, mask = _rows(sample, k, S, channels, live, C, RB, WIDE)
        x = load_tile(x_ptr, offsets, mask, EVEN, False)
        mean, m2 = _moments(
            x, x_ptr, sample, k, slab, S, C, CHANNELS, LIVE, channels, live, own, group, mask, RB,
            GB, ACC, EXACT, EVEN, WIDE,
        )  # fmt: skip
        if HELD:
            save_statistics(stats_ptr, groups, there, GROUPS, mean, m2, n, eps, ACC)
            tl.debug_barrier()
            mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
            _, scale, bias = _affine(
                rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS
            )
            z = (x.to(ACC) - mean[None, :]) * scale[None, :] + bias[None, :]
            store_tile(y_ptr, offsets, activate(z, ACTIVATION), mask, EVEN, True)
        else:
            mean, m2, last = publish_part(
                mean, m2, partial_ptr, counters_ptr, unit, k, UNITS, K, S, RB, CHANNELS, GB, ACC,
                True, False,
            )  # fmt: skip
            if last:
                save_statistics(stats_ptr, groups, there, GROUPS, mean, m2, n, eps, ACC)
                arrive(ready_flag(counters_ptr, unit, UNITS, K))
    if not HELD:
        u = t - LAG
        if u >= 0:
            unit, k = _turn(u, K, ABREAST, True)
            sample = unit // SLABS
            slab = unit - sample * SLABS
            channels, live, own, group = _slab(slab, CHANNELS, LIVE, C, BC)
            offsets, mask = _rows(sample, k, S, channels, live, C, RB, WIDE)
            x = load_tile(x_ptr, offsets, mask, EVEN, True)
            wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
            mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
            _, scale, bias = _affine(
                rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS
            )
            z = (x.to(ACC) - mean[None, :]) * scale[None, :] + bias[None, :]
            store_tile(y_ptr, offsets, activate(z, ACTIVATION), mask, EVEN, False)


@triton.jit
def _gradient(dy, x, mean, scale, bias, ACC: tl.constexpr, ACTIVATION: tl.constexpr):
    """The gradient before the activation, and distances from the mean."""
    centred = x.to(ACC) - mean[None, :]
    return gradient_before(dy, centred, scale[None, :], bias[None, :], ACC, ACTIVATION), centred


@triton.jit
def _save_means(
    means_ptr, unit, sum_dz, sum_dz_xhat, weight, n, own, GB: tl.constexpr, EXACT: tl.constexpr
):
    """Save the means of g and of g * xhat over each group of a slab, where g = dz * weight."""
    unit_ptr = means_ptr + unit * (2 * GB) + tl.arange(0, GB)
    tl.store(unit_ptr, _by_group(sum_dz * weight, own, GB, EXACT) / n)
    tl.store(unit_ptr + GB, _by_group(sum_dz_xhat * weight, own, GB, EXACT) / n)


@triton.jit
def _write_dx(
    dx_ptr, means_ptr, unit, own, live, offsets, mask, dz, centred, scale, rstd, root,
    GB: tl.constexpr, ACC: tl.constexpr, EVEN: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Write a tile of dx from its group's saved means."""
    unit_ptr = means_ptr + unit * (2 * GB) + own
    mean_g = tl.load(unit_ptr, mask=live, other=0.0, cache_modifier=".cg")
    mean_gx = tl.load(unit_ptr + GB, mask=live, other=0.0, cache_modifier=".cg")
    rstd_root = rstd * scalar(root, ACC)
    slope = rstd_root * rstd * mean_gx
    dx = dz * scale[None, :] - (centred * slope[None, :] + (rstd_root * mean_g)[None, :])
    store_tile(dx_ptr, offsets, dx, mask, EVEN, HELD)


@triton.jit(do_not_specialize=[*_SIZES, *SCALARS])
def group_norm_columns_backward(
    dy_ptr, x_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dweight_ptr, dbias_ptr, partial_ptr,
    counters_ptr,
    N, G, CHANNELS, S, WIDTH_UNITS, LIVE_UNITS, SLABS, ABREAST, K, LAG, SPLITS,
    root,
    UNIT: tl.constexpr, RB: tl.constexpr, BC: tl.constexpr, GB: tl.constexpr,
    EXACT: tl.constexpr, HELD: tl.constexpr, FINISH: tl.constexpr, PARTS: tl.constexpr,
    ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, EVEN: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of `group_norm_columns_forward` that DX, DWEIGHT and DBIAS ask for.

    Held, one program takes a slab of every SPLITS-th sample.
    """
    t = tl.program_id(0)
    C = WIDTH_UNITS * UNIT
    LIVE = LIVE_UNITS * UNIT
    GROUPS = N * G
    UNITS = N * SLABS
    SUMS: tl.constexpr = DWEIGHT or DBIAS
    n = (S * CHANNELS).to(ACC)
    if HELD:
        programs = SLABS * SPLITS
        means_ptr = partial_ptr
        done_ptr = counters_ptr
        sums_ptr = means_ptr + UNITS * (2 * GB)
        if t < programs:
            split = t // SLABS
            slab = t - split * SLABS
            channels, live, own, group = _slab(slab, CHANNELS, LIVE, C, BC)
            all_dz = tl.zeros([BC], ACC)
            all_dz_xhat = tl.zeros([BC], ACC)
            for sample in range(split, N, SPLITS):
                mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
                weight, scale, bias = _affine(
                    rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS
                )
                offsets, mask = _rows(sample, 0, S, channels, live, C, RB, WIDE)
                dy = load_tile(dy_ptr, offsets, mask, EVEN, False)
                x = load_tile(x_ptr, offsets, mask, EVEN, False)
                dz, centred = _gradient(dy, x, mean, scale, bias, ACC, ACTIVATION)
                sum_dz = tl.sum(dz, axis=0)
                sum_dz_xhat = tl.sum(dz * centred, axis=0) * rstd
                if SUMS:
                    all_dz += sum_dz
                    all_dz_xhat += sum_dz_xhat
                if DX:
                    unit = sample * SLABS + slab
                    _save_means(means_ptr, unit, sum_dz, sum_dz_xhat, weight, n, own, GB, EXACT)
                    tl.debug_barrier()
                    _write_dx(
                        dx_ptr, means_ptr, unit, own, live, offsets, mask, dz, centred, scale,
                        rstd, root, GB, ACC, EVEN, True,
                    )  # fmt: skip
            if SUMS:
                publish_sums(
                    sums_ptr, split, channels, live, C, all_dz, all_dz_xhat, DWEIGHT, DBIAS
                )
                arrive(done_ptr)
        f = t - programs
        arrivals = programs
        parts = SPLITS
    else:
        tiles = UNITS * K
        means_ptr = after_parts(partial_ptr, UNITS, K, BC)
        done_ptr = ready_flag(counters_ptr, UNITS, UNITS, K)
        sums_ptr = means_ptr + UNITS * (2 * GB)
        if t < tiles:
            unit, k = _turn(t, K, ABREAST, False)
            sample = unit // SLABS
            slab = unit - sample * SLABS
            channels, live, own, group = _slab(slab, CHANNELS, LIVE, C, BC)
            mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
            weight, scale, bias = _affine(
                rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS
            )
            offsets, mask = _rows(sample, k, S, channels, live, C, RB, WIDE)
            dy = load_tile(dy_ptr, offsets, mask, EVEN, not DX)
            x = load_tile(x_ptr, offsets, mask, EVEN, not DX)
            dz, centred = _gradient(dy, x, mean, scale, bias, ACC, ACTIVATION)
            sum_dz = tl.sum(dz, axis=0)
            sum_dz_xhat = tl.sum(dz * centred, axis=0) * rstd
            sum_dz, sum_dz_xhat, last = publish_part(
                sum_dz, sum_dz_xhat, partial_ptr, counters_ptr, unit, k, UNITS, K, S, RB, 1, BC,
                ACC, False, False,
            )  # fmt: skip
            if last:
                if DX:
                    _save_means(means_ptr, unit, sum_dz, sum_dz_xhat, weight, n, own, GB, EXACT)
                    arrive(ready_flag(counters_ptr, unit, UNITS, K))
                if SUMS:
                    publish_sums(
                        sums_ptr, sample, channels, live, C, sum_dz, sum_dz_xhat, DWEIGHT, DBIAS
                    )
                    arrive(done_ptr)
        u = t - LAG
        if DX:
            if (u >= 0) & (u < tiles):
                unit, k = _turn(u, K, ABREAST, True)
                sample = unit // SLABS
                slab = unit - sample * SLABS
                channels, live, own, group = _slab(slab, CHANNELS, LIVE, C, BC)
                mean, rstd = load_statistics(stats_ptr, sample * G + group, live, GROUPS)
                _, scale, bias = _affine(
                    rstd, weight_ptr, bias_ptr, channels, live, root, ACC, WEIGHT, BIAS
                )
                offsets, mask = _rows(sample, k, S, channels, live, C, RB, WIDE)
                dy = load_tile(dy_ptr, offsets, mask, EVEN, True)
                x = load_tile(x_ptr, offsets, mask, EVEN, True)
                wait(ready_flag(counters_ptr, unit, UNITS, K), 1, K)
                dz, centred = _gradient(dy, x, mean, scale, bias, ACC, ACTIVATION)
                _write_dx(
                    dx_ptr, means_ptr, unit, own, live, offsets, mask, dz, centred, scale, rstd,
                    root, GB, ACC, EVEN, False,
                )  # fmt: skip
        f = u - tiles
        arrivals = UNITS
        parts = N
    if SUMS:
        if f >= 0:
            finish_sums(
                dweight_ptr, dbias_ptr, sums_ptr, done_ptr, f, arrivals, parts, C, root, FINISH,
                PARTS, ACC, DWEIGHT, DBIAS,
            )  # fmt: skip
