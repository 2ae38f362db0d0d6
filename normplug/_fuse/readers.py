"""Edit the calls that read results of edited statements, so that they recompute these results."""

from __future__ import annotations

import ast
from typing import Any

from normplug._fuse import syntax
from normplug._fuse.statements import Editor
from normplug._ops import recompute

# The function that they call, under the name in the edited source.
CALLED = {"_normplug_recompute": recompute.call}
(_RECOMPUTE,) = CALLED


class Readers:
    """Lets each call that is the only reader of an edited call's result recompute this result."""

    def __init__(self, editor: Editor) -> None:
        self._is_own = editor.flow.is_own
        self._results = [*editor.sums.results, *editor.activations.results]

    def edit(self, body: list[ast.stmt]) -> None:
        """Edit the body of a forward whose norms have been edited."""
        for i, statement in enumerate(body):
            for node in syntax.expressions(statement):
                if self._is_reader(node):
                    for y in syntax.arguments(node):
                        if isinstance(y, ast.Name) and y in self._results:
                            self._recompute(node, y.id)
            name, value = syntax.assigned(statement)
            if name is not None and value in self._results:
                reader = self._only_reader(body[i + 1 :], name)
                if reader is not None:
                    self._recompute(reader, name)
            for _, block in syntax.blocks(statement):
                self.edit(block)

    def _only_reader(self, following: list[ast.stmt], name: str) -> ast.Call | None:
        """The only call that reads a variable before its next assignment; None if there is none."""
        readers = list[ast.Call]()
        for statement in following:
            places = syntax.reads(statement, name)
            if places:
                called = [n for n in syntax.expressions(statement) if self._is_reader(n)]
                readers += [n for n in called if all(p in syntax.arguments(n) for p in places)]
                if len(readers) != 1:
                    break
            if isinstance(statement, ast.Return) or syntax.assigned(statement)[0] == name:
                return readers[0] if readers else None
        return None

    def _is_reader(self, node: Any) -> bool:
        return isinstance(node, ast.Call) and self._is_own(node.func)

    def _recompute(self, reader: ast.Call, y: str) -> None:
        reader.args = [syntax.located(syntax.load(y), reader), reader.func, *reader.args]
        reader.func = syntax.located(syntax.load(_RECOMPUTE), reader)
