"""The mode of each layer: the argument `mode` of `swap`, `plan` and `set_mode`, and `by_depth`."""

from __future__ import annotations

import re
import reprlib
import string
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from torch import nn

from normplug._swap.inventory import Inventory, matching
from normplug._table import shown, some
from normplug.modes import ModeLike, NormMode

Schedule: TypeAlias = Callable[[int, int], float]
ScheduleName: TypeAlias = Literal["1/l", "reversed"]

SCHEDULES: dict[str, Schedule] = {
    "1/l": lambda block, blocks: 1.0 / block,
    "reversed": lambda block, blocks: 1.0 / (blocks - block + 1),
}
WAY_OUT = (
    "Give a mapping of filters to modes or a callable (path, module) -> mode, or swap one part of "
    "the model at a time, with include."
)
_KEY = "mode key"
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Layer -> its mode, and the number of its block if that decides the mode.
Modes: TypeAlias = dict[nn.Module, tuple[NormMode, int | None]]

ModesLike: TypeAlias = (
    "ModeLike | Mapping[Any, ModeLike] | Callable[[str, nn.Module], ModeLike] | ByDepth"
)
# What `read` returns: one mode, or a rule that gives each layer its own.
Rule: TypeAlias = (
    "NormMode | dict[Any, NormMode] | Callable[[str, nn.Module], ModeLike] | ByDepth"
)


def read(mode: ModesLike) -> Rule:
    """Check the argument `mode`, and parse the modes in it."""
    if isinstance(mode, Mapping):
        for key in mode:
            matching(_KEY, key, {})  # refuses invalid filters
        return {key: mode_of(repr(key), value) for key, value in mode.items()}
    is_rule = isinstance(mode, ByDepth) or callable(mode)
    if is_rule and not isinstance(mode, (type, nn.Module)):
        return mode  # type: ignore[return-value]
    try:
        return NormMode(mode)  # type: ignore[arg-type]
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


def assign(
    rule: Rule, caller: str, inventory: Inventory, taken: Sequence[nn.Module]
) -> Modes:
    """The mode of each layer in `taken`; an error if a layer gets none, or an invalid one."""
    if isinstance(rule, NormMode):
        return dict.fromkeys(taken, (rule, None))
    if isinstance(rule, ByDepth):
        return rule.assign(inventory, taken)
    paths = {module: inventory.names[module][0] for module in taken}
    if not isinstance(rule, dict):
        return {
            m: (mode_of(shown(path), rule(path, m)), None) for m, path in paths.items()
        }
    modes: Modes = {}
    for key, mode in rule.items():
        for module in matching(_KEY, key, inventory.norms):
            modes.setdefault(module, (mode, None))
    left = [shown(path) for module, path in paths.items() if module not in modes]
    if left:
        raise ValueError(
            f"normplug.{caller}: no key of mode matches {some(left)}. Add a key such as '*' "
            "for the rest, or exclude these layers."
        )
    return {module: modes[module] for module in taken}


def by_depth(schedule: ScheduleName | Schedule) -> ByDepth:
    """Set each layer's mode by the depth of its block, in `swap`, `plan`, `set_mode` and `swapped`.

    Depth counts blocks, not norms: all norms of block l of L have the same target variance.

        "1/l": 1 / l        "reversed": 1 / (L - l + 1)        a callable: schedule(l, L)

    "1/l" is LayerNorm Scaling (Sun et al. 2025, "The Curse of Depth in Large Language Models",
    arXiv:2502.05795), which multiplies the output of the norms of block l by 1 / sqrt(l).

    Blocks are the items of a `ModuleList`, `Sequential` or `ModuleDict` that contain norms and have
    a number at the end of their name, such as `layers.0`, in numerical order. If each of them
    contains such items of one class, as ResNet stages do, the inner items are the blocks, and are
    numbered consecutively. A unit of one norm and otherwise only plain layers, such as a
    convolution with its BatchNorm, is a block only if the model has no others.
    `print(normplug.plan(model, by_depth(schedule)))` shows each layer's block.

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
    known = SCHEDULES.get(schedule) if isinstance(schedule, str) else schedule
    if known is None or not callable(known) or isinstance(known, (type, nn.Module)):
        rule = (
            f"{', '.join(map(repr, SCHEDULES))}, or a callable (block, blocks) -> number"
        )
        text = (
            f"normplug.by_depth: schedule must be {rule}; got {reprlib.repr(schedule)}."
        )
        raise ValueError(text) if isinstance(schedule, str) else TypeError(text)
    return ByDepth(known, getattr(schedule, "__qualname__", repr(schedule)))


@dataclass(frozen=True)
class ByDepth:
    """Gives each layer the mode that a schedule sets for its block; standard outside blocks."""

    schedule: Schedule
    name: str

    def __repr__(self) -> str:
        return f"by_depth({self.name})"

    def assign(self, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        """Number the blocks, and call the schedule once for each block that contains a layer."""
        blocks = _blocks(inventory, taken)
        assigned: Modes = dict.fromkeys(taken, (NormMode.STANDARD, None))
        for number, block in enumerate(blocks, 1):
            inside = [m for m in inventory.modules[block].modules() if m in assigned]
            if not inside:
                continue
            target = self.schedule(number, len(blocks))
            mode = mode_of(f"block {number} of {len(blocks)}, {block}", target)
            for module in inside:
                other = assigned[module][1]
                if other is not None:
                    raise ValueError(
                        f"normplug.by_depth: {shown(inventory.names[module][0])} is in block "
                        f"{other} and in block {number}. {WAY_OUT}"
                    )
                assigned[module] = mode, number
        return assigned


def _blocks(inventory: Inventory, taken: Iterable[nn.Module]) -> list[str]:
    """The paths of the only sequence of blocks that contains layers of `taken`.

    The items of lists form a sequence if their paths differ only in numbers. Units of one norm and
    plain layers count only if there is nothing else. Where the items of a sequence contain another
    sequence, the classes of the items of each inner list decide:

        all are the same          the inner items are blocks, and the outer ones are stages
        each is another           the inner items are parts, such as attention and MLP
        neither                   refused
    """
    modules, norms, wanted = inventory.modules, inventory.norms, set(taken)
    items = [
        path
        for path, module in modules.items()
        if path.endswith(tuple(string.digits))
        and isinstance(modules[path.rpartition(".")[0]], _LISTS)
        and module not in norms
        and not norms.keys().isdisjoint(module.modules())
    ]
    blocks = [path for path in items if not _is_unit(modules[path], norms)] or items
    sequences = defaultdict[str, list[str]](list)
    for path in blocks:
        sequences[re.sub(r"\d+", "#", path)].append(path)
    for pattern, inner in list(sequences.items()):  # the outer ones come first
        for outer in [other for other in sequences if pattern.startswith(f"{other}.")]:
            parts = _are_parts(inner, sequences[outer], inventory)
            del sequences[pattern if parts else outer]
    chosen = [
        sorted(paths, key=_numbers_in)
        for paths in sequences.values()
        if any(not wanted.isdisjoint(modules[path].modules()) for path in paths)
    ]
    if len(chosen) == 1:
        return chosen[0]
    text = "no sequence of blocks, that is, of numbered modules in a list that contain norm layers"
    if chosen:
        listed = " and ".join(f"{paths[0]} to {paths[-1]}" for paths in chosen)
        text = f"several sequences of blocks side by side: {listed}"
    raise ValueError(
        f"normplug.by_depth: {type(inventory.model).__name__} has {text}. {WAY_OUT}"
    )


def _numbers_in(path: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path)]


def _are_parts(inner: list[str], outer: list[str], inventory: Inventory) -> bool:
    """Whether inner items are parts of the outer ones; False if blocks; an error if either."""
    modules = inventory.modules
    lists = defaultdict[str, list[type]](list)
    for path in inner:
        lists[path.rpartition(".")[0]].append(type(modules[path]))
    if all(len(set(classes)) == len(classes) > 1 for classes in lists.values()):
        return True
    alike = all(len(set(classes)) == 1 for classes in lists.values())
    hold = all(any(path.startswith(f"{stage}.") for path in inner) for stage in outer)
    children = {child for path in outer for child in modules[path].children()}
    if alike and hold and children.isdisjoint(inventory.norms):
        return False
    raise ValueError(
        f"normplug.by_depth: {outer[0]} may be one block, or a stage of several: {inner[0]} to "
        f"{inner[-1]}. {WAY_OUT}"
    )


def _is_unit(module: nn.Module, norms: Container[nn.Module]) -> bool:
    """Whether a module is one norm and plain layers, at most one of which has parameters."""
    children = list(module.children())
    others = [child for child in children if child not in norms]
    if len(children) - len(others) != 1:
        return False
    layers = [child for child in others if next(child.parameters(), None) is not None]
    return len(layers) <= 1 and not any(list(child.children()) for child in others)
