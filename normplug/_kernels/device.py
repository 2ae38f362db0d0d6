"""What every schedule needs to know: the machine, and the limits of the kernels' integers."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what compiles kernels does without torch
    import torch

_INT32 = 2**31 - 2**24  # leaves room for what the padding of the last tile adds
MOST_PLACES = _INT32  # along one axis, whose places are int32


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; on a CPU those of an H100."""
    if device.type != "cuda":
        return 132
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; on a CPU those of an H100."""
    if device.type != "cuda":
        return 227 << 10
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]


def needs_int64(rows: int, stride: int) -> bool:
    """Whether offsets into so many rows outgrow an int32."""
    return rows * stride > _INT32


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def floor_2(n: int) -> int:
    """The largest power of two that is at most n, and at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


def unit_of(*sizes: int) -> int:
    """The largest of 8, 4, 2, 1 that divides every size: the alignment the compiler may assume."""
    return math.gcd(8, *sizes)
