"""Find which call reads a value next, if nothing that runs in between has a side effect.

A value and its reader become one call only if nothing between them has a side effect. So only two
kinds of statement may come between: an assignment from variable to variable, and an `if` whose test
reads only variables, attributes of the module and constants. The edited statement that computes the
value evaluates the same tests, to find which reader comes next, if any.
"""

from __future__ import annotations

import ast
import copy
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from normplug import _activations
from normplug._fuse import syntax

# How many tests may lie between a value and its reader.
_MAX_TESTS = 4


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


class Need(NamedTuple):
    """A condition on an attribute of the module, without which a statement does not run.

    Attributes:
        name: the attribute's name.
        value: what the test compares it with; None if the test is the attribute itself.
        holds: the result that the test must have.
    """

    name: str
    value: Any
    holds: bool

    def may_hold(self, state: dict[str, Any]) -> bool:
        """Whether the module's `__dict__` allows it; an attribute not in it may be anything."""
        if self.name not in state:
            return True
        value = state[self.name]
        if self.value is None:
            return value is not (not self.holds)  # only the other bool surely fails the test
        known = value is None or isinstance(value, (str, int))
        return (value == self.value) == self.holds if known else True


# The conditions of all `if` branches around a statement.
Branch = tuple[Need, ...]


def may_hold(branch: Branch, state: dict[str, Any]) -> bool:
    """Whether the statements of a branch may run, given the module's `__dict__`."""
    return all(need.may_hold(state) for need in branch)


class Rest(NamedTuple):
    """The statements to run next: those of `body` from `place` on, then those of `after`."""

    body: list[ast.stmt]
    place: int
    after: Rest | None


@dataclass(eq=False)
class Reader:
    """A call that reads a value, in a statement of `body`."""

    body: list[ast.stmt]
    statement: ast.stmt
    call: Any


@dataclass(eq=False)
class Choice:
    """The readers of a value if a test is true and if it is false."""

    test: ast.expr
    true: Next
    false: Next


# The next reader of a value; None if there is none.
Next = Reader | Choice | None


@dataclass
class Flow:
    """The data flow between a forward's statements, and what their names mean.

    Attributes:
        cls: the class whose forward it is.
        me: the name of the module itself, usually "self".
        parts: the children that edits concern.
        globals: the forward's globals.
        local: the names of its variables.
    """

    cls: type[nn.Module]
    me: str
    parts: Parts
    globals: dict[str, Any]
    local: frozenset[str]

    def next(
        self,
        rest: Rest | None,
        target: str,
        is_reader: Callable[[ast.stmt, Any, set[str]], bool],
        aliases: bool,
    ) -> Next:
        """The next reader of a value, if nothing that runs before it has a side effect.

        Args:
            rest: the statements after the one that computes the value.
            target: the variable that holds the value.
            is_reader: (statement, call, variables) -> whether the call reads one of the variables.
            aliases: whether the value may be assigned to other variables.
        """

        def find(rest: Rest | None, held: set[str], stale: set[str], tests: int) -> Next:
            # held: the variables that have the value. stale: the variables assigned since. No test
            # may read these, as the edited statement evaluates it before they are assigned.
            while rest is not None:
                body, place, after = rest
                if place == len(body):
                    rest = after
                    continue
                statement = body[place]
                first = self.first_effect(getattr(statement, "value", None))
                if first is not None:
                    found = is_reader(statement, first, held)
                    return Reader(body, statement, first) if found else None
                rest = Rest(body, place + 1, after)
                if isinstance(statement, ast.If) and tests and self.is_plain(statement.test, stale):
                    true = find(Rest(statement.body, 0, rest), held, stale, tests - 1)
                    false = find(Rest(statement.orelse, 0, rest), held, stale, tests - 1)
                    return Choice(statement.test, true, false) if true or false else None
                name, value = syntax.assigned(statement)
                if name is None or isinstance(statement, ast.AugAssign):
                    return None
                stale = stale | {name}
                if not aliases and any(syntax.is_name(part, held) for part in ast.walk(value)):
                    return None
                held = held | {name} if syntax.is_name(value, held) else held - {name}
            return None

        return find(rest, {target}, {target}, _MAX_TESTS)

    def readers(self, found: Next, needed: Branch = ()) -> Iterator[tuple[Reader, Branch]]:
        """The possible readers of a value, each with the conditions under which it runs."""
        if isinstance(found, Reader):
            yield found, needed
        elif found is not None:
            yield from self.readers(found.true, needed + self.needed(found.test, True))
            yield from self.readers(found.false, needed + self.needed(found.test, False))

    def first_effect(self, node: Any) -> Any:
        """The first part of an expression that may have a side effect; None if it has none."""
        if node is None or isinstance(node, (ast.Name, ast.Constant)) or self._is_stored(node):
            return None
        parts: list[Any] = []
        if isinstance(node, ast.Call):
            named = self.function(node.func) is not None  # reading its name has no effect
            parts = [*([] if named else [node.func]), *syntax.arguments(node)]
        elif isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Tuple):
            parts = node.elts
        for part in parts:
            if (found := self.first_effect(part)) is not None:
                return found
        return None if isinstance(node, ast.Tuple) else node

    def is_plain(self, test: ast.expr, stale: set[str]) -> bool:
        """Whether a test may also be evaluated earlier, with the same result.

        It may read variables that are not in `stale`, attributes and constants, and compare with a
        string.
        """
        if isinstance(test, ast.BoolOp):
            return all(self.is_plain(part, stale) for part in test.values)
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not) and self.is_plain(test.operand, stale)
        if isinstance(test, ast.Compare):
            operands = (test.left, *test.comparators)
            if not all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
                text = operands[-1].value if isinstance(operands[-1], ast.Constant) else None
                equal = len(operands) == 2 and isinstance(test.ops[0], (ast.Eq, ast.NotEq))
                return equal and isinstance(text, str) and self.is_plain(test.left, stale)
            return all(self.is_plain(part, stale) for part in operands)
        if isinstance(test, ast.Name):
            return test.id not in stale
        if isinstance(test, ast.Constant):
            return True
        # A class's own `__getattr__` may have effects, such as a warning about an old name.
        looks: Any = self.cls.__getattr__
        return self._is_stored(test) and looks is nn.Module.__getattr__

    def needed(self, test: ast.expr, result: bool) -> Branch:
        """The conditions on attributes for a test to have this result."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == result:
            return tuple(part for value in test.values for part in self.needed(value, result))
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.needed(test.operand, not result)
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Eq, ast.NotEq)):
            equal, value = isinstance(test.ops[0], ast.Eq), test.comparators[0]
            if len(test.ops) > 1 or not isinstance(value, ast.Constant) or value.value is None:
                return ()
            return self._need(test.left, value.value, equal == result)
        return self._need(test, None, result)

    def _need(self, node: ast.expr, value: Any, holds: bool) -> Branch:
        if not isinstance(node, ast.Attribute) or not self._is_stored(node):
            return ()
        return (Need(node.attr, value, holds),)

    def _is_stored(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module, and not a property."""
        if not isinstance(node, ast.Attribute) or not self.is_own(node):
            return False
        found = inspect.getattr_static(self.cls, node.attr, None)
        return found is None or isinstance(found, (types.FunctionType, bool))

    def is_own(self, node: ast.expr) -> bool:
        """Whether an expression is an attribute of the module."""
        return isinstance(node, ast.Attribute) and syntax.is_name(node.value, {self.me})

    def child_called(self, node: Any, names: tuple[str, ...]) -> str:
        """The child in `names` that a node calls with one argument, neither named nor starred."""
        if not isinstance(node, ast.Call) or not self.is_own(node.func):
            return ""
        alone = len(node.args) == 1 and not node.keywords
        name = node.func.attr  # type: ignore[attr-defined]
        plain = alone and not isinstance(node.args[0], ast.Starred)
        return name if plain and name in names else ""

    def function(self, node: ast.expr) -> str | None:
        """The activation's name if a node refers to a global that is one; else None."""
        value = self._global(node)
        return _activations.of_function(value) if isinstance(value, _FUNCTIONS) else None

    def _global(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return None if node.id in self.local else self.globals.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._global(node.value)
            return getattr(base, node.attr, None) if isinstance(base, types.ModuleType) else None
        return None


# Python's functions, and C++'s.
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


def chosen(found: Next) -> ast.expr:
    """An expression for the next function to read a value; it is `None` if there is none."""
    if found is None:
        return ast.Constant(None)
    if isinstance(found, Reader):
        return copy.deepcopy(found.call.func)
    return ast.IfExp(copy.deepcopy(found.test), chosen(found.true), chosen(found.false))
