"""The one cache: what calls with equal keys have in common is worked out once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

from normplug._ops.spec import Tensors

_MOST = 8192
_kept: dict[tuple[Hashable, ...], Any] = {}


def key_of(t: Tensors, spec: Hashable, route: Hashable) -> tuple[Any, ...]:
    """All that decides whether a call is right, and how it is carried out.

    () where an argument has no shape: it is no tensor, which the checks refuse, or a nested one.

    Args:
        t: the call's tensors.
        spec: the call's numbers.
        route: what is asked for: the name of a backend, or a class of plans.
    """
    # In one expression: this runs before every kernel.
    try:
        kinds = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, type(t)) for t in t
        ]
    except (AttributeError, RuntimeError):
        return ()
    return (spec, route, *kinds)


def find(key: tuple[Any, ...]) -> Any:
    """What was kept for a call like this one; None where nothing was, or where it must not run."""
    if is_watched():
        return None
    try:
        return _kept.get(key)
    except TypeError:  # a setting that cannot be hashed, and is about to be refused
        return None


def keep(key: tuple[Any, ...], value: Any) -> None:
    """Keep what carries out calls like this one, without their checks."""
    if is_watched():
        return
    if len(_kept) >= _MOST:
        _kept.clear()
    _kept[key] = value


def made_once(key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` made of the arguments when this key was first seen."""
    value = _kept.get(key)
    if value is None:
        if len(_kept) >= _MOST:
            _kept.clear()
        value = _kept[key] = make(*arguments)
    return value


def is_watched() -> bool:
    """Whether something interposes itself between torch's operations, and would miss a kernel."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )
