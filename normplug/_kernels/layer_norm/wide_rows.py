"""LayerNorm and RMSNorm over rows that are too wide for one program, or too few to occupy the GPU.

A block of RB rows, forward a single row, is cut into K tiles of CW columns. Program t reduces tile
t, publishes its sums, and then writes tile t - LAG (see `waiting`): by then the tile's rows are
complete, and the tile is still in the L2 cache. So DRAM traffic is one read and one write.
Gradients of weight and bias are summed over the rows of a tile. At the end of the grid, further
programs add them up over the blocks of rows, in order.
"""

import triton
import triton.language as tl

from normplug._kernels import merging
from normplug._kernels.layer_norm import shared
from normplug._kernels.layer_norm.shared import row_places, size, strides_of
from normplug._kernels.primitives import as_dtype, as_stored, kernel, scalar
from normplug._kernels.tiles import load, store
from normplug._kernels.waiting import arrive, publish, wait


@kernel
def layer_norm_wide_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, input_bias_ptr, running_mean_ptr, running_var_ptr,
    tracked_ptr, y_ptr, total_ptr, stats_ptr, partial_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS, K, LAG,
    FINISHERS, momentum, eps, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute y, total and stats by the formulas of `rows.layer_norm_rows_forward`.

    F.residual and F.given exclude each other: with both, no program would store the total.
    Counters: arrivals of each row. With F.running, two words per row follow, and two per finisher.
    """
    ACC: tl.constexpr = F.acc
    CENTRED: tl.constexpr = F.centred
    CW: tl.constexpr = T.cw
    t = tl.program_id(0)
    WIDTH = WIDTH_UNITS * T.unit
    DENSE = size(WIDTH_UNITS, T)
    x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, T)
    residual_strides = strides_of(RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS, INNER, T)
    if t < (0 if F.given else ROWS * K):
        row = t // K
        k = t - row * K
        columns = k * CW + tl.arange(0, CW)
        live = columns < WIDTH
        place = row_places(row, x_strides, T.x_middle, T)
        if CENTRED:
            first = tl.load(x_ptr + place + k * CW).to(ACC)
        h = tl.load(x_ptr + place + columns, mask=live, other=0.0).to(ACC)
        if F.residual:
            place = row_places(row, residual_strides, T.residual_middle, T)
            if CENTRED:
                first += tl.load(residual_ptr + place + k * CW).to(ACC)
            h += tl.load(residual_ptr + place + columns, mask=live, other=0.0).to(ACC)
            total = as_stored(h, total_ptr)
            tl.store(total_ptr + row * DENSE + columns, total, mask=live)
            h = total.to(ACC)
        if F.input_bias:
            if CENTRED:
                first += tl.load(input_bias_ptr + k * CW).to(ACC)
            h += tl.load(input_bias_ptr + columns, mask=live, other=0.0).to(ACC)
        if CENTRED:
            # Distances from one of the values, so that a large mean costs no precision.
            d = h - first
            d = d if T.even else tl.where(live, d, 0.0)
            mean = tl.sum(d) / merging.tile_counts(k, WIDTH, CW, ACC)
            d -= mean
            d = d if T.even else tl.where(live, d, 0.0)
            tl.store(partial_ptr + 2 * t, first + mean)
            tl.store(partial_ptr + 2 * t + 1, tl.sum(d * d))
        else:
            tl.store(partial_ptr + t, tl.sum(h * h))
        arrive(counters_ptr + row)
    u = t - LAG
    if (u >= 0) & (u < ROWS * K):
        row = u // K
        k = u - row * K
        columns = k * CW + tl.arange(0, CW)
        live = columns < WIDTH
        if F.residual:
            wait(counters_ptr + row, K, K)  # another program stores the total
            place = row * DENSE
            h = tl.load(
                total_ptr + place + columns, mask=live, other=0.0, cache_modifier=".cg"
            )
        else:
            place = row_places(row, x_strides, T.x_middle, T)
            h = tl.load(x_ptr + place + columns, mask=live, other=0.0)
            if not F.given:
                wait(counters_ptr + row, K, K)
        if F.given:
            mean, rstd = shared.load_statistics(stats_ptr, row, True, ROWS, CENTRED)
        else:
            if CENTRED:
                parts_ptr = partial_ptr + 2 * row * K
                mean, m2 = merging.merge_tile_moments(parts_ptr, K, WIDTH, CW, T.kp, ACC)
            else:
                mean = tl.full([], 0.0, ACC)
                m2 = merging.merge_tile_sum(partial_ptr + row * K, K, T.kp, ACC)
            var = m2 / WIDTH.to(ACC)
            rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
        h = h.to(ACC)
        if F.input_bias:
            h += tl.load(input_bias_ptr + columns, mask=live, other=0.0).to(ACC)
        if CENTRED:
            h -= mean
        y = as_dtype(h * (rstd * scalar(root, ACC)), F.rounded).to(ACC)
        if F.weight:
            weight = tl.load(weight_ptr + columns, mask=live, other=0.0)
            y *= shared.factor_of(weight, F)
        if F.bias:
            y += tl.load(bias_ptr + columns, mask=live, other=0.0).to(ACC)
        y = as_stored(y, y_ptr)
        tl.store(y_ptr + row * DENSE + columns, y, mask=live)
        if k == 0:
            if F.stats:
                if CENTRED:
                    tl.store(stats_ptr + row, mean)
                tl.store(stats_ptr + (ROWS if CENTRED else 0) + row, rstd)
            if F.running:
                publish(counters_ptr + ROWS, row, mean, var)
    if F.running:
        f = u - ROWS * K
        if f >= 0:
            running = running_mean_ptr, running_var_ptr, tracked_ptr, momentum
            words_ptr = counters_ptr + ROWS
            shared.finish_running(
                running, words_ptr, f, FINISHERS, ROWS, ROWS, T.fan_in, F
            )


@triton.jit
def _columns_gradient(value, gradient_ptr, parts, which, area, SUMS, factor, SINGLE):
    """Sum a gradient over the rows of a tile; store the gradient itself if SINGLE, else a part.

    parts: the address of the parts, and the block of rows. which: the gradient's row in a part of
    SUMS rows. area: the tile's columns, which of them exist, and the width. factor: of the gradient
    itself.
    """
    parts_ptr, block = parts
    columns, live, WIDTH = area
    total = tl.sum(value, axis=0)
    if SINGLE:
        total = as_stored(total * factor, gradient_ptr)
        tl.store(gradient_ptr + columns, total, mask=live)
    else:
        offset = (block * SUMS + which).to(tl.int64) * WIDTH
        tl.store(parts_ptr + offset + columns, total, mask=live)


@triton.jit
def _tile(pointer, places, columns, mask, EVEN, LAST):
    """Load a tile. EVEN: all its rows and columns exist. LAST: it is not read again."""
    return load(pointer, places[:, None] + columns[None, :], mask, EVEN, LAST)


@kernel
def layer_norm_wide_backward(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, input_bias_ptr, stats_ptr, dx_ptr, dweight_ptr,
    dbias_ptr, dinput_bias_ptr, partial_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, DY_UNITS, DY_OUTER_UNITS, DTOTAL_UNITS,
    DTOTAL_OUTER_UNITS, K, LAG, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients by the formulas of `rows.layer_norm_rows_backward`.

    Counters: arrivals of each block of rows; a ready flag for its sums; arrivals of each tile of
    columns. Partial: two sums per row of each tile, two means per row, parts of the gradients.
    """
    ACC: tl.constexpr = F.acc
    CENTRED: tl.constexpr = F.centred
    RB: tl.constexpr = T.rb
    CW: tl.constexpr = T.cw
    EVEN: tl.constexpr = T.even
    SINGLE: tl.constexpr = T.single
    ROOT: tl.constexpr = F.rounded == ACC  # the sums for dweight lack the factor root
    t = tl.program_id(0)
    WIDTH = WIDTH_UNITS * T.unit
    DENSE = size(WIDTH_UNITS, T)
    x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, T)
    dy_strides = strides_of(DY_UNITS, DY_OUTER_UNITS, INNER, T)
    dtotal_strides = strides_of(DTOTAL_UNITS, DTOTAL_OUTER_UNITS, INNER, T)
    SUMS: tl.constexpr = F.dweight + F.dbias + F.dinput_bias
    LATE: tl.constexpr = F.dx or F.dinput_bias
    BLOCKS = tl.cdiv(ROWS, RB)
    TILES = BLOCKS * K
    n = WIDTH.to(ACC)
    lanes = tl.arange(0, RB)
    sums_ptr = partial_ptr + TILES.to(tl.int64) * (2 * RB)
    parts_ptr = sums_ptr + BLOCKS * (2 * RB)
    ready_ptr = counters_ptr + BLOCKS
    done_ptr = ready_ptr + BLOCKS
    if LATE and t < TILES:
        block = t // K
        k = t - block * K
        rows = block * RB + lanes
        columns = k * CW + tl.arange(0, CW)
        inside = rows < ROWS
        live = columns < WIDTH
        mask = inside[:, None] & live[None, :]
        place = row_places(rows, x_strides, T.x_middle, T)
        x = _tile(x_ptr, place, columns, mask, EVEN, False)
        place = row_places(rows, dy_strides, T.dy_middle, T)
        dy = _tile(dy_ptr, place, columns, mask, EVEN, False).to(ACC)
        mean, rstd = shared.load_statistics(stats_ptr, rows, inside, ROWS, CENTRED)
        h = x.to(ACC)
        if F.input_bias:
            h += load(input_bias_ptr, columns, live, EVEN, False).to(ACC)[None, :]
        # d needs no mask: out of bounds dy is 0, and so is all that d is multiplied by.
        d = h - mean[:, None] if CENTRED else h
        g = dy
        if F.weight:
            weight = load(weight_ptr, columns, live, EVEN, False)
            g *= shared.factor_of(weight, F)[None, :]
        tile_ptr = partial_ptr + t.to(tl.int64) * (2 * RB)
        tl.store(tile_ptr + lanes, tl.sum(g, axis=1) if CENTRED else tl.zeros([RB], ACC))
        tl.store(tile_ptr + RB + lanes, tl.sum(g * d, axis=1) * rstd)
        if arrive(counters_ptr + block) == K - 1:
            tl.atomic_xchg(counters_ptr + block, 0, sem="relaxed")
            places = tl.arange(0, 2 * RB)
            total = tl.zeros([T.kp, 2 * RB], ACC)
            block_ptr = partial_ptr + (block * K).to(tl.int64) * (2 * RB)
            for start in range(0, K, T.kp):
                tile = start + tl.arange(0, T.kp)
                there = (tile < K)[:, None]
                tiles_ptr = block_ptr + tile[:, None] * (2 * RB) + places[None, :]
                total += tl.load(tiles_ptr, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(sums_ptr + block * (2 * RB) + places, tl.sum(total, axis=0) / n)
            arrive(ready_ptr + block)
    u = t - LAG
    if (u >= 0) & (u < TILES):
        block = u // K
        k = u - block * K
        rows = block * RB + lanes
        columns = k * CW + tl.arange(0, CW)
        inside = rows < ROWS
        live = columns < WIDTH
        parts = parts_ptr, block
        area = columns, live, WIDTH
        mask = inside[:, None] & live[None, :]
        x_place = row_places(rows, x_strides, T.x_middle, T)
        x = _tile(x_ptr, x_place, columns, mask, EVEN, True)
        place = row_places(rows, dy_strides, T.dy_middle, T)
        dy = _tile(dy_ptr, place, columns, mask, EVEN, True).to(ACC)
        mean, rstd = shared.load_statistics(stats_ptr, rows, inside, ROWS, CENTRED)
        h = x.to(ACC)
        if F.input_bias:
            h += load(input_bias_ptr, columns, live, EVEN, False).to(ACC)[None, :]
        d = h - mean[:, None] if CENTRED else h
        if LATE:
            wait(ready_ptr + block, 1, K)
            if CENTRED:
                mean_g = tl.load(
                    sums_ptr + block * (2 * RB) + lanes, cache_modifier=".cg"
                )
            mean_gx = tl.load(
                sums_ptr + block * (2 * RB) + RB + lanes, cache_modifier=".cg"
            )
            g = dy
            if F.weight:
                weight = load(weight_ptr, columns, live, EVEN, False)
                g *= shared.factor_of(weight, F)[None, :]
            scale = rstd * scalar(root, ACC)
            slope = scale * rstd * mean_gx
            if CENTRED:
                dx = g * scale[:, None] - (d * slope[:, None] + (scale * mean_g)[:, None])
            else:
                dx = g * scale[:, None] - d * slope[:, None]
            if F.dtotal:
                place = row_places(rows, dtotal_strides, T.dtotal_middle, T)
                dx += _tile(dtotal_ptr, place, columns, mask, EVEN, True).to(ACC)
            if F.dx:
                place = x_place if F.dx_as_x else rows * DENSE
                store(dx_ptr, place[:, None] + columns[None, :], dx, mask, EVEN, True)
            if F.dinput_bias:
                masked = dx if EVEN else tl.where(mask, dx, 0.0)
                which: tl.constexpr = F.dweight + F.dbias
                _columns_gradient(
                    masked, dinput_bias_ptr, parts, which, area, SUMS, 1.0, SINGLE
                )
        if F.dweight:
            if ROOT:
                terms = dy * rstd[:, None] * d
            else:
                terms = dy * as_dtype(
                    d * (rstd * scalar(root, ACC))[:, None], F.rounded
                ).to(ACC)
            factor = scalar(root, ACC) if ROOT else 1.0
            _columns_gradient(terms, dweight_ptr, parts, 0, area, SUMS, factor, SINGLE)
        if F.dbias:
            _columns_gradient(dy, dbias_ptr, parts, F.dweight, area, SUMS, 1.0, SINGLE)
        if SUMS > 0 and not SINGLE:
            arrive(done_ptr + k)
    if SUMS > 0 and not SINGLE:
        k = u - TILES
        if k >= 0:
            wait(done_ptr + k, BLOCKS, 1)
            gradients = dweight_ptr, dbias_ptr, dinput_bias_ptr
            blocks = parts_ptr, k, WIDTH, BLOCKS
            merging.finish_gradients(gradients, blocks, root, CW, SUMS, ROOT, F)
