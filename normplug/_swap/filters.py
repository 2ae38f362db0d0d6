"""Select norm layers by filters: `include`, `exclude` and the keys of `mode`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch import nn

from normplug import _checks
from normplug._table import shown, some

Filter: TypeAlias = str | type | Callable[[str, nn.Module], bool]
Filters: TypeAlias = Filter | Sequence[Filter] | None


def matching(role: str, filters: Filters, norms: dict[nn.Module, list[str]]) -> set[nn.Module]:
    """Return the norm layers that match any of the filters under any of their paths.

    Args:
        role: "include", "exclude" or "mode key", for messages.
        filters: the user's filters.
        norms: every norm layer with all its paths.

    Raises:
        TypeError: a filter has another type.
        ValueError: an invalid regular expression, or, unless the role is "exclude", a pattern that
            matches nothing.

    Warns:
        UserWarning: an `exclude` pattern that matches nothing.
    """
    found: set[nn.Module] = set()
    for one in _checks.filters(role, filters):
        matches = _predicate(role, one)
        taken = {m for m, paths in norms.items() if any(matches(path, m) for path in paths)}
        if not taken and norms and isinstance(one, str):
            _report_unmatched(role, one, norms)
        found |= taken
    return found


def _predicate(role: str, one: Filter) -> Callable[[str, nn.Module], bool]:
    if isinstance(one, type):
        return lambda path, module: isinstance(module, one)
    if not isinstance(one, str):
        return one
    if not one.startswith("re:"):
        return lambda path, module: fnmatch.fnmatchcase(path, one)
    try:
        pattern = re.compile(one[3:])
    except re.error as error:
        text = f"normplug: {role}={one[:200]!r} is not a valid regular expression: {error}."
        raise ValueError(text) from None
    return lambda path, module: pattern.fullmatch(path) is not None


def _report_unmatched(role: str, pattern: str, norms: dict[nn.Module, list[str]]) -> None:
    paths = [shown(path) for names in norms.values() for path in names]
    text = f"normplug: {role}={pattern[:200]!r} matches no norm layer; the model has: "
    text += f"{some(paths)}."
    if role != "exclude":
        raise ValueError(text)
    _checks.warn(text)
