"""What a norm measures in its forward while `normplug.watch` or a `VarianceLogger` watches it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Measured(NamedTuple):
    """What one forward of a norm measured."""

    input: Tensor  # the `_measure` of each channel, row or group
    output: Tensor  # the same of the output
    plain: Tensor | None  # with weight and bias undone; None: output / weight ** 2
    weight: Tensor | None  # a copy, with its offset; None without weight


class Probe:
    """What the latest forward of a norm measured, for `averages` to reduce.

    A forward stores its tensors as they are. On a GPU each small operation costs the host more than
    the GPU, so `averages` reduces all layers of a model together. A copy or a pickle of the layer
    has no probe.

    model: if set, only calls of this model in training, with gradients enabled, count.
    """

    measured: Measured | None = None  # None: the norm has not run
    # Turns back a stock layer that was converted only to be measured.
    revert: Callable[[nn.Module], None] | None = None

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def is_on(self) -> bool:
        """Whether it measures the call that now runs."""
        return self.model is None or (self.model.training and torch.is_grad_enabled())

    def store(self, layer: Any, x: Tensor, y: Tensor, measured: Measured) -> None:
        """Store what a call measured; a subclass measures more."""
        self.measured = measured

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class SharedProbe(Probe):
    """The probes of all that watch a layer, as one. It is replaced as a whole."""

    def __init__(
        self, probes: Sequence[Probe], revert: Callable[[nn.Module], None] | None
    ) -> None:
        super().__init__()
        self.probes = tuple(probes)
        self.revert = revert

    def is_on(self) -> bool:
        """Whether any of them measures the call that now runs."""
        return any(probe.is_on() for probe in self.probes)

    def store(self, layer: Any, x: Tensor, y: Tensor, measured: Measured) -> None:
        """Store what a call measured in each probe that is on."""
        for probe in self.probes:
            if probe.is_on():
                probe.store(layer, x, y, measured)


def is_only_measured(layer: nn.Module) -> bool:
    """Whether a layer is normplug's only while it is measured, and stock before and after."""
    probe: Probe | None = vars(layer).get("_probe")
    settings = vars(layer).get("_normplug")
    if probe is None or probe.revert is None or settings is None:
        return False
    # A layer keeps another mode that it got in the meantime.
    return bool(settings.target_variance == 1.0)


def without_probe(layer: nn.Module) -> nn.Module:
    """A shallow copy of a layer, as the layer is while nothing measures it."""
    twin = layer.__new__(type(layer))
    state: dict[str, Any] = vars(twin)
    state.update(vars(layer))
    # Only the twin is asked: another thread may stop measuring the layer.
    is_stock = is_only_measured(twin)
    probe = state.pop("_probe", None)
    if is_stock:
        state["_buffers"] = dict(state["_buffers"])  # `revert` may remove some
        probe.revert(twin)
    return twin


def deepcopied(layer: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of the class and the attributes of a layer, without a probe."""
    twin = without_probe(layer)
    memo[id(layer)] = twin
    vars(twin).update(copy.deepcopy(vars(twin), memo))
    return twin


def is_copied() -> bool:
    """Whether `copy` calls the `__reduce_ex__` that asks, and not a pickler."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "__reduce_ex__":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "copy"


def averages(probes: Sequence[Probe]) -> Tensor:
    """The average variances and the root mean square (RMS) of the weight of each probe's layer.

    Returns:
        (probes, 4), on the device of the first layer that has run: the variances of the input, of
            the output before weight and bias (channels with a weight of 0 left out), and of the
            output, and the RMS of the weight (1 without weight); nan if no forward has run.
    """
    results = {n: p.measured for n, p in enumerate(probes) if p.measured is not None}
    groups: dict[Any, list[int]] = {}
    for number, measured in results.items():
        kind = tuple(t if t is None else (t.shape, t.dtype, t.device) for t in measured)
        groups.setdefault(kind, []).append(number)
    device = next((measured.input.device for measured in results.values()), None)
    table = torch.full((len(probes), 4), torch.nan, device=device)
    for numbers in groups.values():
        table[numbers] = _averages([results[number] for number in numbers]).to(table)
    return table


def _averages(results: list[Measured]) -> Tensor:
    """The averages of results of one kind, (results, 4)."""
    inputs, outputs = _joined(results, "input"), _joined(results, "output")
    if results[0].weight is None:
        square = outputs.new_ones(len(results), 1)
    else:
        square = _joined(results, "weight").square()
    if results[0].plain is None:  # channels stand last
        plain = outputs / square.reshape(len(results), *(1,) * (outputs.dim() - 2), -1)
    else:
        plain = _joined(results, "plain")
    values = (inputs, plain, outputs, square)
    inputs, plain, outputs, square = (each.reshape(len(results), -1) for each in values)
    means = [inputs.mean(1), plain.nanmean(1), outputs.mean(1), square.mean(1).sqrt()]
    return torch.stack([each.to(means[0].dtype) for each in means], 1)


def _joined(results: list[Measured], name: str) -> Tensor:
    return torch.stack([getattr(measured, name) for measured in results])
