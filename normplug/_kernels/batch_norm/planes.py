"""BatchNorm over (N, C, *space) contiguous tensors, whose channels are planes of adjacent values.

The N * HW values of a channel are cut into tiles. Program t reduces tile t, publishes its moments,
and then normalises tile t - LAG (see `waiting`): by then the tile's channel is complete, and the
tile is still in the L2 cache. So DRAM traffic is one read and one write. The backward does the same
with dy and x: it publishes two sums instead of moments, and writes dx (the formula is in
`columns`).
"""

import triton
import triton.language as tl

from normplug._kernels import activation
from normplug._kernels.batch_norm.columns import finish_backward, finish_forward
from normplug._kernels.merging import merge_tile_moments, merge_tile_sums, tile_counts
from normplug._kernels.primitives import is_finite, kernel, scalar, update_running
from normplug._kernels.tiles import load, store
from normplug._kernels.waiting import arrive, is_last, wait

# If WORLD > 1, the last program of a channel to publish merges it, and the others wait for that.
# The flags of a call are explained in `columns`, other arguments in `schedule.Planes`.


@triton.jit
def _offset(place, channel, C, HW):
    """The offset in the tensor of a channel's value `place`, counted over batch and space."""
    n = place // HW
    return (n * C + channel) * HW + (place - n * HW)


@triton.jit
def _tile(t, TILES_A_CHANNEL, N, C, HW, BLOCK, WIDE):
    """Tile t: its channel and place in it, its offsets and mask, and its first value's offset."""
    channel = t // TILES_A_CHANNEL
    k = t - channel * TILES_A_CHANNEL
    long_channel = channel.to(tl.int64) if WIDE else channel
    start = (k.to(tl.int64) if WIDE else k) * BLOCK
    places = start + tl.arange(0, BLOCK)
    offsets, inside = _offset(places, long_channel, C, HW), places < N * HW
    return channel, k, offsets, inside, _offset(start, long_channel, C, HW)


@kernel
def batch_norm_planes_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, tracked_ptr,
    y_ptr, bits_ptr, stats_ptr, partial_ptr, counters_ptr,
    N, C, HW_UNITS, TILES_A_CHANNEL, TILES, LAG, PEERS, momentum, eps, root,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr,
    TRAINING: tl.constexpr, GIVEN: tl.constexpr, NORMALIZE: tl.constexpr, VARIANCE: tl.constexpr,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, BITS: tl.constexpr,
    ACTIVATION: tl.constexpr, RUNNING: tl.constexpr, CUMULATIVE: tl.constexpr,
    TRACKED: tl.constexpr, SAFE: tl.constexpr, WIDE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Y = activation(weight * root * (x - mean) * rstd + bias + residual); stats = (mean, rstd).

    Without NORMALIZE, one program per channel, after the TILES programs, writes the statistics:
    LAG = TILES. SAFE: a channel whose moments are not finite updates nothing, and the first
    channel's decide whether the batch is counted.
    """
    t = tl.program_id(0)
    HW = HW_UNITS * UNIT
    total = (N.to(tl.int64) if WIDE else N) * HW
    if TRAINING:
        if t < TILES:
            channel, k, offsets, inside, first = _tile(t, TILES_A_CHANNEL, N, C, HW, BLOCK, WIDE)
            # Distances from one of the values, whose sums do not round at the size of the mean.
            first = tl.load(x_ptr + first).to(ACC)
            x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(ACC) - first
            mean = tl.sum(tl.where(inside, x, 0.0)) / tile_counts(k, total, BLOCK, ACC)
            x = tl.where(inside, x - mean, 0.0)
            tl.store(partial_ptr + 2 * t, first + mean)
            tl.store(partial_ptr + 2 * t + 1, tl.sum(x * x))
            seen = arrive(counters_ptr + channel)
            if WORLD > 1:
                if is_last(seen, TILES_A_CHANNEL):
                    parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                    mean, m2 = merge_tile_moments(parts_ptr, TILES_A_CHANNEL, total, BLOCK, KP, ACC)
                    finish_forward(
                        mean, m2, channel, C, N, running_mean_ptr, running_var_ptr, tracked_ptr,
                        stats_ptr, HW, 1, PEERS, momentum, eps, 1, ACC, VARIANCE, RUNNING,
                        CUMULATIVE, TRACKED, SAFE, WORLD,
                    )  # fmt: skip
                    arrive(counters_ptr + channel)
    u = t - LAG
    if u >= 0:
        if NORMALIZE:
            channel, k, offsets, inside, first = _tile(u, TILES_A_CHANNEL, N, C, HW, BLOCK, WIDE)
            x = load(x_ptr, offsets, inside, FULL=False, LAST=True)
        else:
            channel = u
            k = 0
        if TRAINING and WORLD > 1:
            wait(counters_ptr + channel, TILES_A_CHANNEL + 1, TILES_A_CHANNEL)
            mean = tl.load(stats_ptr + channel, cache_modifier=".cg")
            rstd = tl.load(stats_ptr + C + channel, cache_modifier=".cg")
        elif TRAINING:
            wait(counters_ptr + channel, TILES_A_CHANNEL, TILES_A_CHANNEL if NORMALIZE else 1)
            parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
            mean, m2 = merge_tile_moments(parts_ptr, TILES_A_CHANNEL, total, BLOCK, KP, ACC)
            n = total.to(ACC)
            var = m2 / n
            updated = is_finite(mean, m2) if SAFE else None
            if RUNNING:
                if k == 0:
                    step = scalar(momentum, ACC)
                    if CUMULATIVE:
                        step = 1.0 / tl.load(tracked_ptr).to(ACC)
                    old_mean = tl.load(running_mean_ptr + channel)
                    update_running(running_mean_ptr + channel, old_mean, mean, step, updated)
                    old_var = tl.load(running_var_ptr + channel)
                    var_ptr = running_var_ptr + channel
                    update_running(var_ptr, old_var, m2 / (n - 1.0), step, updated)
            if TRACKED:
                if u == 0:
                    tl.store(tracked_ptr, tl.load(tracked_ptr) + 1, mask=updated)
        elif GIVEN:
            mean = tl.load(stats_ptr + channel)
            rstd = tl.load(stats_ptr + C + channel)
        else:
            mean = tl.load(running_mean_ptr + channel).to(ACC)
            var = tl.load(running_var_ptr + channel).to(ACC)
        if not GIVEN and WORLD == 1:
            rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
            if k == 0:
                tl.store(stats_ptr + channel, mean)
                tl.store(stats_ptr + C + channel, var if VARIANCE else rstd)
        if NORMALIZE:
            scale = rstd * scalar(root, ACC)
            if WEIGHT:
                scale *= tl.load(weight_ptr + channel).to(ACC)
            z = (x.to(ACC) - mean) * scale
            if BIAS:
                z += tl.load(bias_ptr + channel).to(ACC)
            if RESIDUAL:
                z += tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(ACC)
            if BITS:
                stride = tl.cdiv(total, 8)
                byte = k * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
                packed = activation.pack_mask(z, BLOCK)
                tl.store(bits_ptr + channel * stride + byte, packed, mask=byte < stride)
            y = activation.activate(z, ACTIVATION)
            store(y_ptr, offsets, y, inside, FULL=False, LAST=True)


@triton.jit
def _load(tensors, offsets, inside, channel, k, total, BLOCK, RESIDUAL, BITS, LAST):
    """Load a tile of dy, x and what else the derivative needs: relu's mask or the residual."""
    dy_ptr, x_ptr, residual_ptr, bits_ptr = tensors
    dy = load(dy_ptr, offsets, inside, FULL=False, LAST=LAST)
    x = load(x_ptr, offsets, inside, FULL=False, LAST=LAST)
    if BITS:
        stride = tl.cdiv(total, 8)
        byte = k * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
        extra = tl.load(bits_ptr + channel * stride + byte, mask=byte < stride, other=0)
    elif RESIDUAL:
        extra = tl.load(residual_ptr + offsets, mask=inside, other=0.0)
    else:
        extra = 0
    return dy, x, extra


@triton.jit
def _gradient(
    tile, vectors, channel, mean, rstd, BLOCK, ACC, WEIGHT, BIAS, RESIDUAL, BITS, ACTIVATION
):
    """Compute dz, the gradient of the activation's input; return it, x - mean, and the scale.

    The scale is weight * root * rstd. tile: what `_load` returns.
    """
    dy, x, extra = tile
    weight_ptr, bias_ptr, root = vectors
    scale = rstd * scalar(root, ACC)
    if WEIGHT:
        scale *= tl.load(weight_ptr + channel).to(ACC)
    bias = tl.load(bias_ptr + channel).to(ACC) if BIAS else 0.0
    centred = x.to(ACC) - mean
    dz = dy.to(ACC)  # 0 out of bounds, and so is all that is computed from it
    if BITS:
        dz = tl.where(activation.unpack_mask(extra, BLOCK) != 0, dz, 0.0)
    elif ACTIVATION != 0:
        z = centred * scale + bias
        if RESIDUAL:
            z += extra.to(ACC)
        dz = activation.activation_gradient(dz, z, ACTIVATION)
    return dz, centred, scale


@kernel
def batch_norm_planes_backward(
    dy_ptr, x_ptr, residual_ptr, bits_ptr, weight_ptr, bias_ptr, stats_ptr, dx_ptr, dresidual_ptr,
    dweight_ptr, dbias_ptr, partial_ptr, counters_ptr,
    N, C, HW_UNITS, TILES_A_CHANNEL, TILES, LAG, PEERS, root,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr,
    SUMS: tl.constexpr, LATE: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, BITS: tl.constexpr, ACTIVATION: tl.constexpr, DX: tl.constexpr,
    DRESIDUAL: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, WIDE: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    """The gradients of `batch_norm_planes_forward` that DX, DRESIDUAL, DWEIGHT, DBIAS ask for.

    LATE: dx depends on sums over the batch, so tiles are written LAG programs later. Otherwise
    statistics are constants, and the first read gives dx. With SUMS, one program per channel after
    the TILES programs then writes dweight and dbias: LAG = TILES.
    """
    t = tl.program_id(0)
    HW = HW_UNITS * UNIT
    total = (N.to(tl.int64) if WIDE else N) * HW
    tensors = dy_ptr, x_ptr, residual_ptr, bits_ptr
    vectors = weight_ptr, bias_ptr, root
    if t < TILES:
        channel, k, offsets, inside, first = _tile(t, TILES_A_CHANNEL, N, C, HW, BLOCK, WIDE)
        tile = _load(tensors, offsets, inside, channel, k, total, BLOCK, RESIDUAL, BITS, LAST=False)
        mean = tl.load(stats_ptr + channel)
        rstd = tl.load(stats_ptr + C + channel)
        dz, centred, scale = _gradient(
            tile, vectors, channel, mean, rstd, BLOCK, ACC, WEIGHT, BIAS, RESIDUAL, BITS, ACTIVATION
        )
        if SUMS:
            tl.store(partial_ptr + 2 * t, tl.sum(dz))
            tl.store(partial_ptr + 2 * t + 1, tl.sum(dz * centred))
            seen = arrive(counters_ptr + channel)
            if WORLD > 1:
                if is_last(seen, TILES_A_CHANNEL):
                    parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                    a, b = merge_tile_sums(parts_ptr, TILES_A_CHANNEL, KP, ACC)
                    finish_backward(
                        a, b, channel, C, N, HW, 1, PEERS, stats_ptr, dweight_ptr, dbias_ptr,
                        partial_ptr + 2 * TILES, root, 1, ACC, DWEIGHT, DBIAS, LATE, WORLD,
                    )  # fmt: skip
                    arrive(counters_ptr + channel)
        if not LATE:
            if DX:
                store(dx_ptr, offsets, dz * scale, inside, FULL=False, LAST=True)
            if DRESIDUAL:
                store(dresidual_ptr, offsets, dz, inside, FULL=False, LAST=True)
    if SUMS:
        u = t - LAG
        if u >= 0:
            channel = u
            k = 0
            if LATE:
                channel, k, offsets, inside, first = _tile(
                    u, TILES_A_CHANNEL, N, C, HW, BLOCK, WIDE
                )
                tile = _load(
                    tensors, offsets, inside, channel, k, total, BLOCK, RESIDUAL, BITS, LAST=True
                )
            if WORLD > 1:
                wait(counters_ptr + channel, TILES_A_CHANNEL + 1, TILES_A_CHANNEL)
            else:
                wait(counters_ptr + channel, TILES_A_CHANNEL, TILES_A_CHANNEL if LATE else 1)
            mean = tl.load(stats_ptr + channel)
            rstd = tl.load(stats_ptr + C + channel)
            if WORLD > 1:
                mean_dz = tl.load(partial_ptr + 2 * TILES + channel, cache_modifier=".cg")
                slope = tl.load(partial_ptr + 2 * TILES + C + channel, cache_modifier=".cg")
            else:
                parts_ptr = partial_ptr + 2 * channel * TILES_A_CHANNEL
                sum_dz, sum_dz_centred = merge_tile_sums(parts_ptr, TILES_A_CHANNEL, KP, ACC)
                if k == 0:
                    if DWEIGHT:
                        dweight = sum_dz_centred * rstd * scalar(root, ACC)
                        tl.store(dweight_ptr + channel, dweight.to(dweight_ptr.dtype.element_ty))
                    if DBIAS:
                        tl.store(dbias_ptr + channel, sum_dz.to(dbias_ptr.dtype.element_ty))
                n = total.to(ACC)
                mean_dz = sum_dz / n
                slope = sum_dz_centred * rstd * rstd / n
            if LATE:
                dz, centred, scale = _gradient(
                    tile, vectors, channel, mean, rstd, BLOCK, ACC, WEIGHT, BIAS, RESIDUAL, BITS,
                    ACTIVATION,
                )  # fmt: skip
                if DRESIDUAL:
                    store(dresidual_ptr, offsets, dz, inside, FULL=False, LAST=True)
                dx = (dz - mean_dz - centred * slope) * scale
                store(dx_ptr, offsets, dx, inside, FULL=False, LAST=True)
