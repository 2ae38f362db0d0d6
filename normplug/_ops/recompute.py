"""Calling what reads a result of the kernels, so that it does not keep it for its backward.

What the kernels keep for their own backward gives the result again, to the bit, for one read and
one write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

# Which hooks are in force. Without it (torch before 2.8) those of activation checkpointing could
# not be told, and would be put out of force.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
AVAILABLE = _top_hooks is not None
_hooks_are_allowed: Any = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled")  # noqa: B009


class Recomputable(torch.autograd.Function):
    """An operation whose first result follows from what it keeps for its backward."""

    @staticmethod
    def recompute(node: Any) -> Tensor:
        """The first result again.

        Args:
            node: its `grad_fn`.

        Raises:
            RuntimeError: what it kept is freed, or was changed in place.
        """
        raise NotImplementedError


def call(module: nn.Module, y: Tensor) -> Any:
    """`module(y)`, whose backward computes y anew where that can be done.

    Under activation checkpointing, and wherever else hooks decide already what becomes of saved
    tensors, it is left to them.
    """
    if torch.compiler.is_compiling() or _top_hooks is None or not _is_recomputable(y):
        return module(y)
    outer = (_top_hooks(True) or (None,))[0]
    if not (outer is None or isinstance(outer, _Pack)):
        return module(y)
    pack = _Pack(y, outer)
    try:
        with saved_tensors_hooks(pack, _unpack):
            return module(y)
    finally:
        pack.y = None  # the saved tensors hold `pack`


def _is_recomputable(y: Any) -> bool:
    function = getattr(getattr(y, "grad_fn", None), "_forward_cls", object)
    return issubclass(function, Recomputable) and _hooks_are_allowed()


class _Recipe:
    """A tensor made of y: y itself or its cast to another dtype, or a view of either."""

    def __init__(self, node: Any, source: Tensor, cast: bool, t: Tensor) -> None:
        self._node = node
        self._cast = (source.stride(), source.dtype) if cast else None
        self._view = (t.size(), t.stride(), t.storage_offset())

    def __call__(self) -> Tensor:
        t = self._node._forward_cls.recompute(self._node)
        if self._cast is not None:
            stride, dtype = self._cast
            t = t.new_empty_strided(t.size(), stride, dtype=dtype).copy_(t)
        return t.as_strided(*self._view)


class _Pack:
    """What is saved in place of a tensor: for what is made of y a recipe, else the tensor."""

    def __init__(self, y: Tensor, outer: _Pack | None) -> None:
        self.y: Tensor | None = y
        self._node, self._version, self._outer = y.grad_fn, y._version, outer

    def __call__(self, t: Tensor) -> _Recipe | tuple[Tensor, int]:
        if t.is_leaf:
            return t, t._version
        if type(t) is Tensor and t.layout is torch.strided:
            pack: _Pack | None = self
            while pack is not None:
                recipe = pack._recipe(t)
                if recipe is not None:
                    return recipe
                pack = pack._outer
        # Detached, since an operation that holds its own result would never be freed.
        return t.detach(), t._version

    def _recipe(self, t: Tensor) -> _Recipe | None:
        y = self.y
        assert y is not None
        if y._version != self._version:
            return None
        if t.dtype == y.dtype:
            same = t.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            return _Recipe(self._node, y, False, t) if same and t._version == y._version else None
        # As autocast casts, before or after it is taken for a matrix of rows.
        source = t if t._base is None else t._base
        made = source.grad_fn
        if (
            made is not None
            and made.name() == "ToCopyBackward0"
            and made.next_functions[0][0] is self._node
            and source._version == 0
            and source.dtype == t.dtype
            and source.device == y.device
        ):
            return _Recipe(self._node, source, True, t)
        return None


def _unpack(kept: _Recipe | tuple[Tensor, int]) -> Tensor:
    if isinstance(kept, _Recipe):
        return kept()
    t, version = kept
    # Where there are hooks, autograd leaves this to them.
    if t._version != version:
        raise RuntimeError(
            "normplug: one of the variables needed for gradient computation has been modified by "
            f"an inplace operation: {tuple(t.shape)} is at version {t._version}; expected version "
            f"{version}."
        )
    return t
