"""The record of a model's layers that a swap stores in it, so that `check` finds lost layers.

The swapped module keeps an entry for each path, and the layer keeps the same entry. So the record
follows copies and pickles of the model, and survives wrapping the model or moving a layer within
it; yet it keeps no layer alive. A layer that another tool has rebuilt lacks its entry.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normplug import _checks, _convert
from normplug._batches import unwrapped
from normplug._swap.inventory import Inventory
from normplug._table import shown, some
from normplug._torch import is_class_patched
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm

_RECORD = "_normplug_record"  # in the swapped module: path -> entry
_ENTRY = "_normplug_entry"  # in a layer: its entry


class Entry:
    """The target variance that was set for a layer; None once the layer is stock again."""

    target_variance: float | None = None


def warn_of_lost(caller: str, inventory: Inventory) -> bool:
    """Warn if recorded layers have been removed since, before `renew` forgets them."""
    lost = [shown(path) for _, path, layer in _recorded(inventory) if layer is None]
    if lost:
        _checks.warn(
            f"normplug.{caller}: another tool has rebuilt or removed norm layers of an earlier "
            f"swap: {some(lost)}. normplug.check no longer looks for them."
        )
    return bool(lost)


def renew(inventory: Inventory) -> None:
    """Record a model's normplug layers and their modes, replacing every record in it."""
    owner = unwrapped(inventory.model)
    prefix, record = inventory.names[owner][0], {}
    for path, module in inventory.model.named_modules():
        vars(module).pop(_RECORD, None)
        if isinstance(module, TargetVarianceNorm):
            entry = vars(module).setdefault(_ENTRY, Entry())
            entry.target_variance = module.target_variance
            record[path[len(prefix) :].removeprefix(".")] = entry
            continue
        reverted = vars(module).pop(_ENTRY, None)
        if reverted is not None:
            reverted.target_variance = None
    if record:
        vars(owner)[_RECORD] = record


def forget(model: nn.Module) -> None:
    """Remove every record in a model."""
    for module in model.modules():
        vars(module).pop(_RECORD, None)
        vars(module).pop(_ENTRY, None)


def findings(model: nn.Module) -> list[str]:
    """Return a message for each layer that is lost, in another mode, or bypasses a patch."""
    inventory, found = Inventory(model), []
    stock = {*_convert.REPLACEMENTS, *_convert.STOCK.values()}
    for tv, path, layer in _recorded(inventory):
        mode = NormMode(tv)
        if layer is None:
            now = "no longer in the model"
            if path in inventory.modules:
                now = f"now a {type(inventory.modules[path]).__name__}"
            found.append(
                f"{shown(path)}: swapped in mode {mode}, {now}: another tool rebuilt or removed "
                "the layer, and its target variance with it. Use that tool before normplug.swap, "
                "or call normplug.unswap first. If this is intended, swap again."
            )
        elif layer.target_variance != tv:
            found.append(
                f"{shown(path)}: in mode {layer.mode}, but swapped in mode {mode}. Set the mode "
                "with normplug.set_mode(model, mode), or with normplug.swap(model, mode, "
                "include=...) for some layers."
            )
    for path, layer in _convert.normplug_layers(model):
        for cls in _convert.plain_class(layer).__mro__:
            if cls in stock and is_class_patched(cls):
                found.append(
                    f"{shown(path)}: the forward of its stock class was replaced by other code, "
                    "which the layer does not run. Call normplug.unswap(model), or patch the "
                    "class before normplug.swap, which then leaves its layers unchanged."
                )
    return found


def refuse_other_modes(
    caller: str, now: dict[str, float], saved: dict[str, float]
) -> None:
    """Refuse to resume a checkpoint of other modes; both map paths to target variances."""
    differ = [
        f"{shown(p)} in mode {NormMode(saved.get(p, 1.0))}, now {NormMode(now.get(p, 1.0))}"
        for p in {**now, **saved}
        if now.get(p, 1.0) != saved.get(p, 1.0)
    ]
    if differ:
        raise ValueError(
            f"normplug.{caller}: the checkpoint was trained in other modes: "
            f"{some(differ, '; ')}. Resume with the modes of its training."
        )


def _recorded(
    inventory: Inventory,
) -> Iterator[tuple[float, str, TargetVarianceNorm | None]]:
    """(target variance, path, layer) of each entry; the layer is None if it is lost.

    If no layer has the entry, a layer in the recorded mode under the path counts, such as a copy.
    """
    layers = {
        vars(m).get(_ENTRY): m
        for m in inventory.names
        if isinstance(m, TargetVarianceNorm)
    }
    entries: dict[Entry, str] = {}
    for prefix, owner in inventory.model.named_modules():
        for path, entry in vars(owner).get(_RECORD, {}).items():
            entries[entry] = f"{prefix}.{path}".strip(".")
    for entry, path in entries.items():
        target_variance = entry.target_variance
        if target_variance is None:
            continue
        layer = layers.get(entry)
        now = inventory.modules.get(path)
        if (
            layer is None
            and isinstance(now, TargetVarianceNorm)
            and now.target_variance == target_variance
        ):
            layer = now
        yield target_variance, path, layer
