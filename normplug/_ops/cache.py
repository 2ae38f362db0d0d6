"""The one cache: calls with equal keys share their checks, their route and their plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from normplug import native
from normplug._ops.spec import Tensors
from normplug._torch import interposed

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
            None if a is None else (a.shape, a.stride(), a.dtype, a.device, type(a), a.is_neg())
            for a in t
        ]
    except (AttributeError, RuntimeError):
        return ()
    return (spec, route, *kinds)


def find(key: tuple[Any, ...]) -> Any:
    """What was kept under this key; None if nothing was, or if kernels must not run now."""
    if interposed():
        return None
    try:
        return _kept.get(key)
    except TypeError:  # a setting that cannot be hashed, and is about to be refused
        return None


def keep(key: tuple[Any, ...], value: Any) -> None:
    """Keep what carries out calls with this key, unless that is (): they skip their checks."""
    if key and not interposed():
        _put(key, value)


def made_once(key: tuple[Any, ...], make: Callable[..., Any], *arguments: Any) -> Any:
    """The value of this key, made of the arguments when the key is first seen."""
    value = _kept.get(key)
    if value is None:
        value = make(*arguments)
        _put(key, value)
    return value


def _put(key: tuple[Any, ...], value: Any) -> None:
    if len(_kept) >= _MOST:
        _kept.clear()
        native.forget()
    _kept[key] = value
