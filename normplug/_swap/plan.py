"""The dry run of a swap: which layers it would take, which it would leave, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from normplug import _checks, _convert
from normplug._ops import exchange
from normplug._swap.inventory import Filters, Inventory, has_tensors, matching, name_of
from normplug._swap.layer_modes import ModesLike, Rule, assign, read
from normplug._table import Table, counts, shown
from normplug._torch import is_patched
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm
from normplug.modules.frozen import is_frozen


@dataclass(frozen=True)
class PlanRow:
    """One norm layer of a model.

    Attributes:
        path: its first path in the model; "" is the model itself.
        module: the layer.
        becomes: the normplug class it becomes, or already is; None if it is left unchanged.
        note: why it is left and what to do, or that it is swapped already; how its class was
            recognised, if by what it computes; and whether it is frozen. "" otherwise.
        aliases: its other paths, if the layer is shared.
        mode: the mode it gets; None if it is left unchanged, or the plan was made without a mode.
        block: the number of its block, from 1, where `normplug.by_depth` gives the mode; None
            outside of blocks.
    """

    path: str
    module: nn.Module
    becomes: str | None
    note: str
    aliases: tuple[str, ...]
    mode: NormMode | None = None
    block: int | None = None

    @property
    def kind(self) -> str:
        """The layer's class name."""
        return name_of(self.module)


class SwapPlan(Table[PlanRow]):
    """Every norm layer of a model, in order; `print` it for a table."""

    def columns(self) -> dict[str, list[str]]:
        """The cells of each column; block and mode only where one is known."""
        columns = {
            "path": [shown(row.path) for row in self.rows],
            "class": [row.kind for row in self.rows],
            "becomes": [
                f"normplug.{row.becomes}" if row.becomes else "-" for row in self.rows
            ],
        }
        for name in ("block", "mode"):
            values = [getattr(row, name) for row in self.rows]
            if any(value is not None for value in values):
                columns[name] = ["-" if value is None else str(value) for value in values]
        columns["notes"] = [
            "; ".join(filter(None, (row.note, *(f"also {name}" for name in row.aliases))))
            for row in self.rows
        ]
        return columns

    def __str__(self) -> str:
        if not self.rows:
            return "no norm layers"
        lines = [super().__str__()]
        if any("Sync" in (row.becomes or "") for row in self.rows):
            lines += [f"SyncBatchNorm of {group}." for group in exchange.groups]
        return "\n".join(lines)

    def summary(self) -> str:
        """One line: how many layers of each class are swapped, and how many stay."""
        taken = Counter(row.kind for row in self.rows if row.becomes)
        left = Counter(f"{row.kind} ({row.note})" for row in self.rows if not row.becomes)
        parts = [
            f"{sum(taken.values())} of {len(self.rows)} norm layers: {counts(taken)}"
        ]
        if left:
            parts.append(f"left: {counts(left)}")
        return "; ".join(parts)


def plan(
    model: nn.Module,
    mode: ModesLike | None = "standard",
    *,
    include: Filters = None,
    exclude: Filters = None,
    sync: bool = False,
) -> SwapPlan:
    """List what `normplug.swap` would do with the same arguments, without changing anything.

    Args:
        model: any module.
        mode: a `mode` of `normplug.swap`: the plan has the mode of each layer, and its block if the
            mode is a `normplug.by_depth`. None leaves them out.
        include: take only layers that match: a glob on the layer's path ("layer1.*"), a pattern
            "re:..." that the whole path must match, a class, a callable (path, module) -> bool,
            or a list of these; None takes all.
        exclude: skip layers that match, even if they match `include`.
        sync: whether BatchNorms become SyncBatchNorms.

    Returns:
        A `SwapPlan`: print it, or iterate over its rows, one `PlanRow` per norm layer.

    Raises:
        TypeError: `model` is not a module, or is TorchScript; a filter has another type.
        ValueError: an `include` pattern matches no norm layer, most likely because of a typo; a
            `mode` that `normplug.swap` refuses.

    Warns:
        UserWarning: an `exclude` pattern matches no norm layer.
    """
    _checks.module("plan", model)
    _checks.flags("plan", sync=sync)
    rule = None if mode is None else read(mode)
    return make("plan", Inventory(model), rule, include, exclude, sync)


def make(
    caller: str,
    inventory: Inventory,
    rule: Rule | None,
    include: Filters,
    exclude: Filters,
    sync: bool,
) -> SwapPlan:
    """Make the plan of an inventory; caller: the public function, for messages."""
    norms = inventory.norms
    included = set(norms) if include is None else matching("include", include, norms)
    excluded = matching("exclude", exclude, norms)
    rows = {}
    for module, (path, *aliases) in norms.items():
        becomes, note = _destination(module, sync)
        if module in excluded:
            becomes, note = None, "excluded"
        elif module not in included:
            becomes, note = None, "not included"
        if is_frozen(module):
            note = f"{note}; frozen" if note else "frozen"
        rows[module] = PlanRow(path, module, becomes, note, tuple(aliases))
    taken = [module for module, row in rows.items() if row.becomes]
    if rule is not None and taken:
        for module, (mode, block) in assign(rule, caller, inventory, taken).items():
            rows[module] = replace(rows[module], mode=mode, block=block)
    return SwapPlan(tuple(rows.values()))


def _destination(module: nn.Module, sync: bool) -> tuple[str | None, str]:
    """The name of the class that the layer becomes, or None; and a note."""
    cls = _convert.plain_class(module)
    if isinstance(module, TargetVarianceNorm):
        if not _convert.is_revertible(module):
            return None, "a subclass of a normplug class: assign its mode yourself"
        becomes = _convert.synchronised(cls) if sync else cls
        return becomes.__name__, f"swapped already, mode {module.mode}"
    if isinstance(module, torch.jit.ScriptModule):
        return None, "compiled TorchScript: swap before you compile"
    found = _convert.replacement_or_reason(module)
    if isinstance(found, type) and is_patched(module):
        return (
            None,
            "its forward was replaced on the instance: swap before patches and hooks",
        )
    if isinstance(found, type):
        becomes = _convert.synchronised(found) if sync else found
        return becomes.__name__, found._note
    if cls not in _convert.REPLACEMENTS and any(map(has_tensors, module.children())):
        return None, "nothing to do: its scale comes from layers of its own"
    if found is not None:
        return None, found if "then swap" in found else f"nothing to do: {found}"
    return None, _why_left(cls)


def _why_left(cls: type[nn.Module]) -> str:
    """Why layers of a class that normplug does not know are left, and what to do."""
    way_out = "write an adapter (docs/add-a-norm.md)"
    stock = next((c for c in cls.__mro__ if c in _convert.REPLACEMENTS), None)
    if stock is None and cls.__module__.startswith("torch."):
        return "nothing to do: no normplug counterpart"
    if stock is None:
        return f"no normplug counterpart: use a norm of torch.nn, or {way_out}"
    library = stock.__module__.partition(".")[0]
    name = f"{'nn' if library == 'torch' else library}.{stock.__name__}"
    if cls.forward is stock.forward:
        return f"inherits {name}.forward: set its __class__ to {name}, then swap"
    return f"a subclass of {name} with a forward of its own: {way_out}"
