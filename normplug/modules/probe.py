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
    """

    input: Tensor | None = None  # the `_measure` of each channel, row or group; None: has not run
    output: Tensor | None = None  # the same of the output
    plain: Tensor | None = None  # with weight and bias undone; None: output / weight ** 2
    weight: Tensor | None = None  # a copy, with its offset; None without weight

    def look(self, layer: Any, x: Tensor, y: Tensor) -> None:
        """Called with input and output after each measurement; a subclass measures more."""


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
            tensors = (probe.input, probe.plain, probe.output, probe.weight)
            kind = tuple(t if t is None else (t.shape, t.dtype, t.device) for t in tensors)
            groups.setdefault(kind, []).append(number)
    device = next((p.input.device for p in probes if p.input is not None), None)
    found = torch.full((len(probes), 4), torch.nan, device=device)
    for group in groups.values():
        found[group] = _averages([probes[i] for i in group]).to(found)
    return found


def _averages(probes: list[Probe]) -> Tensor:
    """The averages of probes of one kind, (probes, 4)."""
    inputs, outputs = _joined(probes, "input"), _joined(probes, "output")
    if probes[0].weight is None:
        square = outputs.new_ones(len(probes), 1)
    else:
        square = _joined(probes, "weight").square()
    if probes[0].plain is None:  # channels stand last
        plain = outputs / square.reshape(len(probes), *(1,) * (outputs.dim() - 2), -1)
    else:
        plain = _joined(probes, "plain")
    values = (inputs, plain, outputs, square)
    inputs, plain, outputs, square = (each.reshape(len(probes), -1) for each in values)
    found = [inputs.mean(1), plain.nanmean(1), outputs.mean(1), square.mean(1).sqrt()]
    return torch.stack([each.to(found[0].dtype) for each in found], 1)


def _joined(probes: list[Probe], name: str) -> Tensor:
    return torch.stack([getattr(probe, name) for probe in probes])
