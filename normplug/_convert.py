"""Convert a norm layer between its stock class and its normplug class, as the same object.

Assigning `__class__` keeps what rebuilding the layer would lose: the identity of the module, of its
parameters and of its buffers (so a running optimizer stays valid), hooks, aliases, sharing, dtype,
device and the training flag.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from normplug._checks import as_number
from normplug._ops import guess
from normplug._torch import is_class_patched, is_parametrized_class, is_patched
from normplug.modules import frozen
from normplug.modules.base import Settings, TargetVarianceNorm
from normplug.modules.probe import deepcopied
from normplug.modules.table import (
    REPLACEMENTS,
    STOCK,
    UNKNOWN,
    adapted,
    register,
    register_adapted,
)

__all__ = ["REPLACEMENTS", "register"]

# The settings of a layer that a swap sets.
_OPTIONS = ("target_variance", "backend", "autocast_output", "statistics")
# The attribute of a class that `fuse` has made: the class that it was made from.
FUSED = "_normplug_fused"
# The attribute of a fused module that holds its `FusedForwards`.
FORWARDS = "_normplug_fusion"


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class without the private subclass that torch may have derived, and without a freeze."""
    cls = type(module)
    while _is_private(cls):
        cls = cls.__bases__[-1]
    thawed: type[nn.Module] = vars(cls).get(frozen.THAWED, cls)
    return thawed


def _is_private(cls: type[nn.Module]) -> bool:
    """Whether torch derived a class for single modules: parametrize, FSDP and replicate do."""
    if (
        not cls.__module__.startswith("torch.")
        or "." in cls.__qualname__
        or FUSED in vars(cls)
    ):
        return False
    return getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is not cls


def replacement(module: nn.Module) -> type[TargetVarianceNorm] | None:
    """The normplug class that a swap gives this module; None if it is left unchanged."""
    found = replacement_or_reason(module)
    return None if isinstance(found, str) else found


def replacement_or_reason(module: nn.Module) -> type[TargetVarianceNorm] | str | None:
    """The `replacement` of a module, or why there is none if its class or adapter says why."""
    cls = plain_class(module)
    register_adapted(cls)
    if (ours := REPLACEMENTS.get(cls)) is not None:
        if is_class_patched(cls):
            return "the forward of its class was replaced by other code: undo that, then swap"
        return ours._refusal(module) or ours
    if getattr(cls, "cls_to_become", None) in REPLACEMENTS:
        return "it is lazy and has no shape yet: run one forward, then swap"
    reason = adapted(cls)
    if reason not in (None, UNKNOWN):
        return reason
    recognised = _recognised(module)
    if recognised is None:
        return reason
    found: type[TargetVarianceNorm] | str = recognised.ours or recognised.note
    return found


def is_recognised(module: nn.Module) -> bool:
    """Whether a module normalises rows, by what its forward computes."""
    recognised = _recognised(module)
    return recognised is not None and recognised.is_norm


def _recognised(module: nn.Module) -> Any:
    """What `adapters.handwritten` recognises a module as; None at once for most modules."""
    if module._modules or not module._parameters:
        return None
    cls = plain_class(module)
    if cls.__module__.startswith(("torch.", "normplug.")):
        return None
    # Imported only when it is needed.
    handwritten = importlib.import_module("normplug.adapters.handwritten")
    return handwritten.recognise(module, cls)


def synchronised(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `synchronise` gives layers of `cls`; `cls` itself if it has none."""
    register_adapted(cls)  # a class from a pickle may be new to this process
    return vars(cls).get("_synchronised") or cls


def is_revertible(module: nn.Module) -> bool:
    """Whether `revert` knows the stock class: not for a user's own subclass of a normplug class."""
    cls = plain_class(module)
    register_adapted(cls)  # a class from a pickle may be new to this process
    return cls in STOCK or is_synchronised(module)


def norm_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of each normplug layer, and of each layer that a swap can convert.

    Args:
        model: any module.

    Yields:
        Pairs in the order of `model.named_modules()`. A layer with several paths comes once, by its
        first.

    Examples:
        >>> [path for path, _ in norm_layers(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))]
        ['1']
    """
    for path, module in model.named_modules():
        if isinstance(module, TargetVarianceNorm) or replacement(module) is not None:
            yield path, module


def normplug_layers(model: nn.Module) -> Iterator[tuple[str, TargetVarianceNorm]]:
    """Yield (path, layer) of every normplug layer in a model."""
    return (
        (path, m)
        for path, m in model.named_modules()
        if isinstance(m, TargetVarianceNorm)
    )


def declared(module: nn.Module) -> Any:
    """The class that declares what a norm layer is, whether the layer is stock or normplug's."""
    return type(module) if isinstance(module, TargetVarianceNorm) else replacement(module)


def weight_name(module: nn.Module) -> str:
    """The name of the weight of a norm layer, whether the layer is stock or normplug's."""
    name: str = declared(module)._affine_names[0]
    return name


def convert(
    module: nn.Module,
    target_variance: float,
    *,
    track_running_stats: bool | None = False,
    device: Any = None,
    **options: Any,
) -> None:
    """Convert a stock norm layer, in place; on a normplug layer, only change its settings.

    device: the device of watched statistics if the layer has no weight. options: other `Settings`.
    """
    options["target_variance"] = target_variance
    probe = vars(module).get("_probe")
    if probe is not None and probe.revert is not None:  # converted only to be measured
        probe.revert = None
        revert(module)
    if not isinstance(module, TargetVarianceNorm):
        ours = replacement(module)
        assert ours is not None
        ours._adopt(module, track_running_stats, device)
        eps = as_number(getattr(module, ours._eps_name))
        watches = bool(track_running_stats)
        vars(module)["_normplug"] = Settings(eps=eps, watches=watches, **options)
        assign_class(module, ours)
        assert isinstance(module, TargetVarianceNorm)
        guess.record(module)
    module._set(was_stock=False, **options)


def target_variance(module: nn.Module) -> float:
    """The target variance of a norm layer: 1 for a stock one."""
    current = state(module)
    return 1.0 if current is None else current.target_variance


def revert(module: nn.Module) -> None:
    """Give a normplug layer its stock class again, in place; the inverse of `convert`."""
    desynchronise(module)
    if not isinstance(module, TargetVarianceNorm):
        return
    ours, stock = type(module), STOCK[plain_class(module)]
    vars(module)[ours._eps_name] = module._normplug.eps
    assign_class(module, stock)
    ours._leave(module)
    del module._normplug


def state(module: nn.Module) -> Settings | None:
    """The settings of a norm layer, for `restore`; None for a stock layer."""
    return module._normplug if isinstance(module, TargetVarianceNorm) else None


def restore(module: nn.Module, before: Settings | None) -> None:
    """Undo the conversions since `state`; a layer that has become stock stays stock."""
    if before is None:
        revert(module)
        return
    if before.unsynced_class is None:
        desynchronise(module)
    if isinstance(module, TargetVarianceNorm):
        options = {name: getattr(before, name) for name in _OPTIONS}
        module._set(**options)


def is_synchronised(module: nn.Module) -> bool:
    """Whether `synchronise` has changed the layer's class."""
    own = vars(module).get("_normplug")
    return own is not None and own.unsynced_class is not None


def synchronise(module: nn.Module) -> bool:
    """Give a layer its synchronised class, in place, and return whether it has one.

    A stock layer gets mode standard.
    """
    was_stock = not isinstance(module, TargetVarianceNorm)
    ours = replacement(module) if was_stock else plain_class(module)
    if ours is None or synchronised(ours) is ours:
        return False
    if was_stock:
        convert(module, 1.0, backend="torch")
    assert isinstance(module, TargetVarianceNorm)
    module._set(unsynced_class=STOCK[ours], was_stock=was_stock)
    module.process_group = None
    assign_class(module, synchronised(ours))
    return True


def desynchronise(module: nn.Module) -> None:
    """Undo `synchronise`. A stock layer whose mode was changed since stays a normplug layer."""
    if not is_synchronised(module):  # `unswap` has undone it already
        return
    assert isinstance(module, TargetVarianceNorm)
    before: Any = module._normplug.unsynced_class
    was_stock = module._normplug.was_stock
    # In a pickle of version 0.3, `before` may be normplug's class.
    assign_class(module, REPLACEMENTS.get(before, before))
    module._set(unsynced_class=None, was_stock=False)
    del module.process_group
    if was_stock and module.target_variance == 1.0:
        revert(module)


def freeze(module: nn.Module) -> None:
    """Give a layer its frozen class, in place; the inverse of `thaw`."""
    vars(module).setdefault(frozen.RECORD, {"trained": []})
    assign_class(module, plain_class(module))


def thaw(module: nn.Module) -> list[str]:
    """Give a frozen layer its class back, in place; return the parameters that train again."""
    frozen.unpack(module)
    record: dict[str, Any] = vars(module).pop(frozen.RECORD, {})
    _assign(module, plain_class(module))
    return record.get("trained", [])


def assign_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change a module's class; a frozen layer stays frozen."""
    if frozen.is_frozen(module):
        frozen.unpack(module)
        register_adapted(cls)
        cls = frozen.frozen_class(cls)
    _assign(module, cls)


def _assign(module: nn.Module, cls: type[nn.Module]) -> None:
    """Change a module's class; keep the private subclass that torch may have derived from it."""
    if not is_patched(module):
        vars(module).pop("forward", None)  # the old class's method
    # A class may define a __setattr__ that refuses new values.
    object.__setattr__(module, "__class__", _below(type(module), cls))


def _below(private: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """A copy of the private subclass `private` that derives from `cls`; `cls` for other classes."""
    if not _is_private(private):
        return cls
    *others, base = private.__bases__
    namespace = {
        k: v for k, v in vars(private).items() if k not in ("__dict__", "__weakref__")
    }
    below = _below(base, cls)
    if is_parametrized_class(private):
        # torch, too, adds a `__deepcopy__` only where the class has none.
        namespace.pop("__deepcopy__", None)
        if not hasattr(below, "__deepcopy__"):
            namespace["__deepcopy__"] = deepcopied
    return type(private.__name__, (*others, below), namespace)


def fused_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward has been fused, by path."""
    return {
        path: m
        for path, m in model.named_modules()
        if FORWARDS in vars(m) or has_fused_class(m)
    }


def has_fused_class(module: nn.Module) -> bool:
    """Whether a module's class is a fused class, and not one that other code derived from it."""
    return FUSED in vars(plain_class(module))


def unfused_class(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclasses that `fuse` and torch put before it."""
    cls = plain_class(module)
    found: type[nn.Module] = vars(cls).get(FUSED, cls)
    return found


def release(fused: Iterable[nn.Module]) -> None:
    """Give modules their own class back.

    A class that other code has derived from a fused class stays, and so does a wrapper around the
    forward on the instance. Both then run the module's own forward.
    """
    for module in fused:
        vars(module).pop(FORWARDS, None)
        if has_fused_class(module):
            assign_class(module, unfused_class(module))
