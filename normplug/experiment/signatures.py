"""Read the signature of a function, and check YAML values against its annotations."""

from __future__ import annotations

import enum
import inspect
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union

from typing_extensions import Unpack


class Signature(NamedTuple):
    """The arguments that a function takes by name.

    Attributes:
        hints: name -> type; Any if the annotation is missing or cannot be resolved.
        required: the names without a default.
        defaults: name -> default, of the others.
        is_open: whether the function takes any keyword.
    """

    hints: dict[str, Any]
    required: set[str]
    defaults: dict[str, Any]
    is_open: bool


def signature_of(target: Any) -> Signature | None:
    """Return the signature of a function or class; None if it cannot be inspected."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # written in C, without a text signature
        return None
    function = inspect.unwrap(target.__init__ if inspect.isclass(target) else target)
    names = getattr(function, "__globals__", {})
    hints: dict[str, Any] = {}
    is_open = False
    for parameter in parameters:
        hint = _resolved(parameter.annotation, names)
        if parameter.kind is not parameter.VAR_KEYWORD:
            hints[parameter.name] = hint
        elif typing.get_origin(hint) is Unpack:
            options = typing.get_args(hint)[0]
            module = inspect.getmodule(options)
            for name, inner in options.__annotations__.items():
                hints[name] = _resolved(inner, vars(module) if module else {})
        else:
            is_open = True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    fixed = [p for p in parameters if p.kind not in variadic]
    return Signature(
        hints,
        {p.name for p in fixed if p.default is p.empty},
        {p.name: p.default for p in fixed if p.default is not p.empty},
        is_open,
    )


def _resolved(annotation: Any, names: Mapping[str, Any]) -> Any:
    """Return the type that an annotation names; Any if it is missing or cannot be resolved."""
    if annotation is inspect.Parameter.empty:
        return Any

    # get_type_hints resolves annotations given as strings, but needs an object that has them.
    def holder() -> None: ...

    holder.__annotations__ = {"hint": annotation}
    try:
        return typing.get_type_hints(holder, dict(names))["hint"]
    except Exception:  # a name that only type checkers import
        return Any


def accepts(hint: Any, value: Any) -> bool:
    """Whether a YAML value matches an annotation; True if that cannot be decided."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(accepts(part, value) for part in arguments)
    if origin is Literal:
        return any(value == one and type(value) is type(one) for one in arguments)
    kind = origin or hint
    if hint is Any or not isinstance(kind, type):
        return True
    if isinstance(value, dict) and "_target_" in value:
        return True
    if isinstance(value, str):
        return issubclass(str, kind) or issubclass(Path, kind) or issubclass(kind, enum.Enum)
    if isinstance(value, list):
        return issubclass(list, kind) or issubclass(kind, (tuple, set, frozenset))
    if isinstance(value, dict):
        return kind not in (bool, int, float, str, types.NoneType, list, tuple)
    if isinstance(value, int) and not isinstance(value, bool):
        return kind in (int, float, object)
    return kind in (type(value), object)


def described(hint: Any) -> str:
    """Describe an annotation in YAML's terms."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    parts = arguments if origin in (Union, types.UnionType) else (hint,)
    if float in parts:
        parts = tuple(part for part in parts if part is not int)
    words = list(dict.fromkeys(word for part in parts for word in _words(part)))
    words = words or [f"a mapping whose _target_ is a {getattr(hint, '__name__', hint)}"]
    if "null" in words:
        words.remove("null")
        words.append("null")
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


def _words(hint: Any) -> list[str]:
    """Return the words for one type; [] for a class that YAML can only name as a `_target_`."""
    if typing.get_origin(hint) is Literal:
        return [shown(value) for value in typing.get_args(hint)]
    kind = typing.get_origin(hint) or hint
    if kind is bool:
        return ["true", "false"]
    plain = {int: "an integer", float: "a number", str: "text", types.NoneType: "null"}
    if kind in plain:
        return [plain[kind]]
    if not isinstance(kind, type):
        return []
    if issubclass(Path, kind) or issubclass(kind, os.PathLike):
        return ["text"]
    if issubclass(dict, kind):
        return ["a mapping"]
    if issubclass(list, kind) or issubclass(kind, (tuple, set, frozenset)):
        return ["a list"]
    return []


def shown(value: Any) -> str:
    """Format a value as a user would type it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value)
