"""The activations that a norm can apply in the same call, in one table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# The values of `activation=`: a name, a pair of a name and a slope, or None for no activation.
ActivationLike = str | tuple[str, float] | None


class Activation(NamedTuple):
    """One activation, by its name in `activation=`."""

    name: str
    # For kernels: see the function `kernel_code`; unused if there is a slope.
    kernel_code: int
    function: Callable[..., Tensor]  # takes the input, and the slope if there is one
    module: type[nn.Module]
    settings: tuple[tuple[str, Any], ...] = ()  # attributes that a module must have
    aliases: tuple[Any, ...] = ()  # other functions, and names of tensor methods
    # The name of the slope, as an attribute of the module and an argument of the function.
    slope: str = ""


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation(
            "relu", 1, F.relu, nn.ReLU, aliases=(torch.relu, torch.relu_, "relu", "relu_")
        ),
        Activation("silu", 2, F.silu, nn.SiLU),
        Activation("gelu", 3, F.gelu, nn.GELU, (("approximate", "none"),)),
        Activation("relu6", 4, F.relu6, nn.ReLU6, (("min_val", 0.0), ("max_val", 6.0))),
        Activation("hardswish", 5, F.hardswish, nn.Hardswish),
        Activation("leaky_relu", 0, F.leaky_relu, nn.LeakyReLU, slope="negative_slope"),
    )
}
SLOPE = 0.01  # the default of torch
_BY_MODULE = {a.module: a for a in ACTIVATIONS.values()}
# A function, or the name of a tensor method -> the name of the activation that it computes.
BY_FUNCTION = {
    f: name for name, a in ACTIVATIONS.items() for f in (a.function, *a.aliases)
}


def parts(activation: ActivationLike) -> tuple[str | None, float]:
    """Split an activation into its name and slope, the form that operators take."""
    return activation if isinstance(activation, tuple) else (activation, SLOPE)


def joined(name: str | None, slope: float) -> ActivationLike:
    """The inverse of `parts`."""
    return (name, slope) if name is not None and ACTIVATIONS[name].slope else name


def apply(activation: ActivationLike, z: Tensor) -> Tensor:
    """Apply the activation to z."""
    name, slope = parts(activation)
    if name is None:
        return z
    chosen = ACTIVATIONS[name]
    return chosen.function(z, slope) if chosen.slope else chosen.function(z)


def backward_reads_input(activation: ActivationLike) -> bool:
    """Whether the backward reads the activation's input. For relu, its signs are enough."""
    return activation not in (None, "relu")


def kernel_code(activation: ActivationLike) -> float:
    """The constant that kernels are compiled with: 0 for None, minus the slope for leaky relu."""
    name, slope = parts(activation)
    if name is None:
        return 0
    chosen = ACTIVATIONS[name]
    return -slope if chosen.slope else chosen.kernel_code


def label(activation: ActivationLike) -> str:
    """The activation's name in reports; "" for None."""
    name, _ = parts(activation)
    return "" if name is None else ACTIVATIONS[name].module.__name__


def is_slope(value: Any) -> bool:
    """Whether kernels can be compiled with this slope."""
    return type(value) in (int, float) and 0 < value < math.inf


def of_module(module: nn.Module) -> ActivationLike:
    """The activation that a module computes with its current settings, or None."""
    activation = _BY_MODULE.get(type(module))
    if activation is None:
        return None
    for name, value in activation.settings:
        if getattr(module, name) != value:
            return None
    if not activation.slope:
        return activation.name
    slope = getattr(module, activation.slope)
    return (activation.name, float(slope)) if is_slope(slope) else None
