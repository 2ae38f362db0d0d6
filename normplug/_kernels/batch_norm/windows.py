"""BatchNorm, relu and max pooling of a channels_last tensor: the norm's result is never written.

Forward, the statistics come from `columns`. Then each program computes a row of the output. For
each window it normalises all the values and finds the largest. It stores that value's relu, its x
(the peak) and its place in the window, which is NOWHERE where relu is 0.

Backward, only peaks have a gradient. So `columns` computes the sums by channel for BatchNorm + relu
of the peaks, a tensor as small as the output. Then each program takes as many rows of the input as
windows are apart. Each value gathers the gradients of the windows whose peak it is.
"""

import triton.language as tl

from normplug._kernels.activation import activate
from normplug._kernels.batch_norm.columns import affine
from normplug._kernels.primitives import kernel, load_both, scalar
from normplug._kernels.tiles import load

LARGEST_WINDOW = 25  # values: the loops over a window are unrolled, so all its loads are in flight
_NOWHERE = tl.constexpr(255)
# The arguments that `schedule.Pixels` and `primitives` do not explain.
#   H, W, OH, OW         height and width of the input and of the output
#   KH, KW, SH, SW, PH, PW   kernel, stride and padding of the windows, by height and width
#   TRAINING             the statistics are the batch's; if not, constants


@kernel
def batch_norm_pool_forward(
    x_ptr, weight_ptr, bias_ptr, running_mean_ptr, running_var_ptr, y_ptr, peaks_ptr, places_ptr,
    stats_ptr,
    H, W, OH, OW, C_UNITS, SLABS, eps, root,
    UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ACC: tl.constexpr,
    TRAINING: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Y = max over windows of relu(weight * root * (x - mean) * rstd + bias).

    In TRAINING, stats = (mean, rstd) are read. Otherwise they are computed from the running
    statistics, and written. KEEP: peaks and places are written too, for the backward.
    """
    t = tl.program_id(0)
    C = C_UNITS * UNIT
    slab = t % SLABS
    row = t // SLABS
    image = row // OH
    top = (row - image * OH) * SH - PH
    channels = slab * BC + tl.arange(0, BC)
    live = channels < C
    if TRAINING:
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
    mean, scale, bias = affine(mean, rstd, vectors, channels, live, ACC, WEIGHT, BIAS)
    first = row.to(tl.int64) * (OW * C)
    for start in range(0, OW, BP):
        out = start + tl.arange(0, BP)
        left = out * SW - PW
        best = tl.full([BP, BC], float("-inf"), ACC)
        peak = tl.zeros([BP, BC], x_ptr.dtype.element_ty)
        place = tl.zeros([BP, BC], tl.int32)
        stride = W * C
        for kh in tl.static_range(KH):
            # The row kh below `top`, or the nearest in the image, which is in the window too.
            line = tl.minimum(tl.maximum(top + kh, 0), H - 1)
            line_ptr = x_ptr + (image * H + line).to(tl.int64) * stride
            for kw in tl.static_range(KW):
                # The same for columns: all loads are in bounds, and a value that is seen twice is
                # not higher than itself.
                first_place = (line - top) * KW
                column = tl.minimum(tl.maximum(left + kw, 0), W - 1)
                offsets = column[:, None] * C + channels[None, :]
                x = load(line_ptr, offsets, live[None, :], EVEN, False)
                z = (x.to(ACC) - mean[None, :]) * scale[None, :] + bias[None, :]
                higher = (z > best) | (z != z)
                best = tl.where(higher, z, best)
                peak = tl.where(higher, x, peak)
                place = tl.where(higher, (first_place + column - left)[:, None], place)
        offsets = out[:, None] * C + channels[None, :]
        mask = (out < OW)[:, None] & live[None, :]
        y = activate(best, 1).to(y_ptr.dtype.element_ty)  # relu
        tl.store(y_ptr + first + offsets, y, mask=mask)
        if KEEP:
            tl.store(peaks_ptr + first + offsets, peak, mask=mask, eviction_policy="evict_first")
            place = tl.where(best <= 0, _NOWHERE, place).to(tl.uint8)
            tl.store(places_ptr + first + offsets, place, mask=mask, eviction_policy="evict_first")


@kernel
def batch_norm_pool_backward(
    dy_ptr, x_ptr, places_ptr, weight_ptr, stats_ptr, dweight_ptr, dbias_ptr, dx_ptr,
    H, W, OH, OW, C_UNITS, SLABS, root,
    UNIT: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ACC: tl.constexpr,
    TRAINING: tl.constexpr, JOINED: tl.constexpr, WEIGHT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute dx. In TRAINING its sums are read from dweight and dbias, which are in ACC.

    JOINED: dweight holds the terms of dx over all processes, which the sums' launch has written.

    A program takes SH rows, BP blocks of SH * SW values at a time.
    """
    t = tl.program_id(0)
    C = C_UNITS * UNIT
    slab = t % SLABS
    rows = tl.cdiv(H, SH)
    image = t // SLABS // rows
    up = t // SLABS - image * rows
    channels = slab * BC + tl.arange(0, BC)
    live = channels < C
    mean = tl.load(stats_ptr + channels, mask=live, other=0.0)
    rstd = tl.load(stats_ptr + C + channels, mask=live, other=0.0)
    # dx has no bias, so `affine` gives zeros for it. Without TRAINING they stand for the sums.
    vectors = weight_ptr, weight_ptr, root
    mean, scale, zeros = affine(mean, rstd, vectors, channels, live, ACC, WEIGHT, BIAS=False)
    mean_dz = zeros
    slope = zeros
    if TRAINING and JOINED:
        mean_dz, slope = load_both(dweight_ptr, channels, live, C)
    elif TRAINING:
        each = 1.0 / ((tl.num_programs(0) // SLABS // rows).to(ACC) * H * W)
        mean_dz = tl.load(dbias_ptr + channels, mask=live, other=0.0) * each
        dweight = tl.load(dweight_ptr + channels, mask=live, other=0.0)
        # The slope of `columns`, as dweight is root * rstd times the sum of dz * (x - mean).
        slope = dweight * rstd * (each / scalar(root, ACC))
    for start in range(0, tl.cdiv(W, SW), BP):
        left = start + tl.arange(0, BP)
        for i in tl.static_range(SH):
            for j in tl.static_range(SW):
                # All these values have the same places in the windows that cover them.
                row = up * SH + i
                column = left * SW + j
                inside = column < tl.where(row < H, W, 0)
                offsets = column[:, None] * C + channels[None, :]
                first = (image * H + row).to(tl.int64) * (W * C)
                mask = inside[:, None]
                if not EVEN:
                    mask = mask & live[None, :]
                if TRAINING:
                    x = tl.load(x_ptr + first + offsets, mask=mask, other=0)
                dz = tl.zeros([BP, BC], ACC)
                for below in tl.static_range((i + PH) % SH, KH, SH):
                    for beside in tl.static_range((j + PW) % SW, KW, SW):
                        # The window whose place (below, beside) these values take.
                        top = up + (i + PH - below) // SH
                        begin = left + (j + PW - beside) // SW
                        window = (image * OH + top).to(tl.int64) * (OW * C)
                        windows = begin[:, None] * C + channels[None, :]
                        width = tl.where((top >= 0) & (top < OH), OW, 0)
                        there = (inside & (begin >= 0) & (begin < width))[:, None]
                        if not EVEN:
                            there = there & live[None, :]
                        place = tl.load(places_ptr + window + windows, mask=there, other=_NOWHERE)
                        place = place.to(tl.int32)
                        dy = tl.load(dy_ptr + window + windows, mask=there, other=0).to(ACC)
                        dz += tl.where(place == below * KW + beside, dy, 0.0)
                if TRAINING:
                    centred = x.to(ACC) - mean[None, :]
                    dz = dz - mean_dz[None, :] - centred * slope[None, :]
                dx = (dz * scale[None, :]).to(dx_ptr.dtype.element_ty)
                tl.store(dx_ptr + first + offsets, dx, mask=mask)
