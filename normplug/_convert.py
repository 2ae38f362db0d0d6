"""One norm layer between its torch class and its normplug class, as the same object.

Assigning `__class__` keeps what rebuilding loses: the identity of the module, its parameters and
buffers (so a running optimizer stays valid), hooks, aliases, sharing, dtype, device, train flag.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.utils import parametrize

from normplug import modules
from normplug.modules import LAYER_NORM_STATISTICS, LayerNorm, TargetVarianceNorm

REPLACEMENTS: dict[type[nn.Module], type[TargetVarianceNorm]] = {
    nn.BatchNorm1d: modules.BatchNorm1d,
    nn.BatchNorm2d: modules.BatchNorm2d,
    nn.BatchNorm3d: modules.BatchNorm3d,
    nn.LazyBatchNorm1d: modules.LazyBatchNorm1d,
    nn.LazyBatchNorm2d: modules.LazyBatchNorm2d,
    nn.LazyBatchNorm3d: modules.LazyBatchNorm3d,
    nn.SyncBatchNorm: modules.SyncBatchNorm,
    nn.LayerNorm: modules.LayerNorm,
}
_STOCK: dict[type[nn.Module], type[nn.Module]] = {
    ours: stock for stock, ours in REPLACEMENTS.items()
}
_SYNCHRONISED: dict[type[nn.Module], type[nn.Module]] = {
    modules.BatchNorm1d: modules.SyncBatchNorm,
    modules.BatchNorm2d: modules.SyncBatchNorm,
    modules.BatchNorm3d: modules.SyncBatchNorm,
    modules.LazyBatchNorm1d: modules.LazySyncBatchNorm,
    modules.LazyBatchNorm2d: modules.LazySyncBatchNorm,
    modules.LazyBatchNorm3d: modules.LazySyncBatchNorm,
}
# Where a library defines norms, and the module of `normplug.adapters` that knows them.
_ADAPTERS = {
    "timm.layers.": "timm_layers",
    "timm.models.metaformer": "timm_metaformer",
    "torchvision.models.convnext": "torchvision_convnext",
    "transformers.models.": "transformers_models",
}


class Adapted(NamedTuple):
    """What a swap makes of a library's class: what an adapter's `adapt(cls)` returns, or None.

    Attributes:
        norm: the normplug class that takes its place.
        synchronised: of a BatchNorm, what `swap(sync=True)` makes of it.
    """

    norm: type[TargetVarianceNorm]
    synchronised: type[TargetVarianceNorm] | None = None


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, behind a private subclass that torch has put before it."""
    private = _private_base(module)
    return type(module) if private is None else type(module).__bases__[private]


def _private_base(module: nn.Module) -> int | None:
    """Which base of a private subclass, by a parametrization or by `fully_shard`, is the class."""
    if parametrize.is_parametrized(module):
        return 0
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = fsdp is not None and issubclass(type(module).__bases__[0], fsdp.FSDPModule)
    return 1 if sharded else None


def replacement(module: nn.Module) -> type[TargetVarianceNorm] | None:
    """The normplug class of exactly this torch class, or one of another library; or None."""
    cls = plain_class(module)
    _learn(cls)
    return REPLACEMENTS.get(cls)


def _learn(cls: type[nn.Module]) -> None:
    """Ask the adapters about a class of another library, and about those that it derives from."""
    if cls in REPLACEMENTS or not issubclass(cls, tuple(REPLACEMENTS)):
        return
    for base in cls.__mro__:
        if base not in REPLACEMENTS and (adapted := _adapt(base)) is not None:
            REPLACEMENTS[base] = adapted.norm
            _STOCK[adapted.norm] = base
            if adapted.synchronised is not None:
                _SYNCHRONISED[adapted.norm] = adapted.synchronised


def _adapt(cls: type[nn.Module]) -> Adapted | None:
    """What the adapter of the class's library, if there is one, makes of it."""
    for library, adapter in _ADAPTERS.items():
        if cls.__module__.startswith(library):
            try:
                return importlib.import_module(f"normplug.adapters.{adapter}").adapt(cls)
            except (ImportError, AttributeError) as error:  # a version that lacks what is adapted
                text = f"normplug: {cls.__module__}.{cls.__name__} is left as it is, since {error}."
                warnings.warn(f"{text} Another version of the library may do.", stacklevel=2)
    return None


def synchronised(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that `synchronise` makes of a normplug class: for other than BatchNorms, itself."""
    return _SYNCHRONISED.get(cls, cls)


def is_revertible(module: nn.Module) -> bool:
    """Whether `revert` knows the way back: not for a user's own subclass of a normplug class."""
    cls = plain_class(module)
    _learn(cls)  # it may come from a pickle
    return cls in _STOCK or cls in _SYNCHRONISED.values()


def normplug_layers(model: nn.Module) -> Iterator[tuple[str, TargetVarianceNorm]]:
    """(path, layer) of every normplug layer in a model."""
    for path, module in model.named_modules():
        if isinstance(module, TargetVarianceNorm):
            yield path, module


def is_patched(module: nn.Module) -> bool:
    """Whether an attribute of the instance has taken the place of the class's `forward`.

    A bound method of the class is none: accelerate leaves one behind when it removes its hooks.
    """
    return "forward" in vars(module) and not _is_bound_forward(module)


def _is_bound_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return getattr(forward, "__func__", None) is type(module).forward


def convert(
    module: nn.Module,
    target_variance: float,
    *,
    backend: str = "auto",
    autocast_output: str = "float32",
    track_running_stats: bool = False,
    device: Any = None,
) -> None:
    """Make a stock norm layer a normplug layer, in place, or set up one that is.

    Args:
        module: one for which `replacement` has a class, or a normplug layer.
        target_variance: a float above 0.
        backend: as in `normplug.functional`.
        autocast_output: for LayerNorm, as in `normplug.functional.layer_norm`.
        track_running_stats: for a stock LayerNorm, give it running statistics.
        device: where those live if the layer has no weight to go by.
    """
    module.target_variance = target_variance  # type: ignore[assignment]
    module.backend = backend  # type: ignore[assignment]
    if isinstance(module, nn.LayerNorm):
        module.autocast_output = autocast_output  # type: ignore[assignment]
    if isinstance(module, TargetVarianceNorm):
        if (unsynced := vars(module).get("_unsynced_class")) in REPLACEMENTS:
            module._unsynced_class = REPLACEMENTS[unsynced]  # type: ignore[assignment]
        return
    ours = replacement(module)
    assert ours is not None
    module._eps = module.eps
    assign_class(module, ours)
    if isinstance(module, LayerNorm):
        module.track_running_stats = track_running_stats
        module.momentum = 0.1
        module.register_statistics(device if module.weight is None else module.weight.device)


def revert(module: TargetVarianceNorm) -> None:
    """Make a normplug layer the stock layer that it was, in place; the inverse of `convert`."""
    desynchronise(module)
    if not isinstance(module, TargetVarianceNorm):
        return
    if isinstance(module, LayerNorm):
        for name in (*LAYER_NORM_STATISTICS, "track_running_stats", "momentum", "autocast_output"):
            delattr(module, name)
    del module.target_variance, module.backend, module._eps
    assign_class(module, _STOCK[plain_class(module)])


def synchronise(module: nn.Module) -> bool:
    """Make a BatchNorm, stock (then in mode standard) or normplug's, a SyncBatchNorm, in place.

    Returns:
        Whether it was one; anything else is left alone.
    """
    before = plain_class(module)
    ours = before if isinstance(module, TargetVarianceNorm) else replacement(module)
    if ours not in _SYNCHRONISED:
        return False
    if before is not ours:
        convert(module, 1.0, backend="torch")
    module._unsynced_class = before  # type: ignore[assignment]
    module.process_group = None  # type: ignore[assignment]
    assign_class(module, _SYNCHRONISED[ours])
    return True


def desynchronise(module: nn.Module) -> None:
    """Undo `synchronise`; a layer that was stock stays normplug's if it has another mode now."""
    if "_unsynced_class" not in vars(module):  # undone since, by `unswap`
        return
    before = vars(module).pop("_unsynced_class")
    del module.process_group
    if plain_class(module) is modules.SyncBatchNorm:  # a lazy one may have been materialised
        before = getattr(before, "cls_to_become", before)
    ours = REPLACEMENTS.get(before, before)
    assign_class(module, ours)
    assert isinstance(module, TargetVarianceNorm)
    if before is not ours and module.target_variance == 1.0:
        revert(module)


def assign_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a module another class, behind a private subclass that torch has put before it."""
    if _is_bound_forward(module):
        del module.forward
    index = _private_base(module)
    if index is not None:
        private = type(module)
        namespace = {k: v for k, v in vars(private).items() if k not in ("__dict__", "__weakref__")}
        cls = type(private.__name__, (*private.__bases__[:index], cls), namespace)
    module.__class__ = cls
