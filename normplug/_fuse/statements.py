"""Edit the statements of a forward that match the patterns of `sums` and `activated`."""

from __future__ import annotations

import ast

from normplug._fuse import activated, sums, syntax
from normplug._fuse.activated import Activations
from normplug._fuse.flow import Branch, Flow, Rest
from normplug._fuse.sums import Sums

# The functions that edited statements call, under the names in the edited source.
CALLED = {**sums.CALLED, **activated.CALLED}


class Editor:
    """Edits the statements of a forward.

    Attributes:
        flow: the forward's statements.
        sums: the sums that were found in them.
        activations: the activations.
    """

    def __init__(self, flow: Flow, definition: ast.FunctionDef) -> None:
        self.flow = flow
        self.sums, self.activations = Sums(flow), Activations(flow, definition)
        self._definition = definition

    def edit(self) -> None:
        """Edit the body of the forward."""
        body = self._definition.body
        self._block(Rest(body, 0, None), ())
        for each in (self.activations, self.sums):
            each.edit(body)

    def _block(self, rest: Rest, branch: Branch) -> None:
        """Look at consecutive statements, and at the blocks inside them."""
        for i, statement in enumerate(rest.body):
            following = Rest(rest.body, i + 1, rest.after)
            for each in (self.activations, self.sums):
                each.look(statement, following, branch)
            test = statement.test if isinstance(statement, ast.If) else None
            for name, block in syntax.blocks(statement):
                needed = () if test is None else self.flow.needed(test, name == "body")
                after = None if test is None else following
                self._block(Rest(block, 0, after), branch + needed)
