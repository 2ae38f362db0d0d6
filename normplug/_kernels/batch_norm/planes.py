"""BatchNorm over (N, C, *space) contiguous tensors, whose channels are planes of adjacent values.

The N * HW values of a channel are cut into tiles. Program t reduces tile t, publishes its moments,
and then normalises tile t - LAG (see `waiting`): by then the tile's channel is complete, and the
tile is still in the L2 cache. So DRAM traffic is one read and one write. The backward does the same
with dy and x: it publishes two sums instead of moments, and writes dx (the formula is in
`columns`). `columns` also explains a residual with a norm of its own, which adds a third sum.
"""

import triton
import triton.language as tl

from normplug._kernels import activation
from normplug._kernels.batch_norm.columns import (
    finish_backward,
    finish_forward,
    store_dstats,
)
from normplug._kernels.merging import (
    merge_tile_moments,
    merge_tile_sum,
    merge_tile_sums,
    tile_counts,
)
from normplug._kernels.primitives import is_finite, kernel, scalar, update_running
from normplug._kernels.tiles import load, store
from normplug._kernels.waiting import arrive, is_last, wait

# If F.world > 1, the last program of a channel to publish merges it, and the others wait for that.


@triton.jit
def _offset(place, channel, C, HW):
    """The offset in the tensor of a channel's value `place`, counted over batch and space."""
    n = place // HW
    return (n * C + channel) * HW + (place - n * HW)


@triton.jit
def _tile(t, TILES_A_CHANNEL, N, C, HW, T):
    """Tile t: its channel and place in it, its offsets and mask, and its first value's offset."""
    channel = t // TILES_A_CHANNEL
    k = t - channel * TILES_A_CHANNEL
    long_channel = channel.to(tl.int64) if T.wide else channel
    start = (k.to(tl.int64) if T.wide else k) * T.block
    places = start + tl.arange(0, T.block)
    offsets = _offset(places, long_channel, C, HW)
    inside = places < N * HW
    return channel, k, offsets, inside, _offset(start, long_channel, C, HW)


@triton.jit
def _affine(vectors, channel, F):
    """A channel's weight * root, and bias."""
    weight_ptr, bias_ptr, root = vectors
    gain = scalar(root, F.acc)
    if F.weight:
        gain *= tl.load(weight_ptr + channel).to(F.acc)
    bias = 0.0
    if F.bias:
        bias = tl.load(bias_ptr + channel).to(F.acc)
    return gain, bias


@triton.jit
def _residual_norm(stats_ptr, channel, C, F):
    """Mean, rstd, scale and bias of a channel of the residual's norm, or zeros."""
    if F.residual_norm:
        mean = tl.load(stats_ptr + 2 * C + channel)
        rstd = tl.load(stats_ptr + 3 * C + channel)
        gain = tl.load(stats_ptr + 4 * C + channel)
        bias = tl.load(stats_ptr + 5 * C + channel)
        return mean, rstd, gain * rstd, bias
    else:
        return 0, 0, 0, 0


@kernel
def batch_norm_planes_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    y_ptr, bits_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, C, HW_UNITS, TILES_A_CHANNEL, TILES, LAG, PEERS, momentum, eps, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias + residual); stats = (mean, rstd).

    Unless F.normalize, one program per channel, after the TILES programs, writes the statistics:
    LAG = TILES.
    """
    ACC: tl.constexpr = F.acc
    BLOCK: tl.constexpr = T.block
    t = tl.program_id(0)
    HW = HW_UNITS * T.unit
    total = (N.to(tl.int64) if T.wide else N) * HW
    if F.for_residual:
        stats_ptr += 2 * C
    if F.training:
        if t < TILES:
            channel, k, offsets, inside, first = _tile(t, TILES_A_CHANNEL, N, C, HW, T)
            # Distances from one of the values, so that a large mean costs no precision.
            first = tl.load(x_ptr + first).to(ACC)
            x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC) - first
            mean = tl.sum(tl.where(inside, x, 0.0)) / tile_counts(k, total, BLOCK, ACC)
            x = tl.where(inside, x - mean, 0.0)
            tl.store(partial_ptr + 2 * t, first + mean)
            tl.store(partial_ptr + 2 * t + 1, tl.sum(x * x))
            seen = arrive(counters_ptr + channel)
            if F.world > 1:
                if is_last(seen, TILES_A_CHANNEL):
                    parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                    mean, m2 = merge_tile_moments(
                        parts_ptr, TILES_A_CHANNEL, total, BLOCK, T.kp, ACC
                    )
                    running = running_mean_ptr, running_var_ptr, tracked_ptr, momentum
                    finish_forward(
                        mean,
                        m2,
                        channel,
                        (C, N, HW, 1),
                        running,
                        stats_ptr,
                        eps,
                        PEERS,
                        1,
                        F,
                    )
                    arrive(counters_ptr + channel)
    u = t - LAG
    if u >= 0:
        if F.normalize:
            channel, k, offsets, inside, first = _tile(u, TILES_A_CHANNEL, N, C, HW, T)
            x = load(x_ptr, offsets, inside, FULL=False, LAST=True)
        else:
            channel = u
            k = 0
        if F.training and F.world > 1:
            wait(counters_ptr + channel, TILES_A_CHANNEL + 1, TILES_A_CHANNEL)
            mean = tl.load(stats_ptr + channel, cache_modifier=".cg")
            rstd = tl.load(stats_ptr + C + channel, cache_modifier=".cg")
        elif F.training:
            readers = TILES_A_CHANNEL if F.normalize else 1
            wait(counters_ptr + channel, TILES_A_CHANNEL, readers)
            parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
            mean, m2 = merge_tile_moments(
                parts_ptr, TILES_A_CHANNEL, total, BLOCK, T.kp, ACC
            )
            n = total.to(ACC)
            var = m2 / n
            updated = is_finite(mean, m2) if F.safe else None
            if F.running:
                if k == 0:
                    step = scalar(momentum, ACC)
                    if F.cumulative:
                        step = 1.0 / tl.load(tracked_ptr).to(ACC)
                    old_mean = tl.load(running_mean_ptr + channel)
                    update_running(
                        running_mean_ptr + channel, old_mean, mean, step, updated
                    )
                    old_var = tl.load(running_var_ptr + channel)
                    var_ptr = running_var_ptr + channel
                    update_running(var_ptr, old_var, m2 / (n - 1.0), step, updated)
            if F.tracked:
                if u == 0:
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + 1, mask=updated)
        elif F.given:
            mean = tl.load(stats_ptr + channel)
            rstd = tl.load(stats_ptr + C + channel)
        else:
            mean = tl.load(running_mean_ptr + channel).to(ACC)
            var = tl.load(running_var_ptr + channel).to(ACC)
        if not F.given and F.world == 1:
            rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
            if k == 0:
                tl.store(stats_ptr + channel, mean)
                tl.store(stats_ptr + C + channel, var if F.variance else rstd)
        if F.for_residual:
            gain, bias = _affine((weight_ptr, bias_ptr, root), channel, F)
            tl.store(stats_ptr + 2 * C + channel, gain)
            tl.store(stats_ptr + 3 * C + channel, bias)
        if F.normalize:
            scale = rstd * scalar(root, ACC)
            if F.weight:
                scale *= tl.load(weight_ptr + channel).to(ACC)
            z = (x.to(ACC) - mean) * scale
            if F.bias:
                z += tl.load(bias_ptr + channel).to(ACC)
            if F.residual:
                residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(ACC)
                if F.residual_norm:
                    other_mean, other_rstd, other_scale, other_bias = _residual_norm(
                        stats_ptr, channel, C, F
                    )
                    residual = (residual - other_mean) * other_scale + other_bias
                z += residual
            if F.bits:
                stride = tl.cdiv(total, 8)
                byte = k * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
                packed = activation.pack_mask(z, BLOCK)
                tl.store(bits_ptr + channel * stride + byte, packed, mask=byte < stride)
            y = activation.activate(z, F.activation)
            store(y_ptr, offsets, y, inside, FULL=False, LAST=True)


@triton.jit
def _load(tensors, offsets, inside, channel, k, total, T, F, LAST):
    """Load a tile of dy, x and what else is needed, or 0: relu's mask, and the residual."""
    dy_ptr, x_ptr, residual_ptr, bits_ptr = tensors
    dy = load(dy_ptr, offsets, inside, FULL=False, LAST=LAST)
    x = load(x_ptr, offsets, inside, FULL=False, LAST=LAST)
    if F.bits:
        stride = tl.cdiv(total, 8)
        byte = k * (T.block // 8) + tl.arange(0, T.block // 8)
        bits = tl.load(bits_ptr + channel * stride + byte, mask=byte < stride, other=0)
    else:
        bits = 0
    if F.residual:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    else:
        residual = 0
    return dy, x, bits, residual


@triton.jit
def _gradient(tile, vectors, channel, mean, rstd, other, T, F):
    """Compute dz, the gradient of the activation's input.

    Return it with x - mean; the scale, weight * root * rstd; and, for the residual's norm,
    residual - mean. tile: what `_load` returns. other: what `_residual_norm` returns.
    """
    ACC: tl.constexpr = F.acc
    dy, x, bits, residual = tile
    weight_ptr, bias_ptr, root = vectors
    scale = rstd * scalar(root, ACC)
    if F.weight:
        scale *= tl.load(weight_ptr + channel).to(ACC)
    bias = tl.load(bias_ptr + channel).to(ACC) if F.bias else 0.0
    centred = x.to(ACC) - mean
    other_mean, other_rstd, other_scale, other_bias = other
    if F.residual:
        residual = residual.to(ACC)
    if F.residual_norm:
        residual -= other_mean
    dz = dy.to(ACC)  # 0 out of bounds, and so is all that is computed from it
    if F.bits:
        dz = tl.where(activation.unpack_mask(bits, T.block) != 0, dz, 0.0)
    elif F.activation != 0:
        z = centred * scale + bias
        if F.residual_norm:
            z += residual * other_scale + other_bias
        elif F.residual:
            z += residual
        dz = activation.activation_gradient(dz, z, F.activation)
    return dz, centred, scale, residual


@kernel
def batch_norm_planes_backward(
    dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dresidual_ptr,
    dweight_ptr, dbias_ptr, partial_ptr, counters_ptr, dstats_ptr,
    N, C, HW_UNITS, TILES_A_CHANNEL, TILES, LAG, PEERS, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients of `batch_norm_planes_forward`.

    F.late: tiles are written LAG programs later. Otherwise the first read gives dx. With F.sums,
    one program per channel after the TILES programs then writes dweight and dbias: LAG = TILES.
    """
    t = tl.program_id(0)
    HW = HW_UNITS * T.unit
    total = (N.to(tl.int64) if T.wide else N) * HW
    tensors = dy_ptr, x_ptr, residual_ptr, bits_ptr
    vectors = weight_ptr, bias_ptr, root
    # Of a joined batch, per channel: the mean of dz, and the slopes of dx and of dresidual.
    means_ptr = partial_ptr + (2 + F.residual_norm) * TILES
    if t < TILES:
        channel, k, offsets, inside, first = _tile(t, TILES_A_CHANNEL, N, C, HW, T)
        tile = _load(tensors, offsets, inside, channel, k, total, T, F, LAST=False)
        mean = tl.load(stats_ptr + channel)
        rstd = tl.load(stats_ptr + C + channel)
        other = _residual_norm(stats_ptr, channel, C, F)
        dz, centred, scale, residual = _gradient(
            tile, vectors, channel, mean, rstd, other, T, F
        )
        if F.sums:
            tl.store(partial_ptr + 2 * t, tl.sum(dz))
            tl.store(partial_ptr + 2 * t + 1, tl.sum(dz * centred))
            if F.residual_norm:
                tl.store(partial_ptr + 2 * TILES + t, tl.sum(dz * residual))
            seen = arrive(counters_ptr + channel)
            if F.world > 1:
                if is_last(seen, TILES_A_CHANNEL):
                    parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                    a, b = merge_tile_sums(parts_ptr, TILES_A_CHANNEL, T.kp, F.acc)
                    sizes = C, N, HW, 1
                    c = 0.0
                    if F.residual_norm:
                        parts_ptr = partial_ptr + 2 * TILES + channel * TILES_A_CHANNEL
                        c = merge_tile_sum(parts_ptr, TILES_A_CHANNEL, T.kp, F.acc)
                        store_dstats(a, c, channel, sizes, stats_ptr, dstats_ptr, 1, F)
                    results = dweight_ptr, dbias_ptr, means_ptr
                    merged = a, b, c
                    finish_backward(
                        merged, channel, sizes, stats_ptr, results, root, PEERS, 1, F
                    )
                    arrive(counters_ptr + channel)
        if not F.late:
            if F.dx:
                store(dx_ptr, offsets, dz * scale, inside, FULL=False, LAST=True)
            if F.dresidual:
                store(dresidual_ptr, offsets, dz, inside, FULL=False, LAST=True)
    if F.sums:
        u = t - LAG
        if u >= 0:
            channel = u
            k = 0
            if F.late:
                channel, k, offsets, inside, first = _tile(
                    u, TILES_A_CHANNEL, N, C, HW, T
                )
                tile = _load(tensors, offsets, inside, channel, k, total, T, F, LAST=True)
            if F.world > 1:
                wait(counters_ptr + channel, TILES_A_CHANNEL + 1, TILES_A_CHANNEL)
            else:
                readers = TILES_A_CHANNEL if F.late else 1
                wait(counters_ptr + channel, TILES_A_CHANNEL, readers)
            mean = tl.load(stats_ptr + channel)
            rstd = tl.load(stats_ptr + C + channel)
            if F.world > 1:
                mean_dz = tl.load(means_ptr + channel, cache_modifier=".cg")
                slope = tl.load(means_ptr + C + channel, cache_modifier=".cg")
                residual_slope = 0.0
                if F.residual_norm:
                    residual_slope = tl.load(
                        means_ptr + 2 * C + channel, cache_modifier=".cg"
                    )
            else:
                parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                sum_dz, sum_dz_centred = merge_tile_sums(
                    parts_ptr, TILES_A_CHANNEL, T.kp, F.acc
                )
                if k == 0:
                    if F.dweight:
                        dweight = sum_dz_centred * rstd * scalar(root, F.acc)
                        tl.store(
                            dweight_ptr + channel,
                            dweight.to(dweight_ptr.dtype.element_ty),
                        )
                    if F.dbias:
                        tl.store(
                            dbias_ptr + channel, sum_dz.to(dbias_ptr.dtype.element_ty)
                        )
                n = total.to(F.acc)
                mean_dz = sum_dz / n
                slope = sum_dz_centred * rstd * rstd / n
            other = _residual_norm(stats_ptr, channel, C, F)
            other_mean, other_rstd, other_scale, other_bias = other
            if F.residual_norm and F.world == 1:
                parts_ptr = partial_ptr + 2 * TILES + channel * TILES_A_CHANNEL
                sum_dz_residual = merge_tile_sum(parts_ptr, TILES_A_CHANNEL, T.kp, F.acc)
                dgain = sum_dz_residual * other_rstd
                if F.dstats:
                    if k == 0:
                        for constant in tl.static_range(4):
                            tl.store(dstats_ptr + constant * C + channel, 0.0)
                        tl.store(dstats_ptr + 4 * C + channel, dgain)
                        tl.store(dstats_ptr + 5 * C + channel, sum_dz)
                residual_slope = dgain * other_rstd / total.to(F.acc)
            if F.late:
                dz, centred, scale, residual = _gradient(
                    tile, vectors, channel, mean, rstd, other, T, F
                )
                if F.dresidual:
                    dresidual = dz
                    if F.residual_norm:
                        dresidual -= mean_dz + residual * residual_slope
                        dresidual *= other_scale
                    store(
                        dresidual_ptr, offsets, dresidual, inside, FULL=False, LAST=True
                    )
                if F.dx:
                    dx = (dz - mean_dz - centred * slope) * scale
                    store(dx_ptr, offsets, dx, inside, FULL=False, LAST=True)
