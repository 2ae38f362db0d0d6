"""How long calls take. Calls to be compared take turns, so that drift and load affect all of them.

The stopwatches are `triton.testing.do_bench` and `torch.utils.benchmark`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from normplug._torch import gpu_sleep
from normplug.bench.rows import Row

Change = Callable[[Any], Any]  # takes a layer or a model, and returns it or another
Call = Callable[[], Any]
Turn = Callable[[], list[float]]  # some calls; it returns their times

PEERS = ("eager", "compile")
TURNS = 5
TURN_MS = 25  # of repetitions in a turn
FEWEST, MOST = 5, 2000  # calls back to back
# The GPU sleeps before each repetition while the host queues it: LEAD times the host's time, plus
# LEAD_US. So it never waits for the host. The lead also covers a clock of up to 4 GHz.
LEAD, LEAD_US, CYCLES_PER_US = 2.0, 50.0, 2000
STEPS = 3  # in a profile
COPY_BYTES = 512 * 2**20  # of the copy that other calls are compared with
_BOUNDS = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)


def ready(device: str) -> torch.device:
    """A device to measure on. For a GPU, first build the host path in C++: calls do not wait."""
    if device.startswith("cuda"):
        # The build says so if it fails.
        subprocess.run([sys.executable, "-m", "normplug.native", "build"])
    return torch.device(device)


def in_turns(
    key: str, turns: Mapping[str, Turn], rounds: int | None = None
) -> dict[str, Row]:
    """Name -> a row's fields: the median of its times (`key`), their spread, speed over peers."""
    samples: dict[str, list[float]] = {name: [] for name in turns}
    names = deque(turns)
    for _ in range(rounds or TURNS):
        for name in names:
            samples[name] += turns[name]()
        names.rotate(-1)
    rows: dict[str, Row] = {}
    for name, times in samples.items():
        low, middle, high = (
            torch.tensor(times, dtype=torch.float64).quantile(_BOUNDS).tolist()
        )
        rows[name] = {
            key: middle,
            f"{key}_p20": low,
            f"{key}_p80": high,
            f"best_{key}": min(times),
        }
    for row in rows.values():
        row |= {
            f"over_{peer}": rows[peer][key] / row[key] for peer in PEERS if peer in rows
        }
    return rows


def at_rest() -> float:
    """Wait for the GPU, if this process uses one, then return the time in seconds."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def gpu_stopwatch(call: Call) -> Turn:
    """Make a turn of calls, each with a cold L2 cache: microseconds of the GPU alone."""
    from triton.testing import do_bench

    call()  # compile
    start = at_rest()
    for _ in range(FEWEST):
        call()
    host_us = (time.perf_counter() - start) / FEWEST * 1e6  # while the GPU may still work
    at_rest()
    cycles = int((LEAD_US + LEAD * host_us) * CYCLES_PER_US)

    class Sleep:
        # `do_bench` sets it before each repetition, then clears the L2 cache and starts its clock.
        grad = property(fset=lambda self, value: gpu_sleep(cycles))

    bench = partial(do_bench, call, 5, TURN_MS, grad_to_none=[Sleep()], return_mode="all")
    return lambda: [1e3 * ms for ms in bench()]


def back_to_back(call: Call, per_second: float = 1e6) -> Turn:
    """Make a turn of calls back to back: the time of one, by the slower of host and GPU."""
    # Imported here: it looks for compilers, and may print what it finds.
    from torch.utils.benchmark import Timer

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    seconds = timer.timeit(FEWEST).median
    count = min(max(int(TURN_MS / 1e3 / seconds), FEWEST), MOST)
    return lambda: [per_second * timer.timeit(count).median]


def stopwatch(device: torch.device) -> Callable[[Call], Turn]:
    """The stopwatch for single operations: microseconds of the GPU alone, or of the CPU."""
    return gpu_stopwatch if device.type == "cuda" else back_to_back


@cache
def copy_gbps(device: torch.device) -> float:
    """The bandwidth of a large copy on a device in 1e9 bytes per second, read and written."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    turn = stopwatch(device)(partial(torch.empty_like(source).copy_, source))
    return 2 * COPY_BYTES / median(turn()) / 1e3


def say(text: str) -> None:
    """Say on stderr what a measurement does."""
    print(f"normplug.bench: {text}", file=sys.stderr, flush=True)


def attempt(what: str, call: Callable[[], Any]) -> Any:
    """The result of `call()`; if it raises, why is printed, and the result is None."""
    try:
        return call()
    except (
        Exception
    ) as error:  # of any kind, such as no compiler: measure the others anyway
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    # Not in the except block: the traceback there keeps tensors alive.
    say(f"{what} is left out: {why}")
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None


def traced(call: Call, *activities: ProfilerActivity) -> profile:
    """Profile `STEPS` calls: by default, the work of the host and of the GPU."""
    at_rest()
    with profile(activities=activities or None) as profiler:
        for _ in range(STEPS):
            call()
        at_rest()
    return profiler


def gpu_ms(step: Call) -> float:
    """Milliseconds per step in which the GPU is busy."""
    # If the host's work were traced, too, the optimizer's own label would count as GPU work.
    events = traced(step, ProfilerActivity.CUDA).events() or ()
    busy = (each.time_range for each in events if each.device_type == DeviceType.CUDA)
    return sum(each.elapsed_us() for each in busy) / STEPS / 1e3
