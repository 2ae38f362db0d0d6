"""GroupNorm's kernels as operators, for compilers: see `normplug._ops.library`.

Torch operations outside the operator update the running statistics, as for BatchNorm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normplug import _activations
from normplug._layouts import dense
from normplug._ops.group_norm.updates import moments, update_running
from normplug._ops.library import NormOperators
from normplug._ops.spec import GroupNormSpec, Route, Tensors
from normplug.reference import accumulator_dtype

_NUMBERS = (
    "int groups, float eps, float target_variance, str? activation, float slope, "
    "ScalarType? autocast, str autocast_output"
)


class _GroupNorm(NormOperators):
    def kernels(self) -> Any:
        from normplug._ops.group_norm.eager import KERNELS

        return KERNELS

    def spec(self, *numbers: Any) -> GroupNormSpec:
        groups, eps, target_variance, name, slope, *autocast = numbers
        activation = _activations.joined(name, slope)
        return GroupNormSpec(groups, eps, target_variance, activation, *autocast)

    def fake(self, t: Tensors, spec: GroupNormSpec) -> tuple[Tensor, ...]:
        present = (each.dtype for each in (t.x, t.weight, t.bias) if each is not None)
        stats = t.x.new_empty(2 * t.x.shape[0] * spec.groups, dtype=accumulator_dtype(*present))
        return torch.empty_like(dense(t.x), dtype=spec.output_dtype(t.x.dtype)), stats

    def fake_dx(self, x: Tensor, spec: GroupNormSpec) -> Tensor:
        return dense(x)


PLAIN = _GroupNorm("group_norm", _NUMBERS, ("stats",), has_total=False, updates_running=False)
_plain = PLAIN.differentiable


class _Compiled(Route):
    def __call__(self, t: Tensors, spec: GroupNormSpec) -> Tensor:
        numbers = (
            spec.groups,
            spec.eps,
            spec.target_variance,
            *_activations.parts(spec.activation),
            spec.autocast,
            spec.autocast_output,
        )
        y, stats = _plain(t.x, None, t.weight, t.bias, None, None, None, None, *numbers)
        if t.running_mean is not None:
            update_running(t, spec, *moments(t, spec, stats))
        return y


COMPILED = _Compiled()
