"""LayerNorm by PyTorch's own kernels: any device, any dtype, differentiable twice.

The target variance costs no pass over the data, since it folds into the weight: see
`batch_norm.aten`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normplug._ops import nested, statistics
from normplug._ops.spec import LayerNormSpec, Route, Tensors
from normplug.reference import accumulator_dtype


def layer_norm(t: Tensors, spec: LayerNormSpec) -> Any:
    """`functional.layer_norm`, or `add_layer_norm` with a residual, of a call that was checked."""
    total = t.x if t.residual is None else t.x + t.residual
    y = _layer_norm(total, t, spec)
    return y if t.residual is None else (y, total)


class _Aten(Route):
    def __call__(self, t: Tensors, spec: LayerNormSpec) -> Any:
        return layer_norm(t, spec)


ATEN = _Aten()


def _layer_norm(total: Tensor, t: Tensors, spec: LayerNormSpec) -> Tensor:
    h = total if t.input_bias is None else total + t.input_bias
    weight, bias, shape = t.weight, t.bias, spec.normalized_shape
    autocast = None if total.dtype == torch.float64 else spec.autocast
    if autocast is None:
        h, weight, bias = promoted(h, weight, bias)
    if spec.target_variance != 1.0:
        root = math.sqrt(spec.target_variance)
        dtype = h.dtype if bias is None else bias.dtype
        if weight is None:
            weight = torch.full(shape, root, dtype=dtype, device=h.device)
        else:
            weight = weight * root
    y, mean, rstd = torch.native_layer_norm(h, shape, weight, bias, spec.eps)
    if t.running_mean is not None and t.running_var is not None and total.numel() > 0:
        # Detached, not under no_grad: that would be a subgraph for torch.export, and one of no
        # result, which an ExportedProgram cannot be saved with.
        mean, rstd = mean.detach(), rstd.detach()
        mean, var = _row_statistics(h.detach(), len(shape), mean, rstd, spec.eps)
        step = statistics.count_batch(t.running_mean, t.tracked, spec.momentum)
        statistics.move(t.running_mean, t.running_var, mean, var, step)
    if autocast is None:
        return y.to(total.dtype)
    return y.to(autocast) if spec.autocast_output == "low" else y


def _row_statistics(
    h: Tensor, row_dims: int, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The rows' mean of mean and of biased variance.

    The variance is read back from rstd: a pass over the rows' statistics and none over `h`, with
    an error of about 1e-7 * (var + eps). The CPU kernel gives half rstd for half input, which is
    too coarse for that: there both are taken from `h`. So they are for a nested tensor, which may
    have rows that belong to no component.
    """
    if rstd.dtype in (torch.float32, torch.float64) and not h.is_nested:
        return mean.mean(), rstd.pow(-2).mean().sub_(eps).clamp_min_(0)
    h = nested.rows(h, h.shape[-row_dims:])
    dims = tuple(range(-row_dims, 0))
    var, mean = torch.var_mean(h.to(accumulator_dtype(h.dtype)), dim=dims, correction=0)
    return mean.mean(), var.mean()


def promoted(
    h: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """All three in their common dtype, as not every device's kernel takes a mixture."""
    dtype = h.dtype
    for affine in (weight, bias):
        # Asked only where they differ: torch.export of torch 2.6 cannot save the question.
        if affine is not None and affine.dtype != dtype:
            dtype = torch.promote_types(dtype, affine.dtype)
    if dtype == h.dtype and (weight is None or weight.dtype == dtype):
        return h, weight, None if bias is None else bias.to(dtype)
    return (
        h.to(dtype),
        None if weight is None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
    )
