"""What calls of BatchNorm are to be expected, once there has been one.

`swap` and `fuse` note how their layers will be called. Sizes and dtypes are unknown to them. But
when the first layer runs, those of the others can be guessed well enough to have their kernels
compiled meanwhile: most sizes have the same kernel. A wrong guess costs only its compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from normplug._activations import ActivationLike
from normplug._ops.spec import Tensors

_LEAST, _LARGEST = 1 / 16, 4  # values that a layer's input has, over those of the first


class Call(NamedTuple):
    """How a layer is called."""

    channels: int
    activation: ActivationLike = None
    residual: bool = False


_calls: WeakKeyDictionary[Any, Call] = WeakKeyDictionary()
_seen: set[Call] = set()  # what `after` has given


def note(layer: Any, call: Call) -> None:
    """Say how a layer will be called."""
    _calls[layer] = call


def after(t: Tensors) -> Iterator[tuple[Tensors, ActivationLike]]:
    """Calls that may follow a model's first one; each once, with its activation.

    A layer has the batch size and layout of the first, and as much space or, any number of times, a
    half of it along each axis.
    """
    new = set(_calls.values()) - _seen
    _seen.update(new)
    for call in [c for c in dict.fromkeys(_calls.values()) if c in new]:
        n, _, *space = t.x.shape
        while min(space, default=1) > 0:
            x = _laid_out_as(t.x, (n, call.channels, *space))
            if _LEAST <= x.numel() / t.x.numel() <= _LARGEST:
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
    """A tensor without memory; its channels lie innermost where those of x do."""
    if x.is_contiguous():
        return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)
    n, c, *space = shape
    inside = torch.empty((n, *space, c), dtype=x.dtype, device="meta")
    return inside.movedim(-1, 1).requires_grad_(x.requires_grad)


def _vector(v: Tensor | None, size: int) -> Tensor | None:
    if v is None:
        return None
    return torch.empty(size, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)
