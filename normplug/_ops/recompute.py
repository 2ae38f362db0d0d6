"""Recompute a norm's output in the backward of the layer that reads it, instead of storing it.

The kernels save tensors for their own backward. From these they recompute the output, bit for bit,
at the cost of one read and one write. The output and views of it are recomputed; copies of it, such
as the casts of autocast, are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from normplug import native
from normplug._torch import saved_tensors_hooks_are_allowed, top_saved_tensors_hooks

AVAILABLE = top_saved_tensors_hooks is not None


def call(y: Tensor, module: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `module(*args, **kwargs)`, and recompute y, one of the arguments, in its backward.

    y is stored where it cannot be recomputed. Other hooks on saved tensors, such as
    activation checkpointing's, take precedence.
    """
    if not will_recompute(y):
        return module(*args, **kwargs)
    outer = _hook()
    pack = _Pack(y, outer)
    try:
        with saved_tensors_hooks(pack, _unpack):
            return module(*args, **kwargs)
    finally:
        pack.y = None  # autograd keeps `pack` with the saved tensors


def is_possible() -> bool:
    """Whether `call` would recompute the result of a norm whose plan allows it."""
    if torch.compiler.is_compiling() or not AVAILABLE:
        return False
    return saved_tensors_hooks_are_allowed() and isinstance(_hook(), (_Pack, NoneType))


def will_recompute(y: Any) -> bool:
    """Whether `call` with y would recompute it."""
    return is_possible() and _recomputation(y) is not None


def _recomputation(y: Any) -> Callable[[], Tensor] | None:
    """The function that recomputes y; None if there is none."""
    node: Any = y.grad_fn if isinstance(y, Tensor) else None  # torch.fx passes proxies
    if node is None:
        return None
    known = native.path.recomputable_node(y)
    if known is not None:
        return partial(native.path.recompute, known)
    plan: Any = getattr(node, "plan", None)  # of a norm's node in Python
    if y.output_nr == 0 and getattr(plan, "is_recomputable", False):
        # `saved_tensors` raises if one has been freed, or modified in place.
        return lambda: plan.recomputed(node.saved_tensors)
    return None


def _hook() -> Any:
    """The hook that packs saved tensors now, or None."""
    assert top_saved_tensors_hooks is not None
    return (top_saved_tensors_hooks(True) or (None,))[0]


class _Pack:
    """The hook that saves a recipe in place of y, and of each view of y."""

    def __init__(self, y: Tensor, outer: _Pack | None) -> None:
        self.y: Tensor | None = y
        self._version = y._version
        self._outer = outer
        self._make = _recomputation(y)

    def __call__(self, t: Tensor) -> Callable[[], Tensor] | tuple[Tensor, int]:
        if t.is_leaf:
            return t, t._version
        pack = self if type(t) is Tensor and t.layout is torch.strided else None
        while pack is not None:
            recipe = pack._recipe(t)
            if recipe is not None:
                return recipe
            pack = pack._outer
        # Detached, since a node that saves its own result would be a reference cycle.
        return t.detach(), t._version

    def _recipe(self, t: Tensor) -> Callable[[], Tensor] | None:
        """The function that makes t, which is y or a view of it; None for another tensor."""
        y = self.y
        make = self._make
        assert y is not None
        assert make is not None
        if t.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
            return None
        if t.dtype != y.dtype or not self._version == y._version == t._version:
            return None
        size, stride, offset = t.size(), t.stride(), t.storage_offset()
        return lambda: make().as_strided(size, stride, offset)


def _unpack(kept: Callable[[], Tensor] | tuple[Tensor, int]) -> Tensor:
    if callable(kept):
        return kept()
    t, version = kept
    # Autograd leaves this check to the hooks.
    if t._version != version:
        raise RuntimeError(
            "normplug: one of the variables needed for gradient computation has been modified by "
            f"an inplace operation: {tuple(t.shape)} is at version {t._version}; expected version "
            f"{version}."
        )
    return t
