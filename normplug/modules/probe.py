"""What a norm measures in its forward while `normplug.watch` or a `VarianceLogger` watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Probe:
    """What the latest forward of a norm measured, for `averages` to reduce.

    A forward stores its tensors as they are. On a GPU each small operation costs the host more than
    the GPU, so `averages` reduces all layers of a model together.

    Attributes:
        input: the `_measure` of each channel, row or group of the input; None if no forward with
            data has run.
        plain: the `_measure` of the output, with weight and bias undone.
        output: the `_measure` of the output.
        weight: a copy of the weight, with its offset; None without weight.
    """

    input: Tensor | None = None
    plain: Tensor | None = None
    output: Tensor | None = None
    weight: Tensor | None = None

    def kind(self) -> tuple[Any, ...]:
        """A key: probes with equal keys can be reduced together."""
        tensors = (self.input, self.plain, self.output, self.weight)
        return tuple((t.shape, t.dtype, t.device) if t is not None else None for t in tensors)


def averages(probes: Sequence[Probe]) -> Tensor:
    """The average variances and the root mean square (RMS) of the weight of each probe's layer.

    Returns:
        (probes, 4), on the device of the first layer that has run: the variances of the input, of
            the output before weight and bias (channels with a weight of 0 left out), and of the
            output, and the RMS of the weight (1 without weight); nan if no forward has run.
    """
    groups: dict[Any, list[int]] = {}
    for number, probe in enumerate(probes):
        if probe.input is not None:
            groups.setdefault(probe.kind(), []).append(number)
    if not groups:
        return torch.full((len(probes), 4), torch.nan)
    tables = [_averages([probes[i] for i in group]) for group in groups.values()]
    device = tables[0].device
    rows = torch.cat([table.to(device, torch.float32) for table in tables])
    order = {number: row for row, number in enumerate(i for g in groups.values() for i in g)}
    missing = rows.new_full((1, 4), torch.nan)
    places = [order.get(number, len(rows)) for number in range(len(probes))]
    return torch.cat([rows, missing])[places]


def _averages(probes: list[Probe]) -> Tensor:
    """The averages of probes of one kind, (probes, 4)."""
    means = [_joined(probes, name) for name in ("input", "plain", "output")]
    if probes[0].weight is None:
        square = torch.ones_like(means[0][:, :1])
    else:
        square = _joined(probes, "weight").square()
    found = [means[0].mean(1), means[1].nanmean(1), means[2].mean(1), square.mean(1).sqrt()]
    return torch.stack([each.to(found[0].dtype) for each in found], 1)


def _joined(probes: list[Probe], name: str) -> Tensor:
    return torch.stack([getattr(probe, name) for probe in probes]).reshape(len(probes), -1)
