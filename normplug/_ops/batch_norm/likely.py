"""Which BatchNorm calls are likely to follow a model's first one.

`swap` and `fuse` record how their layers will be called, but not the sizes and dtypes. When the
first layer runs, those of the others can be guessed well enough to compile their kernels in the
meantime, since most sizes share a kernel. A wrong guess costs only its compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from normplug._activations import ActivationLike
from normplug._ops.spec import Tensors

_SMALLEST, _LARGEST = 1 / 16, 4  # size of a layer's input, relative to the first layer's


class Call(NamedTuple):
    """How a layer is called."""

    channels: int
    activation: ActivationLike = None
    residual: bool = False


_calls: WeakKeyDictionary[Any, Call] = WeakKeyDictionary()
_seen: set[Call] = set()  # what `after` has yielded


def note(layer: Any, call: Call) -> None:
    """Record how a layer will be called."""
    _calls[layer] = call


def after(t: Tensors) -> Iterator[tuple[Tensors, ActivationLike]]:
    """Yield calls that may follow a model's first one, each once, with its activation.

    A layer is taken to have the first layer's batch size and layout, and its spatial size, halved
    along each axis any number of times.
    """
    new = set(_calls.values()) - _seen
    _seen.update(new)
    for call in [c for c in dict.fromkeys(_calls.values()) if c in new]:
        n, _, *space = t.x.shape
        while min(space, default=1) > 0:
            x = _laid_out_as(t.x, (n, call.channels, *space))
            if _SMALLEST <= x.numel() / t.x.numel() <= _LARGEST:
                residual = torch.empty_like(x, requires_grad=True) if call.residual else None
                weight, bias, mean, var = (
                    _vector(v, call.channels)
                    for v in (t.weight, t.bias, t.running_mean, t.running_var)
                )
                others = Tensors(x, residual, weight, bias, None, mean, var, t.tracked)
                yield others, call.activation
            if not space:
                break
            space = [size // 2 for size in space]


def _laid_out_as(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A meta tensor; channels_last if x is."""
    if x.is_contiguous():
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
    n, c, *space = shape
    inside = torch.empty((n, *space, c), dtype=x.dtype, device="meta")
    return inside.movedim(-1, 1).requires_grad_(x.requires_grad)


def _vector(v: Tensor | None, size: int) -> Tensor | None:
    if v is None:
        return None
    return torch.empty(size, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)
