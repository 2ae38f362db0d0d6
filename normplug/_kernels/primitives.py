"""What the kernels of several norms share: numbers, tiles, and how their moments are merged.

The kernels for rows of adjacent columns read tiles of three axes: LANES, STEPS and columns. Columns
and lanes are to be spread over threads, and each thread is to hold all the steps, so that a sum
over the steps moves nothing between threads. Triton spreads the axis with the most contiguous
addresses first. Lanes and steps tie, and a tie goes to the first axis up to Triton 3.6 and to the
last since 3.7 (triton-lang/triton#7143), so the order of those two depends on the version.
"""

import triton
import triton.language as tl

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
STEP_AXIS = tl.constexpr(1 if _VERSION < (3, 7) else 0)
LANE_AXIS = tl.constexpr(0 if _VERSION < (3, 7) else 1)
# Names of numbers that no kernel is to be compiled for: a float64's bits are an integer to Triton.
SCALARS = ("momentum", "eps", "root")


@triton.jit
def tile_of_zeros(LANES: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr, ACC):
    """A tile of zeros."""
    if STEP_AXIS == 1:
        tile = tl.zeros([LANES, STEPS, COLUMNS], ACC)
    else:
        tile = tl.zeros([STEPS, LANES, COLUMNS], ACC)
    return tile


@triton.jit
def as_tile(values, LANES: tl.constexpr, STEPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The values of a tensor of any shape, in their order, as a tile."""
    if STEP_AXIS == 1:
        tile = tl.reshape(values, [LANES, STEPS, COLUMNS])
    else:
        tile = tl.reshape(values, [STEPS, LANES, COLUMNS])
    return tile


@triton.jit
def scalar(value, ACC: tl.constexpr):
    """A number from the host, which passes a float64 as its bits: Triton takes none."""
    if ACC == tl.float64:
        number = value.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        number = value
    return number


@triton.jit
def as_dtype(value, DTYPE: tl.constexpr):
    """A value in another dtype; float64 is rounded to float32 before half."""
    if value.dtype == tl.float64:
        # Two conditions: Triton 3.3 cannot join them with `or` here.
        if DTYPE == tl.float16:
            value = value.to(tl.float32)
        elif DTYPE == tl.bfloat16:
            value = value.to(tl.float32)
    return value.to(DTYPE)


@triton.jit
def as_stored(value, pointer):
    """A value in the dtype that `pointer` points to."""
    return as_dtype(value, pointer.dtype.element_ty)


@triton.jit
def tile_counts(k, total, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """How many values tile k has, of `total` values cut into tiles of BLOCK."""
    return tl.minimum(tl.maximum(total - k * BLOCK, 0), BLOCK).to(ACC)


@triton.jit
def merge_moments(partial_ptr, K, total, BLOCK: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr):
    """Mean of `total` values, and sum of squared distances from it, from those of K tiles.

    KP tiles at a time, in their order.
    """
    count = tl.full([], 0.0, ACC)
    mean = tl.full([], 0.0, ACC)
    m2 = tl.full([], 0.0, ACC)
    first = tl.load(partial_ptr, cache_modifier=".cg")
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        counts = tl.where(k < K, tile_counts(k, total, BLOCK, ACC), 0.0)
        means = tl.load(partial_ptr + 2 * k, mask=k < K, other=0.0, cache_modifier=".cg")
        m2s = tl.load(partial_ptr + 2 * k + 1, mask=k < K, other=0.0, cache_modifier=".cg")
        means = tl.where(k < K, means - first, 0.0)
        chunk_count = tl.sum(counts)
        chunk_mean = tl.sum(means * counts) / chunk_count
        spread = means - chunk_mean
        chunk_m2 = tl.sum(tl.where(k < K, m2s + counts * spread * spread, 0.0))
        fraction = chunk_count / (count + chunk_count)
        difference = chunk_mean - mean
        m2 += chunk_m2 + difference * difference * count * fraction
        mean += difference * fraction
        count += chunk_count
    return first + mean, m2


@triton.jit
def merge_sum(partial_ptr, K, KP: tl.constexpr, ACC: tl.constexpr):
    """A sum from those of K tiles, KP at a time, in their order."""
    total = tl.full([], 0.0, ACC)
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        total += tl.sum(tl.load(partial_ptr + k, mask=k < K, other=0.0, cache_modifier=".cg"))
    return total


@triton.jit
def merge_sums(partial_ptr, K, KP: tl.constexpr, ACC: tl.constexpr):
    """Two sums from those of K tiles, KP at a time, in their order."""
    a = tl.full([], 0.0, ACC)
    b = tl.full([], 0.0, ACC)
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        a += tl.sum(tl.load(partial_ptr + 2 * k, mask=k < K, other=0.0, cache_modifier=".cg"))
        b += tl.sum(tl.load(partial_ptr + 2 * k + 1, mask=k < K, other=0.0, cache_modifier=".cg"))
    return a, b


@triton.jit
def affine(
    rstd, weight_ptr, bias_ptr, channels, live, root,
    BC: tl.constexpr, ACC: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """What x - mean is multiplied by, and what is added, for each column."""
    scale = rstd * scalar(root, ACC)
    if WEIGHT:
        scale *= tl.load(weight_ptr + channels, mask=live, other=0.0).to(ACC)
    bias = tl.zeros([BC], ACC)
    if BIAS:
        bias = tl.load(bias_ptr + channels, mask=live, other=0.0).to(ACC)
    return scale, bias
