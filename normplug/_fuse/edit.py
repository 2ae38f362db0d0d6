"""Copies of forwards in which a norm and the operation next to it are one call.

A trace can replace a forward only while everything that it depends on is unchanged. Many forwards
cannot be traced: they take keyword arguments and masks, keep caches, or test the type of a value.
An edited forward is the original forward, except for statements of these patterns:

    y = self.norm(a + b)              x = a + b
                                      y = self.norm(x)

    y = self.act(self.norm(x))        x = self.norm(x)
                                      x = self.act(x)

    y = self.norm(x) * (1 + a) + b    x = self.norm(x)
                                      y = x * (1 + a) + b

The last may also be a call of a function that returns such an expression: see `modulation`.

Both statements must be in the same block. If an `if` separates them, one of them is first copied
into its branches; a scale and a shift must be in the very next statement. Nothing with a side
effect may run between the two, and nothing but the activation, or the scale and the shift, may read
the norm's result. So an edited forward takes any arguments, and depends on nothing but the function
that it was made from. Each call decides at run time whether the two run as one. A forward with a
`try` or a `match` is not edited.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from normplug import _activations
from normplug._fuse import calls, modulation
from normplug._fuse.trace import SCOPES, Untraceable, compiled, definition, is_name
from normplug._ops.guess import Fusion

# Why a norm is not edited, for a report.
REASON = "nothing to do: no plain addition or activation is next to it"
# The functions that edited statements call, under the names in the edited source.
_CALLED = {
    "_normplug_add_norm": calls.add_norm,
    "_normplug_norm_activation": calls.norm_add_activation,
    "_normplug_modulated": calls.modulated_norm,
    "_normplug_norm_function": modulation.norm_then_function,
}
_ADD_NORM, _NORM_ACTIVATION, _MODULATED, _NORM_FUNCTION = _CALLED
# The variable that holds a norm's result until a statement reads it.
_RESULT = "_normplug_result"
# After an exception, the second of two statements may not run. `except*` came with Python 3.11.
_REFUSED = (ast.Try, getattr(ast, "TryStar", ast.Try), ast.Match)

# (name, kind) of each child that `edit` needs. The kinds: "sum", a norm that may be fused with an
# addition before it; "rows", one that may also be fused with a scale and a shift after it; "norm",
# one that may be fused with an activation after it; "activation".
Children = tuple[tuple[str, str], ...]
_SUMS = ("sum", "rows")


class EditedCall(NamedTuple):
    """An edited call of a norm."""

    activation: str  # the child after the norm; "" if there is none
    in_branch: bool  # of an `if`, so that it may not run
    # Whether a scale and a shift come after it, not a sum before it.
    is_modulated: bool = False


@dataclass(frozen=True, eq=False)
class Edited:
    """An edited forward."""

    original: Any  # the class's forward
    forward: Any  # the edited one
    calls: dict[str, list[EditedCall]]  # name of a norm -> its edited calls

    def fusion(self, norm: str, module: nn.Module) -> Fusion | None:
        """What the norm with this name is fused with; None if it is not fused."""
        for activation, in_branch, is_modulated in self.calls.get(norm, ()):
            where = " (in a branch)" if in_branch else ""
            if is_modulated:
                return Fusion(f"scale and shift after it{where}")
            if not activation:
                return Fusion(f"add before it{where}", adds=True)
            child: Any = module._modules.get(activation)
            name = _activations.of_module(child)
            if name is not None:
                label = _activations.label(name)
                return Fusion(f"{label}{where}", activation=name)
        return None


@functools.cache
def edit(cls: Any, forward: Any, children: Children) -> Edited:
    """Edit the forward of a class, given the norms and activations among a module's children."""
    if cls.__getattribute__ is not nn.Module.__getattribute__:
        raise Untraceable("its class defines __getattribute__")
    chain = [forward]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    if not all(isinstance(function, types.FunctionType) for function in chain):
        raise Untraceable("its forward is not a plain function")
    written = chain[-1]
    editor = _Editor(cls, dict(children), definition(written), written.__globals__)
    editor.modulate(editor.definition.body)
    editor.edit(editor.definition.body)
    code = compiled(written, editor.definition, _CALLED)
    edited = _function(written, code, written.__closure__ or ())
    for outer, inner in zip(chain[-2::-1], chain[:0:-1], strict=True):
        edited = _rewrapped(outer, inner, edited)
    return Edited(forward, edited, editor.calls)


@dataclass
class _Editor:
    """Edits the statements of a forward."""

    cls: type[nn.Module]  # whose forward it is
    children: dict[str, str]  # name of a child -> its kind
    definition: ast.FunctionDef  # the forward's, which `edit` changes
    globals: dict[str, Any]  # the forward's
    # Name of a norm -> its edited calls.
    calls: dict[str, list[EditedCall]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments = [*self.definition.args.posonlyargs, *self.definition.args.args]
        if not arguments:
            raise Untraceable("its forward takes only *args")
        self.me = arguments[0].arg  # the forward's name for the module, usually "self"
        nodes = list(ast.walk(self.definition))[1:]
        self._has_scopes = any(isinstance(node, SCOPES) for node in nodes)
        named = [node for node in nodes if isinstance(node, ast.Name)]
        self._locals = {node.id for node in named if not isinstance(node.ctx, ast.Load)}
        self._locals |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if is_name(node, {self.me}) and not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                raise Untraceable(f"its forward assigns to {self.me}")
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                raise Untraceable("its forward assigns to a variable outside it")
            if isinstance(node, _REFUSED):
                raise Untraceable("its forward has a try or match statement")
            name = getattr(node, "attr", "")
            # Python renames such an attribute in a class.
            if name.startswith("__") and not name.endswith("__"):
                raise Untraceable(f"its forward uses {name}, a private attribute")

    def edit(self, body: list[ast.stmt], in_branch: bool = False) -> None:
        """Edit the norms in statements; in_branch: whether an `if` contains them."""
        for i, _ in enumerate(body):
            self._into_branches(body, i)
            statement = body[i]
            for node in _expressions(statement):
                self._nested(statement, node, in_branch)
            self._pair_sum(body, i, in_branch)
            self._pair_norm(body, i, in_branch)
            if isinstance(statement, SCOPES):
                continue
            for name in ("body", "orelse"):
                inner = getattr(statement, name, [])
                self.edit(inner, in_branch or isinstance(statement, ast.If))

    def modulate(self, body: list[ast.stmt], in_branch: bool = False) -> None:
        """Edit the norms in statements that a scale and a shift follow; in_branch: as in `edit`.

        This comes before `edit`, since it saves more than an addition before the norm.
        """
        for i, _ in enumerate(body):
            statement = body[i]
            for node in list(_expressions(statement)):
                value, made = self._modulation(node)
                name = self._child(value, "rows")
                if name:
                    self._record(name, "", in_branch, True)
                    _replace(statement, node, made(value))
            self._pair_modulation(body, i, in_branch)
            if isinstance(statement, SCOPES):
                continue
            for name in ("body", "orelse"):
                inner = getattr(statement, name, [])
                self.modulate(inner, in_branch or isinstance(statement, ast.If))

    def _pair_modulation(self, body: list[ast.stmt], i: int, in_branch: bool) -> None:
        """Edit a statement that computes a norm, if the next one scales and shifts it."""
        statement: Any = body[i]
        target, value = _assigned(statement)
        name = self._child(value, "rows")
        following = body[i + 1 : i + 2]
        node: Any = getattr(following[0], "value", None) if following else None
        if not name or node is None:
            return
        if isinstance(node, ast.Call) and self._is_own(node.func) and node.args:
            node = node.args[0] if self._modulation(node)[0] is None else node
        inner, made = self._modulation(node)
        if not is_name(inner, {target}) or len(_reads(following[0], target)) != 1:
            return
        is_last = _assigned(following[0])[0] == target
        if not is_last and len(_reads(self.definition, target)) != 1:
            return
        self._record(name, "", in_branch, True)
        statement.value = _located(made(value), statement)
        _replace(following[0], node, ast.Name(target, ast.Load()))

    def _modulation(self, node: Any) -> tuple[Any, Any]:
        """What an expression scales and shifts, and how to build the call for it; or Nones."""
        parts = modulation.of_expression(node)
        if parts is not None:
            return parts.normalised, lambda call: _call(
                _MODULATED, call.func, call.args[0], parts.scale, parts.shift
            )
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return None, None
        known = node.func.id not in self._locals and not node.keywords
        function = self.globals.get(node.func.id) if known else None
        first, *rest = [*node.args, None]
        if not all(map(modulation.is_view, rest[:-1])):
            return None, None
        if first is None or modulation.of_function(function) is None:
            return None, None
        return first, lambda call: _call(
            _NORM_FUNCTION, node.func, call.func, call.args[0], *rest[:-1]
        )

    def _into_branches(self, body: list[ast.stmt], i: int) -> None:
        """Move a sum or norm before an `if`, or its reader after one, into the branches."""
        if self._begins(body[i]) and self._may_follow(body[i], body[i + 1 : i + 2]):
            first, choice = body[i], body[i + 1]
            for block in (choice.body, choice.orelse):  # type: ignore[attr-defined]
                block.insert(0, copy.deepcopy(first))
            del body[i]
        choice = body[i]
        if not isinstance(choice, ast.If) or not any(map(self._begins, ast.walk(choice))):
            return
        for end, statement in enumerate(body[i + 1 :], i + 2):
            inner = statement.body[0] if isinstance(statement, ast.If) else statement
            first = self._first_effect(getattr(inner, "value", None))
            begins_with_one = self._child(first, "activation", *_SUMS)
            if begins_with_one:
                for block in (choice.body, choice.orelse):
                    block += copy.deepcopy(body[i + 1 : end])
                del body[i + 1 : end]
                return
            target, value = _assigned(statement)
            if target is None or self._first_effect(value) is not None:
                return

    def _begins(self, node: ast.AST) -> bool:
        """Whether a statement computes a sum or a norm, and no more."""
        _, value = _assigned(node)
        return _is_sum(value) or bool(self._child(value, "norm"))

    def _may_follow(self, statement: ast.stmt, following: list[ast.stmt]) -> bool:
        """Whether the next statement is an `if` whose test is safe to run before this one.

        The test has no side effect and does not read the assigned variable: it is a variable or an
        attribute, or compares one by `is`. And this statement changes nothing that the test reads.
        """
        if not following or not isinstance(following[0], ast.If):
            return False
        test: Any = following[0].test
        identity = (ast.Is, ast.IsNot)
        compares = isinstance(test, ast.Compare) and all(
            isinstance(op, identity) for op in test.ops
        )
        parts = [test.left, *test.comparators] if compares else [test]
        target, value = _assigned(statement)
        if self._first_effect(ast.Tuple(parts)) is not None or _reads(test, target):
            return False
        if not _is_sum(value):
            return True
        if self._first_effect(ast.Tuple([value.left, value.right])) is None:
            return True
        # The operands may change an object and its truth, but not which object a local variable is.
        binds = any(isinstance(node, ast.NamedExpr) for node in ast.walk(value))
        return compares and not binds and all(map(self._is_fixed, parts))

    def _is_fixed(self, node: ast.expr) -> bool:
        """Whether an expression is a constant or a local variable, which no call can replace."""
        return isinstance(node, ast.Constant) or is_name(node, self._locals)

    def _nested(self, statement: ast.stmt, node: Any, in_branch: bool) -> None:
        """Edit a norm of a sum, or an activation of a norm."""
        inner: Any = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if (name := self._child(node, *_SUMS)) and _is_sum(inner):
            both = _call(_ADD_NORM, node.func, inner.left, inner.right)
            self._record(name, "", in_branch)
            _replace(statement, node, ast.Subscript(both, ast.Constant(0), ast.Load()))
        elif (name := self._child(inner, "norm")) and self._child(node, "activation"):
            self._record(name, node.func.attr, in_branch)
            made = _call(_NORM_ACTIVATION, inner.func, inner.args[0], node.func)
            _replace(statement, node, made)

    def _pair_sum(self, body: list[ast.stmt], i: int, in_branch: bool) -> None:
        """Edit a statement that computes a sum, and the norm after it."""
        statement = body[i]
        target, value = _assigned(statement)
        if not _is_sum(value):
            return
        norm, reader = self._reader(body[i + 1 :], target, False)
        if norm is None:
            return
        self._record(norm.func.attr, "", in_branch)
        both = _call(_ADD_NORM, norm.func, value.left, value.right)
        names: list[ast.expr] = [ast.Name(n, ast.Store()) for n in (_RESULT, target)]
        made = ast.Assign([ast.Tuple(names, ast.Store())], both)
        body[i] = _located(made, statement)
        if not (isinstance(reader, ast.Return) or _is_sum(reader.value)):
            unset = ast.Assign([ast.Name(_RESULT, ast.Store())], ast.Constant(None))
            body.insert(body.index(reader) + 1, _located(unset, reader))
        _replace(reader, norm, ast.Name(_RESULT, ast.Load()))

    def _pair_norm(self, body: list[ast.stmt], i: int, in_branch: bool) -> None:
        """Edit a statement that computes a norm, and the activation after it."""
        statement: Any = body[i]
        target, value = _assigned(statement)
        name = self._child(value, "norm")
        if not name:
            return
        activation, reader = self._reader(body[i + 1 :], target, True)
        if activation is None:
            return
        self._record(name, activation.func.attr, in_branch)
        function = copy.deepcopy(activation.func)
        made = _call(_NORM_ACTIVATION, value.func, value.args[0], function)
        statement.value = _located(made, statement)
        _replace(reader, activation, activation.args[0])

    def _record(
        self, norm: str, activation: str, in_branch: bool, is_modulated: bool = False
    ) -> None:
        call = EditedCall(activation, in_branch, is_modulated)
        self.calls.setdefault(norm, []).append(call)

    def _reader(
        self, following: list[ast.stmt], name: str, activates: bool
    ) -> tuple[Any, Any]:
        """The next call with a side effect, and its statement, if it reads a variable; else Nones.

        name: the variable. Other variables may get its value, and the call may read one of these.
        activates: whether the call must be an activation and the only reader; otherwise it must be
            a norm.
        """
        held = {name}
        for statement in following:
            call = self._first_effect(getattr(statement, "value", None))
            if call is not None:
                plain = bool(self._child(call, *_SUMS)) and is_name(call.args[0], held)
                reads = self._activates(statement, call, held) if activates else plain
                return (call, statement) if reads else (None, None)
            target, value = _assigned(statement)
            if target is None:
                break
            if activates and any(is_name(part, held) for part in ast.walk(value)):
                break
            held = held | {target} if is_name(value, held) else held - {target}
        return None, None

    def _first_effect(self, node: Any) -> Any:
        """The first part of an expression that may have a side effect; None if no part may."""
        if (
            node is None
            or isinstance(node, (ast.Name, ast.Constant))
            or self._is_stored(node)
        ):
            return None
        parts: list[Any] = []
        if isinstance(node, ast.Call):
            parts = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Tuple):
            parts = node.elts
        for part in parts:
            if (found := self._first_effect(part)) is not None:
                return found
        return None if isinstance(node, ast.Tuple) else node

    def _is_stored(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module, and not a property."""
        if not self._is_own(node):
            return False
        found = inspect.getattr_static(self.cls, node.attr, None)  # type: ignore[attr-defined]
        return found is None or isinstance(found, (types.FunctionType, bool))

    def _is_own(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and is_name(node.value, {self.me})

    def _child(self, node: Any, *kinds: str) -> str:
        """The name of the child of these kinds that a node calls with one argument; "" if none."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return ""
        if isinstance(node.args[0], ast.Starred) or not self._is_own(node.func):
            return ""
        name: str = node.func.attr  # type: ignore[attr-defined]
        return name if self.children.get(name, "") in kinds else ""

    def _activates(self, statement: ast.stmt, node: Any, held: set[str]) -> bool:
        """Whether a node applies an activation to a variable that only this node reads."""
        if not self._child(node, "activation") or not is_name(node.args[0], held):
            return False
        name = node.args[0].id
        if len(_reads(statement, name)) != 1:
            return False
        if _assigned(statement)[0] == name or len(_reads(self.definition, name)) == 1:
            return True
        # After a return, functions that captured the variable may run.
        return isinstance(statement, ast.Return) and not self._has_scopes


# Python's syntax trees: find, build and replace nodes.


def _expressions(statement: ast.stmt) -> Iterator[Any]:
    """Yield a statement's expressions, but none inside nested statements and functions."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        children = ast.iter_child_nodes(waiting.pop())
        parts = [c for c in children if not isinstance(c, (ast.stmt, *SCOPES))]
        waiting += parts
        yield from parts


def _assigned(node: ast.AST) -> tuple[Any, Any]:
    """The only variable that a statement assigns to, and the value; Nones for other statements."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return None, None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    single = len(targets) == 1 and isinstance(targets[0], ast.Name)
    return (targets[0].id, node.value) if single else (None, None)  # type: ignore[attr-defined]


def _reads(statement: ast.AST, name: str) -> list[ast.AST]:
    """The nodes of a statement that read a variable."""
    nodes = list(ast.walk(statement))
    updated = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return [node for node in named if node in updated or isinstance(node.ctx, ast.Load)]


def _is_sum(node: Any) -> bool:
    """Whether an expression adds two values, neither of them a constant."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def _call(name: str, *values: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(values), [])


def _located(made: Any, old: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(made, old))


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _replace(statement: ast.stmt, old: ast.AST, new: ast.AST) -> None:
    _Replacement(old, _located(new, old)).visit(statement)


# Copies of functions with other code.


def _function(
    like: types.FunctionType, code: types.CodeType, cells: tuple[types.CellType, ...]
) -> types.FunctionType:
    """Copy a function, with other code or other closure cells."""
    known = {name: types.CellType(f) for name, f in _CALLED.items()}
    known |= zip(like.__code__.co_freevars, cells, strict=True)
    closure = tuple(known[name] for name in code.co_freevars)
    made = types.FunctionType(
        code, like.__globals__, like.__name__, like.__defaults__, closure
    )
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
