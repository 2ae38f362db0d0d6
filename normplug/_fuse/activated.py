"""Merge a norm and the activation after it into one call.

Two patterns are edited:

    y = self.act(self.norm(x))

    x = self.norm(x)
    x = self.act(x)

In the second, nothing else may read the norm's result. If several branches lead to the activation,
each may have a norm. The call decides at run time whether it does both. If not, the activation runs
where it was written.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from normplug._fuse import calls, syntax
from normplug._fuse.flow import Branch, Flow, Next, Rest, chosen

# The functions that edited statements call, under the names in the edited source.
CALLED = {
    "_normplug_activated_norm": calls.activated_norm,
    "_normplug_norm_then": calls.norm_then,
}
_ACTIVATED_NORM, _NORM_THEN = CALLED
# `except*` came with Python 3.11.
_TRIES = (ast.Try, getattr(ast, "TryStar", ast.Try))
# The variable that tells the activation's statement whether the norm's statement has applied the
# activation.
_DONE = "_normplug_done"


class Activated(NamedTuple):
    """An edited call of a norm.

    Attributes:
        branch: the branches that contain it.
        child: the name of the activation if it is a child of the module; else "".
        function: the name of the activation if it is a function; else None.
    """

    branch: Branch
    child: str
    function: str | None


@dataclass
class Activations:
    """The activations of a forward.

    Attributes:
        flow: the forward's statements.
        definition: the forward.
        found: the edited calls of each norm, by its name.
        results: the expressions for the results of edited calls.
    """

    flow: Flow
    definition: ast.FunctionDef
    found: dict[str, list[Activated]] = field(default_factory=dict)
    results: list[ast.expr] = field(default_factory=list)
    _norms: list[tuple[Any, Next]] = field(default_factory=list)

    def look(self, statement: ast.stmt, following: Rest, branch: Branch) -> None:
        """Edit activated norms inside a statement, and note whether it assigns a norm's result."""
        for node in syntax.expressions(statement):
            inner: Any = node.args[0] if self._is_activation(node) else None
            name = self._norm_of(inner)
            if name:
                made = syntax.call(_ACTIVATED_NORM, node.func, inner.func, inner.args[0])
                syntax.replace(statement, node, made)
                self.results.append(made)
                self._found(name, branch, node)
        target, call = syntax.assigned(statement)
        name = self._norm_of(call) if isinstance(statement, ast.Assign) else ""
        if target is None or not name:
            return
        found = self.flow.next(following, target, self._activates, aliases=False)
        for reader, needed in self.flow.readers(found):
            self._found(name, branch + needed, reader.call)
        if found is not None:
            self._norms.append((statement, found))

    def edit(self, body: list[ast.stmt]) -> None:
        """Edit the norms that `look` noted in the body of a forward, and their activations."""
        readers = {r.call: r for _, found in self._norms for r, _ in self.flow.readers(found)}
        for call, reader in readers.items():
            self.results.append(ast.IfExp(syntax.load(_DONE), call.args[0], call))
            syntax.replace(reader.statement, call, self.results[-1])
            if not any(reader.statement is norm for norm, _ in self._norms):  # else it sets _DONE
                place = reader.body.index(reader.statement) + 1
                reader.body.insert(place, _not_done(reader.statement))
        for statement, found in self._norms:
            target, call = statement.targets[0], statement.value
            both = syntax.call(_NORM_THEN, call.func, call.args[0], chosen(found))
            done = ast.Name(_DONE, ast.Store())
            statement.targets = [ast.Tuple([target, done], ast.Store())]
            statement.value = both
            syntax.located(statement, call)
        if readers:
            body.insert(0, _not_done(body[0]))

    def _found(self, name: str, branch: Branch, call: Any) -> None:
        child = call.func.attr if self.flow.is_own(call.func) else ""
        function = None if child else self.flow.function(call.func)
        self.found.setdefault(name, []).append(Activated(branch, child, function))

    def _norm_of(self, node: Any) -> str:
        return self.flow.child_called(node, self.flow.parts.activated)

    def _is_activation(self, node: Any) -> bool:
        """Whether a node calls an activation with one positional argument."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return False
        if isinstance(node.args[0], ast.Starred):
            return False
        own = self.flow.child_called(node, self.flow.parts.activations)
        return bool(own) or self.flow.function(node.func) is not None

    def _activates(self, statement: ast.stmt, node: Any, held: set[str]) -> bool:
        """Whether a node activates a norm's result, in a variable that only this node reads."""
        if not self._is_activation(node) or not syntax.is_name(node.args[0], held):
            return False
        name = node.args[0].id
        return len(syntax.reads(statement, name)) == 1 and self._is_last(statement, name)

    def _is_last(self, statement: ast.stmt, name: str) -> bool:
        """Whether a statement is the last to read a variable's value."""
        if syntax.assigned(statement)[0] == name or len(syntax.reads(self.definition, name)) == 1:
            return True
        # After a return, `finally` runs, and so may functions that captured the variable.
        return isinstance(statement, ast.Return) and not any(
            isinstance(node, (*_TRIES, *syntax.SCOPES)) and node is not self.definition
            for node in ast.walk(self.definition)
        )


def _not_done(old: ast.AST) -> ast.stmt:
    return syntax.assignment([_DONE], ast.Constant(False), old)
