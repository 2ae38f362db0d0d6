"""Convolutions next to a norm whose gradients can cost less than PyTorch's.

Both keep the size of their input: stride 1, no dilation, no bias.

- Depthwise: the gradient of the input is the convolution of dy with the flipped weight. In the
  cases of `FLIPPED`, PyTorch's own gradient takes up to twice the time of the forward.
- 1x1, at the start of a residual block: x also goes to the shortcut. The gradient of x is a matrix
  product, added in place to the shortcut's gradient. Otherwise autograd reads both and writes the
  sum.

The autograd node is written in C++ (`native/convolutions.h`), since one in Python would cost the
host more than the GPU gains. Without it, and for calls that it refuses, PyTorch's convolution runs.
Compilers get an operator for the first kind. They fuse sums of gradients themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normplug import native
from normplug._ops.spec import autocast_dtype
from normplug._torch import has_hooks, is_exporting

# (dtype, whether the input is channels_last) -> the sizes of depthwise kernels for which the
# flipped convolution is faster than PyTorch's gradient. On an H100 and an H200, torch 2.11.
FLIPPED = {
    (torch.bfloat16, True): (3, 5, 7),
    (torch.bfloat16, False): (3, 7),
    (torch.float16, True): (7,),
    (torch.float16, False): (7,),
    (torch.float32, False): (3, 7),
}
# The dtypes in which the matrix product is as fast as PyTorch's gradient.
ACCUMULATED = (torch.float16, torch.bfloat16)
# The types of device for which these were measured.
DEVICES = ("cuda",)

_aten = torch.ops.aten
_library = torch.library.Library("normplug", "FRAGMENT")


def is_depthwise(layer: nn.Conv2d) -> bool:
    """Whether each channel has a kernel of its own."""
    return 1 < layer.groups == layer.in_channels == layer.out_channels


def refusal(layer: Any, with_bias: bool = False) -> str:
    """Why the gradients of a convolution are left to PyTorch, whatever its input; "" if not.

    with_bias: whether the layer may have a bias, because the caller adds it.
    """
    if type(layer) is not nn.Conv2d:
        return f"a {type(layer).__name__}"
    if has_hooks(layer):
        return "hooks"
    height, width = layer.kernel_size
    if layer.stride != (1, 1):
        return f"stride={layer.stride}"
    if layer.dilation != (1, 1):
        return f"dilation={layer.dilation}"
    if layer.padding != (height // 2, width // 2):
        return f"padding={layer.padding!r}"
    if layer.padding_mode != "zeros":
        return f"padding_mode={layer.padding_mode!r}"
    if layer.bias is not None and not with_bias:
        return "a bias"
    if is_depthwise(layer):
        sizes = FLIPPED[torch.bfloat16, True]
        is_kind = height == width and height in sizes
    else:
        is_kind = height == width == layer.groups == 1
    return "" if is_kind else f"kernel_size={layer.kernel_size}, groups={layer.groups}"


def depthwise(layer: nn.Conv2d, x: Any) -> Tensor | None:
    """Apply a depthwise convolution without its bias; None if PyTorch has to.

    layer: a convolution that `refusal` may refuse.
    """
    if not _is_measured(x) or not is_depthwise(layer) or refusal(layer, with_bias=True):
        return None
    if is_exporting():
        return None
    if torch.compiler.is_compiling():
        y: Tensor = torch.ops.normplug.depthwise_convolution(x, layer.weight)
        return y
    if not _is_flipped(x, layer.weight):
        return None
    return native.path.convolve(x, layer.weight, False)


def fork(layer: nn.Conv2d, x: Any) -> tuple[Tensor, Tensor] | None:
    """Apply a 1x1 convolution; return y, and x for the shortcut. None if PyTorch has to.

    The results are those of one autograd node. layer: a convolution that `refusal` may refuse.
    """
    if torch.compiler.is_compiling() or not _is_measured(x):
        return None
    dtype = autocast_dtype(x) or x.dtype
    if dtype not in ACCUMULATED or dtype != x.dtype:
        return None
    if not x.is_contiguous(memory_format=torch.channels_last):
        return None
    if is_depthwise(layer) or refusal(layer):
        return None
    return native.path.convolve(x, layer.weight, True)


def _is_measured(x: Any) -> bool:
    """Whether an input is a batch of images on a device of `DEVICES`."""
    return isinstance(x, Tensor) and x.device.type in DEVICES and x.dim() == 4


def _is_flipped(x: Tensor, weight: Tensor) -> bool:
    """Whether the flipped convolution is faster than PyTorch's gradient."""
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    dtype = autocast_dtype(x) or x.dtype
    return weight.shape[-1] in FLIPPED.get((dtype, is_last), ())


def _settings(weight: Tensor) -> tuple[Any, ...]:
    """What `aten.convolution` takes after the bias, for a depthwise convolution."""
    height, width = weight.shape[2:]
    padding = [height // 2, width // 2]
    return [1, 1], padding, [1, 1], False, [0, 0], weight.shape[0]


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Any:
        ctx.save_for_backward(x, weight)
        return _aten.convolution(x, weight, None, *_settings(weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        settings = _settings(weight)
        dx = _aten.convolution(dy, weight.flip(2, 3), None, *settings)
        mask = [False, True, False]
        _, dweight, _ = _aten.convolution_backward(dy, x, weight, None, *settings, mask)
        return dx, dweight


def _call(x: Tensor, weight: Tensor) -> Tensor:
    if not _is_flipped(x, weight):
        padding = weight.shape[-1] // 2
        return torch.conv2d(x, weight, padding=padding, groups=weight.shape[0])
    dtype = autocast_dtype(x)
    if dtype is not None:
        x = x.to(dtype)
        weight = weight.to(dtype)
    y: Tensor = _Depthwise.apply(x, weight)
    return y


_library.define(
    "depthwise_convolution(Tensor x, Tensor weight) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# A composite operator: compilers see what it is made of.
_library.impl("depthwise_convolution", _call, "CompositeImplicitAutograd")
