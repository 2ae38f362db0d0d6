"""One norm layer between its torch class and its normplug class, as the same object.

Assigning `__class__` keeps what rebuilding loses: the identity of the module, its parameters and
buffers (so a running optimizer stays valid), hooks, aliases, sharing, dtype, device, train flag.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

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
    nn.LayerNorm: modules.LayerNorm,
}
_STOCK: dict[type[nn.Module], type[nn.Module]] = {
    ours: stock for stock, ours in REPLACEMENTS.items()
}
# Where a library defines norms, and the module whose class of the same name takes their place.
_ADAPTERS = {
    "timm.layers.": "timm_layers",
    "timm.models.metaformer": "timm_metaformer",
    "torchvision.models.convnext": "torchvision_convnext",
    "transformers.models.": "transformers_models",
}


def register(ours: type[TargetVarianceNorm], stock: type[nn.Module]) -> None:
    """Make `ours` what a swap turns layers of exactly the class `stock` into."""
    REPLACEMENTS[stock] = ours
    _STOCK[ours] = stock


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, behind the private subclass that a parametrization puts before it."""
    return parametrize.type_before_parametrizations(module)


def replacement(module: nn.Module) -> type[TargetVarianceNorm] | None:
    """The normplug class of exactly this torch class, or one of another library; or None."""
    cls = plain_class(module)
    if cls not in REPLACEMENTS and issubclass(cls, tuple(REPLACEMENTS)):
        _adapt(cls)
    return REPLACEMENTS.get(cls)


def _adapt(cls: type[nn.Module]) -> None:
    """Let the adapter of the class's library, if there is one, register what it knows."""
    for library, adapter in _ADAPTERS.items():
        if cls.__module__.startswith(library):
            try:
                getattr(importlib.import_module(f"normplug.adapters.{adapter}"), cls.__name__, None)
            except (ImportError, AttributeError) as error:  # a version that lacks what is adapted
                text = f"normplug: {cls.__module__}.{cls.__name__} is left as it is, since {error}."
                warnings.warn(f"{text} Another version of the library may do.", stacklevel=2)


def is_revertible(module: nn.Module) -> bool:
    """Whether `revert` knows the way back: not for a user's own subclass of a normplug class."""
    return plain_class(module) in _STOCK


def normplug_layers(model: nn.Module) -> Iterator[tuple[str, TargetVarianceNorm]]:
    """(path, layer) of every normplug layer in a model."""
    for path, module in model.named_modules():
        if isinstance(module, TargetVarianceNorm):
            yield path, module


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
        return
    ours = replacement(module)
    assert ours is not None
    _assign_class(module, ours)
    if isinstance(module, LayerNorm):
        module.track_running_stats = track_running_stats
        module.momentum = 0.1
        module.register_statistics(device if module.weight is None else module.weight.device)


def revert(module: TargetVarianceNorm) -> None:
    """Make a normplug layer the stock layer that it was, in place; the inverse of `convert`."""
    if isinstance(module, LayerNorm):
        for name in (*LAYER_NORM_STATISTICS, "track_running_stats", "momentum", "autocast_output"):
            delattr(module, name)
    del module.target_variance, module.backend
    _assign_class(module, _STOCK[plain_class(module)])


def _assign_class(module: nn.Module, cls: type[nn.Module]) -> None:
    if parametrize.is_parametrized(module):
        private = type(module)
        namespace = {k: v for k, v in vars(private).items() if k not in ("__dict__", "__weakref__")}
        cls = type(private.__name__, (cls,), namespace)
    module.__class__ = cls
