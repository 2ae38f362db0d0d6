"""Merge the statistics of several processes' batches into those of the joined batch.

A process sends, in one row of 2 * C + 1 numbers, the mean and the biased variance of each channel,
and the number of values per channel. An empty batch sends zeros. With n_r, mean_r and var_r of
process r, and n = sum_r n_r:

    mean = sum_r n_r * mean_r / n        n * var = sum_r n_r * (var_r + (mean_r - mean)^2)

which is Chan's formula. All processes add the same numbers in the order of the ranks, so their
results are bitwise equal.

Source: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115.
"""

import triton
import triton.language as tl

from normplug._kernels.primitives import SCALARS, scalar

# The arguments.
#   PARTS, C             processes; channels
#   momentum, eps        as in `columns`
#   FAN_IN               processes whose rows are read at a time
#   BC                   channels that a program takes at a time
# ACC, RUNNING, CUMULATIVE, TRACKED: as in `columns`.


@triton.jit
def _joined_moments(
    parts_ptr, channels, there, PARTS, C, FAN_IN: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr
):
    """Count, mean, and sum of squared distances from it (m2), over all processes.

    Where batches may be empty, counts below 1 are raised to 1 before they divide.
    """
    count = tl.full([], 0.0, ACC)
    mean = tl.zeros([BC], ACC)
    m2 = tl.zeros([BC], ACC)
    for start in range(0, PARTS, FAN_IN):
        parts = start + tl.arange(0, FAN_IN)
        rows_ptr = parts_ptr + parts * (2 * C + 1)
        counts = tl.load(rows_ptr + 2 * C, mask=parts < PARTS, other=0.0)[:, None]
        at = rows_ptr[:, None] + channels[None, :]
        mask = (parts < PARTS)[:, None] & there[None, :]
        means = tl.load(at, mask=mask, other=0.0)
        variances = tl.load(at + C, mask=mask, other=0.0)
        chunk_count = tl.sum(counts)
        weights = counts / tl.maximum(chunk_count, 1.0)
        chunk_mean = tl.sum(weights * means, axis=0)
        # The sum above rounds at the size of the mean. The mean distance from it corrects that.
        chunk_mean += tl.sum(weights * (means - chunk_mean[None, :]), axis=0)
        spread = means - chunk_mean[None, :]
        chunk_m2 = tl.sum(counts * (variances + spread * spread), axis=0)
        fraction = chunk_count / tl.maximum(count + chunk_count, 1.0)
        difference = chunk_mean - mean
        m2 += chunk_m2 + difference * difference * (count * fraction)
        mean += difference * fraction
        count += chunk_count
    return count, mean, m2


@triton.jit(do_not_specialize=["PARTS", "C", *SCALARS])
def batch_norm_merge(
    parts_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, stats_ptr,
    PARTS, C,
    momentum, eps,
    FAN_IN: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr, RUNNING: tl.constexpr,
    CUMULATIVE: tl.constexpr, TRACKED: tl.constexpr,
):  # fmt: skip
    """Stats = (mean, rstd, n) of all processes; update the running statistics as in `columns`.

    But here `tracked` does not count this batch yet. With fewer than two values per channel nothing
    is updated or counted. CUMULATIVE needs a single program, since all programs would read the
    counter that one of them increments.
    """
    step = scalar(momentum, ACC)
    if CUMULATIVE:
        step = 1.0 / (tl.load(tracked_ptr) + 1).to(ACC)
    count = tl.full([], 0.0, ACC)
    for start in range(tl.program_id(0) * BC, C, tl.num_programs(0) * BC):
        channels = start + tl.arange(0, BC)
        there = channels < C
        count, mean, m2 = _joined_moments(parts_ptr, channels, there, PARTS, C, FAN_IN, BC, ACC)
        rstd = 1.0 / tl.sqrt(m2 / tl.maximum(count, 1.0) + scalar(eps, ACC))
        tl.store(stats_ptr + channels, mean, mask=there)
        tl.store(stats_ptr + C + channels, rstd, mask=there)
        if RUNNING:
            updated = channels < tl.where(count > 1, C, 0)
            old = tl.load(running_mean_ptr + channels, mask=updated, other=0.0).to(ACC)
            new = (old + step * (mean - old)).to(running_mean_ptr.dtype.element_ty)
            tl.store(running_mean_ptr + channels, new, mask=updated)
            old = tl.load(running_var_ptr + channels, mask=updated, other=0.0).to(ACC)
            unbiased = m2 / tl.maximum(count - 1.0, 1.0)
            new = (old + step * (unbiased - old)).to(running_var_ptr.dtype.element_ty)
            tl.store(running_var_ptr + channels, new, mask=updated)
    if tl.program_id(0) == 0:
        tl.store(stats_ptr + 2 * C, count)
        if TRACKED:
            tl.debug_barrier()  # all threads have read the counter
            tl.store(tracked_ptr, tl.load(tracked_ptr) + 1, mask=count > 1)
