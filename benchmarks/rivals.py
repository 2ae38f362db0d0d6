"""The stock norms of other packages, which are measured if they are installed.

Each is called as `normplug.bench.ops.Op.theirs`: with the tensors by name, and eps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normplug.bench.ops import OPS, Function, groups

MODULES = {"liger": "liger_kernel", "flaggems": "flag_gems", "quack": "quack", "apex": "apex"}


def of(op: str, names: Sequence[str] = ()) -> dict[str, Function]:
    """Provider -> its function for an operation, for each (or those of `names`) installed."""
    return {
        name: functions[op]
        for name, functions in PROVIDERS.items()
        if op in functions
        and (not names or name in names)
        and (name == "cudnn" or find_spec(MODULES[name]) is not None)
    }


class _Pair(torch.autograd.Function):
    """Two kernels as one differentiable call."""

    @staticmethod
    def forward(ctx: Any, forward: Function, backward: Function, *tensors: Tensor) -> Tensor:
        """The first result of `forward`; the others are saved."""
        y, *saved = forward(*tensors)
        ctx.save_for_backward(*saved)
        ctx.run = backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """What `backward` makes of dy and the saved tensors."""
        return None, None, *ctx.run(dy, *ctx.saved_tensors)


def _flaggems_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """FlagGems' two kernels: enabling FlagGems would replace eager's operators."""
    gems: Any = import_module("flag_gems")

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y, mean, rstd = gems.layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y, x, mean, rstd, weight, bias

    def backward(dy: Tensor, x: Tensor, *others: Tensor) -> Any:
        return gems.layer_norm_backward(dy, x, x.shape[-1:], *others, [True] * 3)

    return _Pair.apply(forward, backward, x, weight, bias)


def _quack_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """QuACK's two kernels, which take only float32 parameters."""
    quack: Any = import_module("quack.rmsnorm")

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y, rstd, mean = quack.layernorm_fwd(
            x, weight, bias, eps, return_rstd=True, return_mean=True
        )
        return y, x, weight, rstd, mean

    def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor) -> Any:
        return quack.layernorm_bwd(x, weight, dy, rstd, mean)

    return _Pair.apply(forward, backward, x, weight, bias)


def _liger(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function").apply


def _liger_group_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    # It takes contiguous input with one spatial dimension.
    norm = _liger("group_norm", "GroupNorm")
    return norm(x.flatten(2), weight, bias, x.shape[1], groups(x.shape), eps).view(x.shape)


_GEMMA = (0.0, "gemma", False)  # Liger's RMSNorm then rounds once, as torch's


def _quack(*arguments: Any, **named: Any) -> Any:
    return import_module("quack.rmsnorm").rmsnorm(*arguments, **named)


def _apex(name: str) -> Any:
    return getattr(import_module("apex.normalization.fused_layer_norm"), name)


def _cudnn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    statistics = (running_mean, running_var, training, momentum, eps)
    return torch.cudnn_batch_norm(x, weight, bias, *statistics)[0]


PROVIDERS: dict[str, dict[str, Function]] = {
    # The stock BatchNorm through cuDNN, which torch picks in some dtypes and layouts only.
    "cudnn": {
        name: partial(op.theirs, norm=_cudnn) for name, op in OPS.items() if op.norm == "batch_norm"
    },
    "liger": {
        "layer_norm": lambda x, weight, bias, eps: _liger("layer_norm", "LayerNorm")(
            x, weight, bias, eps
        ),
        "rms_norm": lambda x, weight, eps: _liger("rms_norm", "RMSNorm")(x, weight, eps, *_GEMMA),
        "add_rms_norm": lambda x, residual, weight, eps: _liger(
            "fused_add_rms_norm", "FusedAddRMSNorm"
        )(x, residual, weight, eps, *_GEMMA),
        "group_norm": _liger_group_norm,
    },
    "flaggems": {
        "layer_norm": _flaggems_layer_norm,
        "rms_norm": lambda x, weight, eps: import_module("flag_gems").rms_norm(
            x, x.shape[-1:], weight, eps
        ),
    },
    "quack": {
        "layer_norm": _quack_layer_norm,
        "rms_norm": lambda x, weight, eps: _quack(x, weight, eps=eps),
        "add_rms_norm": lambda x, residual, weight, eps: _quack(
            x, weight, residual=residual, eps=eps, prenorm=True
        ),
    },
    "apex": {
        "layer_norm": lambda x, weight, bias, eps: _apex("fused_layer_norm_affine")(
            x, weight, bias, x.shape[-1:], eps
        ),
        "rms_norm": lambda x, weight, eps: _apex("fused_rms_norm_affine")(
            x, weight, x.shape[-1:], eps
        ),
    },
}


def liger_llama(net: nn.Module) -> nn.Module:
    """Replace only the RMSNorms of a Llama by Liger-Kernel's, in place.

    Raises:
        ValueError: it is no Llama.
    """
    modeling: Any = import_module("transformers.models.llama.modeling_llama")
    if not isinstance(net, modeling.LlamaForCausalLM):
        raise ValueError("the arm liger is for a LlamaForCausalLM only")
    liger: Any = import_module("liger_kernel.transformers")
    stock = modeling.LlamaRMSNorm
    others = ("rope", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
    try:
        liger.apply_liger_kernel_to_llama(rms_norm=True, model=net, **dict.fromkeys(others, False))
    finally:  # Liger also replaces the class, for Llamas that are built later
        modeling.LlamaRMSNorm = stock
    return net
