"""Gradients and running averages by the formulas of `normplug.reference`."""

from typing import NamedTuple

import torch
from torch import Tensor

from normplug.reference import accumulator_dtype, activation, rms_norm


class Gradients(NamedTuple):
    """The gradients of a norm's input, weight and bias."""

    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def gradients(norm, dy, x, weight, **options):
    """The gradients of a norm of the reference by autograd, for the gradient `dy` of its output.

    `options` are the norm's other arguments; `mean` and `var` are constants. dx has the dtype of
    `x`, dweight and dbias the accumulator's. For an RMSNorm dbias is 0.
    """
    acc = accumulator_dtype(x.dtype)
    shape = options.get("normalized_shape", x.shape[1:2])
    zeros = torch.zeros(shape, dtype=acc, device=x.device)
    inputs = {"x": x.to(acc), "weight": zeros + 1 if weight is None else weight.to(acc)}
    if norm is not rms_norm:
        inputs["bias"] = zeros
    elif weight is None:
        options["weight_offset"] = 0.0
    with torch.enable_grad():
        leaves = {name: each.detach().requires_grad_() for name, each in inputs.items()}
        y = norm(**leaves, **options)[0]
        dx, dweight, *dbias = torch.autograd.grad(y, list(leaves.values()), dy.to(acc))
    return Gradients(dx.to(x.dtype), dweight, *dbias or [zeros])


def activation_backward(dy, pre, name):
    """The gradient of `activation` at `pre`.

    At the kinks it is 0 for relu and relu6, and slope * dy for leaky_relu.
    """
    with torch.enable_grad():
        pre = pre.detach().requires_grad_()
        return torch.autograd.grad(activation(pre, name), pre, dy)[0]


def running_average(running, value, momentum, count):
    """The updated moving average: exponential, or over all `count` batches if momentum is None.

    running_next = (1 - m) * running + m * value        m = momentum, or 1 / count
    """
    m = 1.0 / count if momentum is None else momentum
    return (1.0 - m) * running + m * value
