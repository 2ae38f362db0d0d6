"""Timelines of the GPU work of eager's calls and normplug's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import profile, record_function

from normplug.bench.kernels import OPS, OURS, memory_for
from normplug.bench.op import Function
from normplug.bench.suites import Case


def trace(cases: Iterable[Case], path: Path, device: str) -> None:
    """Write a Chrome trace: for each case and direction, a call of eager and one of normplug.

    Each call is named after its case, direction and provider, and runs after a warm-up. Perfetto
    and chrome://tracing show the trace.
    """
    with profile() as profiler:
        for case in cases:
            with memory_for(case):
                _call(case, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def _call(case: Case, device: str) -> None:
    op = OPS[case.op]
    functions: dict[str, Function] = {
        "eager": op.eager,
        "normplug": partial(op.normplug, backend=OURS["normplug"]),
    }
    with record_function("setup"):
        problem = op.make(case, device)
        calls = {name: problem.calls(function) for name, function in functions.items()}
        for ways in calls.values():
            for call in ways.values():
                call()
    for direction in op.passes:
        for name, ways in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            with record_function(f"{case} {direction} {name}"):
                ways[direction]()
                if device == "cuda":
                    torch.cuda.synchronize()
