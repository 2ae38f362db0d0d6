"""The record of its layers that a swap leaves on a model, so that `check` finds lost layers.

The swapped module keeps references to the layers in a plain attribute, with their paths and target
variances. So the record follows deepcopy and pickle, and survives wrapping the model or moving a
layer within it. A layer that another tool has rebuilt is a different object, while one that
`unswap` has reverted in place is still the same.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from normplug import _checks
from normplug._swap.inventory import Inventory
from normplug._table import shown, some
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm

_ATTRIBUTE = "_normplug_layers"


class _Entry(NamedTuple):
    path: str
    target_variance: float
    now: nn.Module | None  # the module that is under the path now


def renew(caller: str, inventory: Inventory) -> None:
    """Record a model's normplug layers and their modes, replacing every record in it.

    Warns:
        UserWarning: layers of an earlier record have been removed since.
    """
    lost = _lost(inventory)
    if lost:
        paths = some([shown(entry.path) for entry in lost])
        _checks.warn(
            f"normplug.{caller}: another tool has rebuilt or removed norm layers of an earlier "
            f"swap: {paths}. normplug.check no longer looks for them."
        )
    owner = unwrapped(inventory.model)
    prefix = inventory.names[owner][0]
    layers = {
        path[len(prefix) :].removeprefix("."): (m, m.target_variance)
        for path, m in inventory.layers()
    }
    put(inventory, [(owner, layers)] if layers else [])


def take(inventory: Inventory) -> list[tuple[nn.Module, object]]:
    """Return every record in a model, as `put` takes them."""
    return [(m, vars(m)[_ATTRIBUTE]) for m in inventory.names if _ATTRIBUTE in vars(m)]


def put(inventory: Inventory, records: list[tuple[nn.Module, object]]) -> None:
    """Replace all records in a model by these."""
    for module in inventory.names:
        vars(module).pop(_ATTRIBUTE, None)
    for module, record in records:
        vars(module)[_ATTRIBUTE] = record


def findings(model: nn.Module) -> list[str]:
    """Return a message for each recorded layer that is lost or in another mode."""
    inventory, found = Inventory(model), []
    for entry in _lost(inventory):
        now = "no longer in the model"
        if entry.now is not None:
            now = f"now a {type(entry.now).__name__}"
        found.append(
            f"{shown(entry.path)}: swapped in mode {NormMode(entry.target_variance)}, {now}: "
            "another tool rebuilt or removed the layer, and its target variance with it. Use that "
            "tool before normplug.swap, or call normplug.unswap first. If this is intended, swap "
            "again."
        )
    for layer, entry in _entries(inventory).items():
        if isinstance(layer, TargetVarianceNorm) and layer.target_variance != entry.target_variance:
            found.append(
                f"{shown(entry.path)}: in mode {layer.mode}, but swapped in mode "
                f"{NormMode(entry.target_variance)}. Set the mode with normplug.set_mode(model, "
                "mode), or with normplug.swap(model, mode, include=...) for some layers."
            )
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside the wrappers of DDP, DataParallel, FSDP and torch.compile."""
    while True:
        inner = model._modules.get("_orig_mod", model._modules.get("_fsdp_wrapped_module"))
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _entries(inventory: Inventory) -> dict[nn.Module, _Entry]:
    """Each recorded layer's entry; of two records, the inner one counts, which is more recent."""
    entries = {}
    for prefix, owner in inventory.each():
        for path, (layer, tv) in vars(owner).get(_ATTRIBUTE, {}).items():
            full = ".".join(filter(None, (prefix, path)))
            entries[layer] = _Entry(full, tv, inventory.modules.get(full))
    return entries


def _lost(inventory: Inventory) -> list[_Entry]:
    entries = _entries(inventory).items()
    return [entry for layer, entry in entries if layer not in inventory.names]
