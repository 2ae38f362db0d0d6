"""The route over PyTorch's own kernels: any device, any dtype, differentiable twice.

The target variance costs no pass over the data, since it folds into the weight:
weight * sqrt(tv) * xhat + bias is the stock norm with weight * sqrt(tv) in place of weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normplug._ops import nested
from normplug._torch import transforms_active
from normplug.reference import accumulator_dtype

# Asked here, once: torch.compile of torch 2.6 cannot trace the question.
_AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)
# What can be fused, by the name it has in `functional`: as a function and as a module.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
}
MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.ReLU6: "relu6",
    nn.Hardswish: "hardswish",
}
# The attributes that decide what such a module computes, and the values that go with its name.
_SETTINGS: dict[type[nn.Module], tuple[tuple[str, Any], ...]] = {
    nn.GELU: (("approximate", "none"),),
    nn.ReLU6: (("min_val", 0.0), ("max_val", 6.0)),
}


def activation_of(module: nn.Module) -> str | None:
    """The name of the activation that a module computes as it is set now, or None."""
    cls = type(module)
    for name, value in _SETTINGS.get(cls, ()):
        if getattr(module, name) != value:
            return None
    return MODULES.get(cls)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    activation: str | None,
) -> Tensor:
    """`functional.batch_norm` after its checks."""
    if target_variance != 1.0:
        like = bias if bias is not None else running_mean
        dtype = accumulator_dtype(x.dtype) if like is None else like.dtype
        weight = _scaled(weight, (x.shape[1],), x, dtype, target_variance)
    if x.numel() == 0:
        y = _empty_batch_norm(x, weight, bias)
    elif training and running_mean is not None and running_var is not None:
        step = count_batch(running_mean, num_batches_tracked, momentum)
        if isinstance(step, Tensor):
            y = _cumulative_batch_norm(x, running_mean, running_var, weight, bias, step, eps)
        else:
            y = F.batch_norm(x, running_mean, running_var, weight, bias, True, step, eps)
    else:
        y = F.batch_norm(x, running_mean, running_var, weight, bias, training, 0.0, eps)
    if residual is not None:
        # y is nobody else's, and not kept for the backward.
        same = residual.shape == y.shape and residual.dtype == y.dtype
        in_place = same and not transforms_active()
        y = y.add_(residual) if in_place else y + residual
    return y if activation is None else ACTIVATIONS[activation](y)


class Pool(NamedTuple):
    """Max pooling over two dimensions, height first, with the arguments of `F.max_pool2d`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool

    def __call__(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, ceil_mode=self.ceil_mode)

    def is_proper(self) -> bool:
        """Whether torch takes it: then every window has a value."""
        pads = zip(self.padding, self.kernel, strict=True)
        return min(self.kernel + self.stride) > 0 and all(0 <= 2 * p <= k for p, k in pads)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output; sizes may be symbols."""
        return self._length(height, 0), self._length(width, 1)

    def _length(self, size: int, axis: int) -> int:
        # No slice of self: torch.compile of torch 2.6 cannot follow one.
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        past = size + 2 * padding - kernel
        if not self.ceil_mode:
            return past // stride + 1
        length = -(-past // stride) + 1
        # The last window starts in the image or the padding before it.
        return length - 1 if (length - 1) * stride >= size + padding else length


def batch_norm_max_pool(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    pool: Pool,
) -> Tensor:
    """`functional._batch_norm_max_pool` after its checks."""
    y = batch_norm(
        x, running_mean, running_var, weight, bias, None, num_batches_tracked, training, momentum,
        eps, target_variance, "relu",
    )  # fmt: skip
    return pool(y)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    normalized_shape: tuple[int, ...],
    momentum: float | None,
    eps: float,
    target_variance: float,
    low_autocast: bool,
) -> Tensor:
    """`functional.layer_norm` after its checks."""
    h = x if input_bias is None else x + input_bias
    autocast = autocast_dtype(x.device.type, x.dtype)
    if autocast is None:
        h, weight, bias = _promoted(h, weight, bias)
    if target_variance != 1.0:
        dtype = h.dtype if bias is None else bias.dtype
        weight = _scaled(weight, normalized_shape, h, dtype, target_variance)
    y, mean, rstd = torch.native_layer_norm(h, normalized_shape, weight, bias, eps)
    if running_mean is not None and running_var is not None and x.numel() > 0:
        # Detached, not under no_grad: that would be a subgraph for torch.export, and one of no
        # result, which an ExportedProgram cannot be saved with.
        mean, rstd = mean.detach(), rstd.detach()
        mean, var = _row_statistics(h.detach(), len(normalized_shape), mean, rstd, eps)
        step = count_batch(running_mean, num_batches_tracked, momentum)
        running_mean.lerp_(mean.to(running_mean), step)
        running_var.lerp_(var.to(running_var), step)
    if autocast is None:
        return y.to(x.dtype)
    return y.to(autocast) if low_autocast else y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """`functional.add_layer_norm` after its checks; settings are those of `layer_norm`."""
    total = x + residual
    running = (running_mean, running_var, num_batches_tracked)
    return layer_norm(total, weight, bias, None, *running, *settings), total


def autocast_dtype(device: str, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that autocast is set to on a device; None where it leaves `dtype` alone."""
    known = device in _AUTOCAST_DEVICES and dtype != torch.float64
    return torch.get_autocast_dtype(device) if known and torch.is_autocast_enabled(device) else None


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


def output_dtype(x: Tensor, dtype: torch.dtype, low_autocast: bool) -> torch.dtype:
    """What the kernels return: `dtype` or, under autocast, what `autocast_output` says."""
    autocast = autocast_dtype(x.device.type, dtype)
    if autocast is None:
        return dtype
    return autocast if low_autocast else torch.float32


def count_batch(running: Tensor, count: Tensor | None, momentum: float | None) -> float | Tensor:
    """Count one more batch; return the weight that it gets in the running statistics.

    As a tensor where momentum is None: torch.nn makes it a float, for which the host has to wait
    for the GPU.
    """
    if count is not None:
        count.add_(1)
        if momentum is None:
            return count.to(running).reciprocal()
    assert momentum is not None
    return momentum


def _scaled(
    weight: Tensor | None, shape: tuple[int, ...], x: Tensor, dtype: torch.dtype, tv: float
) -> Tensor:
    if weight is None:
        return torch.full(shape, math.sqrt(tv), dtype=dtype, device=x.device)
    return weight * math.sqrt(tv)


def _cumulative_batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    step: Tensor,
    eps: float,
) -> Tensor:
    # momentum=1 into empty buffers reads the batch's statistics off the same kernel.
    mean, var = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    y = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=eps)
    running_mean.lerp_(mean, step)
    running_var.lerp_(var, step)
    return y


def _empty_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    # Keeps every input in the graph, so that each gets a gradient (of zeros), and leaves the
    # running statistics alone, which ATen's kernels would fill with nan.
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = x.clone() if weight is None else x * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


def _promoted(
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
