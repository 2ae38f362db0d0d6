"""Which statements of a forward are edited, and how: a sum and its norm become one call.

Two patterns are edited:

    y = self.norm(a + b)

    x = a + b
    y = self.norm(x)

Between the two statements of the second, variables may be assigned to variables, and there may be
an `if` whose test only asks for a variable, an attribute of the module or None. The sum asks the
same to know which norm comes next, if one does. So nothing that runs between the two statements
can see the norm or change the sum, and the order does not matter. The call itself asks whether it
may take the place of the sum and the norm.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn

from normplug._fuse import calls, syntax

# What edited statements call, by the names that they have for it.
CALLED = {"_normplug_add_norm": calls.add_norm, "_normplug_sum_norm": calls.sum_norm}
_ADD_NORM, _SUM_NORM = CALLED
# The variable that has a norm's result, from the sum's statement to the norm's.
_RESULT = "_normplug_result"
# How many times a sum may ask which norm comes next.
_MAX_TESTS = 4

# Attributes of the module that must be true, or false, for a statement to run.
Branch = tuple[tuple[str, bool], ...]


class _Rest(NamedTuple):
    """What runs next: the statements of `body` from a place on, and then those of `after`."""

    body: list[ast.stmt]
    place: int
    after: _Rest | None


@dataclass(eq=False)
class _Norm:
    """The call of a norm, which is in a statement of `body`."""

    body: list[ast.stmt]
    statement: ast.stmt
    call: Any


@dataclass(eq=False)
class _Choice:
    """What normalises a sum where a test is true, and where it is false."""

    test: ast.expr
    true: _Next
    false: _Next


# What normalises a sum; None for nothing.
_Next = _Norm | _Choice | None


@dataclass(eq=False)
class _Sum:
    """A statement of `body` that assigns a sum, and what normalises it."""

    body: list[ast.stmt]
    statement: ast.stmt
    next: _Next


@dataclass
class Editor:
    """Edits the statements of a forward.

    Attributes:
        cls: the class whose forward it is.
        me: the name of the module itself.
        norms: the names of the module's norms that have a fused addition.
        found: for each norm in edited calls, by name, the branches that these are in.
        in_place: the norms left since the addition before them is in place.
        results: the expressions that give the results of edited calls.
    """

    cls: type[nn.Module]
    me: str
    norms: tuple[str, ...]
    found: dict[str, list[Branch]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    results: list[ast.expr] = field(default_factory=list)
    _sums: list[_Sum] = field(default_factory=list)

    def edit(self, body: list[ast.stmt]) -> None:
        """Edit the body of the forward."""
        self._block(_Rest(body, 0, None), ())
        flows = [norm.call for each in self._sums for norm, _ in self._norms(each.next)]
        for each in self._sums:
            for norm, _ in self._norms(each.next):
                alone = norm is each.next and norm.body is each.body
                self._edit_norm(norm, alone and flows.count(norm.call) == 1)
        for each in self._sums:
            self._edit_sum(each)
        if self._sums:
            body.insert(0, syntax.assignment([_RESULT], ast.Constant(None), body[0]))

    def _block(self, rest: _Rest, branch: Branch) -> None:
        """Find sums in statements that run one after the other."""
        for i, statement in enumerate(rest.body):
            self._edit_inside(statement, branch)
            following = _Rest(rest.body, i + 1, rest.after)
            self._find_sum(rest.body, statement, following, branch)
            test = statement.test if isinstance(statement, ast.If) else None
            for name, block in syntax.blocks(statement):
                needed = () if test is None else self._needed(test, name == "body")
                after = None if test is None else following
                self._block(_Rest(block, 0, after), branch + needed)

    def _edit_inside(self, statement: ast.stmt, branch: Branch) -> None:
        """Edit the norms of sums in a statement's own expressions."""
        for node in syntax.expressions(statement):
            name = self._norm_of(node)
            total: Any = node.args[0] if name else None
            if syntax.is_sum(total):
                both = syntax.call(_ADD_NORM, node.func, total.left, total.right)
                self.results.append(ast.Subscript(both, ast.Constant(0), ast.Load()))
                syntax.replace(statement, node, self.results[-1])
                self.found.setdefault(name, []).append(branch)

    def _find_sum(
        self, body: list[ast.stmt], statement: ast.stmt, rest: _Rest, branch: Branch
    ) -> None:
        """Note a statement that assigns a sum, and the norms of it in later ones."""
        target, total = syntax.assigned(statement)
        in_place = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
        if target is None or not (in_place or syntax.is_sum(total)):
            return
        found = self._next(rest, {target}, {target}, _MAX_TESTS)
        for norm, needed in self._norms(found):
            name = self._norm_of(norm.call)
            if in_place:
                self.in_place.add(name)
            else:
                self.found.setdefault(name, []).append(branch + needed)
        if found is not None and not in_place:
            self._sums.append(_Sum(body, statement, found))

    def _next(self, rest: _Rest | None, sums: set[str], known: set[str], tests: int) -> _Next:
        """What normalises a sum next, if nothing that runs before it matters.

        Args:
            rest: the statements after it.
            sums: the variables that have the sum.
            known: the variables assigned since, about which no test may ask.
            tests: how many tests there may be.
        """
        while rest is not None:
            body, place, after = rest
            if place == len(body):
                rest = after
                continue
            statement = body[place]
            first = self._first_effect(getattr(statement, "value", None))
            if first is not None:
                is_next = self._norm_of(first) and syntax.is_name(first.args[0], sums)
                return _Norm(body, statement, first) if is_next else None
            rest = _Rest(body, place + 1, after)
            if isinstance(statement, ast.If) and tests and self._is_plain(statement.test, known):
                true = self._next(_Rest(statement.body, 0, rest), sums, known, tests - 1)
                false = self._next(_Rest(statement.orelse, 0, rest), sums, known, tests - 1)
                return _Choice(statement.test, true, false) if true or false else None
            name, value = syntax.assigned(statement)
            if name is None or isinstance(statement, ast.AugAssign):
                return None
            known = known | {name}
            sums = sums | {name} if syntax.is_name(value, sums) else sums - {name}
        return None

    def _norms(self, found: _Next, needed: Branch = ()) -> Iterator[tuple[_Norm, Branch]]:
        """The norms that a sum may have, each with what is needed for it."""
        if isinstance(found, _Norm):
            yield found, needed
        elif found is not None:
            yield from self._norms(found.true, needed + self._needed(found.test, True))
            yield from self._norms(found.false, needed + self._needed(found.test, False))

    def _edit_norm(self, norm: _Norm, alone: bool) -> None:
        """Put a result in the place of a norm's call; alone: it always comes from one sum."""
        node = norm.call
        if not any(node is part for part in ast.walk(norm.statement)):
            return  # the norm of another sum, too
        value: ast.expr = syntax.load(_RESULT)
        if not alone:
            missing = ast.Compare(value, [ast.Is()], [ast.Constant(None)])
            written = copy.deepcopy(node)
            value = ast.IfExp(missing, written, syntax.load(_RESULT))
        self.results.append(value)
        syntax.replace(norm.statement, node, value)
        if any(norm.statement is each.statement for each in self._sums):
            return  # it assigns another result
        # The result is let go as early as it was.
        done = syntax.assignment([_RESULT], ast.Constant(None), norm.statement)
        norm.body.insert(norm.body.index(norm.statement) + 1, done)

    def _edit_sum(self, each: _Sum) -> None:
        target, total = syntax.assigned(each.statement)
        assert target is not None
        both = syntax.call(_SUM_NORM, total.left, total.right, _chosen(each.next))
        made = syntax.assignment([_RESULT, target], both, each.statement)
        each.body[each.body.index(each.statement)] = made

    def _first_effect(self, node: Any) -> Any:
        """The first part of an expression that does more than name a value; None if none does."""
        if node is None or isinstance(node, (ast.Name, ast.Constant)) or self._is_stored(node):
            return None
        parts: list[Any] = []
        if isinstance(node, ast.Call):
            parts = [node.func, *syntax.arguments(node)]
        elif isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Tuple):
            parts = node.elts
        for part in parts:
            if (found := self._first_effect(part)) is not None:
                return found
        return None if isinstance(node, ast.Tuple) else node

    def _is_plain(self, test: ast.expr, known: set[str]) -> bool:
        """Whether a test may be asked twice: of variables not in `known`, attributes and None."""
        if isinstance(test, ast.BoolOp):
            return all(self._is_plain(part, known) for part in test.values)
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not) and self._is_plain(test.operand, known)
        if isinstance(test, ast.Compare):
            if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
                return False
            return all(self._is_plain(part, known) for part in (test.left, *test.comparators))
        if isinstance(test, ast.Name):
            return test.id not in known
        return isinstance(test, ast.Constant) or self._is_stored(test)

    def _needed(self, test: ast.expr, result: bool) -> Branch:
        """The attributes that must be true, or false, for this result of a test."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == result:
            return tuple(part for value in test.values for part in self._needed(value, result))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._needed(test.operand, not result)
        if not isinstance(test, ast.Attribute) or not self._is_stored(test):
            return ()
        return ((test.attr, result),)

    def _is_stored(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module, and not a property."""
        if not isinstance(node, ast.Attribute) or not self.is_own(node):
            return False
        found = inspect.getattr_static(self.cls, node.attr, None)
        return found is None or isinstance(found, (types.FunctionType, bool))

    def _norm_of(self, node: Any) -> str:
        """The name of the norm that a node calls with one argument; "" for any other node."""
        if not isinstance(node, ast.Call) or not self.is_own(node.func):
            return ""
        alone = len(node.args) == 1 and not node.keywords
        name = node.func.attr  # type: ignore[attr-defined]
        return name if alone and name in self.norms else ""

    def is_own(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and syntax.is_name(node.value, {self.me})


def _chosen(found: _Next) -> ast.expr:
    """An expression for the norm that comes next, or None."""
    if found is None:
        return ast.Constant(None)
    if isinstance(found, _Norm):
        return copy.deepcopy(found.call.func)
    return ast.IfExp(copy.deepcopy(found.test), _chosen(found.true), _chosen(found.false))
