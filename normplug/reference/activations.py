"""The activations after a norm, and their derivatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def activation(pre: Tensor, name: str | tuple[str, float] | None) -> Tensor:
    """Apply an activation to z = `pre`.

    relu: max(z, 0).  relu6: min(max(z, 0), 6).  hardswish: z * relu6(z + 3) / 6.
    silu: z * sigmoid(z).  gelu: z * Phi(z), exact.  (leaky_relu, slope): z, or slope * z below 0;
    the default slope is 0.01.  None: z.
    """
    if name is None:
        return pre
    name, below = _with_slope(name)
    if name == "leaky_relu":
        return torch.where(pre > 0, pre, below * pre)
    if name == "relu":
        return pre.clamp_min(0)
    if name == "silu":
        return pre * torch.sigmoid(pre)
    if name == "relu6":
        return pre.clamp(0, 6)
    if name == "hardswish":
        return pre * (pre + 3).clamp(0, 6) / 6
    return pre * _normal_cdf(pre)


def activation_backward(dy: Tensor, pre: Tensor, name: str | tuple[str, float] | None) -> Tensor:
    """The gradient of `activation` at `pre`.

    At the kinks it is 0 for relu and relu6, and slope * dy for leaky_relu, as in torch.
    """
    if name is None:
        return dy
    name, below = _with_slope(name)
    if name == "leaky_relu":
        return torch.where(pre > 0, dy, below * dy)
    if name == "relu":
        return dy * (pre > 0)
    if name == "silu":
        gate = torch.sigmoid(pre)
        return dy * gate * (1 + pre * (1 - gate))
    if name == "relu6":
        return dy * ((pre > 0) & (pre < 6))
    if name == "hardswish":
        slope = torch.where(pre < 3, pre / 3 + 0.5, 1.0)
        return dy * torch.where(pre > -3, slope, 0.0)
    density = torch.exp(-0.5 * pre * pre) / math.sqrt(2 * math.pi)
    return dy * (_normal_cdf(pre) + pre * density)


def _with_slope(name: str | tuple[str, float]) -> tuple[str, float]:
    return name if isinstance(name, tuple) else (name, 0.01)


def _normal_cdf(z: Tensor) -> Tensor:
    return 0.5 * (1.0 + torch.erf(z / math.sqrt(2.0)))
