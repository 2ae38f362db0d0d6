"""Test the effects that `doctor` claims on a copy of the model, before it claims them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normplug._batches import Reader
from normplug._restore import duplicate, seeded
from normplug._swap.inventory import Inventory
from normplug._swap.layer_modes import by_depth
from normplug._swap.swap import swap
from normplug._torch import tree_leaves

# Differences that rounding and eps explain, relative to the largest value.
_LAYER = 1e-4  # of one layer's output
_MODEL = 1e-3  # of a model's output and gradients, which many layers follow
# A gradient that is this much smaller than the largest is rounding.
_NOISE = 1e-2


class _Observed(NamedTuple):
    """What one training step computes."""

    layer: list[Tensor]  # the outputs of one layer
    outputs: list[Tensor]  # of the model
    gradients: dict[str, Tensor]  # parameter -> gradient

    def has_outputs_of(self, other: _Observed) -> bool:
        """Whether the outputs of both are the same but for rounding."""
        in_layer = _are_close(self.layer, other.layer, _LAYER)
        return in_layer and _are_close(self.outputs, other.outputs, _MODEL)

    def has_gradients_of(self, other: _Observed) -> bool:
        """Whether the other gradients are the same; those of missing parameters are rounding."""
        scale = max(map(_largest, other.gradients.values()), default=0.0)
        for name, expected in other.gradients.items():
            if name in self.gradients:
                off = _largest(expected - self.gradients[name])
                allowed = _MODEL * max(_largest(expected), _NOISE * scale)
            else:
                off = _largest(expected)
                allowed = _MODEL * scale
            if not off <= allowed:  # nan is not
                return False
        return True


class Trials:
    """Tries changes on a copy of a model, and compares training steps of one batch.

    Args:
        reader: reads for the copy.
        batch: the batch of all steps.
        modes: module of the copy -> its `training` in a training step.
    """

    def __init__(self, reader: Reader, batch: Any, modes: dict[nn.Module, bool]) -> None:
        self._reader = reader
        self._batch = batch
        self._modes = modes
        self._inventory = Inventory(reader.model)

    def is_bias_without_effect(self, path: str, norm: str) -> bool:
        """Whether the norm's output and the model's stay if the bias at a path is 0."""
        bias: Any = self._inventory.modules[path].bias
        before = self._observed(norm)
        value = bias.detach().clone()
        with torch.no_grad():
            bias.zero_()
        try:
            after = self._observed(norm)
        finally:
            with torch.no_grad():
                bias.copy_(value)
        return after.has_outputs_of(before)

    def is_norm_without_effect(self, path: str, following: str) -> bool:
        """Whether an Identity for a norm changes no output and no gradient.

        The norm's own parameters must have no gradient: otherwise, training uses them.
        """
        norm = self._inventory.modules[path]
        before = self._observed(following, backward=True)
        self._replace(norm, nn.Identity())
        try:
            after = self._observed(following, backward=True)
        except RuntimeError:  # the model needs more of the norm than its output
            return False
        finally:
            self._replace(norm, norm)
        return after.has_outputs_of(before) and after.has_gradients_of(before)

    def swapped_by_depth(self) -> nn.Module | None:
        """Another copy, swapped by depth; None if the model has no such depth."""
        model = duplicate(self._reader.model)
        for module, twin in zip(
            self._reader.model.modules(), model.modules(), strict=True
        ):
            twin.training = self._modes[module]
        try:
            return swap(model, by_depth("1/l"), preserve_output=False, backend="torch")
        except ValueError:  # its blocks are ambiguous
            return None

    def _replace(self, module: nn.Module, by: nn.Module) -> None:
        for name in self._inventory.names[module]:
            parent, _, last = name.rpartition(".")
            self._inventory.modules[parent]._modules[last] = by

    def _observed(self, path: str, backward: bool = False) -> _Observed:
        """Run a training step; path: the layer whose output is recorded."""
        model = self._reader.model
        for module, training in self._modes.items():
            module.training = training
        of_layer: list[Tensor] = []

        def record(layer: nn.Module, inputs: Any, output: Any) -> None:
            of_layer.extend(y.detach() for y in _floats(output))

        hook = self._inventory.modules[path].register_forward_hook(record)
        try:
            with seeded(), torch.set_grad_enabled(backward):
                outputs = _floats(self._reader.run(self._batch))
                loss = _weighted_sum(outputs)
                if loss.requires_grad:
                    loss.backward()
        finally:
            hook.remove()
        named = model.named_parameters()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        model.zero_grad()
        return _Observed(of_layer, [y.detach() for y in outputs], gradients)


def _floats(output: Any) -> list[Tensor]:
    """The floating-point tensors in an output."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _weighted_sum(outputs: list[Tensor]) -> Tensor:
    """A sum with different weights: that of plain squares is constant behind a norm."""
    total = torch.zeros(())
    for y in outputs:
        if y.requires_grad:
            weight = torch.arange(y.numel(), device=y.device).cos().reshape(y.shape)
            total = total.to(y.device) + (y.float() * weight).mean()
    return total


def _are_close(some: list[Tensor], others: list[Tensor], tolerance: float) -> bool:
    """Whether rounding explains every difference, relative to the largest value of a tensor."""
    if not some or [x.shape for x in some] != [x.shape for x in others]:
        return False
    for x, y in zip(some, others, strict=True):
        allowed = max(tolerance, 4 * torch.finfo(x.dtype).eps) * _largest(x)
        if not _largest(x.double() - y.double()) <= allowed:  # nan is not
            return False
    return True


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
