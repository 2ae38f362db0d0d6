"""Why a norm is in no edited call, according to the source of the forward."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from normplug._fuse import syntax
from normplug._fuse.flow import Branch, Flow

_MOST = 40  # characters of source in a reason

# `sites` gives these reasons for traces, too.
IN_PLACE = "the addition before it is in place, and other code may read its result"
FROM_OUTSIDE = (
    "its input is an argument of the forward; an addition before that is in another module"
)


class Reason(NamedTuple):
    """Why a call of a norm is not edited, and the branches that contain the call.

    text: "" if only a trace could fuse it.
    """

    branch: Branch
    text: str


class _Place(NamedTuple):
    """Where a statement is: its body, the statement around that body, and the branches."""

    body: list[ast.stmt]
    around: ast.stmt | None
    branch: Branch


class Reasons:
    """The reasons for the norms of a forward.

    Args:
        flow: its statements, before they are edited.
        definition: the forward.
    """

    def __init__(self, flow: Flow, definition: ast.FunctionDef) -> None:
        self._flow, self._definition = flow, definition
        self._places: dict[ast.stmt, _Place] = {}
        self._note(definition.body, None, ())

    def _note(self, body: list[ast.stmt], around: ast.stmt | None, branch: Branch) -> None:
        for statement in body:
            self._places[statement] = _Place(body, around, branch)
            for name, block in syntax.blocks(statement):
                test = statement.test if isinstance(statement, ast.If) else None
                needed = () if test is None else self._flow.needed(test, name == "body")
                self._note(block, statement, branch + needed)

    def all(self) -> dict[str, list[Reason]]:
        """For each norm, by name, why each call of it would not be edited."""
        parts = self._flow.parts
        return {
            **{name: list(self._of(name, self._before)) for name in parts.summed},
            **{name: list(self._of(name, self._after)) for name in parts.activated},
        }

    def _of(self, name: str, look: Any) -> Iterator[Reason]:
        called = False
        for statement, place in self._places.items():
            for node in syntax.expressions(statement):
                if isinstance(node, ast.Call) and self._names(node.func, name):
                    called = True
                    plain = self._flow.child_called(node, (name,))
                    text = look(statement, node) if plain else "not called with one tensor"
                    yield Reason(place.branch, text)
        if not called:
            yield Reason((), self._passed(name))

    def _names(self, node: Any, name: str) -> bool:
        return self._flow.is_own(node) and node.attr == name

    def _passed(self, name: str) -> str:
        """How a norm that the forward does not call may reach another function; "" if it cannot."""
        for node in ast.walk(self._definition):
            if self._names(node, name):
                return f"its forward passes self.{name} to another function"
            arguments = syntax.arguments(node) if isinstance(node, ast.Call) else []
            if any(syntax.is_name(part, {self._flow.me}) for part in arguments):
                return "its forward passes self to another function"
        return ""

    def _before(self, statement: ast.stmt, call: ast.Call) -> str:
        """Why a norm is not fused with an addition: what comes before the norm."""
        value: Any = call.args[0]
        assigning: ast.stmt | None = statement
        while isinstance(value, (ast.Name, ast.Subscript)):
            if isinstance(value, ast.Subscript):
                value = value.value
                continue
            assert assigning is not None
            assigning, value = self._assignment(value.id, assigning)
            if assigning is None:
                return FROM_OUTSIDE
        if isinstance(value, ast.Call):
            return f"preceded by {_shown(value)}"
        if not syntax.is_sum(value):
            return "no addition comes right before it"
        for between in self._earlier(statement):
            if between is assigning:
                break
            test = getattr(between, "test", None)
            if test is not None and not self._flow.is_plain(test, set()):
                return f"a test of {_shown(test)} comes between the addition and it"
            effect = self._flow.first_effect(getattr(between, "value", None))
            if effect is not None:
                return f"{_shown(effect)} comes between the addition and it"
        return "not right after the addition before it"

    def _assignment(self, name: str, before: ast.stmt) -> tuple[ast.stmt | None, Any]:
        """The last statement before another that assigns to a variable, and the value."""
        for statement in self._earlier(before):
            targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
            names = [n for t in targets if t is not None for n in ast.walk(t)]
            if any(isinstance(n, ast.Name) and n.id == name for n in names):
                return statement, getattr(statement, "value", None)
        return None, None

    def _earlier(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements that may run before another, the last first."""
        body, around, _ = self._places[statement]
        for sibling in reversed(body[: body.index(statement)]):
            yield from reversed([*syntax.statements(sibling)])
        if around is not None:
            yield around
            yield from self._earlier(around)

    def _after(self, statement: ast.stmt, call: ast.Call) -> str:
        """Why a norm is not fused with an activation: what comes after the norm."""
        later, reader = statement, _reader(statement, call)
        target, value = syntax.assigned(statement)
        if reader is None and value is call and target is not None:
            for later in self._later(statement):
                reads = [n for n in syntax.reads(later, target) if n in syntax.expressions(later)]
                if reads:
                    reader = _reader(later, reads[0]) or later
                    break
        elif reader is None:
            reader = statement
        while isinstance(reader, ast.Attribute):  # of the result, as a method
            reader = _reader(later, reader)
        if isinstance(reader, ast.Call):
            return f"followed by {_shown(reader)}"
        if isinstance(reader, ast.Return):
            return "followed by the end of the module"
        adds = isinstance(reader, (ast.AugAssign, ast.BinOp)) and isinstance(reader.op, ast.Add)
        return "" if adds else "no activation comes right after it"

    def _later(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """The statements that may run after another, the next first."""
        body, around, _ = self._places[statement]
        for sibling in body[body.index(statement) + 1 :]:
            yield from syntax.statements(sibling)
        if around is not None:
            yield from self._later(around)


def _reader(statement: ast.stmt, node: ast.AST) -> Any:
    """The expression in a statement that a node is an operand of; None if there is none."""
    for parent in syntax.expressions(statement):
        if any(child is node for child in ast.iter_child_nodes(parent)):
            return parent
    return None


def _shown(node: ast.expr) -> str:
    """An expression's source, without the arguments of a call."""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    text = text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."
    return f"{text}(...)" if isinstance(node, ast.Call) else text
