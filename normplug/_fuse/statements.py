"""Which statements of a forward are edited, and how: a sum and its norm become one call.

Two patterns are edited:

    y = self.norm(a + b)

    x = a + b
    y = self.norm(x)

Between the two statements of the second, names may be assigned to names, and an `if` may ask
whether an argument is None. The norm is then called with the sum only if that branch is not taken.
Nothing that runs between the two can see the norm or change the sum, so that the order does not
matter. The call itself asks whether it may take the place of the sum and the norm.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from normplug._fuse import calls
from normplug._ops import recompute

# What edited statements call, by the names that they have for it.
CALLED = {
    "_normplug_add_norm": calls.add_norm,
    "_normplug_sum_norm": calls.sum_norm,
    "_normplug_recompute": recompute.call,
}
_ADD_NORM, _SUM_NORM, _RECOMPUTE = CALLED
# What has variables of its own.
SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp,
)  # fmt: skip

# Attributes of the module that must be true, or false, for a statement to run.
Branch = tuple[tuple[str, bool], ...]


@dataclass
class Editor:
    """Edits the statements of a forward.

    Attributes:
        cls: the class whose forward it is.
        me: the name of the module itself.
        norms: the names of the module's norms that have a fused addition.
        recompute: whether the calls that read a norm's result recompute it.
        found: for each norm in edited calls, by name, the branches that these are in.
        in_place: the norms left since the addition before them is in place.
        results: the expressions that give the results of edited calls.
    """

    cls: type[nn.Module]
    me: str
    norms: tuple[str, ...]
    recompute: bool
    found: dict[str, list[Branch]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    results: list[ast.expr] = field(default_factory=list)

    def edit(self, body: list[ast.stmt]) -> None:
        """Edit the body of the forward."""
        self._block(body, ())
        if self.recompute:
            self._let_recompute(body)

    def _block(self, body: list[ast.stmt], branch: Branch) -> None:
        """Edit statements that run one after the other."""
        for i, statement in enumerate(body):  # which gets longer on the way
            self._inside(statement, branch)
            self._after_sum(body, i, branch)
            for part, needed in _blocks(statement):
                self._block(part, branch + self._condition(statement, needed))

    def _condition(self, statement: ast.stmt, needed: bool) -> Branch:
        """The attribute that must be true, or false, for a branch of an `if`, if that is one."""
        test = statement.test if isinstance(statement, ast.If) else None
        if isinstance(test, ast.Attribute) and self._is_me(test.value):
            return ((test.attr, needed),)
        return ()

    def _inside(self, statement: ast.stmt, branch: Branch) -> None:
        """Edit the norms of sums in a statement's own expressions."""
        for node in _expressions(statement):
            name = self._norm(node)
            total: Any = node.args[0] if name else None
            if _is_sum(total):
                both = _call(_ADD_NORM, node.func, total.left, total.right)
                self.results.append(ast.Subscript(both, ast.Constant(0), ast.Load()))
                _replace(statement, node, self.results[-1])
                self.found.setdefault(name, []).append(branch)

    def _after_sum(self, body: list[ast.stmt], at: int, branch: Branch) -> None:
        """Edit a statement that assigns a sum, and a later one that normalises it."""
        statement = body[at]
        target, total = _assigned(statement)
        in_place = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
        if target is None or not (in_place or _is_sum(total)):
            return
        place, call, tests = self._next_norm(body, at, target)
        if call is None:
            return
        if in_place:
            self.in_place.add(self._norm(call))
            return
        self.found.setdefault(self._norm(call), []).append(branch)
        y, norm = f"_normplug_{len(self.results)}", copy.deepcopy(call.func)
        value: ast.expr = ast.Name(y, ast.Load())
        if tests:
            test = tests[0] if len(tests) == 1 else ast.BoolOp(ast.Or(), tests)
            norm = ast.IfExp(copy.deepcopy(test), ast.Constant(None), norm)
            missing = ast.Compare(value, [ast.Is()], [ast.Constant(None)])
            value = ast.IfExp(missing, copy.deepcopy(call), value)
        self.results.append(value)
        both = ast.Tuple([ast.Name(name, ast.Store()) for name in (y, target)], ast.Store())
        made = ast.Assign([both], _call(_SUM_NORM, total.left, total.right, norm))
        body[at] = _located(made, statement)
        _replace(body[place], call, value)
        # The norm's result is let go as early as it was.
        done = ast.Assign([ast.Name(y, ast.Store())], ast.Constant(None))
        body.insert(place + 1, _located(done, body[place]))

    def _next_norm(
        self, body: list[ast.stmt], at: int, target: str
    ) -> tuple[int, ast.Call | None, list[ast.expr]]:
        """The norm of the sum that a statement assigns, if what runs before it does not matter.

        Returns:
            The place of the norm's statement, its call, and the tests that must be false.
        """
        sums, assigned, tests = {target}, {target}, list[ast.expr]()
        for place, statement in enumerate(body[at + 1 :], at + 1):
            first = self._first_effect(getattr(statement, "value", None))
            if first is not None:
                if self._norm(first) and _is_name(first.args[0], sums):
                    return place, first, tests
                break
            name, value = _assigned(statement)
            if name is not None and not isinstance(statement, ast.AugAssign):
                assigned.add(name)
                sums = sums | {name} if _is_name(value, sums) else sums - {name}
            elif isinstance(statement, ast.If) and _asks_for_none(statement, assigned):
                tests.append(statement.test)
            else:
                break
        return at, None, []

    def _first_effect(self, node: Any) -> Any:
        """The first part of an expression that does more than name a value; None if none does."""
        if node is None or isinstance(node, (ast.Name, ast.Constant)):
            return None
        if isinstance(node, ast.Attribute):
            # A property may do anything.
            found = inspect.getattr_static(self.cls, node.attr, None)
            plain = found is None or isinstance(found, types.FunctionType)
            return None if self._is_me(node.value) and plain else node
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

    def _let_recompute(self, body: list[ast.stmt]) -> None:
        """Edit the calls that alone read the results of edited calls."""
        for i, statement in enumerate(body):
            for node in _expressions(statement):
                if isinstance(node, ast.Call) and self._is_own(node.func):
                    for y in _arguments(node):
                        if isinstance(y, ast.Name) and y in self.results:
                            self._recompute(node, y.id)
            name, value = _assigned(statement)
            if name is not None and value in self.results:
                reader = self._only_reader(body[i + 1 :], name)
                if reader is not None:
                    self._recompute(reader, name)
            for part, _ in _blocks(statement):
                self._let_recompute(part)

    def _only_reader(self, following: list[ast.stmt], name: str) -> ast.Call | None:
        """The call that alone reads a variable before it is assigned to again; or None."""
        readers = list[ast.Call]()
        for statement in following:
            reads = _reads(statement, name)
            if reads:
                called = [n for n in _expressions(statement) if isinstance(n, ast.Call)]
                readers += [n for n in called if self._is_own(n.func) and _takes(n, reads)]
                if len(readers) != 1:
                    break
            if isinstance(statement, ast.Return) or _assigned(statement)[0] == name:
                return readers[0] if readers else None
        return None

    def _recompute(self, reader: ast.Call, y: str) -> None:
        reader.args = [_located(ast.Name(y, ast.Load()), reader), reader.func, *reader.args]
        reader.func = _located(ast.Name(_RECOMPUTE, ast.Load()), reader)

    def _norm(self, node: Any) -> str:
        """The name of the norm that a node calls with one argument; "" for any other node."""
        if not isinstance(node, ast.Call) or not self._is_own(node.func):
            return ""
        alone = len(node.args) == 1 and not node.keywords
        name = node.func.attr  # type: ignore[attr-defined]
        return name if alone and name in self.norms else ""

    def _is_own(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and self._is_me(node.value)

    def _is_me(self, node: ast.expr) -> bool:
        return _is_name(node, {self.me})


def _blocks(statement: ast.stmt) -> Iterator[tuple[list[ast.stmt], bool]]:
    """The lists of statements in a statement; of an `if`, whether the test is true for each."""
    if isinstance(statement, SCOPES):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block, name == "body"
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body, True


def _expressions(statement: ast.stmt) -> Iterator[Any]:
    """The expressions of a statement, without those of statements and functions inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        children = ast.iter_child_nodes(waiting.pop())
        parts = [c for c in children if not isinstance(c, (ast.stmt, *SCOPES))]
        waiting += parts
        yield from parts


def _assigned(statement: ast.stmt) -> tuple[str | None, Any]:
    """The name that a statement assigns a value to, and the value; None if there is not one."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    value = getattr(statement, "value", None)
    single = len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None
    return (targets[0].id, value) if single else (None, value)


def _asks_for_none(statement: ast.If, assigned: set[str]) -> bool:
    """Whether an `if` without `else` only asks whether a value from before is None."""
    test = statement.test
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or statement.orelse:
        return False
    right = test.comparators[0]
    return (
        isinstance(test.left, ast.Name)
        and test.left.id not in assigned
        and isinstance(test.ops[0], (ast.Is, ast.IsNot))
        and isinstance(right, ast.Constant)
        and right.value is None
    )


def _is_sum(node: Any) -> bool:
    """Whether an expression adds two values, neither of them a constant."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def _is_name(node: Any, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _reads(statement: ast.stmt, name: str) -> list[ast.AST]:
    """Where a statement reads a variable."""
    nodes = list(ast.walk(statement))
    updated = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    stored = [n for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    return [n for n in nodes if _is_name(n, {name}) and (n in updated or n not in stored)]


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _takes(call: ast.Call, reads: list[ast.AST]) -> bool:
    """Whether some expressions are all arguments of a call."""
    arguments = _arguments(call)
    return all(any(read is argument for argument in arguments) for read in reads)


def _call(name: str, *arguments: Any) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _located(made: Any, old: ast.AST) -> Any:
    """A new node at an old one's place in the file."""
    return ast.fix_missing_locations(ast.copy_location(made, old))


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _replace(statement: ast.stmt, old: ast.AST, new: ast.AST) -> None:
    """Put a node in an old one's place."""
    _Replacement(old, _located(new, old)).visit(statement)
