"""Target variance by depth: find a model's blocks, and apply a schedule over them."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torch import nn

from normplug import modes
from normplug._swap.inventory import Inventory
from normplug._swap.layer_modes import Assigned, LayerModes, Modes, mode_of
from normplug._table import shown
from normplug.modes import NormMode

Schedule: TypeAlias = Callable[[int, int], float]

SCHEDULES: dict[str, Schedule] = {
    "1/l": lambda block, blocks: 1.0 / block,
    "reversed": lambda block, blocks: 1.0 / (blocks - block + 1),
}
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
WAY_OUT = (
    "Give a mapping of filters to modes or a callable (path, module) -> mode, or swap one part of "
    "the model at a time, with include."
)


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
            side by side, such as those of an encoder and a decoder; a norm is shared by two blocks;
            the schedule returns no valid mode.
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
        self.schedule = schedule

    def __str__(self) -> str:
        schedule = self.schedule
        if not isinstance(schedule, str):
            return f"by_depth({getattr(schedule, '__qualname__', repr(schedule))})"
        return f"by_depth({schedule!r})"

    __repr__ = __str__

    def assign(self, caller: str, inventory: Inventory, taken: Sequence[nn.Module]) -> Modes:
        """Number the blocks, and call the schedule once for each block that contains a layer."""
        norms, blocks = inventory.norms, Blocks(inventory).holding(taken)
        schedule = SCHEDULES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        numbers: dict[nn.Module, int] = {}
        for number, block in enumerate(blocks, 1):
            for module in block.module.modules():
                if module in norms and numbers.setdefault(module, number) != number:
                    raise ValueError(
                        f"normplug.by_depth: {shown(norms[module][0])} is in block "
                        f"{numbers[module]} and in block {number}. {WAY_OUT}"
                    )
        modes = {
            number: mode_of(
                f"block {number} of {len(blocks)}, {blocks[number - 1].path}",
                schedule(number, len(blocks)),
            )
            for number in sorted({numbers[module] for module in taken if module in numbers})
        }
        outside = Assigned(NormMode.STANDARD)
        return {
            module: Assigned(modes[numbers[module]], numbers[module])
            if module in numbers
            else outside
            for module in taken
        }


class Block(NamedTuple):
    """One block of a model, under its path."""

    path: str
    module: nn.Module


class Blocks:
    """Finds the sequences of blocks in a model's module tree."""

    def __init__(self, inventory: Inventory) -> None:
        self._model = inventory.model
        self._norms = inventory.norms
        self._holders = {
            holder
            for paths in self._norms.values()
            for path in paths
            for holder in inventory.parents(path)
        }

    def holding(self, taken: Iterable[nn.Module]) -> list[Block]:
        """Return the only sequence of blocks that contains layers of `taken`.

        Raises:
            ValueError: there is none, or there are several.
        """
        wanted = set(taken)
        model = type(self._model).__name__
        found = {
            tuple(map(id, (block.module for block in sequence))): sequence
            for sequence in self._sequences(Block("", self._model))
            if any(not wanted.isdisjoint(block.module.modules()) for block in sequence)
        }
        # Units such as (convolution, norm, activation) are blocks only if nothing else is.
        of_blocks = [s for s in found.values() if not self._is_unit(s[0].module)]
        sequences = of_blocks or list(found.values())
        if len(sequences) == 1:
            return sequences[0]
        if sequences:
            listed = " and ".join(f"{s[0].path} to {s[-1].path}" for s in sequences)
            raise ValueError(
                f"normplug.by_depth: {model} has several sequences of blocks side by side: "
                f"{listed}. {WAY_OUT}"
            )
        raise ValueError(
            f"normplug.by_depth: {model} has no sequence of blocks, that is, of numbered modules "
            f"that contain norm layers. {WAY_OUT}"
        )

    def _sequences(self, parent: Block, within: bool = False) -> Iterator[list[Block]]:
        """Yield a module's outermost sequences, each of blocks or of units.

        within: whether the module is inside a numbered one. If so, units are parts of that one.
        """
        # Numbered children by the text before the number: (number, block).
        families: dict[str, list[tuple[int, Block]]] = {}
        for name, child in parent.module._modules.items():
            if child is None or child not in self._holders or child in self._norms:
                continue
            block = Block(".".join(filter(None, (parent.path, name))), child)
            text = name.rstrip(string.digits)
            if text != name:
                families.setdefault(text, []).append((int(name[len(text) :]), block))
            else:
                yield from self._sequences(block, within)
        for text, numbered in families.items():
            children = [block for _, block in sorted(numbered, key=lambda pair: pair[0])]
            # A single child such as `stage1` is no sequence, but may contain one.
            if text and len(children) == 1 and not isinstance(parent.module, _LISTS):
                yield from self._sequences(children[0], within)
            elif sequence := self._counted(parent, children, within):
                yield sequence

    def _counted(self, parent: Block, children: list[Block], within: bool) -> list[Block]:
        """The blocks among or inside numbered children, or these if all are units.

        [] if they are parts of one block, which is only possible `within` a numbered module.
        """
        blocks = [child for child in children if not self._is_unit(child.module)]
        if not blocks:
            return [] if within else children
        inner = [list(self._sequences(block, within=True)) for block in blocks]
        found = [(block, one[0]) for block, one in zip(blocks, inner, strict=True) if one]
        if not found:
            return self._parts_or_blocks(parent, children, blocks) if within else blocks
        if not all(map(self._is_stage, blocks, inner)):
            raise self._unclear(*found[0])
        return [block for _, sequence in found for block in sequence]

    def _parts_or_blocks(
        self, parent: Block, children: list[Block], blocks: list[Block]
    ) -> list[Block]:
        """`blocks`; [] if they are parts of the numbered module, as attention and MLP are."""
        repeats = sum(any(_alike(a, b) for b in blocks if b is not a) for a in blocks)
        listed = isinstance(parent.module, _LISTS)
        if listed and (len(children) == 1 or repeats == len(blocks)):
            return blocks
        if repeats > (0 if listed else 2):  # two alike with names of their own may be branches
            raise self._unclear(parent, blocks)
        return []

    def _is_stage(self, block: Block, sequences: list[list[Block]]) -> bool:
        """Whether a numbered module has one sequence and fewer norms beside it, none its own."""
        if len(sequences) != 1 or any(child in self._norms for child in block.module.children()):
            return False
        inside = {m for one in sequences[0] for m in one.module.modules() if m in self._norms}
        return sum(m in self._norms for m in block.module.modules()) < 2 * len(inside)

    def _unclear(self, parent: Block, blocks: list[Block]) -> ValueError:
        return ValueError(
            f"normplug.by_depth: {shown(parent.path)} may be one block, or a stage of several: "
            f"{blocks[0].path} to {blocks[-1].path}. {WAY_OUT}"
        )

    def _is_unit(self, module: nn.Module) -> bool:
        """Whether a module is one norm and plain layers, at most one of which has parameters."""
        others = [child for child in module.children() if child not in self._norms]
        layers = [child for child in others if any(True for _ in child.parameters())]
        plain = not any(True for child in others for _ in child.children())
        return plain and len(layers) <= 1 and len(list(module.children())) == len(others) + 1


def _alike(one: Block, other: Block) -> bool:
    """Whether two modules have the same design, as residual blocks do; attention and MLP do not."""
    a, b = _classes(one), _classes(other)
    return type(one.module) is type(other.module) and (a <= b or b <= a)


def _classes(block: Block) -> set[type]:
    passive = (nn.Identity, nn.Sequential, nn.ModuleList, nn.Dropout)
    return {type(m) for m in block.module.modules() if not isinstance(m, passive)}
