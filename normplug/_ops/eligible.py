"""What the routes over the kernels share: which tensors those take, and where they leave notes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from normplug._kernels.launch import BUILDS, INTERPRETED, Workspace
from normplug._torch import current_device_index, current_raw_stream, unwrap_if_dead

_KEPT_PLANS = 4096
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")


class Plans(Generic[Key, Plan]):
    """Plans by what calls have in common, each made once."""

    def __init__(self, make: Callable[[Key], Plan]) -> None:
        self._make = make
        self._kept: dict[Key, Plan] = {}

    def __getitem__(self, key: Key) -> Plan:
        plan = self._kept.get(key)
        if plan is None:
            if len(self._kept) >= _KEPT_PLANS:
                self._kept.clear()
            plan = self._kept[key] = self._make(key)
        return plan


class Workspaces:
    """The workspace of a plan's launch on the stream that is current."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._kept: dict[tuple[int, int], Workspace] = {}

    def get(self, scratch: tuple[int, int]) -> tuple[int, Workspace]:
        """The stream, and on it `scratch` counters and partial results."""
        on_cuda = self._device.type == "cuda"
        stream = current_raw_stream(self._device.index) if on_cuda else 0
        if stream != 0 or not on_cuda:
            return stream, Workspace(self._device, self._dtype, *scratch)
        work = self._kept.get(scratch)
        if work is None:
            work = self._kept[scratch] = Workspace.get(self._device, self._dtype, *scratch)
        return stream, work


def alive(t: Tensor | None) -> Tensor | None:
    """A tensor that a transform of `torch.func` has left behind, as the plain one that it is."""
    return None if t is None else unwrap_if_dead(t)


def elsewhere(x: Tensor) -> bool:
    """Whether x is on another GPU than the current one, where a launch would go."""
    return x.is_cuda and current_device_index() != x.device.index


def on_device_of(x: Tensor, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call with the GPU of x as the current one."""
    if elsewhere(x):
        with torch.cuda.device_of(x):
            return call(*arguments)
    return call(*arguments)


def refusal(
    x: Tensor,
    others: Iterable[Tensor | None],
    tracked: Tensor | None,
    vectors: Iterable[Tensor | None],
) -> str | None:
    """Why no kernel can take these tensors; None where one may. `vectors` have to be dense."""
    dense = [t for t in (*vectors, tracked) if t is not None]
    present = [*(t for t in others if t is not None), *dense]
    if tracked is not None and tracked.dtype != torch.int64:
        return f"num_batches_tracked is {tracked.dtype}, not torch.int64"
    for t in (x, *present):
        if type(t) not in (Tensor, torch.nn.Parameter):
            return f"a tensor is a {type(t).__name__}, of which the kernels know nothing"
    if (why := refusal_of_device(x)) is not None:
        return why
    if x.dtype not in _DTYPES:
        return f"the input is {x.dtype}"
    if x.numel() == 0:
        return "the input is empty"
    if any(t.device != x.device for t in present):
        return f"not every tensor is on {x.device}, where the input is"
    if not all(t.is_contiguous() for t in dense):
        return "a weight, a bias or a running statistic is strided"
    return None


def refusal_of_device(x: Tensor) -> str | None:
    """Why no kernel can run where x is; None where one can."""
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        return f"the input is on {x.device}, and the kernels need a CUDA device"
    if x.is_cuda and not BUILDS:
        return "the kernels need Triton 3.3, which comes with torch 2.7, or newer"
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 0):
        return "the kernels need a GPU of compute capability 8.0 or more"
    return None


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """As `Tensor.is_contiguous`, of a shape and strides."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
