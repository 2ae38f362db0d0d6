"""Where a result comes from: versions and hardware."""

from __future__ import annotations

import contextlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import normplug

PACKAGES = ("torchvision", "triton", "lightning", "hydra-core", "numpy")


def versions(*more: str) -> dict[str, str]:
    """Name -> version: Python, torch, the packages that results depend on, and `more`."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        # Not from the installed metadata, which an editable install keeps from an older version.
        "normplug": normplug.__version__,
    }
    for package in (*PACKAGES, *more):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(gpu: bool, processes: int) -> str:
    """Describe the GPUs or the processor in words.

    Args:
        gpu: whether the run used GPUs.
        processes: the number of processes, each with a GPU of its own.
    """
    if gpu:
        return f"{processes} x {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line for line in lines if line.startswith("model name")).split(": ", 1)[1]
    return f"CPU, {os.cpu_count()} x {name}"
