"""LayerNorm and RMSNorm by PyTorch's own kernels: any device, any dtype, differentiable twice.

The target variance folds into the weight: see `normplug._ops.weights`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normplug._ops import nested, statistics
from normplug._ops.spec import LayerNormSpec, Route, Tensors
from normplug._ops.weights import promoted, scaled
from normplug.reference import accumulator_dtype


def norm(t: Tensors, spec: LayerNormSpec) -> Any:
    """The norm of x, or (the norm of x + residual, x + residual), for a call that was checked."""
    total = t.x if t.residual is None else t.x + t.residual
    y = _layer_norm(total, t, spec) if spec.centred else _rms_norm(total, t, spec)
    return y if t.residual is None else (y, total)


class _Aten(Route):
    def __call__(self, t: Tensors, spec: LayerNormSpec) -> Any:
        return norm(t, spec)


ATEN = _Aten()


def _layer_norm(total: Tensor, t: Tensors, spec: LayerNormSpec) -> Tensor:
    h = total if t.input_bias is None else total + t.input_bias
    weight, bias, shape = t.weight, t.bias, spec.normalized_shape
    autocast = None if total.dtype == torch.float64 else spec.autocast
    if autocast is None:
        h, weight, bias = promoted(h, weight, bias)
    dtype = h.dtype if bias is None else bias.dtype
    weight = scaled(weight, spec.target_variance, shape, dtype, h.device)
    eps = spec.eps_of(total.dtype)
    y, mean, rstd = torch.native_layer_norm(h, shape, weight, bias, eps)
    if t.running_mean is not None and t.running_var is not None and total.numel() > 0:
        # Detached, not under no_grad: torch.export would make that a subgraph without outputs, and
        # an ExportedProgram with one cannot be saved.
        mean, rstd = mean.detach(), rstd.detach()
        mean, var = _row_statistics(h.detach(), len(shape), mean, rstd, eps)
        statistics.update(t, spec.momentum, mean, var)
    if autocast is None:
        return y.to(total.dtype)
    return y.to(autocast) if spec.autocast_output == "low" else y


def _rms_norm(total: Tensor, t: Tensors, spec: LayerNormSpec) -> Tensor:
    h, weight, shape = total, t.weight, spec.normalized_shape
    if t.running_var is not None and total.numel() > 0:
        rows = nested.rows(h.detach(), shape)
        moment = rows.to(accumulator_dtype(h.dtype)).square().mean()
        statistics.update(t, spec.momentum, None, moment)
    if spec.weight_offset or spec.rounding is not None:
        return composed_rms_norm(h, weight, spec)
    autocast, eps = None if total.dtype == torch.float64 else spec.autocast, spec.eps
    if autocast is None or spec.autocast_output == "low":
        h, weight, _ = promoted(h, weight, None)
        if h.dtype != total.dtype:
            eps = spec.eps_of(total.dtype)
    weight = scaled(weight, spec.target_variance, shape, h.dtype, h.device)
    y = torch.rms_norm(h, shape, weight, eps)
    if autocast is None:
        return y.to(total.dtype)
    return y.to(autocast) if spec.autocast_output == "low" else y


def composed_rms_norm(h: Tensor, weight: Tensor | None, spec: LayerNormSpec) -> Tensor:
    """An RMSNorm that torch has no operator for, with its library's order of operations."""
    dtype = None if weight is None else weight.dtype
    acc, dims = accumulator_dtype(h.dtype, dtype), tuple(range(-len(spec.normalized_shape), 0))
    rounded, output = spec.rounds_to(h.dtype, dtype), spec.output_dtype(h.dtype, dtype)
    eps, root = spec.eps_of(h.dtype), math.sqrt(spec.target_variance)
    h = h.to(acc)
    y = h * torch.rsqrt(h.square().mean(dims, keepdim=True) + eps)
    if weight is not None:
        weight = weight.to(acc)
        weight = weight + spec.weight_offset if spec.weight_offset else weight
    if root != 1.0:
        # With no rounding in between, the bits are those of a stock layer with this weight.
        if weight is None or rounded not in (None, acc):
            y = y * root
        else:
            weight = weight * root
    if rounded is not None:
        y = y.to(rounded).to(acc)
    if weight is not None:
        y = y * weight
    return y.to(output)


def _row_statistics(
    h: Tensor, row_dims: int, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of a row, averaged over all rows.

    The variance is computed from rstd, which reads the rows' statistics but not `h`. For
    half-precision input the CPU kernel returns rstd in half precision, too coarse for that, so both
    are computed from `h`. So they are for a nested tensor, which may have rows that belong to no
    component.
    """
    if rstd.dtype in (torch.float32, torch.float64) and not h.is_nested:
        return mean.mean(), statistics.variance_of(rstd, eps).mean()
    h = nested.rows(h, h.shape[-row_dims:])
    dims = tuple(range(-row_dims, 0))
    var, mean = torch.var_mean(h.to(accumulator_dtype(h.dtype)), dim=dims, correction=0)
    return mean.mean(), var.mean()
