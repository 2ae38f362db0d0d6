"""The mode of each layer: the argument `mode` of `swap`, `plan` and `set_mode`, and `by_depth`."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from normplug import _checks, modes
from normplug._swap.inventory import Inventory, matching
from normplug._table import shown, some
from normplug.modes import ModeLike, NormMode

Schedule: TypeAlias = Callable[[int, int], float]

SCHEDULES: dict[str, Schedule] = {
    "1/l": lambda block, blocks: 1.0 / block,
    "reversed": lambda block, blocks: 1.0 / (blocks - block + 1),
}
WAY_OUT = (
    "Give a mapping of filters to modes or a callable (path, module) -> mode, or swap one part of "
    "the model at a time, with include."
)
_KEY = "mode key"


class Assigned(NamedTuple):
    """A layer's mode, and the number of its block if that decides the mode."""

    mode: NormMode
    block: int | None = None


Modes: TypeAlias = dict[nn.Module, Assigned]


class LayerModes:
    """A rule that gives each layer its mode; `name` is its name in messages."""

    name: str

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

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
        self.mode, self.name = mode, str(mode)

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        return dict.fromkeys(taken, Assigned(self.mode))


class _ByFilter(LayerModes):
    """The mode of the first filter that matches a layer."""

    def __init__(self, modes: Mapping[Any, ModeLike]) -> None:
        self._modes = [
            (_checks.filters(_KEY, key), mode_of(repr(key), mode)) for key, mode in modes.items()
        ]
        self.name = repr(dict(modes))
        for filters, _ in self._modes:
            matching(_KEY, filters, {})  # refuses invalid regular expressions

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
        self._function, self.name = function, getattr(function, "__qualname__", repr(function))

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        modes = {}
        for module in taken:
            path = inventory.names[module][0]
            modes[module] = Assigned(mode_of(shown(path), self._function(path, module)))
        return modes


def by_depth(schedule: str | Schedule) -> ByDepth:
    """Set each layer's mode by the depth of its block, in `swap`, `plan`, `set_mode` and `swapped`.

    Depth counts blocks, not norms: all norms of block l of L have the same target variance.

        "1/l": 1 / l        "reversed": 1 / (L - l + 1)        a callable: schedule(l, L)

    "1/l" is LayerNorm Scaling (Sun et al. 2025, "The Curse of Depth in Large Language Models",
    arXiv:2502.05795), which multiplies the output of the norms of block l by 1 / sqrt(l).

    Blocks are the numbered children that contain norms, in numerical order: the children of a
    `ModuleList` or `Sequential`, such as `layers.0`, or children of any module whose names end in a
    number, such as `encoder_layer_3`. Where each of them contains a sequence of its own, as ResNet
    stages do, the blocks of the inner sequences are numbered consecutively. A unit of one norm and
    otherwise only plain layers, such as a convolution with its BatchNorm, is not a block unless the
    model has no others. `print(normplug.plan(model, by_depth(schedule)))` shows each layer's block.

    Norms outside the blocks have mode standard. That includes the final norm: it normalises the sum
    of all blocks for the head, and a smaller variance there would only scale the head's input.

    Args:
        schedule: "1/l", "reversed", or a callable (block, blocks) -> target variance, with block
            from 1 to blocks.

    Returns:
        A value for the argument `mode`.

    Raises:
        ValueError: an unknown schedule. When used: the model has no sequence of blocks, or several
            side by side, such as an encoder's and a decoder's; a norm is shared by two blocks; the
            schedule returns no valid mode.
        TypeError: `schedule` is neither a string nor a callable.

    Examples:
        >>> import normplug
        >>> blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(4))
        >>> normplug.swap(blocks, by_depth("1/l"))[3].norm2.target_variance
        0.25
    """
    return ByDepth(schedule)


class ByDepth(LayerModes):
    """Gives each layer the mode that a schedule sets for its block; standard outside blocks."""

    def __init__(self, schedule: str | Schedule) -> None:
        rule = f"{', '.join(map(repr, SCHEDULES))}, or a callable (block, blocks) -> number"
        text = f"normplug.by_depth: schedule must be {rule}; got {modes.shown(schedule)}."
        if isinstance(schedule, str):
            if schedule not in SCHEDULES:
                raise ValueError(text)
        elif not callable(schedule) or isinstance(schedule, (type, nn.Module)):
            raise TypeError(text)
        name = repr(schedule)
        self.schedule, self.name = schedule, f"by_depth({getattr(schedule, '__qualname__', name)})"

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        """Number the blocks, and call the schedule once for each block that contains a layer."""
        blocks = _Blocks(inventory).holding(taken)
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        assigned = dict.fromkeys(taken, Assigned(NormMode.STANDARD))
        for number, block in enumerate(blocks, 1):
            inside = [m for m in inventory.modules[block].modules() if m in assigned]
            if not inside:
                continue
            target = schedule(number, len(blocks))
            mode = mode_of(f"block {number} of {len(blocks)}, {block}", target)
            for module in inside:
                if (other := assigned[module].block) is not None:
                    raise ValueError(
                        f"normplug.by_depth: {shown(inventory.names[module][0])} is in block "
                        f"{other} and in block {number}. {WAY_OUT}"
                    )
                assigned[module] = Assigned(mode, number)
        return assigned


class _Blocks:
    """Finds the sequence of blocks in a model's module tree; a block is given by its path.

    A unit is a module of one norm and plain layers. What a module's other numbered children are:

        each contains a sequence, and no norm of its own   stages: their blocks are one sequence
        none contains a sequence                           blocks
        none, and they are inside another numbered module  if they are a list and alike: blocks
                                                           if they are unlike: its parts

    Units are blocks only if there are no other blocks. Anything else is refused.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._modules, self._norms = inventory.modules, inventory.norms
        norms = self._norms.keys()
        self._holders = {m for m in inventory.names if not norms.isdisjoint(m.modules())} - norms

    def holding(self, taken: Iterable[nn.Module]) -> list[str]:
        """Return the only sequence of blocks that contains layers of `taken`.

        Raises:
            ValueError: there is none, or there are several.
        """
        wanted, found = set(taken), {}
        for paths in self._sequences(""):
            modules = tuple(self._modules[path] for path in paths)
            if any(not wanted.isdisjoint(module.modules()) for module in modules):
                found[modules] = paths
        of_blocks = [paths for modules, paths in found.items() if not self._is_unit(modules[0])]
        sequences = of_blocks or list(found.values())
        if len(sequences) == 1:
            return sequences[0]
        text = "no sequence of blocks, that is, of numbered modules that contain norm layers"
        if sequences:
            listed = " and ".join(f"{paths[0]} to {paths[-1]}" for paths in sequences)
            text = f"several sequences of blocks side by side: {listed}"
        model = type(self._modules[""]).__name__
        raise ValueError(f"normplug.by_depth: {model} has {text}. {WAY_OUT}")

    def _sequences(self, parent: str, within: bool = False) -> Iterator[list[str]]:
        """Yield a module's outermost sequences; within: whether it is inside a numbered module."""
        # Numbered children by the text before the number: (number, path).
        families: dict[str, list[tuple[int, str]]] = {}
        for name, child in self._modules[parent]._modules.items():
            if child not in self._holders:
                continue
            path, text = f"{parent}.{name}".removeprefix("."), name.rstrip(string.digits)
            if text != name:
                families.setdefault(text, []).append((int(name[len(text) :]), path))
            else:
                yield from self._sequences(path, within)
        for text, numbered in families.items():
            children = [path for _, path in sorted(numbered)]
            # A single child such as `stage1` is no sequence, but may contain one.
            if text and len(children) == 1 and not self._is_list(parent):
                yield from self._sequences(children[0], within)
            elif sequence := self._counted(parent, children, within):
                yield sequence

    def _counted(self, parent: str, children: list[str], within: bool) -> list[str]:
        """The blocks that numbered children are or contain; [] if they are parts of one block."""
        blocks = [path for path in children if not self._is_unit(self._modules[path])]
        inner = {path: list(self._sequences(path, within=True)) for path in blocks}
        stages = {path: found[0] for path, found in inner.items() if found}
        if not stages:
            return self._parts_or_blocks(parent, children, blocks) if within else blocks or children
        for path, found in inner.items():
            if len(found) != 1 or any(m in self._norms for m in self._modules[path].children()):
                raise self._unclear(*next(iter(stages.items())))
        return [path for sequence in stages.values() for path in sequence]

    def _parts_or_blocks(self, parent: str, children: list[str], blocks: list[str]) -> list[str]:
        """`blocks`; [] if they are parts of the numbered module, such as attention and MLP."""
        modules = [self._modules[path] for path in blocks]
        repeats = sum(any(_alike(a, b) for b in modules if b is not a) for a in modules)
        listed = self._is_list(parent)
        if listed and (len(children) == 1 or repeats == len(blocks)):
            return blocks
        if repeats > (0 if listed else 2):  # two alike with names of their own may be branches
            raise self._unclear(parent, blocks)
        return []

    def _unclear(self, parent: str, blocks: list[str]) -> ValueError:
        return ValueError(
            f"normplug.by_depth: {shown(parent)} may be one block, or a stage of several: "
            f"{blocks[0]} to {blocks[-1]}. {WAY_OUT}"
        )

    def _is_list(self, path: str) -> bool:
        return isinstance(self._modules[path], (nn.ModuleList, nn.Sequential, nn.ModuleDict))

    def _is_unit(self, module: nn.Module) -> bool:
        """Whether a module is one norm and plain layers, at most one of which has parameters."""
        others = [child for child in module.children() if child not in self._norms]
        layers = [child for child in others if any(True for _ in child.parameters())]
        plain = not any(True for child in others for _ in child.children())
        return plain and len(layers) <= 1 and len(list(module.children())) == len(others) + 1


def _alike(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules have the same design, as residual blocks do; attention and MLP do not."""
    passive = (nn.Identity, nn.Sequential, nn.ModuleList, nn.Dropout)
    a, b = ({type(m) for m in x.modules() if not isinstance(m, passive)} for x in (one, other))
    return type(one) is type(other) and (a <= b or b <= a)
