"""What the kernels of `rows` and `wide_rows` share: arguments, row offsets, last steps.

They compute LayerNorm or, if not F.centred, RMSNorm, whose mean is 0 and whose variance is the
second moment.

X_UNITS, X_OUTER_UNITS: STEP and OUTER of the rows of x: see `row_places`. The same for RESIDUAL, DY
    and DTOTAL. INNER: for all these tensors; also the rows of a sample, or the groups of a row, if
    these have weights of their own.
FINISHERS: programs that add up the running statistics, `fan_in` parts at a time.
"""

import triton
import triton.language as tl

from normplug._kernels.primitives import scalar, update_running
from normplug._kernels.waiting import collect, publish


@triton.jit
def size(units, T):
    """Convert a size or stride from units to values; to 64 bits if T.wide."""
    return (units.to(tl.int64) if T.wide else units) * T.unit


@triton.jit
def strides_of(STEP_UNITS, OUTER_UNITS, INNER, T):
    """STEP and OUTER of a tensor's rows, in values, and INNER, for `row_places`."""
    return size(STEP_UNITS, T), size(OUTER_UNITS, T), INNER


@triton.jit
def row_places(rows, strides, MIDDLE, T):
    """Offsets at which rows begin, in values.

    On one level of strides, rows are STEP apart. On two levels, the INNER rows of a group are STEP
    apart, and groups OUTER apart. On three, where MIDDLE is not 0, sets of T.heads groups are OUTER
    apart, and the groups of a set MIDDLE apart.
    """
    STEP, OUTER, INNER = strides
    if T.heads == 0:
        return rows * STEP
    elif MIDDLE == 0:
        outer = rows.to(tl.int32) // INNER
        return outer * OUTER + (rows - outer * INNER) * STEP
    else:
        group = rows.to(tl.int32) // INNER
        outer = group // T.heads
        head = (group - outer * T.heads).to(OUTER.dtype)
        return outer * OUTER + head * MIDDLE + (rows - group * INNER) * STEP


@triton.jit
def vector_places(rows, INNER, T):
    """Offsets at which the weights of rows begin, and the biases; see `schedule.RowLayout`."""
    if T.vectors == "sample":
        index = rows.to(tl.int32) // INNER
    elif T.vectors == "group":
        index = rows.to(tl.int32) % INNER
    else:
        index = rows
    return (index.to(tl.int64) if T.wide else index) * T.step


@triton.jit
def factor_of(weight, F):
    """The factor of a normalised value: weight + F.offset."""
    return weight.to(F.acc) + F.offset if F.offset != 0.0 else weight.to(F.acc)


@triton.jit
def load_statistics(stats_ptr, rows, inside, ROWS, CENTRED):
    """Mean and rstd of rows; if not CENTRED, the mean is 0, and stats has rstd only."""
    mean = tl.load(stats_ptr + rows, mask=inside, other=0.0) if CENTRED else 0.0
    rstd = tl.load(stats_ptr + (ROWS if CENTRED else 0) + rows, mask=inside, other=0.0)
    return mean, rstd


@triton.jit
def finish_running(running, words_ptr, f, FINISHERS, PARTS, ROWS, FAN_IN, F):
    """Update the running statistics by the mean and the variance of a row, averaged over rows.

    `words` holds PARTS pairs, each a sum of means and a sum of variances, then a pair per finisher.
    Each of FINISHERS programs adds up a stretch of the parts. The last one also adds up the sums of
    all finishers. running: the addresses of mean, variance and count, and the momentum.
    """
    running_mean_ptr, running_var_ptr, tracked_ptr, momentum = running
    if F.centred:
        old_mean = tl.load(running_mean_ptr)
    old_var = tl.load(running_var_ptr)
    stretch = tl.cdiv(PARTS, FINISHERS)
    first = f * stretch
    mean, var = collect(words_ptr + 2 * first, tl.minimum(PARTS - first, stretch), FAN_IN)
    found_ptr = words_ptr + 2 * PARTS
    publish(found_ptr, f, mean, var)
    if f == FINISHERS - 1:
        step = scalar(momentum, F.acc)
        if F.tracked:
            count = tl.load(tracked_ptr) + 1
            tl.store(tracked_ptr, count)
            if F.cumulative:
                step = 1.0 / count.to(F.acc)
        mean, var = collect(found_ptr, FINISHERS, FAN_IN)
        if F.centred:
            update_running(running_mean_ptr, old_mean, (mean / ROWS).to(F.acc), step)
        update_running(running_var_ptr, old_var, (var / ROWS).to(F.acc), step)
