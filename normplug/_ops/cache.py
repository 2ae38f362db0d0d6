"""The one cache: calls with equal keys share their checks, their route and their plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from normplug import native
from normplug._ops.spec import Tensors
from normplug._torch import interposed

_MAX_ENTRIES = 8192
_kept: dict[tuple[Hashable, ...], Any] = {}


def key_of(t: Tensors, spec: Hashable, route: Hashable) -> tuple[Any, ...]:
    """The key of a call: all that decides whether it is valid, and how it runs.

    () if an argument has no shape: a nested tensor, or not a tensor, which the checks refuse.

    Args:
        t: the call's tensors.
        spec: the call's non-tensor arguments.
        route: the requested route: the name of a backend, or a class of plans.
    """
    # In one expression: this runs before every kernel.
    try:
        kinds = [
            None if a is None else (a.shape, a.stride(), a.dtype, a.device, type(a), a.is_neg())
            for a in t
        ]
    except (AttributeError, RuntimeError):
        return ()
    return (spec, route, *kinds)


def find(key: tuple[Any, ...]) -> Any:
    """The value stored under this key; None if there is none, or if kernels must not run now."""
    if interposed():
        return None
    try:
        return _kept.get(key)
    except TypeError:  # an unhashable setting, which the checks will refuse
        return None


def keep(key: tuple[Any, ...], value: Any) -> None:
    """Store the function that runs calls with this key, unchecked; nothing if the key is ()."""
    if key and not interposed():
        _put(key, value)


def made_once(key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any) -> Any:
    """The value of this key, made by `make(*arguments)` when the key is first seen."""
    value = _kept.get(key)
    if value is None:
        value = make(*arguments)
        _put(key, value)
    return value


def _put(key: tuple[Any, ...], value: Any) -> None:
    if len(_kept) >= _MAX_ENTRIES:
        _kept.clear()
        native.forget()
    _kept[key] = value
