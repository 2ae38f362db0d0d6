"""Whether a forward only computes, judged by its code before a probe runs it."""

from __future__ import annotations

import builtins
import dis
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

# The libraries whose functions a forward may call.
_LIBRARIES = ("einops", "math", "torch", "typing")
_FUNCTIONS = frozenset((
    "abs", "getattr", "hasattr", "isinstance", "issubclass", "len", "max", "min", "pow", "round",
    "sum",
))  # fmt: skip
# Values that no call can change.
CONSTANTS = (
    type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
_STORES = ("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_STORED = object()  # in place of the value of a name that a function sets


def side_effect(cls: Any) -> str | None:
    """What else the forward of a class does, or may do, besides computing; None if nothing.

    All functions and methods that it calls are read, up to those of the libraries.
    """
    todo: list[Any] = [base.forward for base in cls.__mro__ if "forward" in vars(base)]
    done = set()
    while todo:
        function = todo.pop()
        if function in done or _is_of_library(function):
            continue
        if not isinstance(function, FunctionType):
            return "its forward is not a Python function"
        if hasattr(function, "__wrapped__"):
            return f"its {function.__name__} is decorated"
        done.add(function)
        for name, value in _names(function, cls):
            if value is _STORED:
                return f"its forward sets {name}"
            if isinstance(value, property):
                value = value.fget
            value = getattr(value, "__func__", value)  # of a static method
            if isinstance(value, FunctionType):
                todo.append(value)
            elif not _is_harmless(value, cls):
                return f"its forward uses {name}, which may do more than compute"
    return None


def _names(function: FunctionType, cls: type) -> Iterator[tuple[str, Any]]:
    """The names that a function reads or sets outside itself, with their values."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        yield name, cell.cell_contents
    values = {**vars(builtins), **function.__globals__}
    for code in _codes(function.__code__):
        for instruction in dis.get_instructions(code):
            name = instruction.argval
            if instruction.opname in _STORES:
                yield name, _STORED
            elif instruction.opname == "LOAD_GLOBAL":
                yield name, values.get(name)
            elif instruction.opname in _ATTRIBUTES:
                yield name, inspect.getattr_static(cls, name, None)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_harmless(value: Any, cls: type) -> bool:
    if isinstance(value, type):
        return (
            value in cls.__mro__
            or value.__module__ == "builtins"
            or _is_of_library(value)
        )
    if isinstance(value, BuiltinFunctionType) and value.__module__ == "builtins":
        return value.__name__ in _FUNCTIONS
    if isinstance(value, tuple):
        return all(_is_harmless(part, cls) for part in value)
    return isinstance(value, CONSTANTS) or _is_of_library(value)


def _is_of_library(value: Any) -> bool:
    """Whether a module, class or function is of a library that only computes."""
    is_module = isinstance(value, ModuleType)
    home = value.__name__ if is_module else getattr(value, "__module__", None)
    # Sums over processes would not show in a probe.
    is_distributed = (home or "").startswith("torch.distributed")
    return (home or "").partition(".")[0] in _LIBRARIES and not is_distributed
