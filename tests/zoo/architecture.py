"""What a library's list of architectures is made of."""

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
        library: the package it is from.
        name: as the library calls it.
        build: makes it, with random weights; on the meta device, too.
        inputs: what to call it with, by name, tensors on the CPU.
    """

    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[nn.Module], Inputs]
