"""The stock norms of other packages, which are measured if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normplug.bench.op import Change


class _Called(nn.Module):
    """A layer whose work is done by a function of its norm and the inputs."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.norm = function, getattr(layer, "norm", layer)

    def forward(self, *inputs: Tensor) -> Any:
        """What the layer would return."""
        return self.function(self.norm, *inputs)


class _Cudnn(_BatchNorm):
    """The stock BatchNorm through cuDNN, which torch picks in some dtypes and layouts only."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in training."""
        self.num_batches_tracked.add_(1)
        running = (self.running_mean, self.running_var)
        return torch.cudnn_batch_norm(
            x, self.weight, self.bias, *running, True, self.momentum, self.eps
        )[0]


def _cudnn(layer: nn.Module) -> nn.Module:
    for norm in layer.modules():
        if isinstance(norm, _BatchNorm):
            norm.__class__ = _Cudnn
    return layer


def _liger(module: str, name: str) -> Any:
    return getattr(import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function").apply


def _liger_group_norm(norm: Any, x: Tensor) -> Tensor:
    # It takes contiguous input with one spatial dimension.
    call = _liger("group_norm", "GroupNorm")
    y = call(x.flatten(2), norm.weight, norm.bias, x.shape[1], norm.num_groups, norm.eps)
    return y.view(x.shape)


_GEMMA = (0.0, "gemma", False)  # Liger's RMSNorm then rounds once, as torch's
_LIGER: dict[str, Callable[..., Any]] = {
    "layer_norm": lambda norm, x: _liger("layer_norm", "LayerNorm")(
        x, norm.weight, norm.bias, norm.eps
    ),
    "rms_norm": lambda norm, x: _liger("rms_norm", "RMSNorm")(x, norm.weight, norm.eps, *_GEMMA),
    "add_rms_norm": lambda norm, x, residual: _liger("fused_add_rms_norm", "FusedAddRMSNorm")(
        x, residual, norm.weight, norm.eps, *_GEMMA
    ),
    "group_norm": _liger_group_norm,
}


def of(op: str) -> dict[str, Change]:
    """Provider -> what it does to the stock layer of an operation."""
    found: dict[str, Change] = {}
    if op.startswith("batch_norm"):
        found["cudnn"] = _cudnn
    if op in _LIGER and find_spec("liger_kernel") is not None:
        found["liger"] = partial(_Called, _LIGER[op])
    return found


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
