"""The activations that a norm can apply in the same call: the one table of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Activation(NamedTuple):
    """One activation.

    Attributes:
        name: what `activation=` takes.
        kernel_code: what kernels are compiled with; 0 stands for no activation.
        function: computes it.
        module: its torch class.
        settings: attributes of such a module, and the values without which it computes otherwise.
        aliases: other functions that compute it, and the names of such methods of a tensor.
    """

    name: str
    kernel_code: int
    function: Callable[[Tensor], Tensor]
    module: type[nn.Module]
    settings: tuple[tuple[str, Any], ...] = ()
    aliases: tuple[Any, ...] = ()

    @property
    def label(self) -> str:
        """What reports show."""
        return self.module.__name__


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", 1, F.relu, nn.ReLU, aliases=(torch.relu, torch.relu_, "relu", "relu_")),
        Activation("silu", 2, F.silu, nn.SiLU),
        Activation("gelu", 3, F.gelu, nn.GELU, (("approximate", "none"),)),
        Activation("relu6", 4, F.relu6, nn.ReLU6, (("min_val", 0.0), ("max_val", 6.0))),
        Activation("hardswish", 5, F.hardswish, nn.Hardswish),
    )
}
KERNEL_CODES = {None: 0} | {name: a.kernel_code for name, a in ACTIVATIONS.items()}
_BY_MODULE = {a.module: a for a in ACTIVATIONS.values()}
_BY_FUNCTION = {f: name for name, a in ACTIVATIONS.items() for f in (a.function, *a.aliases)}


def of_module(module: nn.Module) -> str | None:
    """The name of the activation that a module computes as it is set now, or None."""
    activation = _BY_MODULE.get(type(module))
    if activation is None:
        return None
    for name, value in activation.settings:
        if getattr(module, name) != value:
            return None
    return activation.name


def of_function(function: Any) -> str | None:
    """The name of the activation that a function, or a method of this name, computes, or None."""
    return _BY_FUNCTION.get(function)
