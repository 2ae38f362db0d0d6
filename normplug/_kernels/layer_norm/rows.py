"""LayerNorm and RMSNorm over rows that a program can hold: x is read once, forward and backward.

A tile is R rows of U * BC columns, with the axes that `tiles` explains: R lanes and U steps. The
threads of a row take BC adjacent columns at a time, U times. Programs take tiles in turn, so sums
over rows (the running statistics; the gradients of weight and bias) stay in registers until a
program's last tile. Then each program publishes its part, and further programs add the parts up in
the programs' order.

Backward, the sums for weight and bias may not fit in registers together with a whole row. Then K
programs that run at once share the row's columns, and exchange the two sums that its dx depends on.
"""

import triton
import triton.language as tl

from normplug._kernels.activation import SILU, activate, silu_and_slope
from normplug._kernels.layer_norm import shared
from normplug._kernels.layer_norm.shared import row_places, size, strides_of
from normplug._kernels.merging import finish_gradients
from normplug._kernels.primitives import as_dtype, as_stored, kernel, scalar, sum_both
from normplug._kernels.tiles import LANE_AXIS, STEP_AXIS, load, store, tile_of_zeros
from normplug._kernels.waiting import arrive, meet, publish, wait


@triton.jit
def _columns(start, WIDTH, T):
    """U times BC columns, and which of them exist.

    The compiler is told that T.vector columns are contiguous, and no more. Otherwise, where tensors
    differ in dtype, it would give a thread more adjacent values of the narrow tensor than of the
    wide one, and move values between threads to match them.
    """
    if T.u == 1:
        # The same, by an operation that the compiler does not fold away with the hint.
        columns = tl.expand_dims(start + tl.arange(0, T.bc), 0)
    else:
        columns = start + tl.arange(0, T.u)[:, None] * T.bc + tl.arange(0, T.bc)[None, :]
    return tl.max_contiguous(columns, [1, T.vector]), columns < WIDTH


@triton.jit
def _rows(tile, ROWS, T):
    """The rows of a tile, and which of them exist."""
    rows = tile * T.r + tl.arange(0, T.r)
    return rows.to(tl.int64) if T.wide else rows, rows < ROWS


@triton.jit
def _all_rows(values):
    """Expand one number per column, (U, BC), to broadcast over the rows of a tile."""
    return tl.expand_dims(values, LANE_AXIS)


@triton.jit
def _vector(pointer, columns, live, T):
    """Load weights or the like once for each row of a tile: every thread loads its own columns."""
    places = _all_rows(columns) + tile_of_zeros(T.r, 1, 1, tl.int32)
    return load(pointer, places, _all_rows(live), T.even, False)


@triton.jit
def _load(pointer, places, inside, columns, live, T, LAST):
    """Load a tile. LAST: caches evict it first."""
    offsets = _each(places) + _all_rows(columns)
    return load(pointer, offsets, _each(inside) & _all_rows(live), T.even, LAST)


@triton.jit
def _weights(pointer, rows, inside, columns, live, INNER, T):
    """Load the weights, or the biases, of a tile's rows."""
    if T.vectors == "all":
        return _vector(pointer, columns, live, T)
    else:
        places = shared.vector_places(rows, INNER, T)
        return _load(pointer, places, inside, columns, live, T, False)


@triton.jit
def _store(pointer, value, places, inside, columns, live, T):
    """Store a tile."""
    offsets = _each(places) + _all_rows(columns)
    mask = _each(inside) & _all_rows(live)
    store(pointer, offsets, value, mask, T.even, False)


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
    tracked_ptr, y_ptr, total_ptr, normalised_ptr, stats_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS,
    FINISHERS, momentum, eps, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Y = weight * root * (h - mean) * rstd + bias, and stats = (mean, rstd) of all rows.

    h = x + input_bias. With a residual, total = x + residual, rounded as it is stored, takes the
    place of x. F.normalised and F.given: x is (h - mean) * rstd of an earlier launch. With F.gate,
    the residual is the gate: silu(gate) multiplies y, or x.
    """
    ACC: tl.constexpr = F.acc
    CENTRED: tl.constexpr = F.centred
    program = tl.program_id(0)
    programs = tl.num_programs(0) - FINISHERS
    if program < programs:
        WIDTH = WIDTH_UNITS * T.unit
        DENSE = size(WIDTH_UNITS, T)
        x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, T)
        residual_strides = strides_of(RESIDUAL_UNITS, RESIDUAL_OUTER_UNITS, INNER, T)
        n = WIDTH.to(ACC)
        columns, live = _columns(0, WIDTH, T)
        if T.keep and F.weight:
            weight = _vector(weight_ptr, columns, live, T)
        if T.keep and F.bias:
            bias = _vector(bias_ptr, columns, live, T)
        sum_mean = tl.zeros([T.r], ACC)
        sum_var = tl.zeros([T.r], ACC)
        for tile in range(program, tl.cdiv(ROWS, T.r), programs):
            rows, inside = _rows(tile, ROWS, T)
            places = row_places(rows, x_strides, T.x_middle, T)
            h = _load(x_ptr, places, inside, columns, live, T, False).to(ACC)
            if CENTRED:
                first = tl.load(x_ptr + places, mask=inside, other=0.0).to(ACC)
            if F.residual:
                places = row_places(rows, residual_strides, T.residual_middle, T)
                h += _load(residual_ptr, places, inside, columns, live, T, False).to(ACC)
                if CENTRED:
                    first += tl.load(residual_ptr + places, mask=inside, other=0.0).to(
                        ACC
                    )
                h = as_stored(h, total_ptr)
                _store(total_ptr, h, rows * DENSE, inside, columns, live, T)
                h = h.to(ACC)
                if CENTRED:
                    first = as_stored(first, total_ptr).to(ACC)
            if F.gate != "":
                places = row_places(rows, residual_strides, T.residual_middle, T)
                gate = _load(residual_ptr, places, inside, columns, live, T, False)
                gate = gate.to(ACC)
                if F.gate == "first":
                    h *= activate(gate, SILU)
            if F.input_bias:
                h += _vector(input_bias_ptr, columns, live, T).to(ACC)
                if CENTRED:
                    first += tl.load(input_bias_ptr).to(ACC)
            # Distances from one of the values, so that a large mean costs no precision.
            d = h - _each(first) if CENTRED else h
            if F.given and F.normalised:
                rstd = tl.full([T.r], 1.0, ACC)
            elif F.given:
                mean, rstd = shared.load_statistics(
                    stats_ptr, rows, inside, ROWS, CENTRED
                )
                if CENTRED:
                    d -= _each(mean - first)
            else:
                if CENTRED:
                    d = d if T.even else tl.where(_all_rows(live), d, 0.0)
                    mean = _sum(d) / n + first
                    # Subtract the mean as it is saved, so that F.given gives the same bits.
                    d -= _each(mean - first)
                    d = d if T.even else tl.where(_all_rows(live), d, 0.0)
                var = _sum(d * d) / n
                rstd = 1.0 / tl.sqrt(var + scalar(eps, ACC))
                if F.normalised:
                    normalised = d * _each(rstd)
                    places = rows * DENSE
                    _store(normalised_ptr, normalised, places, inside, columns, live, T)
            y = as_dtype(d * _each(rstd * scalar(root, ACC)), F.rounded).to(ACC)
            if F.weight:
                if not T.keep:
                    weight = _weights(weight_ptr, rows, inside, columns, live, INNER, T)
                y *= shared.factor_of(weight, F)
            if F.bias:
                if not T.keep:
                    bias = _weights(bias_ptr, rows, inside, columns, live, INNER, T)
                y += bias.to(ACC)
            if F.gate == "last":
                y = as_dtype(y, F.gated).to(ACC) * activate(gate, SILU)
            _store(y_ptr, y, rows * DENSE, inside, columns, live, T)
            if F.stats:
                if CENTRED:
                    tl.store(stats_ptr + rows, mean, mask=inside)
                tl.store(stats_ptr + (ROWS if CENTRED else 0) + rows, rstd, mask=inside)
            if F.running:
                if CENTRED:
                    sum_mean += tl.where(inside, mean, 0.0)
                sum_var += tl.where(inside, var, 0.0)
        if F.running:
            total_mean, total_var = sum_both(sum_mean, sum_var, 0)
            publish(counters_ptr, program, total_mean, total_var)
    elif F.running:
        running = running_mean_ptr, running_var_ptr, tracked_ptr, momentum
        f = program - programs
        shared.finish_running(
            running, counters_ptr, f, FINISHERS, programs, ROWS, T.fan_in, F
        )


@triton.jit
def _set_of(program, PROGRAMS, ROWS, INNER, T):
    """The set of rows that a program takes.

    Also return its place among the set's programs, the number of these, and the set's rows.
    """
    if T.vectors == "sample":
        each = PROGRAMS // (ROWS // INNER)
        members = INNER
    else:
        each = PROGRAMS // INNER
        members = ROWS // INNER
    number = program // each
    return number, program - number * each, each, members


@triton.jit
def _rows_of_set(members, number, INNER, T):
    """The rows that are these members of a set."""
    if T.vectors == "sample":
        return number * INNER + members
    else:
        return members * INNER + number


@triton.jit
def _store_gradient(pointer, sums, number, columns, live, WIDTH, factor):
    """Store the gradient of a set's weight, `factor` times the sums over all rows of the set."""
    places = number.to(tl.int64) * WIDTH + columns
    value = as_stored(tl.sum(sums, axis=LANE_AXIS) * factor, pointer)
    tl.store(pointer + places, value, mask=live)


@triton.jit
def _share_sums(partial_ptr, counters_ptr, tile, k, a, b, T):
    """All-reduce two sums per row of a tile, over the K programs that share its columns."""
    R: tl.constexpr = T.r
    rows = tl.arange(0, R)
    shares = tl.arange(0, T.k_padded)[None, :]
    tile_ptr = partial_ptr + tile.to(tl.int64) * (2 * T.k * R)
    tl.store(tile_ptr + k * (2 * R) + rows, a)
    tl.store(tile_ptr + k * (2 * R) + R + rows, b)
    meet(counters_ptr + tile, T.k)
    all_ptr = tile_ptr + shares * (2 * R) + rows[:, None]
    a = tl.sum(
        tl.load(all_ptr, mask=shares < T.k, other=0.0, cache_modifier=".cg"), axis=1
    )
    b = tl.sum(
        tl.load(all_ptr + R, mask=shares < T.k, other=0.0, cache_modifier=".cg"), axis=1
    )
    return a, b


@kernel
def layer_norm_rows_backward(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, input_bias_ptr, stats_ptr, dx_ptr, dweight_ptr,
    dbias_ptr, dinput_bias_ptr, partial_ptr, counters_ptr,
    ROWS, INNER, WIDTH_UNITS, X_UNITS, X_OUTER_UNITS, DY_UNITS, DY_OUTER_UNITS, DTOTAL_UNITS,
    DTOTAL_OUTER_UNITS, PROGRAMS, root,
    T: tl.constexpr, F: tl.constexpr,
):  # fmt: skip
    """Compute the wanted gradients of `layer_norm_rows_forward`.

    With a residual, x is the total, and dx the gradient of both; F.normalised: it is the total,
    normalised. The gradient of input_bias is the sum of dx over the rows. With F.gate, dtotal is
    the gate, and dinput_bias the gate's gradient, laid out as dx.
    """
    ACC: tl.constexpr = F.acc
    K: tl.constexpr = T.k
    LANES: tl.constexpr = T.lanes
    ROOT: tl.constexpr = F.rounded == ACC  # the sums for dweight lack the factor root
    program = tl.program_id(0)
    WIDTH = WIDTH_UNITS * T.unit
    # Whether sets of rows have a weight each. A program takes rows of one set.
    SETS: tl.constexpr = T.vectors == "sample" or T.vectors == "group"
    EACH: tl.constexpr = T.vectors == "token"  # the weight is as large as x
    SUMS: tl.constexpr = 0 if EACH else F.dweight + F.dbias + F.dinput_bias
    # evict_first: faster where few programs share a row, slower where many do, the same for one.
    LAST: tl.constexpr = K > 1 and K <= 4
    groups = PROGRAMS // K
    group = program // K
    k = program - group * K
    part = group
    members = ROWS
    if SETS:
        number, group, groups, members = _set_of(program, PROGRAMS, ROWS, INNER, T)
    tiles = tl.cdiv(members, T.r)
    parts_ptr = partial_ptr
    if K > 1:
        parts_ptr += tiles.to(tl.int64) * (2 * K * T.r)
    if program < PROGRAMS:
        DENSE = size(WIDTH_UNITS, T)
        x_strides = strides_of(X_UNITS, X_OUTER_UNITS, INNER, T)
        dy_strides = strides_of(DY_UNITS, DY_OUTER_UNITS, INNER, T)
        dtotal_strides = strides_of(DTOTAL_UNITS, DTOTAL_OUTER_UNITS, INNER, T)
        n = WIDTH.to(ACC)
        columns, live = _columns(k * (T.u * T.bc), WIDTH, T)
        # Inside the loop these would be prefetched like a tile, into as much shared memory.
        if T.keep and F.weight:
            if SETS:
                weight_ptr += number.to(tl.int64) * T.step
            weight = _vector(weight_ptr, columns, live, T)
        if T.keep and F.input_bias:
            input_bias = _vector(input_bias_ptr, columns, live, T)
        dweight = tile_of_zeros(LANES, T.u, T.bc, ACC)
        dbias = tile_of_zeros(LANES, T.u, T.bc, ACC)
        dinput_bias = tile_of_zeros(LANES, T.u, T.bc, ACC)
        for tile in tl.range(group, tiles, groups, num_stages=T.stages):
            rows, inside = _rows(tile, members, T)
            if SETS:
                rows = _rows_of_set(rows, number, INNER, T)
            x_places = row_places(rows, x_strides, T.x_middle, T)
            h = _load(x_ptr, x_places, inside, columns, live, T, LAST).to(ACC)
            places = row_places(rows, dy_strides, T.dy_middle, T)
            dy = _load(dy_ptr, places, inside, columns, live, T, LAST).to(ACC)
            mean, rstd = shared.load_statistics(stats_ptr, rows, inside, ROWS, F.centred)
            if F.input_bias:
                if not T.keep:
                    input_bias = _vector(input_bias_ptr, columns, live, T)
                h += input_bias.to(ACC)
            if F.gate != "":
                places = row_places(rows, dtotal_strides, T.dtotal_middle, T)
                gate = _load(dtotal_ptr, places, inside, columns, live, T, LAST).to(ACC)
                silu, silu_slope = silu_and_slope(gate)
                dx_places = x_places if F.dx_as_x else rows * DENSE
            if F.gate == "first":
                dh_dgate = h * silu_slope
                h *= silu
            # d needs no mask: out of bounds dy is 0, and so is all that d is multiplied by.
            if F.normalised:
                d = h
                factor = tl.full([T.r], 1.0, ACC)  # d * factor is the normalised value
            else:
                d = h - _each(mean) if F.centred else h
                factor = rstd
            if F.gate == "last":
                if F.dgate:
                    y = as_dtype(d * _each(rstd * scalar(root, ACC)), F.rounded).to(ACC)
                    if F.weight:
                        if not T.keep:
                            weight = _weights(
                                weight_ptr, rows, inside, columns, live, INNER, T
                            )
                        y *= shared.factor_of(weight, F)
                    dgate = dy * as_dtype(y, F.gated).to(ACC) * silu_slope
                    _store(dinput_bias_ptr, dgate, dx_places, inside, columns, live, T)
                dy *= silu
            if F.dweight:
                if ROOT:
                    terms = dy * _each(factor) * d
                else:
                    factor_root = factor * scalar(root, ACC)
                    rounded = as_dtype(d * _each(factor_root), F.rounded).to(ACC)
                    terms = dy * rounded
                if EACH:
                    if ROOT:
                        terms *= scalar(root, ACC)
                    _store(dweight_ptr, terms, rows * DENSE, inside, columns, live, T)
                else:
                    dweight += _folded(terms, LANES)
            if F.dbias:
                if EACH:
                    _store(dbias_ptr, dy, rows * DENSE, inside, columns, live, T)
                else:
                    dbias += _folded(dy, LANES)
            if (F.dx or F.dinput_bias) or F.dgate:
                g = dy
                if F.weight:
                    if not T.keep:
                        weight = _weights(
                            weight_ptr, rows, inside, columns, live, INNER, T
                        )
                    g *= shared.factor_of(weight, F)
                if F.centred:
                    gd = g * d
                    sum_g, sum_gd = sum_both(
                        tl.sum(g, STEP_AXIS), tl.sum(gd, STEP_AXIS), 1
                    )
                else:
                    sum_gd = _sum(g * d)
                    sum_g = sum_gd
                if K > 1:
                    sum_g, sum_gd = _share_sums(
                        partial_ptr, counters_ptr + 1, tile, k, sum_g, sum_gd, T
                    )
                scale = rstd * scalar(root, ACC)
                slope = scale * factor * factor * (sum_gd / n)
                if F.centred:
                    dx = g * _each(scale) - (
                        d * _each(slope) + _each(scale * (sum_g / n))
                    )
                else:
                    dx = g * _each(scale) - d * _each(slope)
                if F.dtotal:
                    places = row_places(rows, dtotal_strides, T.dtotal_middle, T)
                    dx += _load(dtotal_ptr, places, inside, columns, live, T, LAST).to(
                        ACC
                    )
                if F.gate == "first":
                    if F.dgate:
                        dgate = dx * dh_dgate
                        _store(
                            dinput_bias_ptr, dgate, dx_places, inside, columns, live, T
                        )
                    dx *= silu
                if F.dinput_bias:
                    exists = _each(inside) & _all_rows(live)
                    dinput_bias += _folded(
                        dx if T.even else tl.where(exists, dx, 0.0), LANES
                    )
                if F.dx:
                    places = x_places if F.dx_as_x else rows * DENSE
                    _store(dx_ptr, dx, places, inside, columns, live, T)
        if SUMS > 0 and T.single:
            if F.dweight:
                factor = scalar(root, ACC) if ROOT else 1.0
                _store_gradient(
                    dweight_ptr, dweight, number, columns, live, WIDTH, factor
                )
            if F.dbias:
                _store_gradient(dbias_ptr, dbias, number, columns, live, WIDTH, 1.0)
        elif SUMS > 0:
            part_ptr = parts_ptr + (part * SUMS).to(tl.int64) * WIDTH
            if F.dweight:
                tl.store(part_ptr + columns, tl.sum(dweight, axis=LANE_AXIS), mask=live)
                part_ptr += WIDTH
            if F.dbias:
                tl.store(part_ptr + columns, tl.sum(dbias, axis=LANE_AXIS), mask=live)
                part_ptr += WIDTH
            if F.dinput_bias:
                tl.store(
                    part_ptr + columns, tl.sum(dinput_bias, axis=LANE_AXIS), mask=live
                )
            arrive(counters_ptr)
    if SUMS > 0 and not T.single:
        stretches = tl.cdiv(WIDTH, T.finish)
        # If K > 1, all programs run at once, so they can wait for each other. Otherwise further
        # programs finish the gradients: they wait for earlier ones.
        c = program if K > 1 else program - PROGRAMS
        step = PROGRAMS if K > 1 else stretches
        if SETS:
            finishers = PROGRAMS // groups * stretches
            if (c >= 0) & (c < finishers):
                wait(counters_ptr, PROGRAMS, finishers)
                place = (c // stretches).to(tl.int64) * WIDTH
                gradients = dweight_ptr + place, dbias_ptr + place, dinput_bias_ptr
                parts_ptr += place * groups * SUMS
                parts = parts_ptr, c % stretches, WIDTH, groups
                finish_gradients(gradients, parts, root, T.finish, SUMS, ROOT, F)
        elif (c >= 0) & (c < stretches):
            wait(
                counters_ptr,
                PROGRAMS,
                tl.minimum(stretches, PROGRAMS) if K > 1 else stretches,
            )
            for stretch in range(c, stretches, step):
                gradients = dweight_ptr, dbias_ptr, dinput_bias_ptr
                parts = parts_ptr, stretch, WIDTH, groups
                finish_gradients(gradients, parts, root, T.finish, SUMS, ROOT, F)
