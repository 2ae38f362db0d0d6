"""Which calls of norms are likely to follow a model's first one.

`swap` and `fuse` record how their layers will be called, but not the sizes and dtypes. When the
first layer of a family runs, those of the others can be guessed well enough to compile their
kernels in the meantime, since most sizes share a kernel. A plan makes the guesses for its family
(`Plan.likely_plans`), from what this file has. A wrong guess costs only its compilation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from normplug._activations import ActivationLike
from normplug._ops.spec import Tensors

# Size of a layer's input, relative to the first layer's. Halving leaves an eighth of a volume.
_SMALLEST, _SMALLEST_VOLUME, _LARGEST = 1 / 16, 1 / 4096, 4


class Operations(NamedTuple):
    """The operations that `fuse` runs in one call with a layer.

    residual: an addition. input_bias: the addition of a convolution's bias before the layer.
    """

    activation: ActivationLike = None
    residual: bool = False
    input_bias: bool = False


ALONE = Operations()


class Call(NamedTuple):
    """How a layer is called, as far as that differs between the layers of a family.

    spec: the type of the call's spec, which the layers of a family share. shape: that of weight and
    bias. fields: names and values of fields of the spec.
    """

    spec: type
    shape: tuple[int, ...]
    fields: tuple[tuple[str, Any], ...] = ()
    operations: Operations = ALONE


_calls: WeakKeyDictionary[Any, Call] = WeakKeyDictionary()
# What `calls_after` has returned, and its dtype and `keep`.
_seen: set[tuple[Call, torch.dtype, bool]] = set()


def note(layer: Any, call: Call) -> None:
    """Record how a layer will be called."""
    _calls[layer] = call


def calls_after(t: Tensors, spec: Any, keep: bool) -> list[Call]:
    """The calls that may follow a first one of their family, or one whose sum has a new dtype.

    keep: whether the calls save tensors for a backward. Those that do not have their own first one.
    """
    dtype = t.x.dtype if t.residual is None else torch.promote_types(t.x.dtype, t.residual.dtype)
    family = [call for call in dict.fromkeys(_calls.values()) if call.spec is type(spec)]
    new = [call for call in family if (call, dtype, keep) not in _seen]
    _seen.update((call, dtype, keep) for call in new)
    return new


def images(x: Tensor, channels: int) -> Iterator[Tensor]:
    """Inputs with other channels than x, (N, C, *space), on the meta device.

    They have the batch size and layout of x, and its spatial size, halved along each axis any
    number of times.
    """
    n, _, *space = x.shape
    smallest = _SMALLEST_VOLUME if len(space) == 3 else _SMALLEST
    for sizes in _halved(space):
        shape = (n, channels, *sizes)
        if smallest <= _ratio(shape, x) <= _LARGEST:
            yield _laid_out_as(x, shape)


def row_shapes(x: Tensor, row_dims: int, row: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Shapes of inputs with other rows than x, whose rows are its last `row_dims` dimensions.

    They have as many rows as x. Images, (N, H, W, *row), may also have their spatial size halved
    along each axis any number of times.
    """
    outer = x.shape[: x.dim() - row_dims]
    batch, space = outer[:1], outer[1:]
    for sizes in _halved(space) if len(space) > 1 else [space]:
        shape = (*batch, *sizes, *row)
        if _SMALLEST <= _ratio(shape, x) <= _LARGEST:
            yield shape


def rows(shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
    """An input on the meta device: contiguous, or with the strides of `like` if it has this shape.

    It requires a gradient, which matters only after a call that requires any: then the layers in
    between have parameters that do.
    """
    if like is None or like.shape != shape:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
    stride = like.stride()
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta", requires_grad=True)


def vector(v: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """A tensor like `v`, but of another shape, on the meta device; None if `v` is None."""
    if v is None:
        return None
    return torch.empty(shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)


def _laid_out_as(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor that is contiguous or channels_last, as x is."""
    if x.is_contiguous():
        return rows(shape, x.dtype)
    n, c, *space = shape
    inside = torch.empty((n, *space, c), dtype=x.dtype, device="meta")
    return inside.movedim(-1, 1).requires_grad_()


def _halved(space: Sequence[int]) -> Iterator[Sequence[int]]:
    while min(space, default=1) > 0:
        yield space
        space = [size // 2 for size in space] or [0]


def _ratio(shape: Sequence[int], x: Tensor) -> float:
    return math.prod(shape) / x.numel()
