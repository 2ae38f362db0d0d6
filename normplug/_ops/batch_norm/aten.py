"""BatchNorm by PyTorch's own kernels: any device, any dtype, differentiable twice.

The target variance folds into the weight: see `normplug._ops.weights`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import _activations
from normplug._ops import statistics
from normplug._ops.spec import BatchNormSpec, Route, Tensors
from normplug._ops.weights import scaled
from normplug._torch import interposed, transforms_active
from normplug.reference import accumulator_dtype, channel_dims


def batch_norm(t: Tensors, spec: BatchNormSpec) -> Tensor:
    """`functional.batch_norm`, then the pooling, for a call that has passed the checks."""
    like = None if spec.instance else t.running_mean
    x, weight = t.x, scaled_weight(t, spec.target_variance, like)
    if x.numel() == 0:
        y = empty_norm(x, weight, t.bias)
    elif spec.training and t.running_mean is not None and t.running_var is not None:
        y = _training(t, weight, spec)
    else:
        y = _aten(t, weight, t.running_mean, t.running_var, spec, 0.0)
    if t.residual is not None:
        # In place if possible: nothing else holds y, nor does the backward need it.
        same = t.residual.shape == y.shape and t.residual.dtype == y.dtype
        in_place = same and not transforms_active()
        y = y.add_(t.residual) if in_place else y + t.residual
    y = _activations.apply(spec.activation, y)
    return y if spec.pool is None else spec.pool(y)


class _Aten(Route):
    def __call__(self, t: Tensors, spec: BatchNormSpec) -> Tensor:
        return batch_norm(t, spec)


ATEN = _Aten()


def scaled_weight(t: Tensors, target_variance: float, like: Tensor | None) -> Tensor | None:
    """The weight of each channel times sqrt(target_variance).

    like: where there is neither weight nor bias, it gives the dtype, if it is not None.
    """
    like = like if t.bias is None else t.bias
    dtype = accumulator_dtype(t.x.dtype) if like is None else like.dtype
    return scaled(t.weight, target_variance, (t.x.shape[1],), dtype, t.x.device)


def _training(t: Tensors, weight: Tensor | None, spec: BatchNormSpec) -> Tensor:
    """Normalise by the batch's statistics, and update the running ones."""
    if spec.momentum is None:  # before the norm, which saves the last tensors for the backward
        x = t.x.detach()
        var, mean = torch.var_mean(x.to(accumulator_dtype(x.dtype)), channel_dims(x))
        statistics.update(t, None, mean, var)
        return _aten(t, weight, None, None, spec, 0.0)
    if t.tracked is not None:
        t.tracked.add_(1)
    return _aten(t, weight, t.running_mean, t.running_var, spec, spec.momentum)


def _aten(
    t: Tensors,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    spec: BatchNormSpec,
    momentum: float,
) -> Tensor:
    """ATen's operator; `torch.nn.functional.batch_norm` would refuse an eps of 0."""
    if spec.instance:  # it is contiguous, and takes statistics of any dtype
        return realigned(F.instance_norm(t.x, mean, var, weight, t.bias, False, 0.0, spec.eps))
    cudnn = torch.backends.cudnn.enabled
    y = torch.batch_norm(t.x, weight, t.bias, mean, var, spec.training, momentum, spec.eps, cudnn)
    return realigned(y)


def realigned(y: Tensor) -> Tensor:
    """Return y, which takes its gradient in its own strides if it is on the CPU.

    Where a dimension has size 1, PyTorch's CPU kernels (2.6 to 2.15) mistake the strides of one
    memory format for those of another, and return wrong gradients.
    """
    traced = torch.compiler.is_compiling() or interposed()
    if not traced and y.device.type == "cpu" and y.grad_fn is not None:
        y.grad_fn.register_prehook(partial(_in_strides, y.stride()))
    return y


def _in_strides(strides: tuple[int, ...], gradients: Any) -> Any:
    dy, *rest = gradients
    if dy is None or dy.stride() == strides:
        return None
    return (dy.new_empty_strided(dy.shape, strides).copy_(dy), *rest)


def empty_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm over channels of an input without values.

    All inputs stay in the graph, so that each gets a gradient (of zeros). The running statistics
    are not updated; ATen's kernels would fill them with nan.
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = x.clone() if weight is None else x * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)
