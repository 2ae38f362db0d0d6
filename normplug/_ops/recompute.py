"""Recompute a norm's output in the backward of the layer that reads it, instead of storing it.

The kernels save tensors for their own backward. From these they recompute the output, bit for bit,
at the cost of one read and one write. Copies of the output are recognised by the names of their
autograd nodes. That includes the permuted copies of attention: 0.4 GiB of a ViT-B/16.
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


def will_recompute(y: Any) -> bool:
    """Whether `call` with y would recompute it."""
    if torch.compiler.is_compiling() or not AVAILABLE or _recomputation(y) is None:
        return False
    return saved_tensors_hooks_are_allowed() and isinstance(_hook(), (_Pack, NoneType))


def _recomputation(y: Any) -> Callable[[], Tensor] | None:
    """The function that recomputes y; None if there is none."""
    node: Any = y.grad_fn if isinstance(y, Tensor) else None  # torch.fx passes proxies
    if node is None:
        return None
    if (known := native.recomputable_node(y)) is not None:
        return partial(native.recompute, known)
    plan: Any = getattr(node, "plan", None)  # of a norm's node in Python
    if y.output_nr == 0 and getattr(plan, "is_recomputable", False):
        # `saved_tensors` raises if one has been freed, or modified in place.
        return lambda: plan.recomputed(node.saved_tensors)
    return None


def _hook() -> Any:
    """The hook that packs saved tensors now, or None."""
    assert top_saved_tensors_hooks is not None
    return (top_saved_tensors_hooks(True) or (None,))[0]


def _cast(
    size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, y: Tensor
) -> Tensor:
    return y.new_empty_strided(size, stride, dtype=dtype).copy_(y.view(size))


def _permuted(dims: tuple[int, int], y: Tensor) -> Tensor:
    one, other = (
        dim - 2**64 if dim >= 2**63 else dim for dim in dims
    )  # saved as unsigned
    return y.transpose(one, other).contiguous()


class _Pack:
    """The hook that saves a recipe in place of each tensor that can be made from y."""

    def __init__(self, y: Tensor, outer: _Pack | None) -> None:
        self.y: Tensor | None = y
        self._node, self._version, self._outer = y.grad_fn, y._version, outer
        self._make = _recomputation(y)

    def __call__(self, t: Tensor) -> Callable[[], Tensor] | tuple[Tensor, int]:
        if t.is_leaf:
            return t, t._version
        pack = self if type(t) is Tensor and t.layout is torch.strided else None
        while pack is not None:
            if (recipe := pack._recipe(t)) is not None:
                return recipe
            pack = pack._outer
        # Detached, since a node that saves its own result would be a reference cycle.
        return t.detach(), t._version

    def _recipe(self, t: Tensor) -> Callable[[], Tensor] | None:
        """The function that makes t: y, a copy of it, or a view of either; None if none does."""
        y, make, copy = self.y, self._make, None
        assert y is not None
        assert make is not None
        if y._version != self._version:
            return None
        if t.untyped_storage().data_ptr() == y.untyped_storage().data_ptr():
            if t.dtype != y.dtype or t._version != y._version:
                return None
        elif (copy := self._copy(t, y)) is None:
            return None
        view = (t.size(), t.stride(), t.storage_offset())
        return lambda: (make() if copy is None else copy(make())).as_strided(*view)

    def _copy(self, t: Tensor, y: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The function that makes t, or what t is a view of, from y; None if none does."""
        source = t if t._base is None else t._base
        if source._version != 0 or source.dtype != t.dtype or source.device != y.device:
            return None
        # The `grad_fn` of an operation, of its first input, and of that one's first input.
        nodes: list[Any] = []
        node: Any = source.grad_fn
        while node is not None and len(nodes) < 3:
            nodes.append(node)
            node = node.next_functions[0][0] if node.next_functions else None
        names = [node.name() for node in nodes]
        # The cast that autocast makes, of y or of a view of it. A linear layer may save a view of
        # the cast as a matrix of rows.
        if names[:1] == ["ToCopyBackward0"]:
            of_view = names[1:2] == ["ViewBackward0"] and self._reads_y(nodes[1])
            if of_view or self._reads_y(nodes[0]):
                return partial(_cast, source.size(), source.stride(), source.dtype)
        # The copy that a linear layer makes of a tensor permuted by attention, as a matrix of rows.
        is_plain = source.dtype == y.dtype and source.is_contiguous()
        permuted = ["UnsafeViewBackward0", "CloneBackward0", "TransposeBackward0"]
        if is_plain and names == permuted and self._reads_y(nodes[2]):
            return partial(_permuted, (nodes[2]._saved_dim0, nodes[2]._saved_dim1))
        return None

    def _reads_y(self, node: Any) -> bool:
        """Whether y is the first input of the operation with this `grad_fn`."""
        # The total of the same norm has the same `grad_fn`, as its result 1.
        return bool(node.next_functions) and node.next_functions[0] == (self._node, 0)


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
