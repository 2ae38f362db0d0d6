"""The values of options, for type checkers and for the checks of arguments."""

from __future__ import annotations

from typing import Literal, TypeAlias, TypeVar

from torch import nn

Backend: TypeAlias = Literal["auto", "triton", "torch"]
AutocastOutput: TypeAlias = Literal["low", "float32"]
Statistics: TypeAlias = Literal["torch", "safe"]

# The model that a function takes and returns: `swap(model)` has the type of `model`.
Model = TypeVar("Model", bound=nn.Module)
