"""Triton kernels, their schedules, and the code that launches them; only `_ops` imports them.

Here is what the schedules share: properties of the GPU, limits of int32 offsets, sizes of tiles.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the processes that compile kernels never import torch
    import torch

FAN_IN = 32  # parts of a unit, or of a gradient, that one program merges at a time
_INT32 = 2**31 - 2**24  # offsets in the padding of the last tile must not overflow either
LONGEST_AXIS = _INT32  # the longest axis that kernels index in int32


@cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; for a CPU, an H100's."""
    if device.type != "cuda":
        return 132
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can use; for a CPU, an H100's."""
    if device.type != "cuda":
        return 227 << 10
    import triton

    properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    return properties["max_shared_mem"]


def needs_int64(rows: int, stride: int) -> bool:
    """Whether offsets into `rows` rows, `stride` apart, overflow an int32."""
    return rows * stride > _INT32


def cdiv(a: int, b: int) -> int:
    """Divide, and round up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


def floor_2(n: int) -> int:
    """The largest power of two that is at most n, and at least 1."""
    return 1 << max(n.bit_length() - 1, 0)


def unit_of(*sizes: int) -> int:
    """The largest of 8, 4, 2, 1 that divides every size: the alignment the compiler may assume."""
    return math.gcd(8, *sizes)


def tile_of(bytes_each: int) -> int:
    """Values of a tile that is read twice, sized for `bytes_each` bytes per value."""
    if bytes_each <= 4:
        return 8192
    return 4096 if bytes_each <= 8 else 2048


def shrink_to_fill(block: int, units: int, width: int, sms: int) -> int:
    """Halve a tile of `block` values until each multiprocessor has two, or down to 1024 values.

    There are `units` units of `width` values.
    """
    while block > 1024 and units * cdiv(width, block) < 2 * sms:
        block //= 2
    return block


def lag_of(read_bytes: int, tile_bytes: int, tiles: int, units: int) -> int:
    """Tiles between the first read of a tile and its second: at least a unit's `tiles` tiles.

    read_bytes: the bytes that all multiprocessors together read in between.
    """
    return min(max(read_bytes // tile_bytes, tiles), units * tiles)


def room_for_parts(units: int, items: int, columns: int) -> tuple[int, int]:
    """How many counters (with `merging.ready_flag`'s) and results `merging.publish_part` needs."""
    batches = cdiv(items, FAN_IN)
    return units * (batches + 2), units * (items + batches) * 2 * columns


def at_once(warps: int, columns: int, itemsize: int, unit: int) -> int:
    """Rows of `columns` columns that warps read at once, 16 bytes or `unit` values per thread."""
    return max(warps * 32 * min(16 // itemsize, unit) // columns, 1)
