"""Activations by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from normplug._ops.spec import Pool as Pool

# What can be fused, by the name it has in `functional`: as a function and as a module.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
}
MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
}
# The attributes that decide what such a module computes, and the values that go with its name.
_SETTINGS: dict[type[nn.Module], tuple[tuple[str, Any], ...]] = {
    nn.GELU: (("approximate", "none"),),
    nn.ReLU6: (("min_val", 0.0), ("max_val", 6.0)),
}


def activation_of(module: nn.Module) -> str | None:
    """The name of the activation that a module computes as it is set now, or None."""
    cls = type(module)
    for name, value in _SETTINGS.get(cls, ()):
        if getattr(module, name) != value:
            return None
    return MODULES.get(cls)
