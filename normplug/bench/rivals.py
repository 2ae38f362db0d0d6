"""The stock norms of other packages, measured if they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normplug._extras import needs
from normplug.bench.nets import EXTRAS
from normplug.bench.op import Function


class Package(NamedTuple):
    """A package with norms: the name to import, and the name to install."""

    module: str
    distribution: str


PACKAGES = {  # by provider
    "liger": Package("liger_kernel", "liger_kernel"),
    "flaggems": Package("flag_gems", "flag_gems"),
    "quack": Package("quack", "quack-kernels"),
    "timm": Package("timm", "timm"),
}
DISTRIBUTIONS = tuple(package.distribution for package in PACKAGES.values())


def missing(providers: Iterable[str]) -> dict[str, Package]:
    """The providers whose package is not installed."""
    found = {name: PACKAGES[name] for name in providers if name in PACKAGES}
    return {name: package for name, package in found.items() if not find_spec(package.module)}


def liger_layer_norm(eps: float) -> Function:
    """LayerNorm of Liger-Kernel."""
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return LigerLayerNormFunction.apply(x, weight, bias, eps)

    return layer_norm


def liger_group_norm(eps: float, groups: Callable[[Tensor], int]) -> Function:
    """GroupNorm of Liger-Kernel, which takes contiguous input with one spatial dimension."""
    from liger_kernel.ops.group_norm import LigerGroupNormFunction

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.flatten(2)
        numbers = (x.shape[1], groups(x), eps)
        return LigerGroupNormFunction.apply(rows, weight, bias, *numbers).view(x.shape)

    return group_norm


def liger_rms_norm(eps: float) -> Function:
    """RMSNorm of Liger-Kernel, which rounds once, as torch's does."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "gemma", False)

    return rms_norm


def liger_add_rms_norm(eps: float) -> Function:
    """Addition and RMSNorm of Liger-Kernel."""
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return LigerFusedAddRMSNormFunction.apply(x, residual, weight, eps, 0.0, "gemma", False)

    return add_rms_norm


def liger_llama(net: nn.Module) -> nn.Module:
    """Replace only the RMSNorms of the Llamas in `net` by Liger-Kernel's, in place.

    Raises:
        MissingPackage: Liger-Kernel or transformers is not installed.
        ValueError: there is no Llama.
    """
    with needs("normplug.bench models, arm liger,", EXTRAS["transformers"]):
        modeling: Any = import_module("transformers.models.llama.modeling_llama")
    with needs("normplug.bench models, arm liger,", EXTRAS["liger_kernel"]):
        from liger_kernel.transformers import apply_liger_kernel_to_llama
    llamas = [each for each in net.modules() if isinstance(each, modeling.LlamaForCausalLM)]
    if not llamas:
        raise ValueError("normplug.bench models: the arm liger is for a LlamaForCausalLM only.")
    stock = modeling.LlamaRMSNorm
    others = ("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    try:
        for llama in llamas:
            apply_liger_kernel_to_llama(rms_norm=True, model=llama, **dict.fromkeys(others, False))
    finally:  # Liger also replaces the class, for Llamas that are built later
        modeling.LlamaRMSNorm = stock
    return net


def flaggems_layer_norm(eps: float) -> Function:
    """LayerNorm of FlagGems, called directly: enabling FlagGems would replace eager's operators."""
    import flag_gems

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, mean, rstd = flag_gems.layer_norm(x, x.shape[-1:], weight, bias, eps)
            ctx.save_for_backward(x, mean, rstd, weight, bias)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            x, *others = ctx.saved_tensors
            return flag_gems.layer_norm_backward(dy, x, x.shape[-1:], *others, [True] * 3)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return LayerNorm.apply(x, weight, bias)

    return layer_norm


def flaggems_rms_norm(eps: float) -> Function:
    """RMSNorm of FlagGems."""
    import flag_gems

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return flag_gems.rms_norm(x, x.shape[-1:], weight, eps)

    return rms_norm


def quack_layer_norm(eps: float) -> Function:
    """LayerNorm of QuACK, from its two kernels, which take only float32 parameters."""
    from quack.rmsnorm import layernorm_bwd, layernorm_fwd

    class LayerNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
            ctx.save_for_backward(x, weight, rstd, mean)
            return y

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
            x, weight, rstd, mean = ctx.saved_tensors
            return layernorm_bwd(x, weight, dy, rstd, mean)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return LayerNorm.apply(x, weight, bias)

    return layer_norm


def quack_rms_norm(eps: float) -> Function:
    """RMSNorm of QuACK."""
    from quack.rmsnorm import rmsnorm

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return rmsnorm(x, weight, eps=eps)

    return rms_norm


def quack_add_rms_norm(eps: float) -> Function:
    """Addition and RMSNorm of QuACK."""
    from quack.rmsnorm import rmsnorm

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)

    return add_rms_norm


def timm_layer_norm(eps: float) -> Function:
    """Timm's fast LayerNorm: apex's if it is installed, else torch's."""
    from timm.layers.fast_norm import fast_layer_norm

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fast_layer_norm(x, list(x.shape[-1:]), weight, bias, eps)

    return layer_norm


def timm_rms_norm(eps: float) -> Function:
    """Timm's fast RMSNorm: apex's if it is installed, else torch's."""
    from timm.layers.fast_norm import fast_rms_norm

    def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
        return fast_rms_norm(x, list(x.shape[-1:]), weight, eps)

    return rms_norm


def timm_group_norm(eps: float, groups: Callable[[Tensor], int]) -> Function:
    """Timm's fast GroupNorm: torch's, but not in float32 under autocast."""
    from timm.layers.fast_norm import fast_group_norm

    def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fast_group_norm(x, groups(x), weight, bias, eps)

    return group_norm
