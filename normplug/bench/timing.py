"""How long a call takes: on the GPU alone, on the host alone, and on both in a training loop.

Calls to be compared take turns of a few repetitions each, so that clock drift, or load on a shared
host, affects all of them.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from normplug._torch import gpu_sleep

Call = Callable[[], Any]

WARM_UPS = 5
TURN = 5  # repetitions before the next call's turn
FEWEST, MOST = 3 * TURN, 10 * TURN  # repetitions
BUDGET_S = 0.5  # seconds for one call's repetitions; a slow call has fewer, but at least FEWEST
HOST_TURNS = 9
HOST_CALLS = (5, 50)  # fewest and most per turn: few enough that no launch waits for a full queue
HOST_TURN_S = 0.02
# The GPU sleeps before a call until the host has queued all of it: LEAD times the host's time, plus
# LEAD_US. If that was too short, the measurement is repeated with twice the sleep.
LEAD, LEAD_US = 2.0, 50.0
LEAD_DOUBLINGS = 8
COPY_BYTES = 512 * 2**20
SETTLING = 2  # untimed steps at the start of a turn, as caches hold another model's data
SCRATCH_BYTES = 128 * 2**20  # at least; twice the L2 cache if that is more


class HostTime(NamedTuple):
    """Microseconds per call.

    Attributes:
        host_us: until the host is free again, while the GPU may still work.
        wall_us: in calls back to back: the time of the slower of host and GPU.
    """

    host_us: float
    wall_us: float


class Gpu:
    """The current CUDA device, as a stopwatch uses it."""

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        size = max(2 * l2, SCRATCH_BYTES)
        self._scratch = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._cycles_per_us = _cycles_per_us()

    def time_us(self, call: Call, lead_us: float) -> float | None:
        """Microseconds on the GPU, with a cold L2 cache; None if it had to wait for the host.

        The GPU first sleeps for `lead_us`, while the host queues the call.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Leave the cache dirty: the call pays to write it back, as others pay for its output.
        self._scratch.zero_()
        gpu_sleep(int(lead_us * self._cycles_per_us))
        start.record()
        call()
        end.record()
        waited = start.query()
        end.synchronize()
        return None if waited else start.elapsed_time(end) * 1e3

    def back_to_back(self, call: Call, count: int) -> HostTime:
        """As the function `back_to_back`."""
        return back_to_back(call, count)


class Stopwatch:
    """Times calls.

    Args:
        gpu: where they run; None for the current CUDA device.
        clock: returns seconds, to decide how many repetitions are affordable.
    """

    def __init__(
        self, gpu: Gpu | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._gpu = gpu or Gpu()
        self._clock = clock

    def gpu_us(self, calls: Mapping[str, Call]) -> dict[str, list[float]]:
        """Name -> microseconds of each repetition, with a cold L2 cache and without the launch.

        Raises:
            RuntimeError: the GPU waits for the host however long it sleeps before a call.
        """
        plans = {name: self._plan(call) for name, call in calls.items()}
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for done in range(0, MOST, TURN):
            for name, (repetitions, lead_us) in plans.items():
                if done < repetitions:
                    samples[name] += [self._sample(calls[name], lead_us) for _ in range(TURN)]
        return samples

    def host_time(self, calls: Mapping[str, Call]) -> dict[str, HostTime]:
        """Name -> medians over turns of calls back to back."""
        counts = {name: self._calls_in_a_turn(call) for name, call in calls.items()}
        turns: dict[str, list[HostTime]] = {name: [] for name in calls}
        for _ in range(HOST_TURNS):
            for name, call in calls.items():
                turns[name].append(self._gpu.back_to_back(call, counts[name]))
        return {
            name: HostTime(*(statistics.median(column) for column in zip(*times, strict=True)))
            for name, times in turns.items()
        }

    def copy_gbps(self) -> float:
        """The bandwidth of a large copy in 1e9 bytes per second, reads and writes together."""
        source = torch.randn(COPY_BYTES // 2, device="cuda").to(torch.bfloat16)
        target = torch.empty_like(source)
        samples = self.gpu_us({"copy": lambda: target.copy_(source)})["copy"]
        return 2 * COPY_BYTES / statistics.median(samples) / 1e3

    def _plan(self, call: Call) -> tuple[int, float]:
        """How often to repeat the call, and how long the GPU must sleep before it."""
        self._gpu.back_to_back(call, WARM_UPS)
        lead_us = LEAD_US + LEAD * self._gpu.back_to_back(call, WARM_UPS).host_us
        start = self._clock()
        self._sample(call, lead_us)
        affordable = int(BUDGET_S / (self._clock() - start))
        return min(max(affordable, FEWEST), MOST), lead_us

    def _sample(self, call: Call, lead_us: float) -> float:
        for doubling in range(LEAD_DOUBLINGS):
            us = self._gpu.time_us(call, lead_us * 2**doubling)
            if us is not None:
                return us
        raise RuntimeError(
            "normplug.bench: the GPU waits for the host, however long it sleeps before the call: "
            "does the call synchronise?"
        )

    def _calls_in_a_turn(self, call: Call) -> int:
        fewest, most = HOST_CALLS
        wall_s = self._gpu.back_to_back(call, fewest).wall_us / 1e6
        return min(max(int(HOST_TURN_S / wall_s), fewest), most)


class StepStopwatch:
    """Measures time and memory of whole training steps on the current CUDA device."""

    def turn_ms(self, step: Call, count: int) -> list[float]:
        """Milliseconds of each of `count` steps back to back: the slower of host and GPU."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        for _ in range(SETTLING):
            step()
        for mark in marks[:-1]:
            mark.record()
            step()
        marks[-1].record()
        marks[-1].synchronize()
        return [start.elapsed_time(end) for start, end in pairwise(marks)]

    def host_ms(self, step: Callable[[Callable[[], None]], Any]) -> float:
        """Host milliseconds of one step; the GPU is idle at its start.

        The step calls its argument between its parts. There the host waits for the GPU, untimed, so
        that the launch queue is empty for the next part: a full queue would add to the time.
        """
        total, start = 0.0, at_rest()

        def between() -> None:
            nonlocal total, start
            total += time.perf_counter() - start
            start = at_rest()

        step(between)
        between()
        return total * 1e3

    def peak_bytes(self, step: Call) -> int:
        """The most bytes that all tensors on the device hold during a step."""
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def held_bytes(self) -> int:
        """The bytes that tensors hold now, after garbage collection."""
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()


def back_to_back(call: Call, count: int) -> HostTime:
    """Time `count` calls; the GPU, if there is one, is idle before and after them."""
    start = at_rest()
    for _ in range(count):
        call()
    queued = time.perf_counter()
    done = at_rest()
    return HostTime((queued - start) / count * 1e6, (done - start) / count * 1e6)


def cpu_us(call: Call, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Microseconds of each repetition of a call that uses no GPU, after a warm-up.

    A slow call is repeated less often, but at least `TURN` times.
    """
    call()
    samples: list[float] = []
    while len(samples) < TURN or (sum(samples) < BUDGET_S * 1e6 and len(samples) < MOST):
        start = clock()
        call()
        samples.append((clock() - start) * 1e6)
    return samples


def at_rest() -> float:
    """Wait for the GPU, if this process uses one, then return the time in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _cycles_per_us() -> float:
    """Cycles of `gpu_sleep` per microsecond; the first sleep also wakes an idle GPU."""
    cycles, rates = 20_000_000, []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        gpu_sleep(cycles)
        end.record()
        end.synchronize()
        rates.append(cycles / (start.elapsed_time(end) * 1e3))
    return max(rates)
