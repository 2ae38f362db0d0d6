"""What a norm measures in its forward while a `VarianceLogger` logs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Probe:
    """What the latest forward of a norm measured, for `averages` to reduce.

    A forward stores its tensors as they are. On a GPU each small operation costs the host more than
    the GPU, so `averages` reduces all layers of a model together.

    Attributes:
        variance: the `_measure` of each channel, row or group of the input; None if no forward with
            data has run.
        divisor: the variance that the input was normalised by, of the same shape; None if it was
            `variance`.
        output: the `_measure` of the output; None if `averages` can compute it with weight^2.
        weight: a copy of the weight, with its offset; None without weight.
        target_variance: a float above 0.
        eps: a float.
    """

    variance: Tensor | None = None
    divisor: Tensor | None = None
    output: Tensor | None = None
    weight: Tensor | None = None
    target_variance = 1.0
    eps = 0.0

    def kind(self) -> tuple[Any, ...]:
        """A key: probes with equal keys can be reduced together."""
        tensors = (self.variance, self.divisor, self.output, self.weight)
        layouts = ((t.shape, t.dtype, t.device) if t is not None else None for t in tensors)
        return (*layouts, self.target_variance, self.eps)


def averages(probes: Sequence[Probe]) -> list[list[float]]:
    """The average variances and the root mean square (RMS) of the weight of each probe's layer.

    A variance before weight and bias is computed: tv * var / (divisor + eps).

    Returns:
        for each probe: the variances of the input, of the output before weight and bias, and of the
            output, and the RMS of the weight (1 without weight); nan if no forward has run.
    """
    groups: dict[Any, list[Probe]] = {}
    for probe in probes:
        if probe.variance is not None:
            groups.setdefault(probe.kind(), []).append(probe)
    rows: dict[Probe, list[float]] = {}
    if groups:
        tables = [_averages(group) for group in groups.values()]
        values = torch.cat([table.to(tables[0].device) for table in tables]).tolist()
        rows = dict(
            zip((probe for group in groups.values() for probe in group), values, strict=True)
        )
    return [rows.get(probe, [math.nan] * 4) for probe in probes]


def _averages(probes: list[Probe]) -> Tensor:
    """The averages of probes of one kind, (probes, 4)."""
    first = probes[0]
    variance = _joined(probes, "variance")
    divisor = variance if first.divisor is None else _joined(probes, "divisor")
    plain = first.target_variance * variance / (divisor + first.eps)
    if first.weight is None:
        square = torch.ones_like(variance[:, :1])
    else:
        square = _joined(probes, "weight").square()
    output = plain * square if first.output is None else _joined(probes, "output")
    means = [values.mean(1) for values in (variance, plain, output)]
    return torch.stack([*means, square.mean(1).sqrt()], 1)


def _joined(probes: list[Probe], name: str) -> Tensor:
    return torch.stack([getattr(probe, name) for probe in probes]).reshape(len(probes), -1)
