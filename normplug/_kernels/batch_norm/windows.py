"""BatchNorm, relu and max pooling of a channels_last tensor: the norm's result is never written.

Forward, the statistics come from `columns`. Then each program computes a row of the output. For
each window it normalises all the values and finds the largest. It stores that value's relu, its x
(the peak) and its place in the window, which is NOWHERE where relu is 0.

Backward, only peaks have a gradient. So `columns` computes the sums by channel for BatchNorm + relu
of the peaks, a tensor as small as the output. Then each program takes as many rows of the input as
the windows' stride. Each value gathers the gradients of the windows whose peak it is.
"""

import triton.language as tl

from normplug._kernels.activation import activate
from normplug._kernels.batch_norm.columns import affine
from normplug._kernels.primitives import kernel, load_both, scalar
from normplug._kernels.tiles import load

# Values: the loops over a window are unrolled, so all its loads are in flight.
LARGEST_WINDOW = 25
_NOWHERE = tl.constexpr(255)
# H, W, OH, OW: height and width of the input and of the output. `schedule.PixelsTile` has the rest.


@kernel
def batch_norm_pool_forward(
    x_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, y_ptr, peaks_ptr, places_ptr,
    stats_ptr,
    H, W, OH, OW, C_UNITS, SLABS, eps, root, T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = max over windows of relu(weight * root * (x - mean) * rstd + bias).

    In F.training, stats = (mean, rstd) are read. Otherwise they are computed from the running
    statistics, and written.
    """
    ACC: tl.constexpr = F.acc
    BP: tl.constexpr = T.bp
    BC: tl.constexpr = T.bc
    t = tl.program_id(0)
    C = C_UNITS * T.unit
    slab = t % SLABS
    row = t // SLABS
    image = row // OH
    top = (row - image * OH) * T.sh - T.ph
    channels = slab * BC + tl.arange(0, BC)
    live = channels < C
    if F.training:
        mean = tl.load(stats_ptr + channels, mask=live, other=0.0)
        rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0)
    else:
        mean = tl.load(running_mean_ptr + channels, mask=live, other=0.0).to(ACC)
        var = tl.load(running_var_ptr + channels, mask=live, other=1.0).to(ACC)
        rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
        if row == 0:
            tl.store(stats_ptr + channels, mean, mask=live)
            tl.store(stats_ptr + C + channels, rstd, mask=live)
    vectors = weight_ptr, bias_ptr, root
    mean, scale, bias = affine(mean, rstd, vectors, channels, live, F)
    first = row.to(tl.int64) * (OW * C)
    for start in range(0, OW, BP):
        out = start + tl.arange(0, BP)
        left = out * T.sw - T.pw
        best = tl.full([BP, BC], float("-inf"), ACC)
        peak = tl.zeros([BP, BC], x_ptr.dtype.element_ty)
        place = tl.zeros([BP, BC], tl.int32)
        stride = W * C
        for kh in tl.static_range(T.kh):
            # The row kh below `top`, or the nearest in the image, which is in the window too.
            line = tl.minimum(tl.maximum(top + kh, 0), H - 1)
            line_ptr = x_ptr + (image * H + line).to(tl.int64) * stride
            for kw in tl.static_range(T.kw):
                # The same for columns: all loads are in bounds, and a value that is seen twice is
                # not higher than itself.
                first_place = (line - top) * T.kw
                column = tl.minimum(tl.maximum(left + kw, 0), W - 1)
                offsets = column[:, None] * C + channels[None, :]
                x = load(line_ptr, offsets, live[None, :], T.even, False)
                z = (x.to(ACC) - mean[None, :]) * scale[None, :] + bias[None, :]
                higher = (z > best) | (z != z)
                best = tl.where(higher, z, best)
                peak = tl.where(higher, x, peak)
                place = tl.where(higher, (first_place + column - left)[:, None], place)
        offsets = out[:, None] * C + channels[None, :]
        mask = (out < OW)[:, None] & live[None, :]
        y = activate(best, 1).to(y_ptr.dtype.element_ty)  # relu
        tl.store(y_ptr + first + offsets, y, mask=mask)
        if F.peaks:
            tl.store(
                peaks_ptr + first + offsets,
                peak,
                mask=mask,
                eviction_policy="evict_first",
            )
            place = tl.where(best <= 0, _NOWHERE, place).to(tl.uint8)
            tl.store(
                places_ptr + first + offsets,
                place,
                mask=mask,
                eviction_policy="evict_first",
            )


@kernel
def batch_norm_pool_backward(
    dy_ptr, x_ptr, places_ptr, weight_ptr, stats_ptr, dweight_ptr, dbias_ptr, dx_ptr,
    H, W, OH, OW, C_UNITS, SLABS, root, T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute dx. In F.training its sums are read from dweight and dbias, which are in F.acc.

    F.joined: dweight holds the terms of dx over all processes, which the sums' launch has written.

    A program takes SH rows, BP blocks of SH * SW values at a time.
    """
    ACC: tl.constexpr = F.acc
    SH: tl.constexpr = T.sh
    SW: tl.constexpr = T.sw
    t = tl.program_id(0)
    C = C_UNITS * T.unit
    slab = t % SLABS
    rows = tl.cdiv(H, SH)
    image = t // SLABS // rows
    up = t // SLABS - image * rows
    channels = slab * T.bc + tl.arange(0, T.bc)
    live = channels < C
    mean = tl.load(stats_ptr + channels, mask=live, other=0.0)
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0)
    # F has no bias, so `affine` gives zeros for it. Without F.training they stand for the sums.
    vectors = weight_ptr, weight_ptr, root
    mean, scale, zeros = affine(mean, rstd, vectors, channels, live, F)
    mean_dz = zeros
    slope = zeros
    if F.training and F.joined:
        mean_dz, slope = load_both(dweight_ptr, channels, live, C)
    elif F.training:
        each = 1.0 / ((tl.num_programs(0) // SLABS // rows).to(ACC) * H * W)
        mean_dz = tl.load(dbias_ptr + channels, mask=live, other=0.0) * each
        dweight = tl.load(dweight_ptr + channels, mask=live, other=0.0)
        # The slope of `columns`, as dweight is root * rstd times the sum of dz * (x - mean).
        slope = dweight * rstd * (each / scalar(root, ACC))
    for start in range(0, tl.cdiv(W, SW), T.bp):
        left = start + tl.arange(0, T.bp)
        for i in tl.static_range(SH):
            for j in tl.static_range(SW):
                # All these values have the same places in the windows that cover them.
                row = up * SH + i
                column = left * SW + j
                inside = column < tl.where(row < H, W, 0)
                offsets = column[:, None] * C + channels[None, :]
                first = (image * H + row).to(tl.int64) * (W * C)
                mask = inside[:, None]
                if not T.even:
                    mask = mask & live[None, :]
                if F.training:
                    x = tl.load(x_ptr + first + offsets, mask=mask, other=0)
                dz = tl.zeros([T.bp, T.bc], ACC)
                for below in tl.static_range((i + T.ph) % SH, T.kh, SH):
                    for beside in tl.static_range((j + T.pw) % SW, T.kw, SW):
                        # The window whose place (below, beside) these values take.
                        top = up + (i + T.ph - below) // SH
                        begin = left + (j + T.pw - beside) // SW
                        window = (image * OH + top).to(tl.int64) * (OW * C)
                        windows = begin[:, None] * C + channels[None, :]
                        width = tl.where((top >= 0) & (top < OH), OW, 0)
                        there = (inside & (begin >= 0) & (begin < width))[:, None]
                        if not T.even:
                            there = there & live[None, :]
                        place = tl.load(
                            places_ptr + window + windows, mask=there, other=_NOWHERE
                        )
                        place = place.to(tl.int32)
                        dy = tl.load(dy_ptr + window + windows, mask=there, other=0).to(
                            ACC
                        )
                        dz += tl.where(place == below * T.kw + beside, dy, 0.0)
                if F.training:
                    centred = x.to(ACC) - mean[None, :]
                    dz = dz - mean_dz[None, :] - centred * slope[None, :]
                dx = (dz * scale[None, :]).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + first + offsets, dx, mask=mask)
