"""The mode of each layer: parse the argument `mode` of `swap`, `plan` and `set_mode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from normplug import _checks
from normplug._swap.filters import matching
from normplug._swap.inventory import Inventory
from normplug._table import shown, some
from normplug.modes import ModeLike, NormMode

_KEY = "mode key"


class Assigned(NamedTuple):
    """A layer's mode, and the number of its block if that decides the mode."""

    mode: NormMode
    block: int | None = None


Modes: TypeAlias = dict[nn.Module, Assigned]


class LayerModes:
    """A rule that gives each layer its mode; `str` names it in messages."""

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        """Return the mode of each layer in `taken`, a subset of the model's norms.

        Raises:
            ValueError: a layer gets no mode, or an invalid one.
        """
        raise NotImplementedError


ModesLike: TypeAlias = (
    "ModeLike | Mapping[Any, ModeLike] | Callable[[str, nn.Module], ModeLike] | LayerModes"
)


def read(mode: ModesLike) -> LayerModes:
    """Return the rule that the argument `mode` describes.

    Raises:
        ValueError: `mode` is neither a mode nor a rule that gives modes.
        TypeError: a key of a mapping is not a filter.
    """
    if isinstance(mode, LayerModes):
        return mode
    if isinstance(mode, Mapping):
        return _ByFilter(mode)
    if callable(mode) and not isinstance(mode, (type, nn.Module)):
        return _ByFunction(mode)
    try:
        return One(NormMode(mode))  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(
            f"{error} For a mode per layer, give a mapping of filters to modes, a callable "
            "(path, module) -> mode, or normplug.by_depth(schedule)."
        ) from None


def mode_of(who: str, mode: Any) -> NormMode:
    """Parse the mode that a rule gives to `who`, a name for the error message."""
    try:
        return NormMode(mode)
    except ValueError as error:
        raise ValueError(f"{error} That is the mode of {who}.") from None


class One(LayerModes):
    """The same mode for each layer."""

    def __init__(self, mode: NormMode) -> None:
        self.mode = mode

    def __str__(self) -> str:
        return str(self.mode)

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        return dict.fromkeys(taken, Assigned(self.mode))


class _ByFilter(LayerModes):
    """The mode of the first filter that matches a layer."""

    def __init__(self, modes: Mapping[Any, ModeLike]) -> None:
        self._modes = [
            (_checks.filters(_KEY, key), mode_of(repr(key), mode)) for key, mode in modes.items()
        ]
        self._shown = repr(dict(modes))
        for filters, _ in self._modes:
            matching(_KEY, filters, {})  # refuses invalid regular expressions

    def __str__(self) -> str:
        return self._shown

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        modes: dict[nn.Module, Assigned] = {}
        for filters, mode in self._modes:
            for module in matching(_KEY, filters, inventory.norms):
                modes.setdefault(module, Assigned(mode))
        left = [shown(inventory.names[module][0]) for module in taken if module not in modes]
        if left:
            raise ValueError(
                f"normplug.{caller}: no key of mode matches {some(left)}. Add a key such as '*' "
                "for the rest, or exclude these layers."
            )
        return {module: modes[module] for module in taken}


class _ByFunction(LayerModes):
    """The mode that a user's function returns for a layer."""

    def __init__(self, function: Callable[[str, nn.Module], ModeLike]) -> None:
        self._function = function

    def __str__(self) -> str:
        return getattr(self._function, "__qualname__", repr(self._function))

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        modes = {}
        for module in taken:
            path = inventory.names[module][0]
            modes[module] = Assigned(mode_of(shown(path), self._function(path, module)))
        return modes
