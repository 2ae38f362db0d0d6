"""An entry of a library's list of architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

Inputs: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        library: its package.
        name: its name in that package.
        build: makes it with random weights, under `torch.device("meta")` too.
        inputs: arguments of its forward by name; tensors are on the CPU.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
