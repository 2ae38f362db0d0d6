"""Exchange statistics with other processes inside a kernel, through memory that all GPUs can write.

Each process has an inbox in its own memory. For each channel, the program that merges the process's
own parts writes a message to the inboxes of all processes. Then it waits until its own inbox has a
message from each process, and merges them in the order of the ranks. So all processes get the same
bits.

A message has three words of 64 bits per channel: two numbers and the count of values. In float64 it
has five, since numbers take two words. A backward that adds another norm's result sends a third
number in place of the count. Half of a word is data. The other half is a flag: the number
of the exchange on this channel, and a tag of the call. A word is never seen in part, so it is its
own signal, and plain stores suffice. Exchanges are counted in device memory, so a captured CUDA
graph can be replayed. An inbox has two slots, used in turn. A process writes to a slot again only
after it has received the messages of the exchange in between. Their senders had read the slot
before they sent these messages.

Every wait ends if no process stops: programs start in the order of their channels, and publish
before they wait. So the programs of the lowest unpublished channel can always run. On a GPU only
one such kernel runs at a time, even if there are several streams.

If a process does stop, the others' waits time out. Then the statistics are nan, the running
statistics are left unchanged, and the host finds a mark: see `normplug._ops.exchange`. A process
whose wait timed out sends nothing more. So the others do not merge its nan, and their next waits
time out, too.
"""

import os
from collections.abc import Sequence

import triton
import triton.language as tl

CHANNELS = tl.constexpr(8192)  # most channels of a layer
_WORDS = tl.constexpr(6)  # room for a message, per channel
_LOW = tl.constexpr((1 << 32) - 1)

# The table of a process has words of 64 bits: its rank; the nanoseconds after which a wait times
# out; whether a wait has timed out; the address of the host's mark; the addresses of all inboxes,
# in the order of the ranks; and, for each channel, the number of exchanges so far, then the time.
_INBOXES = tl.constexpr(4)
# Polls after which the threads of a program agree whether to keep waiting.
_POLLS = tl.constexpr(1024)
# The interpreter has no clock. A poll there takes about a millisecond.
_CLOCK = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "0")


def table(rank: int, inboxes: Sequence[int], mark: int, seconds: float) -> list[int]:
    """The words of a process's table; a wait times out after `seconds`."""
    return [rank, int(seconds * 1e9), 0, mark, *inboxes] + [0] * (2 * CHANNELS.value)


def room(processes: int) -> int:
    """Words of an inbox."""
    return 2 * processes * _WORDS.value * CHANNELS.value


@triton.jit
def _write(message_ptr, word, value, flag, there, ACC):
    """Write a number of each channel."""
    if ACC == tl.float64:
        bits = value.to(tl.int64, bitcast=True)
        tl.store(
            message_ptr + (word + 3) * CHANNELS, ((bits >> 32) & _LOW) | flag, mask=there
        )
    else:
        bits = value.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(message_ptr + word * CHANNELS, (bits & _LOW) | flag, mask=there)


@triton.jit
def _read(message_ptr, word, there, ACC):
    """Read what `_write` has written, once it has arrived."""
    low = (
        tl.load(message_ptr + word * CHANNELS, mask=there, other=0, volatile=True) & _LOW
    )
    if ACC == tl.float64:
        high = tl.load(
            message_ptr + (word + 3) * CHANNELS, mask=there, other=0, volatile=True
        )
        return (low | (high << 32)).to(tl.float64, bitcast=True)
    else:
        return low.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _missing(messages_ptr, mask, flag, ACC, NUMBERS):
    """For each process and channel, how many words have not arrived."""
    missing = tl.where(mask, 0, 0)
    for word in tl.static_range(3 + NUMBERS if ACC == tl.float64 else 3):
        words = tl.load(messages_ptr + word * CHANNELS, mask=mask, other=0, volatile=True)
        missing += tl.where(mask & ((words & ~_LOW) != flag), 1, 0)
    return missing


@triton.jit
def _agreed(place_ptr, late, ended, rounds):
    """The time in nanoseconds; its low bits: whether words are late, and an earlier wait timed out.

    Warps may hold copies of one tensor, and see a word arrive at different times. But all must loop
    equally often, so one thread decides for all.
    """
    time = tl.extra.cuda.globaltimer() if _CLOCK else rounds * (_POLLS * 1000000)
    state = (time & ~3) | tl.where(late > 0, 1, 0) | tl.where(ended != 0, 2, 0)
    tl.debug_barrier()  # all threads have read the earlier state
    tl.store(place_ptr, state)
    tl.debug_barrier()
    return tl.load(place_ptr, volatile=True)


@triton.jit
def _exchange(a, b, third, channels, there, C, PEERS, BACKWARD, F):
    """Send a message to all processes, and wait for theirs.

    third: the count of values; in a backward with F.residual_norm, a third number. It returns the
    address of the messages, WORDS * CHANNELS apart, and whether all have arrived.
    """
    ACC: tl.constexpr = F.acc
    NUMBERS: tl.constexpr = 3 if BACKWARD and F.residual_norm else 2
    WORLD: tl.constexpr = F.world
    table = PEERS.to(tl.int64).to(tl.pointer_type(tl.int64))
    rank = tl.load(table)
    numbers_ptr = table + _INBOXES + WORLD + channels
    number = tl.load(numbers_ptr, mask=there, other=0) + 1
    tag = 4 * C + 2 * BACKWARD + 1
    flag = (((number & 0x7FFF) << 16) | tag) << 32
    slot = (number & 1) * WORLD * _WORDS * CHANNELS + channels
    # A process that has stopped waiting sends nothing more: a slot may still be read.
    sends = tl.load(table + 2 + 0 * channels, mask=there, other=1, volatile=True) == 0
    for r in tl.static_range(WORLD):
        inbox = tl.load(table + _INBOXES + r).to(tl.pointer_type(tl.int64))
        message = inbox + slot + rank * _WORDS * CHANNELS
        _write(message, 0, a, flag, sends, ACC)
        _write(message, 1, b, flag, sends, ACC)
        if NUMBERS == 3:
            _write(message, 2, third, flag, sends, ACC)
        else:
            tl.store(message + 2 * CHANNELS, third | flag, mask=sends)
    messages = tl.load(table + _INBOXES + rank).to(tl.pointer_type(tl.int64)) + slot
    rows = tl.arange(0, triton.next_power_of_2(WORLD))[:, None]
    mask = (rows < WORLD) & there[None, :]
    all_ptr = messages[None, :] + rows * _WORDS * CHANNELS
    place = table + _INBOXES + WORLD + CHANNELS + tl.min(channels, axis=0)
    patience = tl.load(table + 1)
    start = tl.full([], 0, tl.int64)
    rounds = tl.full([], 0, tl.int64)
    waits = tl.full([], True, tl.int1)
    state = tl.full([], 1, tl.int64)
    while waits:
        ended = tl.load(table + 2, volatile=True)
        missing = _missing(all_ptr, mask, flag[None, :], ACC, NUMBERS)
        late = tl.sum(tl.sum(missing, axis=1), axis=0)
        polls = tl.full([], 0, tl.int32)
        while (late > 0) & (polls < _POLLS):
            missing = _missing(all_ptr, mask, flag[None, :], ACC, NUMBERS)
            late = tl.sum(tl.sum(missing, axis=1), axis=0)
            polls += 1
        rounds += 1
        state = _agreed(place, late, ended, rounds)
        start = tl.where(start == 0, state, start)
        # Once a wait has timed out, no program waits any more.
        waits = ((state & 3) == 1) & (state - start < patience)
    tl.store(numbers_ptr, number, mask=there)
    if (state & 3) == 1:  # the first wait to time out
        missing = _missing(all_ptr, mask, flag[None, :], ACC, NUMBERS)
        first = tl.min(tl.min(tl.where(missing > 0, rows, WORLD - 1), axis=1), axis=0)
        tl.store(table + 2, 1)
        mark = tl.load(table + 3).to(tl.pointer_type(tl.int64))
        tl.store(mark, (first.to(tl.int64) << 32) | tag)
    return messages, (state & 1) == 0


@triton.jit
def joined_moments(mean, m2, values, channels, there, C, PEERS, F):
    """Each channel's count, mean and m2 over all processes, given this process's.

    A process whose batch is empty has 0 `values`. Counts below 1 are raised to 1 before they
    divide. The formula is Chan's: doi:10.1080/00031305.1983.10483115.
    """
    ACC: tl.constexpr = F.acc
    some = values > 0
    count = values + 0 * channels.to(tl.int64)
    mean = tl.where(some, mean, 0.0)
    messages, arrived = _exchange(
        mean, tl.where(some, m2, 0.0), count, channels, there, C, PEERS, False, F
    )
    n = tl.zeros_like(mean)
    mean = tl.zeros_like(mean)
    m2 = tl.zeros_like(mean)
    for r in tl.static_range(F.world):
        message = messages + r * _WORDS * CHANNELS
        more = tl.load(message + 2 * CHANNELS, mask=there, other=0, volatile=True) & _LOW
        fraction = more.to(ACC) / tl.maximum(n + more.to(ACC), 1.0)
        difference = _read(message, 0, there, ACC) - mean
        m2 += _read(message, 1, there, ACC) + difference * difference * (n * fraction)
        mean += difference * fraction
        n += more.to(ACC)
    n = tl.where(arrived, n, 0.0)
    mean = tl.where(arrived, mean, float("nan"))
    m2 = tl.where(arrived, m2, float("nan"))
    return n, mean, m2


@triton.jit
def joined_sums(a, b, c, channels, there, C, PEERS, F):
    """Sums of each channel over all processes, given this process's. c: used if F.residual_norm."""
    if F.residual_norm:
        third = c
    else:
        third = 0 * channels.to(tl.int64)
    messages, arrived = _exchange(a, b, third, channels, there, C, PEERS, True, F)
    a = tl.zeros_like(a)
    b = tl.zeros_like(b)
    c = tl.zeros_like(a)
    for r in tl.static_range(F.world):
        message = messages + r * _WORDS * CHANNELS
        a += _read(message, 0, there, F.acc)
        b += _read(message, 1, there, F.acc)
        if F.residual_norm:
            c += _read(message, 2, there, F.acc)
    nothing = float("nan")
    return (
        tl.where(arrived, a, nothing),
        tl.where(arrived, b, nothing),
        tl.where(arrived, c, nothing),
    )
