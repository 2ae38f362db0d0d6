"""The calls that read the results of edited statements, edited so that they recompute them."""

from __future__ import annotations

import ast
from typing import Any

from normplug._fuse import syntax
from normplug._fuse.statements import Editor
from normplug._ops import recompute

# What they call, by the name that they have for it.
CALLED = {"_normplug_recompute": recompute.call}
(_RECOMPUTE,) = CALLED


class Readers:
    """Lets the calls that alone read the results of edited calls recompute them."""

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
        """The call that alone reads a variable before it is assigned to again; or None."""
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
