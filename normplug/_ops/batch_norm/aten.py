"""BatchNorm by PyTorch's own kernels: any device, any dtype, differentiable twice.

The target variance folds into the weight: see `normplug._ops.weights`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from normplug import _activations
from normplug._ops import statistics
from normplug._ops.spec import BatchNormSpec, Route, Tensors
from normplug._ops.weights import scaled
from normplug._torch import transforms_active
from normplug.reference import accumulator_dtype


def batch_norm(t: Tensors, spec: BatchNormSpec) -> Tensor:
    """`functional.batch_norm`, then the pooling, for a call that has passed the checks."""
    x, weight = t.x, scaled_weight(t, spec.target_variance)
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


def scaled_weight(t: Tensors, target_variance: float) -> Tensor | None:
    """The weight of each channel times sqrt(target_variance)."""
    like = t.bias if t.bias is not None else t.running_mean
    dtype = accumulator_dtype(t.x.dtype) if like is None else like.dtype
    return scaled(t.weight, target_variance, (t.x.shape[1],), dtype, t.x.device)


def _training(t: Tensors, weight: Tensor | None, spec: BatchNormSpec) -> Tensor:
    """Normalise by the batch's statistics, and update the running ones."""
    assert t.running_mean is not None
    assert t.running_var is not None
    step = statistics.count_batch(t.running_mean, t.tracked, spec.momentum)
    if not isinstance(step, Tensor):
        return _aten(t, weight, t.running_mean, t.running_var, spec, step)
    # With momentum=1, the same kernel writes the batch's statistics to these buffers.
    mean, var = torch.zeros_like(t.running_mean), torch.zeros_like(t.running_var)
    y = _aten(t, weight, mean, var, spec, 1.0)
    statistics.update(t.running_mean, t.running_var, mean, var, step)
    return y


def _aten(
    t: Tensors,
    weight: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    spec: BatchNormSpec,
    momentum: float,
) -> Tensor:
    """ATen's operator; `torch.nn.functional.batch_norm` would refuse an eps of 0."""
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(
        t.x, weight, t.bias, mean, var, spec.training, momentum, spec.eps, cudnn
    )


def empty_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm over channels of an input without values.

    All inputs stay in the graph, so that each gets a gradient (of zeros). The running statistics
    are not updated; ATen's kernels would fill them with nan.
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = x.clone() if weight is None else x * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)
