"""The one table of norms: which stock class becomes which normplug class.

A pickle names a layer's class by the stock class, which can always be imported. The classes for
norms of other libraries are made when a layer is first seen, or loaded.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

# Stock class -> normplug class, and back. `register` adds rows.
REPLACEMENTS: dict[type[nn.Module], type[Any]] = {}
STOCK: dict[type[nn.Module], type[nn.Module]] = {}
# Why layers of a library's class stay, if no norm of normplug gives the same results.
UNKNOWN = "its forward computes no norm that normplug knows"
# The packages whose norms `normplug.adapters` may know.
LIBRARIES = ("diffusers.", "timm.", "torchvision.", "transformers.")


def register(ours: type[nn.Module], stock: type[nn.Module]) -> None:
    """Have a swap turn layers of exactly the class `stock` into `ours`."""
    REPLACEMENTS[stock] = ours
    STOCK[ours] = stock


def register_formula(ours: type[nn.Module], stock: type[nn.Module]) -> None:
    """Register a class for those layers of `stock` that compute the formula of `ours`."""
    STOCK[ours] = stock


def register_adapted(cls: type[nn.Module]) -> None:
    """Register the normplug classes that adapters have for a library's class and for its bases."""
    if cls in REPLACEMENTS:
        return
    for base in cls.__mro__:
        if base not in REPLACEMENTS:
            ours = adapted(base)
            if isinstance(ours, type):
                register(ours, base)


def adapted(cls: type[nn.Module]) -> type[Any] | str | None:
    """Ask the adapters for the normplug class of a library's class, or for why there is none."""
    # `plan` also finds norms of other libraries by "norm" in the name. Copies of FrozenBatchNorm2d
    # are in many projects.
    is_known = cls.__module__.startswith(LIBRARIES) or "Frozen" in cls.__name__
    if not is_known or "norm" not in cls.__name__.lower():
        return None
    # Imported only when it is needed.
    return importlib.import_module("normplug.adapters").adapt(cls)


def name_of(cls: type[nn.Module]) -> tuple[type[nn.Module], Any]:
    """A class that can be imported, and what `cls` is of it: the inverse of `class_of`."""
    ours: Any = vars(cls).get("_unsynchronised", cls)
    stock = STOCK.get(ours)
    formula = vars(cls).get("_formula")
    if stock is not None and formula is not None:
        return stock, formula
    if stock is None or REPLACEMENTS.get(stock) is not ours:
        return cls, "itself"  # a subclass of a normplug class, such as a user's
    return stock, "replacement" if ours is cls else "synchronised"


def class_of(cls: type[nn.Module], relation: Any) -> type[nn.Module]:
    """The class itself, its replacement, or the synchronised class of its replacement.

    relation: which of them, or the `Formula` of a class that was recognised by what it computes.

    Raises:
        RuntimeError: the adapters do not know the class, as after an update of its library.
    """
    if relation == "itself":
        return cls
    if not isinstance(relation, str):
        made: Any = importlib.import_module("normplug.adapters.handwritten")
        return made.class_of(cls, relation)
    register_adapted(cls)
    if cls not in REPLACEMENTS:
        raise RuntimeError(
            f"normplug: the pickle has a swapped {cls.__module__}.{cls.__qualname__}, which this "
            "version of normplug does not know, or not in this version of its library. Save "
            "model.state_dict() where it loads, and load it into a new model."
        )
    ours: Any = REPLACEMENTS[cls]
    return ours._synchronised if relation == "synchronised" else ours


def restore(cls: type[nn.Module], relation: Any) -> nn.Module:
    """A layer without attributes, which a pickle then adds. The arguments are `name_of`'s."""
    made = class_of(cls, relation)
    return made.__new__(made)
