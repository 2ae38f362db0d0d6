"""What a swap leaves on a model: which layers it took, so that one that is lost later is found.

The layers themselves are kept, under their paths and with their target variance, in a plain
attribute of the swapped module. So the record follows deepcopy and pickle, a wrapper or a move
within a model does not disturb it, and a layer that another tool has rebuilt is told from one that
`unswap` has reverted in place, which is the same object still.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from torch import nn

from normplug import _convert
from normplug._table import shown
from normplug.modes import NormMode
from normplug.modules import TargetVarianceNorm

_ATTRIBUTE = "_normplug_layers"


class _Entry(NamedTuple):
    path: str
    target_variance: float
    now: nn.Module | None  # what is found under the path


def renew(who: str, model: nn.Module) -> None:
    """Record all normplug layers of a model as they are, in place of any record in it.

    Warns:
        UserWarning: where layers of the former record have been taken out since.
    """
    lost = _lost(model)
    if lost:
        warnings.warn(
            f"normplug.{who}: {len(lost)} norm layers of an earlier swap have been rebuilt or "
            f"removed since, and are forgotten now: {_listed(lost)}.",
            stacklevel=3,
        )
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
    owner = unwrapped(model)
    layers = {path: (m, m.target_variance) for path, m in _convert.normplug_layers(owner)}
    if layers:
        vars(owner)[_ATTRIBUTE] = layers


def take(model: nn.Module) -> list[tuple[nn.Module, object]]:
    """Each record in a model, for `put`."""
    return [(m, vars(m)[_ATTRIBUTE]) for m in model.modules() if _ATTRIBUTE in vars(m)]


def put(model: nn.Module, records: list[tuple[nn.Module, object]]) -> None:
    """Put records back that `take` returned, and remove every other."""
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
    for module, record in records:
        vars(module)[_ATTRIBUTE] = record


def exists(model: nn.Module) -> bool:
    """Whether anything in a model has been swapped and not unswapped."""
    return any(_ATTRIBUTE in vars(m) for m in model.modules())


def findings(model: nn.Module) -> list[str]:
    """A sentence for each thing that takes swapped layers out of effect."""
    found = []
    for entry in _lost(model):
        now = "not in the model any more"
        if entry.now is not None:
            now = f"a {type(entry.now).__name__} now"
        found.append(
            f"{shown(entry.path)}: swapped in mode {NormMode(entry.target_variance)}, {now}: "
            "another tool rebuilt or removed it, and with it the target variance. Use that tool "
            "before normplug.swap, or normplug.unswap first; where it is meant, swap again."
        )
    for layer, entry in _entries(model).items():
        if isinstance(layer, TargetVarianceNorm) and layer.target_variance != entry.target_variance:
            found.append(
                f"{shown(entry.path)}: in mode {layer.mode}, but swapped in mode "
                f"{NormMode(entry.target_variance)}. normplug.set_mode(model, mode), or "
                "normplug.swap(model, mode, include=...) for some layers, sets one on record."
            )
    return found


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DDP, DataParallel, FSDP and torch.compile's wrapper."""
    while True:
        inner = model._modules.get("_orig_mod", model._modules.get("_fsdp_wrapped_module"))
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _entries(model: nn.Module) -> dict[nn.Module, _Entry]:
    """Each recorded layer; of two records that name it the inner one, which is the later."""
    entries = {}
    for prefix, owner in model.named_modules():
        for path, (layer, tv) in vars(owner).get(_ATTRIBUTE, {}).items():
            now: nn.Module | None = owner
            for name in filter(None, path.split(".")):
                now = None if now is None else now._modules.get(name)
            full = ".".join(filter(None, (prefix, path)))
            entries[layer] = _Entry(full, tv, now)
    return entries


def _lost(model: nn.Module) -> list[_Entry]:
    present = set(model.modules())
    return [entry for layer, entry in _entries(model).items() if layer not in present]


def _listed(entries: list[_Entry]) -> str:
    paths = [shown(entry.path) for entry in entries[:4]]
    return ", ".join(paths) + (", ..." if len(entries) > 4 else "")
