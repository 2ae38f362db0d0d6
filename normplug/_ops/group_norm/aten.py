"""GroupNorm and InstanceNorm by PyTorch's own kernels: any device, differentiable twice.

The target variance folds into the weight: see `normplug._ops.weights`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import _activations
from normplug._ops.batch_norm.aten import empty_norm, realigned, scaled_weight
from normplug._ops.group_norm.updates import update_running
from normplug._ops.spec import GroupNormSpec, Route, Tensors
from normplug._ops.weights import promoted, scaled
from normplug.reference import accumulator_dtype


def group_norm(t: Tensors, spec: GroupNormSpec) -> Tensor:
    """`functional.group_norm`, or `instance_norm`, for a call that has passed the checks."""
    y = _instance_norm(t, spec) if spec.instance else _group_norm(t, spec)
    return _activations.apply(spec.activation, y)


class _Aten(Route):
    def __call__(self, t: Tensors, spec: GroupNormSpec) -> Tensor:
        return group_norm(t, spec)


ATEN = _Aten()


def _instance_norm(t: Tensors, spec: GroupNormSpec) -> Tensor:
    x, weight = t.x, scaled_weight(t, spec.target_variance, None)
    if x.numel() == 0:
        return empty_norm(x, weight, t.bias)
    momentum = 0.0 if spec.momentum is None else spec.momentum
    running = (t.running_mean, t.running_var)
    return realigned(F.instance_norm(x, *running, weight, t.bias, True, momentum, spec.eps))


def _group_norm(t: Tensors, spec: GroupNormSpec) -> Tensor:
    x, weight, bias = t.x, t.weight, t.bias
    autocast = None if x.dtype == torch.float64 else spec.autocast
    if autocast is None:
        x, weight, bias = promoted(x, weight, bias)
    dtype = x.dtype if bias is None else bias.dtype
    weight = scaled(weight, spec.target_variance, (x.shape[1],), dtype, x.device)
    y = F.group_norm(x, spec.groups, weight, bias, spec.eps)
    if t.running_mean is not None and x.numel() > 0:
        _watch(t, spec)
    if autocast is None:
        return y.to(t.x.dtype)
    return y.to(autocast) if spec.autocast_output == "low" else y


def _watch(t: Tensors, spec: GroupNormSpec) -> None:
    x = t.x.detach()
    rows = x.to(accumulator_dtype(x.dtype)).reshape(x.shape[0], spec.groups, -1)
    var, mean = torch.var_mean(rows, dim=-1, correction=0)
    update_running(t, spec, mean, var)
