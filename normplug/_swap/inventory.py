"""A model's modules and their paths, found in one walk that the files of `_swap` share."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from normplug.modules import TargetVarianceNorm


class Inventory:
    """Every module of a model, in the order of `named_modules`.

    A swap changes classes and tensors but not the module tree, so one inventory stays valid.

    Attributes:
        model: the model.
        names: all paths of each module; "" is the model itself.
        modules: the module under each path.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names: dict[nn.Module, list[str]] = {}
        for path, module in self.modules.items():
            self.names.setdefault(module, []).append(path)

    def each(self) -> Iterator[tuple[str, nn.Module]]:
        """(path, module) of every module, under its first path."""
        return ((paths[0], module) for module, paths in self.names.items())

    def layers(self) -> list[tuple[str, TargetVarianceNorm]]:
        """(path, layer) of every normplug layer."""
        return [(path, m) for path, m in self.each() if isinstance(m, TargetVarianceNorm)]

    def parents(self, path: str) -> list[nn.Module]:
        """The ancestors of the module under `path`, outermost first."""
        names = path.split(".") if path else []
        return [self.modules[".".join(names[:depth])] for depth in range(len(names))]
