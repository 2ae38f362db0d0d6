"""Launch a Triton kernel at the cost of a native one.

`kernel[grid](...)` binds, hashes and looks up its arguments on every call, which takes longer than
many norms. A `Launch` does that once, stores the compiled kernel, and then passes raw pointers
to its launcher. That launcher is private to Triton, so a launch falls back to `kernel[grid](...)`
in versions whose launcher is unknown. It also does so for pointers that are not aligned to 16
bytes, since the stored kernel was compiled for aligned ones.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from normplug._kernels import ahead
from normplug._kernels.constants import Constants, Work, as_compiled
from normplug._kernels.primitives import SCALARS, VERSION

_DIRECT = (3, 3) <= VERSION <= (3, 9) and torch.version.hip is None
# The compiler of 3.2 crashes the process on some of the kernels.
BUILDS = VERSION >= (3, 3)
COOPERATIVE = BUILDS and torch.version.hip is None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")

# Formats of kernel parameters for `struct`, by Triton's name of their type.
_LAYOUTS = {"*": "<Q", "i32": "<i", "i64": "<q", "fp32": "<f"}
# Tensors that few launches have -> the flag of those launches.
_OPTIONAL = {"dstats_ptr": "residual_norm"}
# Triton's names of tensor dtypes.
TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int64: "i64",
}  # fmt: skip


def accumulator(dtype: torch.dtype) -> Any:
    """Triton's dtype in which kernels compute: float64 for float64, else float32."""
    return tl.float64 if dtype == torch.float64 else tl.float32


class Compiled(NamedTuple):
    """A compiled kernel as the driver launches it, for the host path in C++."""

    function: int  # the driver's handle
    grid: int
    threads: int  # per program
    shared: int  # bytes of shared memory
    cooperative: bool
    # For each, the index of its tensor among the launch's tensors, or -1 for a number; the number's
    # bits; and the parameter's size in bytes.
    parameters: tuple[tuple[int, int, int], ...]


class Launch:
    """A kernel with everything but its tensors: grid, sizes, constants and compiler options.

    The kernel's arguments are tensors, whose names end in `_ptr`; numbers; and the constants T and
    F. `pointers` names the tensors: `x` for `x_ptr`. The last tensor may be one of `_OPTIONAL`,
    which is compiled in as None unless the constants have its flag.

    Args:
        kernel: the kernel, decorated by `primitives.kernel`.
        work: its grid, warps, tile and sizes.
        constants: its flags.
        numbers: the other numbers, by name.

    Raises:
        TypeError: if the sizes and the numbers are not those that the kernel takes.
    """

    def __init__(
        self, kernel: Any, work: Work, constants: Constants, **numbers: float
    ) -> None:
        tensors = [name for name in kernel.arg_names if name.endswith("_ptr")]
        names = kernel.arg_names[len(tensors) : -2]
        flag = _OPTIONAL.get(tensors[-1])
        self._absent: tuple[None, ...] = ()
        if flag is not None and not getattr(constants, flag):
            tensors.pop()
            self._absent = (None,)
        values = work.sizes | numbers
        if values.keys() != set(names):
            raise TypeError(
                f"normplug: {kernel.__name__} takes the numbers {', '.join(names)}; got "
                f"{', '.join(values)}. Pass each of them once, by its name."
            )
        self.pointers = tuple(name.removesuffix("_ptr") for name in tensors)
        self._kernel, self._grid = kernel, work.grid
        is_double = constants.acc == tl.float64
        self._numbers = tuple(_encoded(name, values[name], is_double) for name in names)
        tile, flags = work.tile, constants
        if not INTERPRETED:
            tile = as_compiled(tile)
            flags = as_compiled(flags)
        # Allow a fused multiply-add for a * b + c: the default of Triton before 3.10.
        self._constants = {
            "T": tile,
            "F": flags,
            "num_warps": work.warps,
            "enable_fp_fusion": True,
        }
        if work.cooperative:
            self._constants["launch_cooperative_grid"] = True
        self._tail = (*self._absent, *self._numbers, tile, flags)
        self._direct = _DIRECT and not INTERPRETED
        self._run: Any = None  # Triton's launcher, once it is known
        self._function: Any = None
        self._metadata: Any = None
        self._signature: dict[str, str] = {}
        self._settled = INTERPRETED  # whether `ahead` was asked for the kernel

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Launch on `stream`, which must be the current stream of the current device."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        aligned = not reduce(or_, pointers) & 15
        if aligned and self._run is not None:
            try:
                self._run(
                    self._grid, 1, 1, stream, self._function, self._metadata, None, None, None,
                    *pointers, *self._tail,
                )  # fmt: skip
            except TypeError:  # the launcher takes other arguments
                self._run, self._direct = None, False
            else:
                return
        name = None
        if aligned and tensors[0].is_cuda and not self._settled:  # the first launch
            self._settled = True
            name = ahead.settle(self.job([tensor.dtype for tensor in tensors]))
        compiled = self._kernel[(self._grid,)](
            *tensors, *self._absent, *self._numbers, **self._constants
        )
        if name is not None and compiled.hash != name:  # `job` has predicted it wrongly
            ahead.stop()
        if aligned and self._direct:
            self._function, self._metadata = compiled.function, compiled.packed_metadata
            self._run = compiled.run
            self._signature = compiled.src.signature

    def compiled(self) -> Compiled | None:
        """Return what the driver needs for a launch; None before the first one, or if unknown."""
        details = getattr(self._run, "__self__", self._run)
        scratch = [
            getattr(details, f"{kind}_scratch_size", 0) for kind in ("global", "profile")
        ]
        if self._run is None or any(scratch) or self._metadata is None:
            return None
        warps, _, shared, *_ = self._metadata
        names, parameters = self._kernel.arg_names, []
        values: Any = (*range(len(self.pointers)), *self._absent, *self._numbers)
        for place, (name, value) in enumerate(zip(names, values, strict=False)):
            kind = self._signature.get(name, "constexpr")
            if kind == "constexpr":  # compiled in, so it is not passed
                continue
            is_tensor = place < len(self.pointers)
            layout = _LAYOUTS.get("*" if is_tensor and kind.startswith("*") else kind)
            if layout is None:
                return None
            bits = (
                0 if is_tensor else int.from_bytes(struct.pack(layout, value), "little")
            )
            parameters.append((value if is_tensor else -1, bits, struct.calcsize(layout)))
        cooperative = bool(self._constants.get("launch_cooperative_grid"))
        sizes = self._grid, 32 * warps, shared
        return Compiled(self._function, *sizes, cooperative, tuple(parameters))

    def job(self, dtypes: Sequence[torch.dtype]) -> ahead.Job:
        """Describe what Triton compiles for tensors of these dtypes, aligned to 16 bytes."""
        names, count = self._kernel.arg_names, len(dtypes)
        absent = len(self._absent)
        signature = dict.fromkeys(names, "constexpr")
        signature |= {
            n: "*" + TYPES[dtype] for n, dtype in zip(names, dtypes, strict=False)
        }
        for name, value in zip(names[count + absent :], self._numbers, strict=False):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if isinstance(value, float):
                signature[name] = "fp32"
        # In the order of the arguments, on which Triton's hash depends.
        constants: dict[tuple[int], Any] = {(count + i,): None for i in range(absent)}
        constants |= {
            (i,): self._constants[n] for i, n in enumerate(names) if n in self._constants
        }
        options = {k: v for k, v in self._constants.items() if k not in names}
        attributes: dict[tuple[int], list[list[Any]]]
        attributes = {(i,): [["tt.divisibility", 16]] for i in range(count)}
        if VERSION >= (3, 7):
            attributes |= {place: [] for place in constants}
        return ahead.Job(self._kernel, signature, constants, attributes, options)


def _encoded(name: str, value: float, is_double: bool) -> float:
    """Encode a number for the kernels, which decode it by `primitives.scalar`."""
    if name not in SCALARS:
        return value
    bits: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return bits if is_double else float(value)


class Workspace:
    """Counters, which are zero between launches, and a buffer for programs' partial results.

    A device's default stream has one workspace per dtype, since its launches run one after another.
    A launch on another stream gets its own, because it may run at the same time as others, and
    because its memory may belong to a CUDA graph: during capture, and in the warm-up of
    mode="reduce-overhead".
    """

    _kept: dict[tuple[int, torch.dtype], Workspace] = {}

    def __init__(
        self, device: torch.device, dtype: torch.dtype, counters: int, room: int
    ) -> None:
        self.counters = torch.zeros(counters, dtype=torch.int64, device=device)
        self.partial = torch.empty(room, dtype=dtype, device=device)

    @classmethod
    def get(
        cls, device: torch.device, dtype: torch.dtype, counters: int, room: int
    ) -> Workspace:
        """The default stream's workspace, grown to at least `counters` and `room` elements."""
        key = (device.index, dtype)
        workspace = cls._kept.get(key)
        if workspace is None:
            workspace = cls(device, dtype, max(counters, 4096), max(room, 1 << 16))
            cls._kept[key] = workspace
            return workspace
        has_counters = workspace.counters.numel()
        has_room = workspace.partial.numel()
        if counters > has_counters or room > has_room:
            counters = max(counters, has_counters)
            workspace = cls(device, dtype, counters, max(room, has_room))
            cls._kept[key] = workspace
        return workspace
