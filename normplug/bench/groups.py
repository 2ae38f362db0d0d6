"""The GPU time of a training step by groups of kernels, which are classified by name."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from normplug.bench.results import Row
from normplug.bench.timing import Call

STEPS = 3
LARGEST = 12  # how many kernels to list by name

OTHER = "other"
# The first rule that matches a kernel's name wins. Attention counts as its matrix products.
LIBRARIES = {
    "optimizer": r"multi_tensor_apply",
    "norm": r"norm(?!al)|\bbn_|GammaBeta|RowwiseMoments",
    "copy": r"copy|memcpy|memset|transpose|convertTensor|nchwToNhwc|nhwcToNchw",
    "conv/gemm": (
        r"conv(?!ert)|gemm|gemv|cutlass|xmma|nvjet|wgrad|dgrad|fprop|splitK|fmha|flash|sdpa"
    ),
    "elementwise": r"elementwise",
}
# Inductor names a kernel after all the ops in it: a kernel with a norm counts wholly as `norm`.
INDUCTOR = {
    "conv/gemm": r"^triton_tem_",
    "norm": r"norm|var_mean",
    "copy": r"_fused(_(_to_copy|clone|copy|cat|permute|transpose|view|t|convolution))+_\d+$",
    "elementwise": r"^triton_poi_",
}
GROUPS = ("norm", "conv/gemm", "elementwise", "copy", "optimizer", OTHER)
ON_THE_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}  # a trace's categories


def group(kernel: str) -> str:
    """The group of `GROUPS` that a kernel belongs to, by its name."""
    rules = INDUCTOR if kernel.startswith("triton_") else LIBRARIES
    found = (name for name, rule in rules.items() if re.search(rule, kernel, re.IGNORECASE))
    return next(found, OTHER)


def profiled(step: Call) -> Row:
    """Profile the GPU's work in a step.

    Returns:
        gpu_ms: milliseconds per step in which the GPU is busy; groups_ms: those of each group;
        kernels: the kernels that take longest.
    """
    # The host's events are not needed, and take longer to export than all of the GPU's.
    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return {"gpu_ms": busy_ms(events, STEPS), **summed(events, STEPS)}


def busy_ms(events: Iterable[Mapping[str, Any]], steps: int) -> float:
    """Milliseconds per step in which the GPU is busy; overlapping work counts once."""
    work = [event for event in events if event.get("cat") in ON_THE_GPU]
    total_us, busy_until = 0.0, -math.inf
    for start, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in work):
        total_us += max(0.0, end - max(start, busy_until))
        busy_until = max(busy_until, end)
    return total_us / 1e3 / steps


def summed(events: Iterable[Mapping[str, Any]], steps: int) -> Row:
    """Sum up the events of a Chrome trace of `steps` steps: groups_ms and kernels."""
    ms: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ON_THE_GPU:
            ms[event["name"]] += event["dur"] / 1e3 / steps
            calls[event["name"]] += 1
    groups = dict.fromkeys(GROUPS, 0.0)
    for kernel, time in ms.items():
        groups[group(kernel)] += time
    return {
        "groups_ms": groups,
        "kernels": [
            {"name": kernel, "group": group(kernel), "ms": time, "calls": calls[kernel] / steps}
            for kernel, time in ms.most_common(LARGEST)
        ],
    }
