"""Digests that tell whether functions are the same in another process or after an edit.

A pickle of a fused module contains the source of its fused forward. That source is valid only while
the module's own forward, and the functions it calls, are the code that was traced. Without this
check a fused model would have to be traced again when it is loaded.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterable
from typing import Any

import torch


def fingerprint(functions: Iterable[Any]) -> str:
    """A digest of functions: of their code, their defaults, and the globals that they name."""
    return hashlib.sha256(repr([_function(f) for f in functions]).encode()).hexdigest()


def _function(function: Any) -> Any:
    if not isinstance(function, types.FunctionType):
        return described(function)
    names, used = function.__globals__, function.__code__.co_names
    meanings = [(name, described(names[name], deep=False)) for name in used if name in names]
    defaults = (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
    return described(function.__code__), described(defaults), meanings


def described(value: Any, deep: bool = True) -> Any:
    """A description that is the same in every process; deep: include the values of constants."""
    if isinstance(value, types.CodeType):
        variables = value.co_varnames, value.co_freevars, value.co_cellvars
        return value.co_code.hex(), value.co_names, variables, described(value.co_consts)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if isinstance(value, functools.partial):
        bound = (value.func, value.args, tuple(value.keywords.items()))
        return ["partial", *(described(part, deep) for part in bound)]
    if callable(value):
        names = ("__module__", "__qualname__", "__name__")
        return [type(value).__qualname__, *(getattr(value, name, None) for name in names)]
    if deep and isinstance(value, tuple):
        return [described(part) for part in value]
    if deep and isinstance(value, frozenset):
        return sorted(repr(described(part)) for part in value)
    if isinstance(value, torch.dtype) or (deep and type(value).__module__ == "builtins"):
        return repr(value)
    return type(value).__qualname__
