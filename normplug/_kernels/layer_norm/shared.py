"""What the kernels of `rows` and `wide_rows` share: arguments, row offsets, last steps.

They compute LayerNorm or, if not CENTRED, RMSNorm, whose mean is 0 and whose variance is the second
moment.

The arguments that `schedule` and `primitives` do not explain:

X_UNITS, X_OUTER_UNITS, X_MIDDLE: STEP, OUTER and MIDDLE of the rows of x: see `row_places`. The
    same for RESIDUAL, DY and DTOTAL. INNER, HEADS: for all these tensors.
FINISHERS: programs that add up the running statistics, FAN_IN parts at a time.
CENTRED: the mean is subtracted. If not, stats has rstd only, and no running mean is updated.
OFFSET: added to the weight. ROUND: the dtype to round to before multiplying by the weight, or ACC.
GIVEN: the rows' statistics are read from stats. STATS: they are written there.
RUNNING: the running statistics are updated, with CUMULATIVE as averages over `tracked` batches,
    otherwise by momentum. TRACKED: `tracked` is incremented.
DX_AS_X: the rows of dx have the strides of x; else they are contiguous.
"""

import triton
import triton.language as tl

from normplug._kernels.primitives import scalar, update_running
from normplug._kernels.waiting import collect, publish


@triton.jit
def size(units, UNIT, WIDE):
    """Convert a size or stride from units to values; to 64 bits if WIDE."""
    return (units.to(tl.int64) if WIDE else units) * UNIT


@triton.jit
def strides_of(STEP_UNITS, OUTER_UNITS, INNER, UNIT, WIDE):
    """STEP and OUTER of a tensor's rows, in values, and INNER, for `row_places`."""
    return size(STEP_UNITS, UNIT, WIDE), size(OUTER_UNITS, UNIT, WIDE), INNER


@triton.jit
def row_places(rows, strides, MIDDLE, HEADS):
    """Offsets at which rows begin, in values: STEP apart if HEADS is 0: one level of strides.

    On two levels, the INNER rows of a group are STEP apart, and groups OUTER apart. On three, where
    MIDDLE is not 0, sets of HEADS groups are OUTER apart, and the groups of a set MIDDLE apart.
    """
    STEP, OUTER, INNER = strides
    if HEADS == 0:
        return rows * STEP
    elif MIDDLE == 0:
        outer = rows.to(tl.int32) // INNER
        return outer * OUTER + (rows - outer * INNER) * STEP
    else:
        group = rows.to(tl.int32) // INNER
        outer = group // HEADS
        head = (group - outer * HEADS).to(OUTER.dtype)
        return outer * OUTER + head * MIDDLE + (rows - group * INNER) * STEP


@triton.jit
def factor_of(weight, OFFSET, ACC):
    """The factor of a normalised value: weight + OFFSET."""
    return weight.to(ACC) + OFFSET if OFFSET != 0.0 else weight.to(ACC)


@triton.jit
def load_statistics(stats_ptr, rows, inside, ROWS, CENTRED):
    """Mean and rstd of rows; if not CENTRED, the mean is 0, and stats has rstd only."""
    mean = tl.load(stats_ptr + rows, mask=inside, other=0.0) if CENTRED else 0.0
    rstd = tl.load(stats_ptr + (ROWS if CENTRED else 0) + rows, mask=inside, other=0.0)
    return mean, rstd


@triton.jit
def finish_running(
    running_mean_ptr, running_var_ptr, tracked_ptr, words_ptr, f, FINISHERS, PARTS, ROWS, momentum,
    FAN_IN, ACC, CENTRED, TRACKED, CUMULATIVE,
):  # fmt: skip
    """Update the running statistics by the mean and the variance of a row, averaged over rows.

    `words` holds PARTS pairs, each a sum of means and a sum of variances, then a pair per finisher.
    Each of FINISHERS programs adds up a stretch of the parts. The last one also adds up the sums of
    all finishers.
    """
    if CENTRED:
        old_mean = tl.load(running_mean_ptr)
    old_var = tl.load(running_var_ptr)
    stretch = tl.cdiv(PARTS, FINISHERS)
    first = f * stretch
    mean, var = collect(words_ptr + 2 * first, tl.minimum(PARTS - first, stretch), FAN_IN)
    found_ptr = words_ptr + 2 * PARTS
    publish(found_ptr, f, mean, var)
    if f == FINISHERS - 1:
        step = scalar(momentum, ACC)
        if TRACKED:
            count = tl.load(tracked_ptr) + 1
            tl.store(tracked_ptr, count)
            if CUMULATIVE:
                step = 1.0 / count.to(ACC)
        mean, var = collect(found_ptr, FINISHERS, FAN_IN)
        if CENTRED:
            update_running(running_mean_ptr, old_mean, (mean / ROWS).to(ACC), step)
        update_running(running_var_ptr, old_var, (var / ROWS).to(ACC), step)
