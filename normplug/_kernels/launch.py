"""Launching a Triton kernel at the cost of a native one.

`kernel[grid](...)` binds, hashes and looks up its arguments on every call, which takes longer than
many norms run. A `Launch` does that once, keeps the compiled kernel, and then passes raw pointers
to its launcher. That launcher is private to Triton. So a launch takes the public way in versions
where the launcher is unknown, and for pointers that the compiled kernel was not made for.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from normplug._kernels import ahead

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
_DIRECT = (3, 3) <= _VERSION <= (3, 9) and torch.version.hip is None
BUILDS = _VERSION >= (3, 3)  # the compiler of 3.2 ends the process over some of the kernels
COOPERATIVE = _VERSION >= (3, 3) and torch.version.hip is None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes", "y")


# How parameters lie in memory, by Triton's name of their type.
_LAYOUTS = {"*": "<Q", "i32": "<i", "i64": "<q", "fp32": "<f"}
# Triton's names of the dtypes of tensors.
_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.uint8: "u8", torch.int64: "i64",
}  # fmt: skip


def scalars(double: bool, **values: float) -> dict[str, float | int]:
    """Numbers as the kernels take them: see `primitives.scalar`."""
    if not double:
        return {name: float(value) for name, value in values.items()}
    return {n: struct.unpack("<q", struct.pack("<d", v))[0] for n, v in values.items()}


class Compiled(NamedTuple):
    """A compiled kernel as the driver launches it, for the host path in C++.

    threads: of a program. shared: bytes of shared memory. parameters: of each, the place of its
    tensor among the launch's tensors, or -1; the bits of a number; and its size in bytes.
    """

    function: int
    grid: int
    threads: int
    shared: int
    cooperative: bool
    parameters: tuple[tuple[int, int, int], ...]


class Launch:
    """A kernel with everything but its tensors: grid, sizes, constants and compiler options.

    A call passes tensors by position. So each argument is named here, and the names must be the
    kernel's own, in its order.

    Args:
        kernel: The Triton kernel.
        grid: How many programs run.
        pointers: Names of the tensors of a call; the kernel's argument of tensor `x` is `x_ptr`.
        sizes: Integers, by name.
        scalars: Numbers, as `scalars` makes them.
        constants: What is compiled into the kernel, by name.
        warps: Warps of a program.
        cooperative: All programs run at once.

    Raises:
        TypeError: The names are not those of the kernel's arguments, in order.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int,
        *,
        pointers: tuple[str, ...],
        sizes: dict[str, int],
        scalars: dict[str, float | int],
        constants: dict[str, Any],
        warps: int,
        cooperative: bool = False,
    ) -> None:
        _check_names(kernel, [*(f"{name}_ptr" for name in pointers), *sizes, *scalars, *constants])
        self.pointers, self._kernel, self._grid = pointers, kernel, grid
        self._numbers = (*sizes.values(), *scalars.values())
        # a * b + c in one rounding: the default of Triton before 3.10.
        self._constants = {**constants, "num_warps": warps, "enable_fp_fusion": True}
        if cooperative:
            self._constants["launch_cooperative_grid"] = True
        self._tail = (*self._numbers, *constants.values())
        self._direct = _DIRECT and not INTERPRETED
        self._run: Any = None
        self._function: Any = None
        self._metadata: Any = None
        self._signature: dict[str, str] = {}
        self._settled = INTERPRETED

    def __call__(self, stream: int, *tensors: Tensor) -> None:
        """Launch on `stream`, which must be the current one of the current device."""
        if self._run is not None:
            pointers = [tensor.data_ptr() for tensor in tensors]
            misaligned = 0
            for pointer in pointers:
                misaligned |= pointer
            if not misaligned & 15:
                try:
                    self._run(
                        self._grid, 1, 1, stream, self._function, self._metadata, None, None, None,
                        *pointers, *self._tail,
                    )  # fmt: skip
                except TypeError:  # the launcher takes other arguments
                    self._run, self._direct = None, False
                else:
                    return
        compiled = self._compile(tensors)
        if self._direct and all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
            self._function, self._metadata = compiled.function, compiled.packed_metadata
            self._run = compiled.run
            self._signature = compiled.src.signature

    def compiled(self) -> Compiled | None:
        """What the driver needs to launch it; None before its first launch, or if unknown."""
        details = getattr(self._run, "__self__", self._run)
        scratch = [getattr(details, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
        if self._run is None or any(scratch) or self._metadata is None:
            return None
        warps, clusters, shared, *_ = self._metadata
        if clusters != 1:
            return None
        names, parameters = self._kernel.arg_names, []
        values = (*range(len(self.pointers)), *self._numbers)
        for place, (name, value) in enumerate(zip(names, values, strict=False)):
            kind = self._signature.get(name, "constexpr")
            if kind == "constexpr":  # a number that is compiled in
                continue
            is_tensor = place < len(self.pointers)
            layout = _LAYOUTS.get("*" if is_tensor and kind.startswith("*") else kind)
            if layout is None:
                return None
            bits = 0 if is_tensor else int.from_bytes(struct.pack(layout, value), "little")
            parameters.append((value if is_tensor else -1, bits, struct.calcsize(layout)))
        return Compiled(
            self._function,
            self._grid,
            32 * warps,
            shared,
            bool(self._constants.get("launch_cooperative_grid")),
            tuple(parameters),
        )

    def _compile(self, tensors: tuple[Tensor, ...]) -> Any:
        name = self._settle(tensors)
        compiled = self._kernel[(self._grid,)](*tensors, *self._numbers, **self._constants)
        if name is not None and compiled.hash != name:  # what is expected is not what is needed
            ahead.give_up()
        return compiled

    def _settle(self, tensors: tuple[Tensor, ...]) -> str | None:
        """Count the first launch, and wait for a worker that compiles it; its name, if known."""
        aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        if self._settled or not tensors[0].is_cuda or not aligned:
            return None
        self._settled = True
        return ahead.settle(self.job([tensor.dtype for tensor in tensors]))

    def job(self, dtypes: Sequence[torch.dtype]) -> ahead.Job:
        """What Triton compiles for tensors of these dtypes at addresses divisible by 16."""
        names, count = self._kernel.arg_names, len(dtypes)
        signature = dict.fromkeys(names, "constexpr")
        signature |= {n: "*" + _TYPES[dtype] for n, dtype in zip(names, dtypes, strict=False)}
        for name, value in zip(names[count:], self._numbers, strict=False):
            wide = isinstance(value, int) and not -(2**31) <= value < 2**31
            signature[name] = "fp32" if isinstance(value, float) else "i64" if wide else "i32"
        constants = {(i,): self._constants[n] for i, n in enumerate(names) if n in self._constants}
        options = {k: v for k, v in self._constants.items() if k not in names}
        attributes: dict[tuple[int], list[list[Any]]]
        attributes = {(i,): [["tt.divisibility", 16]] for i in range(count)}
        if _VERSION >= (3, 7):
            attributes |= {place: [] for place in constants}
        return ahead.Job(self._kernel, signature, constants, attributes, options)


def _check_names(kernel: Any, given: list[str]) -> None:
    expected = list(kernel.arg_names)
    if given == expected:
        return
    pairs = itertools.zip_longest(given, expected, fillvalue="nothing")
    place, (got, wanted) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    raise TypeError(
        f"{kernel.__name__}: a launch must name the kernel's arguments in their order; "
        f"argument {place} is {wanted}, and the launch names {got}."
    )


class Workspace:
    """Counters, which are zero between launches, and room for what programs tell each other.

    One workspace is kept for a device's default stream, on which launches follow each other. A
    launch on another stream gets its own. It may run beside others, and its memory may belong to a
    CUDA graph: while one is captured, and in the warm-up of mode="reduce-overhead".
    """

    _kept: dict[tuple[int, torch.dtype], Workspace] = {}

    def __init__(self, device: torch.device, dtype: torch.dtype, counters: int, room: int) -> None:
        self.counters = torch.zeros(counters, dtype=torch.int64, device=device)
        self.partial = torch.empty(room, dtype=dtype, device=device)

    @classmethod
    def get(cls, device: torch.device, dtype: torch.dtype, counters: int, room: int) -> Workspace:
        """The default stream's workspace, with at least `counters` and `room`."""
        key = (device.index, dtype)
        kept = cls._kept.get(key)
        if kept is None or not kept.fits(counters, room):
            if kept is not None:
                counters = max(counters, kept.counters.numel())
                room = max(room, kept.partial.numel())
            kept = cls._kept[key] = cls(device, dtype, max(counters, 4096), max(room, 1 << 16))
        return kept

    def fits(self, counters: int, room: int) -> bool:
        """Whether it has enough of both."""
        return self.counters.numel() >= counters and self.partial.numel() >= room
