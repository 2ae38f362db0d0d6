"""LayerNorm's and RMSNorm's kernels as operators, for compilers: see `normplug._ops.library`.

The operators update the running statistics. Outside them, a compiler would need further kernels to
average the rows' statistics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normplug._ops.library import NormOperators
from normplug._ops.spec import LayerNormSpec, Route, Tensors
from normplug.reference import accumulator_dtype

_NUMBERS = (
    "int[] normalized_shape, float? momentum, float eps, float target_variance, "
    "ScalarType? autocast, str autocast_output"
)
_RMS_NUMBERS = (
    "int[] normalized_shape, float? momentum, float? eps, float target_variance, "
    "ScalarType? autocast, str autocast_output, float weight_offset, str? rounding"
)


class _LayerNorm(NormOperators):
    def kernels(self) -> Any:
        from normplug._ops.layer_norm.eager import KERNELS

        return KERNELS

    def spec(self, normalized_shape: list[int], *numbers: Any) -> LayerNormSpec:
        return LayerNormSpec(tuple(normalized_shape), *numbers)

    def fake(self, t: Tensors, spec: LayerNormSpec) -> tuple[Tensor, ...]:
        x, residual, weight, bias, input_bias, *_ = t
        present = (each for each in (x, residual, weight, bias, input_bias) if each is not None)
        acc = accumulator_dtype(*(each.dtype for each in present))
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        rows = math.prod(x.shape[: x.dim() - len(spec.normalized_shape)])
        stats = x.new_empty(2 * rows if spec.centred else rows, dtype=acc)
        output = spec.output_dtype(dtype, None if weight is None else weight.dtype)
        y = x.new_empty(x.shape, dtype=output)
        return (y, stats) if residual is None else (y, x.new_empty(x.shape, dtype=dtype), stats)

    def fake_dx(self, x: Tensor, spec: LayerNormSpec) -> Tensor:
        from normplug._ops.layer_norm.spacing import lies_dense, row_spacing

        row_dims = len(spec.normalized_shape)
        rows = math.prod(x.shape[: x.dim() - row_dims])
        spacing = row_spacing(x.shape, x.stride(), row_dims)
        is_dense = lies_dense(spacing, rows, math.prod(spec.normalized_shape))
        return x if is_dense else x.new_empty(x.shape)


class _RMSNorm(_LayerNorm):
    def spec(self, normalized_shape: list[int], *numbers: Any) -> LayerNormSpec:
        *shared, weight_offset, rounding = numbers
        own = {"centred": False, "weight_offset": weight_offset, "rounding": rounding}
        return LayerNormSpec(tuple(normalized_shape), *shared, **own)


PLAIN = _LayerNorm("layer_norm", _NUMBERS, ("stats",), has_total=False, updates_running=True)
ADD = _LayerNorm("add_layer_norm", _NUMBERS, ("stats",), has_total=True, updates_running=True)
RMS = _RMSNorm("rms_norm", _RMS_NUMBERS, ("stats",), has_total=False, updates_running=True)
ADD_RMS = _RMSNorm("add_rms_norm", _RMS_NUMBERS, ("stats",), has_total=True, updates_running=True)
_plain, _add = PLAIN.differentiable, ADD.differentiable
_rms, _add_rms = RMS.differentiable, ADD_RMS.differentiable


class _Compiled(Route):
    def __call__(self, t: Tensors, spec: LayerNormSpec) -> Any:
        x, residual, weight, bias, input_bias, mean, var, tracked = t
        shape, row_dims = x.shape, len(spec.normalized_shape)
        if _is_grid_of_rows(x, row_dims) and (
            residual is None or _is_grid_of_rows(residual, row_dims)
        ):
            x = x.flatten(0, -1 - row_dims)
            residual = None if residual is None else residual.flatten(0, -1 - row_dims)
        rest = (weight, bias, input_bias, mean, var, tracked)
        numbers: tuple[Any, ...] = (
            spec.normalized_shape,
            spec.momentum,
            spec.eps,
            spec.target_variance,
            spec.autocast,
            spec.autocast_output,
        )
        plain, add = _plain, _add
        if not spec.centred:
            plain, add, numbers = _rms, _add_rms, (*numbers, spec.weight_offset, spec.rounding)
        if residual is None:
            y, _ = plain(x, None, *rest, *numbers)
            return y.view(shape)
        y, total, _ = add(x, residual, *rest, *numbers)
        return y.view(shape), total.view(shape)


def _is_grid_of_rows(t: Tensor, row_dims: int) -> bool:
    """Whether t is contiguous, with rows in a grid of three or more dimensions: (N, H, W, C).

    Such a tensor is passed to the operator as a matrix. Inductor would take a 4-dimensional one for
    images with channels at dimension 1, save it for the backward in that layout, and copy it.
    """
    return t.dim() > row_dims + 2 and t.is_contiguous()


COMPILED = _Compiled()
