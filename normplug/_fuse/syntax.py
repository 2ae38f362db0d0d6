"""Helpers for Python's syntax trees: find, build and replace nodes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

# The nodes that have variables of their own.
SCOPES = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp,
)  # fmt: skip


def blocks(statement: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The lists of statements in a compound statement, each with its name."""
    if isinstance(statement, SCOPES):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield name, block
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield "case", part.body


def statements(statement: ast.stmt) -> Iterator[ast.stmt]:
    """A statement and those inside it, as they are written."""
    yield statement
    for _, block in blocks(statement):
        for inside in block:
            yield from statements(inside)


def expressions(statement: ast.stmt) -> Iterator[Any]:
    """The expressions of a statement, without those of statements and functions inside it."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        children = ast.iter_child_nodes(waiting.pop())
        parts = [c for c in children if not isinstance(c, (ast.stmt, *SCOPES))]
        waiting += parts
        yield from parts


def assigned(statement: ast.stmt) -> tuple[str | None, Any]:
    """The variable that a statement assigns to, None if not exactly one; and the value."""
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    value = getattr(statement, "value", None)
    single = len(targets) == 1 and isinstance(targets[0], ast.Name) and value is not None
    return (targets[0].id, value) if single else (None, value)


def reads(statement: ast.AST, name: str) -> list[ast.AST]:
    """Where a statement reads a variable."""
    nodes = list(ast.walk(statement))
    updated = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return [node for node in named if node in updated or isinstance(node.ctx, ast.Load)]


def arguments(call: ast.Call) -> list[ast.expr]:
    """The expressions of a call's arguments."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def is_name(node: Any, names: set[str]) -> bool:
    """Whether an expression is a variable with one of these names."""
    return isinstance(node, ast.Name) and node.id in names


def is_sum(node: Any) -> bool:
    """Whether an expression adds two values, neither of them a constant."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return not any(isinstance(part, ast.Constant) for part in (node.left, node.right))


def load(name: str) -> ast.Name:
    """A node that reads a variable."""
    return ast.Name(name, ast.Load())


def call(name: str, *values: Any) -> ast.Call:
    """A node that calls a function by name."""
    return ast.Call(load(name), list(values), [])


def assignment(names: list[str], value: ast.expr, old: ast.AST) -> ast.stmt:
    """An assignment to one variable or several, with an old node's source location."""
    targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in names]
    target = targets[0] if len(targets) == 1 else ast.Tuple(targets, ast.Store())
    made: ast.stmt = located(ast.Assign([target], value), old)
    return made


def located(made: Any, old: ast.AST) -> Any:
    """Give a new node an old one's source location."""
    return ast.fix_missing_locations(ast.copy_location(made, old))


class _Replacement(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def replace(statement: ast.stmt, old: ast.AST, new: ast.AST) -> None:
    """Replace a node inside a statement."""
    _Replacement(old, located(new, old)).visit(statement)
