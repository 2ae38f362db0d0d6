"""Whether a forward only computes, judged by its code before a probe runs it."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import sys
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
# Attributes of tensors by which a forward does something else on a GPU.
_OF_GPU = ("is_cuda",)
_STORED = object()  # in place of the value of a name that a function sets
_UNKNOWN = object()


def side_effect(cls: Any) -> str | None:
    """What else the forward of a class does, or may do, besides computing; None if nothing.

    All functions and methods that it calls are read, up to those of the libraries.
    """
    for function in _functions(cls):
        if not isinstance(function, FunctionType):
            return "its forward is not a Python function"
        if hasattr(function, "__wrapped__"):
            return f"its {function.__name__} is decorated"
        for name, value in _names(function, cls):
            if value is _STORED:
                return f"its forward sets {name}"
            if not isinstance(value, FunctionType) and not _is_harmless(value, cls):
                return f"its forward uses {name}, which may do more than compute"
    return None


def constants_read(cls: Any) -> tuple[tuple[str, Any], ...]:
    """The constants outside a layer that the forward of a class reads, by name.

    They are those that `side_effect` passes: of modules, of the class, and of enclosing functions.
    """
    constants = []
    for function in _functions(cls):
        if isinstance(function, FunctionType):
            for name, value in _names(function, cls):
                if isinstance(value, CONSTANTS):
                    constants.append((name, value))
    return tuple(constants)


def _functions(cls: Any) -> Iterator[Any]:
    """The forwards of a class and its bases, and what they call, up to the libraries."""
    todo: list[Any] = [base.forward for base in cls.__mro__ if "forward" in vars(base)]
    done = set()
    while todo:
        function = todo.pop()
        if function in done or _is_of_library(function):
            continue
        done.add(function)
        yield function
        if isinstance(function, FunctionType):
            values = [value for _, value in _names(function, cls)]
            todo += [value for value in values if isinstance(value, FunctionType)]


def _names(function: FunctionType, cls: type) -> Iterator[tuple[str, Any]]:
    """The names that a function reads or sets outside itself, with their values.

    The value of a property is its function.
    """
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # no value yet
            yield name, _UNKNOWN
    for code in _codes(function.__code__):
        for name, value in _names_in(code, function, cls):
            if isinstance(value, property):
                value = value.fget
            yield name, getattr(value, "__func__", value)  # of a static method


def _names_in(
    code: CodeType, function: FunctionType, cls: type
) -> Iterator[tuple[str, Any]]:
    """The names outside a function that its code reads or sets, with their values."""
    values = {**vars(builtins), **function.__globals__}
    module: Any = None  # whose attribute the next instruction may read
    for instruction in _instructions(code):
        name = instruction.argval
        value: Any = None
        if instruction.opname in _STORES:
            value = _STORED
        elif instruction.opname == "IMPORT_NAME":
            value = sys.modules.get(name, _UNKNOWN)
        elif instruction.opname == "LOAD_GLOBAL":
            value = values.get(name)
        elif instruction.opname in _ATTRIBUTES and module is not None:
            value = getattr(module, name, None)
        elif instruction.opname in _ATTRIBUTES:
            value = _UNKNOWN if name in _OF_GPU else None
            value = inspect.getattr_static(cls, name, value)
        if value is not None:
            yield name, value
        module = value if isinstance(value, ModuleType) else None


@functools.cache
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(dis.get_instructions(code))


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
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.Generator)):
        return False  # a call may change it
    if value is torch.save:
        return False
    is_module = isinstance(value, ModuleType)
    home = value.__name__ if is_module else getattr(value, "__module__", None)
    # Sums over processes would not show in a probe.
    is_distributed = (home or "").startswith("torch.distributed")
    return (home or "").partition(".")[0] in _LIBRARIES and not is_distributed
