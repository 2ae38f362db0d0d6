"""Copies of a class's forward in which some statements are edited.

A trace can replace a forward only while everything that it depends on is unchanged, and many
forwards cannot be traced: they take keyword arguments and masks, keep caches, or test the type of a
value. An edited forward is the original forward except for the statements that `statements.py` can
edit. So it takes any arguments, and depends on nothing but the function that it was made from.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._fuse import readers, statements
from normplug._fuse.activated import Activated
from normplug._fuse.definitions import Untraceable, compiled, definition
from normplug._fuse.flow import Flow, Parts, may_hold
from normplug._fuse.readers import Readers
from normplug._fuse.reasons import IN_PLACE, Reason, Reasons
from normplug._fuse.statements import Editor
from normplug._fuse.sums import Summed
from normplug._fuse.syntax import is_name
from normplug._ops.likely import Operations

# The functions that edited forwards call, under the names in the edited source.
_CALLED = {**statements.CALLED, **readers.CALLED}
# An edited call of a norm.
Place = Summed | Activated


@dataclass(frozen=True, eq=False)
class Edited:
    """An edited forward.

    Attributes:
        cls: the class whose forward it is.
        original: the class's forward.
        forward: that function, edited.
        found: the edited calls of each norm, by its name.
        left: for each norm, by its name, why each call of it would not be edited.
    """

    cls: type[nn.Module]
    original: Any
    forward: Any
    found: dict[str, list[Place]]
    left: dict[str, list[Reason]]

    def holds(self) -> bool:
        """Whether the class still has the forward that was edited."""
        return self.cls.forward is self.original

    def operations(self, norm: str, module: nn.Module) -> Operations | None:
        """The operations that run in one call with a norm, given by name; None if none do."""
        state = vars(module)
        for place in self.found.get(norm, ()):
            if not may_hold(place.branch, state):
                continue
            if isinstance(place, Summed):
                return Operations(residual=True)
            child = module._modules.get(place.child)
            name: ActivationLike = place.function
            if child is not None:
                name = _activations.of_module(child)
            if name is not None:
                return Operations(name)
        return None

    def label(self, norm: str, module: nn.Module) -> str:
        """The label of a norm, given by name, in a report; "" if it is not fused."""
        operations = self.operations(norm, module)
        if operations is None:
            return ""
        activation = operations.activation
        return "add before it" if activation is None else _activations.label(activation)

    def reason(self, norm: str, module: nn.Module) -> str:
        """Why a norm, given by name, is not fused; "" if only a trace could fuse it."""
        state = vars(module)
        whys = (text for branch, text in self.left[norm] if may_hold(branch, state))
        return next(whys, "its module's attributes exclude its call")


def edit(cls: type[nn.Module], parts: Parts, recompute: bool) -> Edited:
    """Edit the forward of a class.

    Args:
        cls: the class.
        parts: the children that the edits concern.
        recompute: let the modules that read the results of the calls recompute them.

    Raises:
        Untraceable: the source of the forward is not certain.
    """
    if cls.__getattribute__ is not nn.Module.__getattribute__:
        raise Untraceable("its class defines __getattribute__")
    known: Any = cls  # to mypy, a class of modules has no hash
    return _edit(known, inspect.getattr_static(cls, "forward"), parts, recompute)


@functools.cache
def _edit(cls: type[nn.Module], forward: Any, parts: Parts, recompute: bool) -> Edited:
    chain = [forward]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    if not all(isinstance(function, types.FunctionType) for function in chain):
        raise Untraceable("its forward is not a plain function")
    written = chain[-1]
    found, code = definition(written), written.__code__
    local = frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    flow = Flow(cls, _first_argument(found), parts, written.__globals__, local)
    left = Reasons(flow, found).all()
    editor = Editor(flow, found)
    editor.edit()
    if recompute:
        Readers(editor).edit(found.body)
    edited = _function(written, compiled(written, found, _CALLED), written.__closure__ or ())
    for outer, inner in zip(chain[-2::-1], chain[:0:-1], strict=True):
        edited = _rewrapped(outer, inner, edited)
    left |= {name: [Reason((), IN_PLACE)] for name in editor.sums.in_place}
    places: dict[str, list[Any]] = {**editor.sums.found, **editor.activations.found}
    return Edited(cls, forward, edited, places, left)


def _first_argument(definition: ast.FunctionDef) -> str:
    """The name of a forward's first argument, usually "self", which it must not reassign."""
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    if not arguments:
        raise Untraceable("its forward takes only *args")
    name = arguments[0].arg
    for node in ast.walk(definition):
        if is_name(node, {name}) and not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
            raise Untraceable(f"its forward assigns to {name}")
    return name


def _function(
    like: types.FunctionType, code: types.CodeType, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    """Copy a function, with other code or other closure cells."""
    known = {name: types.CellType(f) for name, f in _CALLED.items()}
    known |= zip(like.__code__.co_freevars, cells, strict=True)
    closure = tuple(known[name] for name in code.co_freevars)
    made = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure)
    made.__kwdefaults__ = like.__kwdefaults__
    functools.update_wrapper(made, like)
    return made


def _rewrapped(outer: types.FunctionType, inner: Any, edited: Any) -> types.FunctionType:
    """Copy a decorator's wrapper, so that it calls `edited` instead of `inner`."""
    cells = outer.__closure__ or ()
    if not any(_content(cell) is inner for cell in cells):
        raise Untraceable("its forward is decorated")
    replaced = tuple(types.CellType(edited) if _content(c) is inner else c for c in cells)
    made = _function(outer, outer.__code__, replaced)
    made.__wrapped__ = edited  # type: ignore[attr-defined]
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
