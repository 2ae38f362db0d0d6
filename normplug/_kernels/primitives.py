"""What the kernels share: waiting for other programs, moments, activations, bit masks.

Programs that wait. A norm reads a channel twice: once for its statistics, once to normalise. The
kernels do both in one launch, so that the second read finds the data in the L2 cache. Program t
gathers statistics of tile t and then normalises an *earlier* tile, whose statistics only programs
with lower numbers gather. The hardware starts programs in the order of their numbers, and no
program waits before its own part of the statistics is out, so each wait ends, however few programs
fit the GPU at a time. (The argument is that of single-pass scans: Merrill and Garland 2016,
"Single-pass Parallel Prefix Scan with Decoupled Look-back".) A grid run in order by an interpreter
never waits at all.

Tiles. The kernels for rows of adjacent columns read tiles of three axes: LANES, STEPS and columns.
Columns and lanes are to be spread over threads, and each thread is to hold all the steps, so that a
sum over the steps moves nothing between threads. Triton spreads the axis with the most contiguous
addresses first. Lanes and steps tie, and a tie goes to the first axis up to Triton 3.6 and to the
last since 3.7 (triton-lang/triton#7143), so the order of those two depends on the version.
"""

import triton
import triton.language as tl

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
STEP_AXIS = tl.constexpr(1 if _VERSION < (3, 7) else 0)
LANE_AXIS = tl.constexpr(0 if _VERSION < (3, 7) else 1)

# A counter holds arrivals in its low half and readers in its high half.
_READER = tl.constexpr(1 << 32)
_ARRIVALS = tl.constexpr((1 << 32) - 1)


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
    """As many values of any shape, in the order of a tile's, as a tile."""
    if STEP_AXIS == 1:
        tile = tl.reshape(values, [LANES, STEPS, COLUMNS])
    else:
        tile = tl.reshape(values, [STEPS, LANES, COLUMNS])
    return tile


@triton.jit
def arrive(counter_ptr):
    """Count this program in; whoever sees the count sees all that the program has stored."""
    tl.debug_barrier()
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel")


@triton.jit
def wait(counter_ptr, arrivals, readers):
    """Return once `arrivals` programs have arrived; the last of `readers` leaves the counter at 0.

    A reader counts itself in, so a counter that reads 0 to a reader is one that was waited for to
    the end and cleared: the next launch finds it ready, and nothing has to be zeroed in between.
    """
    seen = tl.atomic_add(counter_ptr, _READER, sem="acquire")
    earlier = seen >> 32
    arrived = seen & _ARRIVALS
    while arrived < arrivals:
        seen = tl.atomic_add(counter_ptr, 0, sem="acquire")
        arrived = tl.where(seen == 0, arrivals, seen & _ARRIVALS)
    if earlier == readers - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="release")


@triton.jit
def meet(counter_ptr, programs):
    """Wait for each other: `programs` programs that run at once; the last clears the counter.

    Whatever each has stored before, all see afterwards.
    """
    if arrive(counter_ptr) == programs - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="release")
    else:
        while tl.atomic_add(counter_ptr, 0, sem="acquire") != 0:
            pass
    tl.debug_barrier()


@triton.jit
def scalar(value, ACC: tl.constexpr):
    """A number from the host: float32 as it is, float64 as the bits of one (Triton passes none)."""
    if ACC == tl.float64:
        number = value.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        number = value
    return number


@triton.jit
def size(units, UNIT: tl.constexpr, WIDE: tl.constexpr):
    """A size or stride of so many units, of 64 bits if WIDE."""
    if WIDE:
        units = units.to(tl.int64)
    return units * UNIT


@triton.jit
def row_places(rows, INNER, OUTER, STEP, TWO_LEVELS: tl.constexpr):
    """Where rows begin: STEP apart or, on two levels, INNER rows STEP apart, and those OUTER."""
    if TWO_LEVELS:
        outer = rows.to(tl.int32) // INNER
        places = outer * OUTER + (rows - outer * INNER) * STEP
    else:
        places = rows * STEP
    return places


@triton.jit
def tile_counts(k, total, BLOCK: tl.constexpr, ACC: tl.constexpr):
    """How many of `total` values, cut into tiles of BLOCK, tile k has."""
    return tl.minimum(tl.maximum(total - k * BLOCK, 0), BLOCK).to(ACC)


@triton.jit
def merge_moments(partial_ptr, K, total, BLOCK: tl.constexpr, KP: tl.constexpr, ACC: tl.constexpr):
    """Mean and sum of squares about it of `total` values from those of K tiles, in tile order."""
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
def merge_sums(partial_ptr, K, KP: tl.constexpr, ACC: tl.constexpr):
    """Two sums from those of K tiles, in tile order."""
    a = tl.full([], 0.0, ACC)
    b = tl.full([], 0.0, ACC)
    for start in range(0, K, KP):
        k = start + tl.arange(0, KP)
        a += tl.sum(tl.load(partial_ptr + 2 * k, mask=k < K, other=0.0, cache_modifier=".cg"))
        b += tl.sum(tl.load(partial_ptr + 2 * k + 1, mask=k < K, other=0.0, cache_modifier=".cg"))
    return a, b


@triton.jit
def _word(value):
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    # No number but one nan is all ones.
    return tl.where(value == value, ~bits, 1)


@triton.jit
def publish(words_ptr, place, a, b):
    """Hand in two numbers as words that are never 0: they say themselves that they are there.

    No other store has to be through before, and eight bytes come at once: a plain store will do,
    and the program can end without an answer. `collect` reads them.
    """
    tl.store(words_ptr + 2 * place, _word(a))
    tl.store(words_ptr + 2 * place + 1, _word(b))


@triton.jit
def collect(words_ptr, PAIRS, FAN_IN: tl.constexpr):
    """Wait for PAIRS pairs; return the sums of both, in order, and leave 0 in their places."""
    halves = tl.arange(0, 2)[None, :]
    total = tl.zeros([FAN_IN, 2], tl.float64)
    for start in range(0, PAIRS, FAN_IN):
        pairs = start + tl.arange(0, FAN_IN)[:, None]
        all_ptr = words_ptr + 2 * pairs + halves
        live = pairs + 0 * halves < PAIRS
        words = tl.load(all_ptr, mask=live, other=1, volatile=True)
        while tl.sum(tl.where(words == 0, 1, 0)) > 0:
            words = tl.load(all_ptr, mask=live, other=1, volatile=True)
        tl.store(all_ptr, tl.zeros([FAN_IN, 2], tl.int64), mask=live)
        total += tl.where(live, (~words).to(tl.float64, bitcast=True), 0.0)
    sums = tl.sum(total, axis=0)[None, :]
    a = tl.sum(tl.where(halves == 0, sums, 0.0))
    b = tl.sum(tl.where(halves == 1, sums, 0.0))
    return a, b


@triton.jit
def finish_columns(
    gradient_ptr, parts_ptr, which, c, WIDTH, PARTS, factor,
    SUMS: tl.constexpr, GB: tl.constexpr, CB: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A gradient of CB columns from its parts, in their order; a part is SUMS rows of WIDTH."""
    columns = c * CB + tl.arange(0, CB)
    live = columns < WIDTH
    total = tl.zeros([GB, CB], ACC)
    for start in range(0, PARTS, GB):
        part = start + tl.arange(0, GB)
        offsets = ((part * SUMS + which).to(tl.int64) * WIDTH)[:, None] + columns[None, :]
        mask = (part < PARTS)[:, None] & live[None, :]
        total += tl.load(parts_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    gradient = as_stored(tl.sum(total, axis=0) * factor, gradient_ptr)
    tl.store(gradient_ptr + columns, gradient, mask=live)


@triton.jit
def move_running(running_ptr, old, value, step):
    """The moving average in memory, which is `old`, takes one step towards `value`."""
    old = old.to(value.dtype)
    tl.store(running_ptr, as_stored(old + step * (value - old), running_ptr))


@triton.jit
def count_batch(
    tracked_ptr, momentum, ACC: tl.constexpr, TRACKED: tl.constexpr, CUMULATIVE: tl.constexpr
):
    """Count a batch where there is a counter; return its weight in the running statistics."""
    step = scalar(momentum, ACC)
    if TRACKED:
        count = tl.load(tracked_ptr) + 1
        tl.store(tracked_ptr, count)
        if CUMULATIVE:
            step = 1.0 / count.to(ACC)
    return step


@triton.jit
def finish_running(
    running_mean_ptr, running_var_ptr, tracked_ptr, words_ptr, f, FINISHERS, PARTS, ROWS, momentum,
    FAN_IN: tl.constexpr, ACC: tl.constexpr, TRACKED: tl.constexpr, CUMULATIVE: tl.constexpr,
):  # fmt: skip
    """Take running statistics one step to the mean of ROWS rows' means, and of their variances.

    Pairs of words: PARTS sums of means and variances, then those of the FINISHERS: each adds up
    a stretch of the parts, and the last what they found.
    """
    old_mean = tl.load(running_mean_ptr)
    old_var = tl.load(running_var_ptr)
    stretch = tl.cdiv(PARTS, FINISHERS)
    first = f * stretch
    mean, var = collect(words_ptr + 2 * first, tl.minimum(PARTS - first, stretch), FAN_IN)
    found_ptr = words_ptr + 2 * PARTS
    publish(found_ptr, f, mean, var)
    if f == FINISHERS - 1:
        step = count_batch(tracked_ptr, momentum, ACC, TRACKED, CUMULATIVE)
        mean, var = collect(found_ptr, FINISHERS, FAN_IN)
        move_running(running_mean_ptr, old_mean, (mean / ROWS).to(ACC), step)
        move_running(running_var_ptr, old_var, (var / ROWS).to(ACC), step)


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


@triton.jit
def as_stored(value, pointer):
    """A value in the dtype that `pointer` points to; float64 gets to a half by way of float32."""
    if value.dtype == tl.float64:
        # One by one: of numbers that are no constexpr, Triton 3.3 makes no condition.
        if pointer.dtype.element_ty == tl.float16:
            value = value.to(tl.float32)
        elif pointer.dtype.element_ty == tl.bfloat16:
            value = value.to(tl.float32)
    return value.to(pointer.dtype.element_ty)


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """relu, silu, exact gelu, relu6 or hardswish of z; nan stays nan."""
    if ACTIVATION == 1:
        y = tl.where(z <= 0, 0.0, z)
    elif ACTIVATION == 2:
        y = z * tl.sigmoid(z)
    elif ACTIVATION == 3:
        y = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == 4:
        y = tl.where(z <= 0, 0.0, tl.where(z >= 6, 6.0, z))
    elif ACTIVATION == 5:
        y = tl.where(z <= -3, 0.0, tl.where(z >= 3, z, z * (z + 3.0) * 0.16666666666666666))
    else:
        y = z
    return y


@triton.jit
def activation_gradient(dy, z, ACTIVATION: tl.constexpr):
    """The gradient dy times the slope of the activation at z; where relu and relu6 bend, 0."""
    if ACTIVATION == 1:
        dz = tl.where(z <= 0, 0.0, dy)
    elif ACTIVATION == 2:
        gate = tl.sigmoid(z)
        dz = dy * gate * (1.0 + z * (1.0 - gate))
    elif ACTIVATION == 3:
        density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
        dz = dy * (0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density)
    elif ACTIVATION == 4:
        dz = tl.where(z <= 0, 0.0, tl.where(z >= 6, 0.0, dy))
    elif ACTIVATION == 5:
        slope = tl.where(z <= -3, 0.0, tl.where(z >= 3, 1.0, z * 0.3333333333333333 + 0.5))
        dz = dy * slope
    else:
        dz = dy
    return dz


@triton.jit
def positive(z):
    """Where relu lets a gradient through: everywhere but at z <= 0."""
    return tl.where(z <= 0, 0, 1)


@triton.jit
def pack_bits(bits, COUNT: tl.constexpr):
    """COUNT zeros and ones, of any shape, to COUNT / 8 bytes in a row."""
    eights = tl.reshape(bits.to(tl.int32), [COUNT // 8, 8])
    return tl.sum(eights << tl.arange(0, 8)[None, :], axis=1).to(tl.uint8)


@triton.jit
def unpack_bits(packed, COUNT: tl.constexpr):
    """COUNT / 8 bytes in a row to COUNT zeros and ones in a row."""
    return tl.reshape((packed.to(tl.int32)[:, None] >> tl.arange(0, 8)[None, :]) & 1, [COUNT])
