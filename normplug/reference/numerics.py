"""Shared by the formulas of all norms: results, dtypes, shapes, and averages over batches."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Normalized(NamedTuple):
    """A norm's output, and the statistics that it was normalised by."""

    y: Tensor
    mean: Tensor
    var: Tensor


class Rescaled(NamedTuple):
    """The output of a norm that does not centre, and the second moment used."""

    y: Tensor
    moment: Tensor


class Gradients(NamedTuple):
    """The gradients of a norm's input, weight and bias."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def accumulator_dtype(*dtypes: torch.dtype | None) -> torch.dtype:
    """The dtype of sums: float64 if any of `dtypes` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def channel_dims(x: Tensor) -> tuple[int, ...]:
    """Batch and space: the dimensions over which a channel is normalised."""
    return (0, *range(2, x.dim()))


def per_channel(values: Tensor, x: Tensor) -> Tensor:
    """Reshape (C,) values to broadcast over `x`."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def running_average(running: Tensor, value: Tensor, momentum: float | None, count: int) -> Tensor:
    """The updated moving average: exponential, or over all `count` batches if momentum is None.

    running_next = (1 - m) * running + m * value        m = momentum, or 1 / count
    """
    m = 1.0 / count if momentum is None else momentum
    return (1.0 - m) * running + m * value
