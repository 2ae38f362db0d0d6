"""A timeline of what our calls put on the GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from normplug.bench.kernels import OPS, OURS, memory_for
from normplug.bench.suites import Case


def trace(cases: Iterable[Case], path: Path, device: str) -> None:
    """Write a Chrome trace: one call of normplug, after a warm-up, for each case and direction.

    Perfetto and chrome://tracing show it.
    """
    with profile() as profiler:
        for case in cases:
            with memory_for(case):
                _call(case, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _call(case: Case, device: str) -> None:
    op = OPS[case.op]
    with record_function("setup"):
        problem = op.make(case, device)
        calls = problem.calls(partial(op.normplug, backend=OURS["normplug"]))
        for call in calls.values():
            call()
    for direction, call in calls.items():
        with record_function(f"{case} {direction}"):
            call()
            if device == "cuda":
                torch.cuda.synchronize()
