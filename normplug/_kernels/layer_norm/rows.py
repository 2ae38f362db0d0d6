"""LayerNorm and RMSNorm over rows that a program can hold: x is read once, forward and backward.

A tile is R rows of U * BC columns, with the axes that `tiles` explains: R lanes and U steps. The
threads of a row take BC adjacent columns at a time, U times. Programs take tiles in turn, so sums
over rows (the running statistics; the gradients of weight and bias) stay in registers until a
program's last tile. Then each program publishes its part, and further programs add the parts up in
the programs' order.

Backward, the sums for weight and bias may not fit in registers beside a whole row. Then K programs
that run at once share the row's columns, and exchange the two sums that its dx depends on.
"""

import triton
import triton.language as tl

from normplug._kernels.layer_norm import shared
from normplug._kernels.layer_norm.shared import row_places, size, strides_of
from normplug._kernels.merging import finish_gradients
from normplug._kernels.primitives import as_dtype, as_stored, kernel, scalar, sum_both
from normplug._kernels.tiles import LANE_AXIS, STEP_AXIS, load, store, tile_of_zeros
from normplug._kernels.waiting import arrive, meet, publish, wait


@triton.jit
def _columns(start, WIDTH, U, BC, VECTOR):
    """U times BC columns, and which of them exist.

    The compiler is told that VECTOR columns are contiguous, and no more. Otherwise, where tensors
    differ in dtype, it would give a thread more adjacent values of the narrow tensor than of the
    wide one, and move values between threads to match them.
    """
    if U == 1:  # the same, by an operation that the compiler does not fold away with the hint
        columns = tl.expand_dims(start + tl.arange(0, BC), 0)
    else:
        columns = start + tl.arange(0, U)[:, None] * BC + tl.arange(0, BC)[None, :]
    return tl.max_contiguous(columns, [1, VECTOR]), columns < WIDTH


@triton.jit
def _rows(tile, ROWS, R, WIDE):
    """The rows of a tile, and which of them exist."""
    rows = tile * R + tl.arange(0, R)
    return rows.to(tl.int64) if WIDE else rows, rows < ROWS


@triton.jit
def _all_rows(values):
    """Expand one number per column, (U, BC), to broadcast over the rows of a tile."""
    return tl.expand_dims(values, LANE_AXIS)


@triton.jit
def _vector(pointer, columns, live, R, EVEN):
    """Load weights or the like once for each row of a tile: every thread loads its own columns."""
    places = _all_rows(columns) + tile_of_zeros(R, 1, 1, tl.int32)
    return load(pointer, places, _all_rows(live), EVEN, False)


@triton.jit
def _load(pointer, places, inside, columns, live, EVEN, LAST):
    """Load a tile. EVEN: all its rows and columns exist. LAST: caches evict it first."""
    offsets = _each(places) + _all_rows(columns)
    return load(pointer, offsets, _each(inside) & _all_rows(live), EVEN, LAST)


@triton.jit
def _store(pointer, value, places, inside, columns, live, EVEN):
    offsets = _each(places) + _all_rows(columns)
    store(pointer, offsets, value, _each(inside) & _all_rows(live), EVEN, False)


@triton.jit
def _sum(values):
    """Sum each row of a tile: over what a thread holds, then over threads."""
    return tl.sum(tl.sum(values, axis=STEP_AXIS), axis=1)


@triton.jit
def _folded(values, LANES):
    """Fold a tile's rows into LANES: sum rows that are LANES apart, which one thread holds."""
    R: tl.constexpr = values.shape[LANE_AXIS]
    U: tl.constexpr = values.shape[STEP_AXIS]
    BC: tl.constexpr = values.shape[2]
    if LANES == R:
        folded = values
    elif LANES == 1:
        folded = _all_rows(tl.sum(values, axis=LANE_AXIS))
    elif STEP_AXIS == 1:
        folded = tl.sum(tl.reshape(values, [R // LANES, LANES, U, BC]), axis=0)
    else:
        folded = tl.sum(tl.reshape(values, [U, R // LANES, LANES, BC]), axis=1)
    return folded


@triton.jit
def _each(values):
    """Expand one number per row, in `_sum`'s layout, to broadcast over the columns of a tile."""
    return tl.expand_dims(values[:, None], STEP_AXIS)


@kernel
def layer_norm_rows_forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, input_bias_ptr, running_mean_ptr, running_var_ptr,
    tracked_ptr, y_ptr, total_ptr, stats_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS,
    FINISHERS, momentum, eps, root,
    R: tl.constexpr, U: tl.constexpr, BC: tl.constexpr, VECTOR: tl.constexpr, KEEP: tl.constexpr,
    FAN_IN: tl.constexpr, ACC: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr,
    ROUND: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, INPUT_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GIVEN: tl.constexpr, STATS: tl.constexpr, RUNNING: tl.constexpr,
    TRACKED: tl.constexpr, CUMULATIVE: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    X_MIDDLE: tl.constexpr, RESIDUAL_MIDDLE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Y = weight * root * (h - mean) * rstd + bias, and stats = (mean, rstd) of all rows.

    h = x + input_bias. With a residual, total = x + residual, rounded as it is stored, takes the
    place of x.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0) - FINISHERS
    if program < programs:
        WIDTH = WIDTH_UNITS * UNIT
        DENSE = size(WIDTH_UNITS, UNIT, WIDE)
        x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, UNIT, WIDE)
        residual_strides = strides_of(RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS, INNER, UNIT, WIDE)
        n = WIDTH.to(ACC)
        columns, live = _columns(0, WIDTH, U, BC, VECTOR)
        if KEEP and WEIGHT:
            weight = _vector(weight_ptr, columns, live, R, EVEN)
        if KEEP and BIAS:
            bias = _vector(bias_ptr, columns, live, R, EVEN)
        sum_mean = tl.zeros([R], ACC)
        sum_var = tl.zeros([R], ACC)
        for tile in range(program, tl.cdiv(ROWS, R), programs):
            rows, inside = _rows(tile, ROWS, R, WIDE)
            places = row_places(rows, x_strides, X_MIDDLE, HEADS)
            h = _load(x_ptr, places, inside, columns, live, EVEN, False).to(ACC)
            if CENTRED:
                first = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
            if RESIDUAL:
                places = row_places(rows, residual_strides, RESIDUAL_MIDDLE, HEADS)
                h += _load(residual_ptr, places, inside, columns, live, EVEN, False).to(ACC)
                if CENTRED:
                    first += tl.load(residual_ptr + places, mask=inside, other=0.0).to(ACC)
                h = as_stored(h, total_ptr)
                _store(total_ptr, h, rows * DENSE, inside, columns, live, EVEN)
                h = h.to(ACC)
                if CENTRED:
                    first = as_stored(first, total_ptr).to(ACC)
            if INPUT_BIAS:
                h += _vector(input_bias_ptr, columns, live, R, EVEN).to(ACC)
                if CENTRED:
                    first += tl.load(input_bias_ptr).to(ACC)
            # Distances from one of the values, whose sums do not round at the size of the mean.
            d = h - _each(first) if CENTRED else h
            if GIVEN:
                mean, rstd = shared.load_statistics(stats_ptr, rows, inside, ROWS, CENTRED)
                if CENTRED:
                    d -= _each(mean - first)
            else:
                if CENTRED:
                    d = d if EVEN else tl.where(_all_rows(live), d, 0.0)
                    mean = _sum(d) / n + first
                    # Subtract the mean as it is saved, so that GIVEN gives the same bits.
                    d -= _each(mean - first)
                    d = d if EVEN else tl.where(_all_rows(live), d, 0.0)
                var = _sum(d * d) / n
                rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
            y = as_dtype(d * _each(rstd * scalar(root, ACC)), ROUND).to(ACC)
            if WEIGHT:
                if not KEEP:
                    weight = _vector(weight_ptr, columns, live, R, EVEN)
                y *= shared.factor_of(weight, OFFSET, ACC)
            if BIAS:
                if not KEEP:
                    bias = _vector(bias_ptr, columns, live, R, EVEN)
                y += bias.to(ACC)
            _store(y_ptr, y, rows * DENSE, inside, columns, live, EVEN)
            if STATS:
                if CENTRED:
                    tl.store(stats_ptr + rows, mean, mask=inside)
                tl.store(stats_ptr + (ROWS if CENTRED else 0) + rows, rstd, mask=inside)
            if RUNNING:
                if CENTRED:
                    sum_mean += tl.where(inside, mean, 0.0)
                sum_var += tl.where(inside, var, 0.0)
        if RUNNING:
            total_mean, total_var = sum_both(sum_mean, sum_var, 0)
            publish(counters_ptr, program, total_mean, total_var)
    elif RUNNING:
        shared.finish_running(
            running_mean_ptr, running_var_ptr, tracked_ptr, counters_ptr, program - programs,
            FINISHERS, programs, ROWS, momentum, FAN_IN, ACC, CENTRED, TRACKED, CUMULATIVE,
        )  # fmt: skip


@triton.jit
def _share_sums(partial_ptr, counters_ptr, tile, k, a, b, R, K, K_PADDED):
    """All-reduce two sums per row of a tile, over the K programs that share its columns."""
    rows = tl.arange(0, R)
    shares = tl.arange(0, K_PADDED)[None, :]
    tile_ptr = partial_ptr + tile.to(tl.int64) * (2 * K * R)
    tl.store(tile_ptr + k * (2 * R) + rows, a)
    tl.store(tile_ptr + k * (2 * R) + R + rows, b)
    meet(counters_ptr + tile, K)
    all_ptr = tile_ptr + shares * (2 * R) + rows[:, None]
    a = tl.sum(tl.load(all_ptr, mask=shares < K, other=0.0, cache_modifier=".cg"), axis=1)
    b = tl.sum(tl.load(all_ptr + R, mask=shares < K, other=0.0, cache_modifier=".cg"), axis=1)
    return a, b


@kernel
def layer_norm_rows_backward(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, input_bias_ptr, stats_ptr, dx_ptr, dweight_ptr,
    dbias_ptr, dinput_bias_ptr, partial_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, DY_UNITS, DY_OUTER_UNITS, DTOTAL_UNITS,
    DTOTAL_OUTER_UNITS, PROGRAMS, root,
    R: tl.constexpr, U: tl.constexpr, BC: tl.constexpr, VECTOR: tl.constexpr, K: tl.constexpr,
    K_PADDED: tl.constexpr, STAGES: tl.constexpr, KEEP: tl.constexpr, LANES: tl.constexpr,
    FINISH: tl.constexpr, ACC: tl.constexpr, CENTRED: tl.constexpr, OFFSET: tl.constexpr,
    ROUND: tl.constexpr, WEIGHT: tl.constexpr, INPUT_BIAS: tl.constexpr, DTOTAL: tl.constexpr,
    DX: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DINPUT_BIAS: tl.constexpr,
    DX_AS_X: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr, X_MIDDLE: tl.constexpr,
    DY_MIDDLE: tl.constexpr, DTOTAL_MIDDLE: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The gradients of `layer_norm_rows_forward` that are wanted.

    With a residual, x is the total, and dx the gradient of both. The gradient of input_bias is the
    sum of dx over the rows.
    """
    program = tl.program_id(0)
    WIDTH = WIDTH_UNITS * UNIT
    SUMS: tl.constexpr = DWEIGHT + DBIAS + DINPUT_BIAS
    # evict_first: faster where few programs share a row, slower where many do, the same for one.
    LAST: tl.constexpr = K > 1 and K <= 4
    groups = PROGRAMS // K
    group = program // K
    k = program - group * K
    tiles = tl.cdiv(ROWS, R)
    parts_ptr = partial_ptr
    if K > 1:
        parts_ptr += tiles.to(tl.int64) * (2 * K * R)
    if program < PROGRAMS:
        DENSE = size(WIDTH_UNITS, UNIT, WIDE)
        x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, UNIT, WIDE)
        dy_strides = strides_of(DY_UNITS, DY_OUTER_UNITS, INNER, UNIT, WIDE)
        dtotal_strides = strides_of(DTOTAL_UNITS, DTOTAL_OUTER_UNITS, INNER, UNIT, WIDE)
        n = WIDTH.to(ACC)
        columns, live = _columns(k * (U * BC), WIDTH, U, BC, VECTOR)
        # Inside the loop these would be prefetched like a tile, into as much shared memory.
        if KEEP and WEIGHT:
            weight = _vector(weight_ptr, columns, live, R, EVEN)
        if KEEP and INPUT_BIAS:
            input_bias = _vector(input_bias_ptr, columns, live, R, EVEN)
        dweight = tile_of_zeros(LANES, U, BC, ACC)
        dbias = tile_of_zeros(LANES, U, BC, ACC)
        dinput_bias = tile_of_zeros(LANES, U, BC, ACC)
        for tile in tl.range(group, tiles, groups, num_stages=STAGES):
            rows, inside = _rows(tile, ROWS, R, WIDE)
            x_places = row_places(rows, x_strides, X_MIDDLE, HEADS)
            h = _load(x_ptr, x_places, inside, columns, live, EVEN, LAST).to(ACC)
            places = row_places(rows, dy_strides, DY_MIDDLE, HEADS)
            dy = _load(dy_ptr, places, inside, columns, live, EVEN, LAST).to(ACC)
            mean, rstd = shared.load_statistics(stats_ptr, rows, inside, ROWS, CENTRED)
            if INPUT_BIAS:
                if not KEEP:
                    input_bias = _vector(input_bias_ptr, columns, live, R, EVEN)
                h += input_bias.to(ACC)
            # d needs no mask: out of bounds dy is 0, and so is all that d is multiplied by.
            d = h - _each(mean) if CENTRED else h
            if DWEIGHT:
                if ROUND == ACC:
                    dweight += _folded(dy * _each(rstd) * d, LANES)
                else:
                    rounded = as_dtype(d * _each(rstd * scalar(root, ACC)), ROUND).to(ACC)
                    dweight += _folded(dy * rounded, LANES)
            if DBIAS:
                dbias += _folded(dy, LANES)
            if DX or DINPUT_BIAS:
                g = dy
                if WEIGHT:
                    if not KEEP:
                        weight = _vector(weight_ptr, columns, live, R, EVEN)
                    g *= shared.factor_of(weight, OFFSET, ACC)
                if CENTRED:
                    gd = g * d
                    sum_g, sum_gd = sum_both(tl.sum(g, STEP_AXIS), tl.sum(gd, STEP_AXIS), 1)
                else:
                    sum_gd = _sum(g * d)
                    sum_g = sum_gd
                if K > 1:
                    sum_g, sum_gd = _share_sums(
                        partial_ptr, counters_ptr + 1, tile, k, sum_g, sum_gd, R, K, K_PADDED
                    )
                scale = rstd * scalar(root, ACC)
                slope = scale * rstd * rstd * (sum_gd / n)
                if CENTRED:
                    dx = g * _each(scale) - (d * _each(slope) + _each(scale * (sum_g / n)))
                else:
                    dx = g * _each(scale) - d * _each(slope)
                if DTOTAL:
                    places = row_places(rows, dtotal_strides, DTOTAL_MIDDLE, HEADS)
                    dx += _load(dtotal_ptr, places, inside, columns, live, EVEN, LAST).to(ACC)
                if DINPUT_BIAS:
                    exists = _each(inside) & _all_rows(live)
                    dinput_bias += _folded(dx if EVEN else tl.where(exists, dx, 0.0), LANES)
                if DX:
                    places = x_places if DX_AS_X else rows * DENSE
                    _store(dx_ptr, dx, places, inside, columns, live, EVEN)
        if SUMS > 0:
            part_ptr = parts_ptr + (group * SUMS).to(tl.int64) * WIDTH
            if DWEIGHT:
                tl.store(part_ptr + columns, tl.sum(dweight, axis=LANE_AXIS), mask=live)
                part_ptr += WIDTH
            if DBIAS:
                tl.store(part_ptr + columns, tl.sum(dbias, axis=LANE_AXIS), mask=live)
                part_ptr += WIDTH
            if DINPUT_BIAS:
                tl.store(part_ptr + columns, tl.sum(dinput_bias, axis=LANE_AXIS), mask=live)
            arrive(counters_ptr)
    if SUMS > 0:
        stretches = tl.cdiv(WIDTH, FINISH)
        # K > 1: all run at once, so they can wait for each other. Otherwise further programs do it,
        # which wait for programs before them.
        c = program if K > 1 else program - PROGRAMS
        step = PROGRAMS if K > 1 else stretches
        if (c >= 0) & (c < stretches):
            wait(counters_ptr, PROGRAMS, tl.minimum(stretches, PROGRAMS) if K > 1 else stretches)
            for stretch in range(c, stretches, step):
                finish_gradients(
                    dweight_ptr, dbias_ptr, dinput_bias_ptr, parts_ptr, stretch, WIDTH, groups,
                    root, FINISH, ACC, DWEIGHT, DBIAS, DINPUT_BIAS, SUMS, ROUND == ACC,
                )  # fmt: skip
