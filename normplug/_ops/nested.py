"""Nested tensors: the rows of all their components as one dense tensor, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normplug._ops.spec import Tensors


def is_strided(x: Tensor) -> bool:
    """Whether x is a nested tensor of the older layout, which has no shape."""
    return x.is_nested and x.layout == torch.strided


def components(caller: str, x: Tensor) -> tuple[Tensor, ...]:
    """The components of a nested tensor.

    Raises:
        ValueError: it has none.
    """
    parts = x.unbind()
    if not parts:
        raise ValueError(
            f"normplug.{caller}: a nested input needs at least one component; got none. Do not "
            "normalise an empty batch."
        )
    return parts


def rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """All rows of a nested tensor, (n, *shape), in the order of its components; a dense x as is."""
    if not x.is_nested:
        return x
    if x.layout == torch.jagged and x.lengths() is None:  # type: ignore[attr-defined]
        return x.values()
    return torch.cat([component.reshape(-1, *shape) for component in x.unbind()])


def run(t: Tensors, shape: Sequence[int], call: Callable[[Tensors], Tensor]) -> Any:
    """Run a call whose x is a nested tensor of the older layout, as one of all its rows."""
    total = t.x if t.residual is None else t.x + t.residual
    y = _of_rows(call(t._replace(x=rows(total, shape), residual=None)), total)
    return y if t.residual is None else (y, total)


def _of_rows(y: Tensor, like: Tensor) -> Tensor:
    """The strided nested tensor whose rows are y, with the shapes of the components of `like`."""
    components, width = like.unbind(), math.prod(y.shape[1:])
    parts = y.split([component.numel() // width for component in components])
    pairs = zip(parts, components, strict=True)
    return torch.nested.as_nested_tensor([p.reshape(c.shape) for p, c in pairs])
