"""Merge a sum and the norm after it into one call.

Two patterns are edited:

    y = self.norm(a + b)

    x = a + b
    y = self.norm(x)

The call decides at run time whether it does both at once.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from normplug._fuse import calls, syntax
from normplug._fuse.flow import Branch, Flow, Next, Reader, Rest, chosen

# The functions that edited statements call, under the names in the edited source.
CALLED = {"_normplug_add_norm": calls.add_norm, "_normplug_sum_norm": calls.sum_norm}
_ADD_NORM, _SUM_NORM = CALLED
# The variable that holds a norm's result from the sum's statement to the norm's.
_RESULT = "_normplug_result"


class Summed(NamedTuple):
    """An edited call of a norm, and the branches that contain it."""

    branch: Branch


@dataclass(eq=False)
class _Sum:
    """A statement of `body` that assigns a sum, and the norms that may read it."""

    body: list[ast.stmt]
    statement: ast.stmt
    next: Next


@dataclass
class Sums:
    """The sums of a forward.

    Attributes:
        flow: the forward's statements.
        found: the edited calls of each norm, by its name.
        in_place: the norms that are left because the addition before them is in place.
        results: the expressions for the results of edited calls.
    """

    flow: Flow
    found: dict[str, list[Summed]] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    results: list[ast.expr] = field(default_factory=list)
    _sums: list[_Sum] = field(default_factory=list)

    def look(self, statement: ast.stmt, following: Rest, branch: Branch) -> None:
        """Edit the norms of sums inside a statement, and note whether it assigns a sum."""
        for node in syntax.expressions(statement):
            name = self._norm_of(node)
            total: Any = node.args[0] if name else None
            if syntax.is_sum(total):
                both = syntax.call(_ADD_NORM, node.func, total.left, total.right)
                self.results.append(ast.Subscript(both, ast.Constant(0), ast.Load()))
                syntax.replace(statement, node, self.results[-1])
                self.found.setdefault(name, []).append(Summed(branch))
        self._note(statement, following, branch)

    def _note(self, statement: ast.stmt, following: Rest, branch: Branch) -> None:
        target, total = syntax.assigned(statement)
        in_place = isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add)
        if target is None or not (in_place or syntax.is_sum(total)):
            return
        found = self.flow.next(following, target, self._is_norm_of, aliases=True)
        for norm, needed in self.flow.readers(found):
            name = self._norm_of(norm.call)
            if in_place:
                self.in_place.add(name)
            else:
                self.found.setdefault(name, []).append(Summed(branch + needed))
        if found is not None and not in_place:
            self._sums.append(_Sum(following.body, statement, found))

    def edit(self, body: list[ast.stmt]) -> None:
        """Edit the sums that `look` noted in the body of a forward, and their norms."""
        flows = [norm.call for each in self._sums for norm, _ in self.flow.readers(each.next)]
        for each in self._sums:
            for norm, _ in self.flow.readers(each.next):
                alone = norm is each.next and norm.body is each.body
                self._edit_norm(norm, alone and flows.count(norm.call) == 1)
        for each in self._sums:
            self._edit_sum(each)
        if self._sums:
            body.insert(0, syntax.assignment([_RESULT], ast.Constant(None), body[0]))

    def _edit_norm(self, norm: Reader, alone: bool) -> None:
        """Replace a norm's call by its result; alone: the result always comes from one sum."""
        node = norm.call
        if not any(node is part for part in ast.walk(norm.statement)):
            return  # edited already, for another sum
        value: ast.expr = syntax.load(_RESULT)
        if not alone:
            missing = ast.Compare(value, [ast.Is()], [ast.Constant(None)])
            written = copy.deepcopy(node)
            value = ast.IfExp(missing, written, syntax.load(_RESULT))
        self.results.append(value)
        syntax.replace(norm.statement, node, value)
        if any(norm.statement is each.statement for each in self._sums):
            return  # it assigns the next result
        # Free the result's memory as early as the original forward does.
        done = syntax.assignment([_RESULT], ast.Constant(None), norm.statement)
        norm.body.insert(norm.body.index(norm.statement) + 1, done)

    def _edit_sum(self, each: _Sum) -> None:
        target, total = syntax.assigned(each.statement)
        assert target is not None
        both = syntax.call(_SUM_NORM, total.left, total.right, chosen(each.next))
        made = syntax.assignment([_RESULT, target], both, each.statement)
        each.body[each.body.index(each.statement)] = made

    def _norm_of(self, node: Any) -> str:
        return self.flow.child_called(node, self.flow.parts.summed)

    def _is_norm_of(self, statement: ast.stmt, node: Any, held: set[str]) -> bool:
        return bool(self._norm_of(node)) and syntax.is_name(node.args[0], held)
