"""Copies of forwards in which a norm and the operation next to it are one call.

A trace can replace a forward only while everything that it depends on is unchanged, and many
forwards cannot be traced: they take keyword arguments and masks, keep caches, or test the type of a
value. An edited forward is the original forward except for the statements of these patterns:

    y = self.norm(a + b)              x = a + b
                                      y = self.norm(x)

    y = self.act(self.norm(x))        x = self.norm(x)
                                      x = self.act(x)

Both statements must be in the same block. If an `if` separates them, each of its branches gets a
copy first. Nothing with a side effect may run between the two, and nothing but the activation may
read the norm's result. So an edited forward takes any arguments, and depends on nothing but the
function that it was made from. Each call decides at run time whether the two run as one.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._fuse import calls
from normplug._fuse.source import SCOPES, Untraceable, compiled, definition, is_name
from normplug._ops import recompute as _recompute

# Why a norm is not edited, for a report.
REASON = "no plain addition or activation is next to it"
# The functions that edited statements call, under the names in the edited source.
_CALLED = {
    "_normplug_add_norm": calls.add_norm,
    "_normplug_activated_norm": calls.activated_norm,
    "_normplug_recompute": _recompute.call,
}
_ADD_NORM, _ACTIVATED_NORM, _RECOMPUTE = _CALLED
# The variable that holds a norm's result from the addition to the statement that reads it.
_RESULT = "_normplug_result"
# `except*` came with Python 3.11.
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
# Python's functions, and C++'s.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


class Parts(NamedTuple):
    """The children of a module that edits concern, by name.

    Attributes:
        summed: the norms that can be fused with an addition before them.
        activated: the norms that can be fused with an activation after them.
        activations: the activations.
    """

    summed: tuple[str, ...]
    activated: tuple[str, ...]
    activations: tuple[str, ...]


# The tests of the `if` statements around a statement, each with the result that it must have.
Branch = tuple[tuple[ast.expr, bool], ...]


class Place(NamedTuple):
    """An edited call of a norm.

    Attributes:
        branch: the branches that contain it.
        activation: given the module, the activation after the norm, or None if it has no kernels;
            None if an addition comes before the norm.
    """

    branch: Branch
    activation: Callable[[nn.Module], ActivationLike] | None


@dataclass(frozen=True, eq=False)
class Edited:
    """An edited forward.

    Attributes:
        cls: the class whose forward it is.
        original: the class's forward.
        forward: that function, edited.
        me: the name of the module itself in it, usually "self".
        found: the edited calls of each norm, by its name.
    """

    cls: type[nn.Module]
    original: Any
    forward: Any
    me: str
    found: dict[str, list[Place]]

    def holds(self) -> bool:
        """Whether the class still has the forward that was edited."""
        return self.cls.forward is self.original

    def label(self, norm: str, module: nn.Module) -> str:
        """The label of a norm, given by name, in a report; "" if it is not fused."""
        state = {**module._modules, **vars(module)}
        for branch, activation in self.found.get(norm, ()):
            if not all(_may_be(*each, self.me, state) for each in branch):
                continue
            if activation is None:
                return "add before it"
            if (name := activation(module)) is not None:
                return _activations.label(name)
        return ""


def edit(cls: type[nn.Module], parts: Parts, recompute: bool) -> Edited:
    """Edit the forward of a class.

    Args:
        cls: the class.
        parts: the children that the edits concern.
        recompute: let the modules that read the results of the calls recompute them.

    Raises:
        Untraceable: the source of the forward is not certain.
    """
    known: Any = cls  # to mypy, a class of modules has no hash
    return _edit(known, inspect.getattr_static(cls, "forward"), parts, recompute)


@functools.cache
def _edit(cls: type[nn.Module], forward: Any, parts: Parts, recompute: bool) -> Edited:
    if cls.__getattribute__ is not nn.Module.__getattribute__:
        raise Untraceable("its class defines __getattribute__")
    chain = [forward]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    if not all(isinstance(function, types.FunctionType) for function in chain):
        raise Untraceable("its forward is not a plain function")
    written = chain[-1]
    editor = _Editor(cls, parts, written, definition(written))
    editor.edit(editor.definition.body)
    if recompute:
        editor.recompute(editor.definition.body)
    code = compiled(written, editor.definition, _CALLED)
    edited = _function(written, code, written.__closure__ or ())
    for outer, inner in zip(chain[-2::-1], chain[:0:-1], strict=True):
        edited = _rewrapped(outer, inner, edited)
    return Edited(cls, forward, edited, editor.me, editor.found)


@dataclass
class _Editor:
    """Edits the statements of a forward.

    Attributes:
        cls: the class whose forward it is.
        parts: the children that edits concern.
        function: the forward.
        definition: its definition, which `edit` changes.
        found: the edited calls of each norm, by its name.
    """

    cls: type[nn.Module]
    parts: Parts
    function: types.FunctionType
    definition: ast.FunctionDef
    found: dict[str, list[Place]] = field(default_factory=dict)
    _results: list[ast.expr] = field(default_factory=list)  # of edited calls

    def __post_init__(self) -> None:
        arguments = [*self.definition.args.posonlyargs, *self.definition.args.args]
        if not arguments:
            raise Untraceable("its forward takes only *args")
        self.me = arguments[0].arg
        # After an exception, the second statement may not run.
        self._has_try = any(isinstance(node, _TRIES) for node in ast.walk(self.definition))
        for node in ast.walk(self.definition):
            if is_name(node, {self.me}) and not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
                raise Untraceable(f"its forward assigns to {self.me}")

    def edit(self, body: list[ast.stmt], branch: Branch = ()) -> None:
        """Edit the norms in statements; branch: the branches that contain the statements."""
        for i, _ in enumerate(body):
            if not self._has_try:
                self._into_branches(body, i)
            statement = body[i]
            for node in _expressions(statement):
                self._nested(statement, node, branch)
            if not self._has_try:
                self._pair(body, i, branch)
            for block in _blocks(body[i]):
                test = statement.test if isinstance(statement, ast.If) else ast.Constant(None)
                self.edit(block, (*branch, (test, block is getattr(statement, "body", None))))

    def _into_branches(self, body: list[ast.stmt], i: int) -> None:
        """Copy a sum or a norm before an `if` into its branches, and what reads one after it."""
        if len(body) > i + 1 and self._begins(body[i]) and self._is_plain(body[i], body[i + 1]):
            first, choice = body[i], body[i + 1]
            for block in (choice.body, choice.orelse):  # type: ignore[attr-defined]
                block.insert(0, copy.deepcopy(first))
            del body[i]
        choice = body[i]
        if not isinstance(choice, ast.If) or not any(map(self._begins, ast.walk(choice))):
            return
        for end, statement in enumerate(body[i + 1 :], i + 2):
            if self._ends(statement):
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
        return _is_sum(value) or bool(self._child(value, self.parts.activated))

    def _ends(self, statement: ast.stmt) -> bool:
        """Whether a statement, or the first one in an `if`, begins with a norm or an activation."""
        inner = statement.body[0] if isinstance(statement, ast.If) else statement
        first = self._first_effect(getattr(inner, "value", None))
        return self._is_activation(first) or bool(self._child(first, self.parts.summed))

    def _is_plain(self, before: ast.stmt, choice: ast.stmt) -> bool:
        """Whether an `if` may run its test before another statement: it compares with None."""
        test = getattr(choice, "test", None)
        if not isinstance(choice, ast.If) or not isinstance(test, ast.Compare):
            return False
        none = isinstance(test.ops[0], (ast.Is, ast.IsNot)) and len(test.ops) == 1
        known = isinstance(test.left, ast.Name) and test.left.id != _assigned(before)[0]
        constant = isinstance(test.comparators[0], ast.Constant)
        return none and constant and (known or self._is_stored(test.left))

    def _nested(self, statement: ast.stmt, node: Any, branch: Branch) -> None:
        """Edit a norm of a sum, or an activation of a norm."""
        inner: Any = node.args[0] if isinstance(node, ast.Call) and node.args else None
        if (name := self._child(node, self.parts.summed)) and _is_sum(inner):
            both = _call(_ADD_NORM, node.func, inner.left, inner.right)
            made: Any = ast.Subscript(both, ast.Constant(0), ast.Load())
            self._found(name, branch)
        elif (name := self._child(inner, self.parts.activated)) and self._is_activation(node):
            made = _call(_ACTIVATED_NORM, node.func, inner.func, inner.args[0])
            self._found(name, branch, node.func)
        else:
            return
        self._results.append(made)
        _replace(statement, node, made)

    def _pair(self, body: list[ast.stmt], i: int, branch: Branch) -> None:
        """Edit a statement that computes a sum or a norm, and the norm or activation after it."""
        statement: Any = body[i]
        target, value = _assigned(statement)
        if target is None:
            return
        if _is_sum(value):
            norm, reader = self._reader(body[i + 1 :], target, False)
            if norm is None:
                return
            self._found(norm.func.attr, branch)
            both = _call(_ADD_NORM, norm.func, value.left, value.right)
            body[i] = _assignment([_RESULT, target], both, statement)
            result: ast.expr = _load(_RESULT)
            if not (isinstance(reader, ast.Return) or _is_sum(reader.value)):
                unset = _assignment([_RESULT], ast.Constant(None), reader)
                body.insert(body.index(reader) + 1, unset)
        elif name := self._child(value, self.parts.activated):
            activation, reader = self._reader(body[i + 1 :], target, True)
            if activation is None:
                return
            self._found(name, branch, activation.func)
            made = _call(_ACTIVATED_NORM, copy.deepcopy(activation.func), value.func, value.args[0])
            statement.value = _located(made, statement)
            result = activation.args[0]
        else:
            return
        self._results.append(result)
        _replace(reader, norm if _is_sum(value) else activation, result)

    def _found(self, norm: str, branch: Branch, function: Any = None) -> None:
        """Record an edited call of a norm; function: the activation that is called after it."""
        activation = None
        if function is not None:
            child = function.attr if self._is_own(function) else ""
            activation = partial(_activation, child, self._named(function))
        self.found.setdefault(norm, []).append(Place(branch, activation))

    def _reader(self, following: list[ast.stmt], name: str, activates: bool) -> tuple[Any, Any]:
        """The next call with a side effect, and its statement, if it reads a variable; else None.

        name: the variable, which may be assigned to others before. activates: whether the call must
            be an activation and the only reader, and not a norm.
        """
        held = {name}
        for statement in following:
            call = self._first_effect(getattr(statement, "value", None))
            if call is not None:
                plain = bool(self._child(call, self.parts.summed)) and is_name(call.args[0], held)
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
        """The first part of an expression that may have a side effect; None if it has none."""
        if node is None or isinstance(node, (ast.Name, ast.Constant)) or self._is_stored(node):
            return None
        parts: list[Any] = []
        if isinstance(node, ast.Call):
            named = self._named(node.func) is not None  # reading its name has no effect
            parts = [*([] if named else [node.func]), *_arguments(node)]
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

    def _child(self, node: Any, names: tuple[str, ...]) -> str:
        """The child in `names` that a node calls with one argument; "" if it calls none."""
        plain = _has_one_argument(node) and self._is_own(node.func)
        return node.func.attr if plain and node.func.attr in names else ""

    def _is_activation(self, node: Any) -> bool:
        if not _has_one_argument(node):
            return False
        return bool(self._child(node, self.parts.activations)) or self._named(node.func) is not None

    def _activates(self, statement: ast.stmt, node: Any, held: set[str]) -> bool:
        """Whether a node activates a norm's result, in the variable that only this node reads."""
        if not self._is_activation(node) or not is_name(node.args[0], held):
            return False
        name = node.args[0].id
        if len(_reads(statement, name)) != 1:
            return False
        if _assigned(statement)[0] == name or len(_reads(self.definition, name)) == 1:
            return True
        # After a return, functions that captured the variable may run.
        return isinstance(statement, ast.Return) and not any(
            isinstance(part, SCOPES) and part is not self.definition
            for part in ast.walk(self.definition)
        )

    def _named(self, node: ast.expr) -> str | None:
        """The activation's name if a node refers to a global that is one; else None."""
        value = self._global(node)
        return _activations.of_function(value) if isinstance(value, _FUNCTIONS) else None

    def _global(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            code = self.function.__code__
            local = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
            return None if node.id in local else self.function.__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._global(node.value)
            return getattr(base, node.attr, None) if isinstance(base, types.ModuleType) else None
        return None

    def recompute(self, body: list[ast.stmt]) -> None:
        """Let each call that is the only reader of an edited call's result recompute it."""
        for i, statement in enumerate(body):
            for node in _expressions(statement):
                if self._is_reader(node):
                    for y in _arguments(node):
                        if y in self._results and isinstance(y, ast.Name):
                            _let_recompute(node, y.id)
            name, value = _assigned(statement)
            if name is not None and value in self._results:
                reader = self._only_reader(body[i + 1 :], name)
                if reader is not None:
                    _let_recompute(reader, name)
            for block in _blocks(statement):
                self.recompute(block)

    def _only_reader(self, following: list[ast.stmt], name: str) -> ast.Call | None:
        """The only call that reads a variable before its next assignment; None if there is none."""
        readers = list[ast.Call]()
        for statement in following:
            places = _reads(statement, name)
            if places:
                called = [n for n in _expressions(statement) if self._is_reader(n)]
                readers += [n for n in called if all(p in _arguments(n) for p in places)]
                if len(readers) != 1:
                    break
            if isinstance(statement, ast.Return) or _assigned(statement)[0] == name:
                return readers[0] if readers else None
        return None

    def _is_reader(self, node: Any) -> bool:
        return isinstance(node, ast.Call) and self._is_own(node.func)


def _activation(child: str, name: ActivationLike, module: nn.Module) -> ActivationLike:
    """The activation that a child of a module computes; `name` if it has no such child."""
    found = module._modules.get(child)
    return name if found is None else _activations.of_module(found)


def _may_be(test: ast.expr, result: bool, me: str, state: dict[str, Any]) -> bool:
    """Whether a test may have a result, given the module's attributes and children."""
    if isinstance(test, ast.BoolOp):
        parts = [_may_be(part, result, me, state) for part in test.values]
        return all(parts) if isinstance(test.op, ast.And) == result else any(parts)
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if names != {me} or any(isinstance(node, ast.Call) for node in nodes):
        return True
    try:
        code = compile(ast.Expression(test), "<test>", "eval")
        return bool(eval(code, {me: types.SimpleNamespace(**state)})) == result
    except Exception:  # an attribute that only the forward can read
        return True


def _let_recompute(reader: ast.Call, y: str) -> None:
    reader.args = [_located(_load(y), reader), reader.func, *reader.args]
    reader.func = _located(_load(_RECOMPUTE), reader)


# Python's syntax trees: find, build and replace nodes.


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a compound statement."""
    if isinstance(statement, SCOPES):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _expressions(statement: ast.stmt) -> Iterator[Any]:
    """The expressions of a statement, without those of statements and functions inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        children = ast.iter_child_nodes(waiting.pop())
        parts = [c for c in children if not isinstance(c, (ast.stmt, *SCOPES))]
        waiting += parts
        yield from parts


def _assigned(node: ast.AST) -> tuple[Any, Any]:
    """The variable to which a statement assigns a value, and the value; None if not exactly one."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return None, None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    single = len(targets) == 1 and isinstance(targets[0], ast.Name)
    return (targets[0].id, node.value) if single else (None, None)  # type: ignore[attr-defined]


def _reads(statement: ast.AST, name: str) -> list[ast.AST]:
    """Where a statement reads a variable."""
    nodes = list(ast.walk(statement))
    updated = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return [node for node in named if node in updated or isinstance(node.ctx, ast.Load)]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _has_one_argument(node: Any) -> bool:
    """Whether a node is a call with one argument, neither named nor starred."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
        return False
    return not isinstance(node.args[0], ast.Starred)


def _is_sum(node: Any) -> bool:
    """Whether an expression adds two values, neither of them a constant."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _call(name: str, *values: Any) -> ast.Call:
    return ast.Call(_load(name), list(values), [])


def _assignment(names: list[str], value: ast.expr, old: ast.AST) -> ast.stmt:
    """An assignment to one variable or several, with an old node's source location."""
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
    made: ast.stmt = _located(ast.Assign([target], value), old)
    return made


def _located(made: Any, old: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(made, old))


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _replace(statement: ast.stmt, old: ast.AST, new: ast.AST) -> None:
    _Replacement(old, _located(new, old)).visit(statement)


# Functions with other code.


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
