"""The stock norms of other packages, which are measured if they are installed.

Each is called as `normplug.bench.ops.Op.theirs`: with the tensors by name, and eps.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normplug.bench.ops import MOMENTUM, OPS, Function, groups

MODULES = {"liger": "liger_kernel", "flaggems": "flag_gems", "quack": "quack", "apex": "apex"}


def of(op: str, names: tuple[str, ...] = ()) -> dict[str, Function]:
    """Provider -> its function for an operation, for each (or those of `names`) installed."""
    found = {}
    for name, functions in PROVIDERS.items():
        installed = name == "cudnn" or find_spec(MODULES[name]) is not None
        if op in functions and installed and (not names or name in names):
            found[name] = functions[op]
    return found


def _from(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def _liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    function = _from("liger_kernel.ops.layer_norm", "LigerLayerNormFunction")
    return function.apply(x, weight, bias, eps)


def _liger_group_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    function = _from("liger_kernel.ops.group_norm", "LigerGroupNormFunction")
    # It takes contiguous input with one spatial dimension.
    y = function.apply(x.flatten(2), weight, bias, x.shape[1], groups(x), eps)
    return y.view(x.shape)


def _liger_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    function = _from("liger_kernel.ops.rms_norm", "LigerRMSNormFunction")
    return function.apply(x, weight, eps, 0.0, "gemma", False)  # gemma: it rounds once, as torch's


def _liger_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    function = _from("liger_kernel.ops.fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    return function.apply(x, residual, weight, eps, 0.0, "gemma", False)


class _FlagGemsLayerNorm(torch.autograd.Function):
    """FlagGems' two kernels: enabling FlagGems would replace eager's operators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise rows."""
        y, mean, rstd = _from("flag_gems", "layer_norm")(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """The gradients of x, weight and bias."""
        x, *others = ctx.saved_tensors
        backward = _from("flag_gems", "layer_norm_backward")
        return *backward(dy, x, x.shape[-1:], *others, [True] * 3), None


class _QuackLayerNorm(torch.autograd.Function):
    """QuACK's two kernels, which take only float32 parameters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise rows."""
        forward = _from("quack.rmsnorm", "layernorm_fwd")
        y, rstd, mean = forward(x, weight, bias, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """The gradients of x, weight and bias."""
        x, weight, rstd, mean = ctx.saved_tensors
        return *_from("quack.rmsnorm", "layernorm_bwd")(x, weight, dy, rstd, mean), None


def _in_order(function: type[torch.autograd.Function]) -> Function:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return function.apply(x, weight, bias, eps)

    return layer_norm


def _flaggems_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _from("flag_gems", "rms_norm")(x, x.shape[-1:], weight, eps)


def _quack_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _from("quack.rmsnorm", "rmsnorm")(x, weight, eps=eps)


def _quack_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
    rmsnorm = _from("quack.rmsnorm", "rmsnorm")
    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def _apex_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    affine = _from("apex.normalization.fused_layer_norm", "fused_layer_norm_affine")
    return affine(x, weight, bias, x.shape[-1:], eps)


def _apex_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    affine = _from("apex.normalization.fused_layer_norm", "fused_rms_norm_affine")
    return affine(x, weight, x.shape[-1:], eps)


def _through_cudnn(op: str) -> Function:
    """The stock BatchNorm through cuDNN, which torch picks in some dtypes and layouts only."""

    def batch_norm(eps: float, **tensors: Any) -> Tensor:
        def norm(x: Tensor, t: dict[str, Tensor]) -> Tensor:
            names = ("weight", "bias", "running_mean", "running_var")
            named = [t[name] for name in names]
            return torch.cudnn_batch_norm(x, *named, True, MOMENTUM, eps)[0]

        return OPS[op].theirs(eps=eps, norm=norm, **tensors)

    return batch_norm


PROVIDERS: dict[str, dict[str, Function]] = {
    "cudnn": {op: _through_cudnn(op) for op in OPS if op.startswith("batch_norm")},
    "liger": {
        "layer_norm": _liger_layer_norm,
        "rms_norm": _liger_rms_norm,
        "add_rms_norm": _liger_add_rms_norm,
        "group_norm": _liger_group_norm,
    },
    "flaggems": {"layer_norm": _in_order(_FlagGemsLayerNorm), "rms_norm": _flaggems_rms_norm},
    "quack": {
        "layer_norm": _in_order(_QuackLayerNorm),
        "rms_norm": _quack_rms_norm,
        "add_rms_norm": _quack_add_rms_norm,
    },
    "apex": {"layer_norm": _apex_layer_norm, "rms_norm": _apex_rms_norm},
}


def liger_llama(net: nn.Module) -> nn.Module:
    """Replace only the RMSNorms of a Llama by Liger-Kernel's, in place.

    Raises:
        ValueError: it is no Llama.
    """
    modeling: Any = import_module("transformers.models.llama.modeling_llama")
    if not isinstance(net, modeling.LlamaForCausalLM):
        raise ValueError("the arm liger is for a LlamaForCausalLM only")
    apply: Callable[..., None] = _from("liger_kernel.transformers", "apply_liger_kernel_to_llama")
    stock = modeling.LlamaRMSNorm
    others = ("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    try:
        apply(rms_norm=True, model=net, **dict.fromkeys(others, False))
    finally:  # Liger also replaces the class, for Llamas that are built later
        modeling.LlamaRMSNorm = stock
    return net
