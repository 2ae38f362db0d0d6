"""Register normplug's layers with tools that look layers up by their exact class."""

from __future__ import annotations

import copy
import sys
from operator import attrgetter
from typing import Any

from normplug import _convert

# The module of each tool's registries, and their names in it. They map classes to what the tool
# does with their layers. A tool that is imported later is registered with by the next swap.
_REGISTRIES = {
    "captum.attr._core.lrp": ("SUPPORTED_LAYERS_WITH_RULES",),
    "opacus.validators": ("ModuleValidator.VALIDATORS", "ModuleValidator.FIXERS"),
    "ptflops.pytorch_ops": ("MODULES_MAPPING",),
    "thop.profile": ("register_hooks",),
    "torch.ao.quantization.quantization_mappings": ("DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",),
}


def tell_tools() -> None:
    """Have the tools that are in use treat normplug's layers like the stock ones."""
    for module, names in _REGISTRIES.items():
        if (tool := sys.modules.get(module)) is None:
            continue
        for name in names:
            registry = attrgetter(name)(tool)
            for stock, ours in _convert.REPLACEMENTS.items():
                if stock in registry:
                    entry = registry[stock]
                    quantised = hasattr(entry, "from_float")
                    registry.setdefault(ours, _Unswapped(entry) if quantised else entry)
    if (opacus := sys.modules.get("opacus.validators")) is not None:
        # Running statistics that are only watched are not private.
        for ours in _convert.REPLACEMENTS.values():
            opacus.ModuleValidator.FIXERS.setdefault(ours, _without_watching)


class _Unswapped:
    """Quantise a layer as its stock layer, with the target variance in the weight."""

    def __init__(self, quantised: Any) -> None:
        self.quantised = quantised

    def from_float(self, mod: Any, **options: Any) -> Any:
        """Called by torch.ao, with the layer."""
        from normplug._swap.swap import unswap  # which imports this module

        return self.quantised.from_float(unswap(copy.deepcopy(mod)), **options)


def _without_watching(layer: Any, **options: Any) -> Any:
    layer.stop_watching()
    return layer
