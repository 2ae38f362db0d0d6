"""How programs of one launch wait for each other, and pass each other their results.

A norm reads a channel or a row twice: once for its statistics, once to normalise. The kernels do
both in one launch, so that the second read finds the data in the L2 cache. Program t gathers
statistics of tile t and then normalises an *earlier* tile, whose statistics only programs with
lower numbers gather. The hardware starts programs in the order of their numbers, and a program
publishes its own part of the statistics before it waits. So every wait ends, however few programs
fit the GPU at a time. (Single-pass scans use the same argument: Merrill and Garland 2016,
"Single-pass Parallel Prefix Scan with Decoupled Look-back".) An interpreter that runs the programs
in order never waits at all.
"""

import triton
import triton.language as tl

# A counter holds arrivals in its low half and readers in its high half.
_READER = tl.constexpr(1 << 32)
_ARRIVALS = tl.constexpr((1 << 32) - 1)


@triton.jit
def arrive(counter_ptr):
    """Count this program as arrived; return how many have arrived before it.

    A program that sees the count also sees everything that this one has stored.
    """
    tl.debug_barrier()  # the atomic must follow the stores of all threads
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel")


@triton.jit
def is_last(arrived, programs):
    """Whether a program is the last of `programs`, given what its `arrive` returned."""
    return (arrived & _ARRIVALS) == programs - 1


@triton.jit
def wait(counter_ptr, arrivals, readers):
    """Return once `arrivals` programs have arrived; the last of `readers` leaves the counter at 0.

    Each reader adds one. A reader that then reads 0 knows that the last one has reset the counter:
    all have arrived. The next launch finds the counter at 0, without a memset in between.
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
    """A barrier for `programs` programs that run at once; the last to arrive clears the counter.

    Afterwards each program sees everything that all of them stored before.
    """
    if arrive(counter_ptr) == programs - 1:
        tl.atomic_xchg(counter_ptr, 0, sem="release")
    else:
        while tl.atomic_add(counter_ptr, 0, sem="acquire") != 0:
            pass
    tl.debug_barrier()


@triton.jit
def _word(value):
    """Encode a number as the inverted bits of its float64, which are never 0."""
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    # Only a nan can be all ones, so a nan gets the word 1, which decodes to a nan as well.
    return tl.where(value == value, ~bits, 1)


@triton.jit
def publish(words_ptr, place, a, b):
    """Store two numbers as words that are never 0, so that a word is its own ready flag.

    A store of eight bytes is never seen in part, and depends on no other store. So plain stores
    suffice, without a fence, and the program can end at once. `collect` reads the words.
    """
    tl.store(words_ptr + 2 * place, _word(a))
    tl.store(words_ptr + 2 * place + 1, _word(b))


@triton.jit
def collect(words_ptr, PAIRS, FAN_IN):
    """Wait for PAIRS published pairs; return their two sums, added in order; clear the words."""
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
