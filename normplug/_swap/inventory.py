"""A model's modules and their paths, found in one walk, and the filters that choose norms."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn

from normplug import _checks, _convert
from normplug._table import shown, some
from normplug.modules import TargetVarianceNorm

Filter: TypeAlias = str | type | Callable[[str, nn.Module], bool]
Filters: TypeAlias = Filter | Sequence[Filter] | None

# Every class that these modules of torch define is a norm, and so is every subclass.
_TORCH_NORM_MODULES = {
    c.__module__ for c in (nn.BatchNorm1d, nn.InstanceNorm1d, nn.LayerNorm)
}


class Inventory:
    """Every module of a model, by path and with all its paths, in the order of `named_modules`.

    A swap changes classes and tensors but not the module tree, so one inventory stays valid.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            self.names.setdefault(module, []).append(path)

    @cached_property
    def norms(self) -> dict[nn.Module, list[str]]:
        """Every norm layer, stock or normplug's, with all its paths."""
        return {module: paths for module, paths in self.names.items() if is_norm(module)}


def is_known_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by its class, or is recognised by its behaviour."""
    # `replacement` registers other libraries' norms, too.
    if _convert.replacement(module) is not None:
        return True
    if isinstance(module, (TargetVarianceNorm, *_convert.REPLACEMENTS)):
        return True
    return any(cls.__module__ in _TORCH_NORM_MODULES for cls in type(module).__mro__)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, or is called one: enough to list it, but not to change it."""
    if is_known_norm(module) or _convert.is_recognised(module):
        return True
    # Norms of other libraries, by name. A leading underscore marks torch's own weight and spectral
    # normalisation, which are parametrizations, not layers.
    name = name_of(module)
    if "norm" not in name.lower() or name.startswith("_"):
        return False
    # A norm is a leaf, or contains an activation.
    children = list(module.children())
    if any(map(has_tensors, children)):
        # Or its child layers compute its scale. A block that contains norms is not a norm.
        inner = chain.from_iterable(child.modules() for child in children)
        return "eps" in vars(module) and not any(map(is_norm, inner))
    return not children or "weight" in {**module._parameters, **module._buffers}


def has_tensors(module: nn.Module) -> bool:
    """Whether a module or one inside it has a parameter or a buffer."""
    return next(chain(module.parameters(), module.buffers()), None) is not None


def name_of(module: nn.Module) -> str:
    """The name of a module's class."""
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, "original_name", type(module).__name__)
    return _convert.plain_class(module).__name__


def matching(
    role: str, filters: Filters, norms: dict[nn.Module, list[str]]
) -> set[nn.Module]:
    """Return the norms that match any of the filters; role: "include", "exclude" or "mode key".

    A pattern that matches nothing is an error, or a warning if it excludes.
    """
    found: set[nn.Module] = set()
    for one in _checks.filters(role, filters):
        matches = _predicate(role, one)
        taken = {
            m for m, paths in norms.items() if any(matches(path, m) for path in paths)
        }
        found |= taken
        if taken or not norms or not isinstance(one, str):
            continue
        paths = [shown(path) for names in norms.values() for path in names]
        text = f"normplug: {role}={one[:200]!r} matches no norm layer; the model has: "
        text += f"{some(paths)}.{_hint(one, paths)}"
        if role != "exclude":
            raise ValueError(text)
        _checks.warn(text)
    return found


def _hint(pattern: str, paths: Sequence[str]) -> str:
    """A sentence with the filter that was most likely meant, or nothing."""
    if any(path.startswith(f"{pattern}.") for path in paths):
        return f' Did you mean "{pattern}.*"?'
    with suppress(re.error):
        if any(re.fullmatch(pattern, path) for path in paths):
            return f' Did you mean "re:{pattern}"?'
    return ""


def _predicate(role: str, one: Filter) -> Callable[[str, nn.Module], bool]:
    if isinstance(one, type):
        # A frozen layer counts as one of the class that it would have without the freeze.
        return lambda path, module: (
            isinstance(module, one) or issubclass(_convert.plain_class(module), one)
        )
    if not isinstance(one, str):
        return one
    try:
        pattern = re.compile(one[3:] if one.startswith("re:") else fnmatch.translate(one))
    except re.error as error:
        text = (
            f"normplug: {role}={one[:200]!r} is not a valid regular expression: {error}."
        )
        raise ValueError(text) from None
    return lambda path, module: pattern.fullmatch(path) is not None
