"""The stock norms of other packages, which are measured if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from normplug.bench.op import Change


class _Called(nn.Module):
    """A layer whose work is done by a function of its norm and the inputs."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module) -> None:
        super().__init__()
        self.function, self.norm = function, getattr(layer, "norm", layer)

    def forward(self, *inputs: Tensor) -> Any:
        """What the layer would return."""
        return self.function(self.norm, *inputs)


def _liger(module: str, name: str) -> Any:
    return getattr(
        import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function"
    ).apply


def _liger_group_norm(norm: Any, x: Tensor) -> Tensor:
    # It takes contiguous input with one spatial dimension.
    call = _liger("group_norm", "GroupNorm")
    y = call(x.flatten(2), norm.weight, norm.bias, x.shape[1], norm.num_groups, norm.eps)
    return y.view(x.shape)


class _Pair(torch.autograd.Function):
    """Two kernels as one differentiable call."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *tensors: Tensor) -> Tensor:
        """The first result of `forward`; the others are saved."""
        y, *saved = forward(*tensors)
        ctx.save_for_backward(*saved)
        ctx.run = backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """What `backward` makes of dy and the saved tensors."""
        return None, None, *ctx.run(dy, *ctx.saved_tensors)


def _flaggems_layer_norm(norm: Any, x: Tensor) -> Tensor:
    """FlagGems' two kernels: enabling FlagGems would replace eager's operators."""
    gems: Any = import_module("flag_gems")
    shape = norm.normalized_shape

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y, mean, rstd = gems.layer_norm(x, shape, weight, bias, norm.eps)
        return y, x, mean, rstd, weight, bias

    def backward(dy: Tensor, x: Tensor, *others: Tensor) -> Any:
        return gems.layer_norm_backward(dy, x, shape, *others, [True] * 3)

    return _Pair.apply(forward, backward, x, norm.weight, norm.bias)


def _quack_layer_norm(norm: Any, x: Tensor) -> Tensor:
    """QuACK's two kernels, which take only float32 parameters."""
    quack: Any = import_module("quack.rmsnorm")

    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Any:
        y, rstd, mean = quack.layernorm_fwd(
            x, weight, bias, norm.eps, return_rstd=True, return_mean=True
        )
        return y, x, weight, rstd, mean

    def backward(
        dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mean: Tensor
    ) -> Any:
        return quack.layernorm_bwd(x, weight, dy, rstd, mean)

    return _Pair.apply(forward, backward, x, norm.weight, norm.bias)


def _quack(*tensors: Tensor, **named: Any) -> Any:
    return import_module("quack.rmsnorm").rmsnorm(*tensors, **named)


def _cudnn_layer_norm(norm: Any, x: Tensor) -> Tensor:
    shape = norm.normalized_shape
    return _cudnn("layer_norm")(x, shape, norm.weight, norm.bias, norm.eps)


def _cudnn(name: str) -> Any:
    return getattr(import_module("cudnn.ops.norm"), name)


def _apex(name: str) -> Any:
    return getattr(import_module("apex.normalization.fused_layer_norm"), name)


_GEMMA = (0.0, "gemma", False)  # Liger's RMSNorm then rounds once, as torch's
# Package -> operation -> a function of its norm and the inputs.
_RIVALS: dict[str, dict[str, Callable[..., Any]]] = {
    "liger_kernel": {
        "layer_norm": lambda norm, x: _liger("layer_norm", "LayerNorm")(
            x, norm.weight, norm.bias, norm.eps
        ),
        "rms_norm": lambda norm, x: _liger("rms_norm", "RMSNorm")(
            x, norm.weight, norm.eps, *_GEMMA
        ),
        "add_rms_norm": lambda norm, x, residual: _liger(
            "fused_add_rms_norm", "FusedAddRMSNorm"
        )(x, residual, norm.weight, norm.eps, *_GEMMA),
        "group_norm": _liger_group_norm,
    },
    "flag_gems": {
        "layer_norm": _flaggems_layer_norm,
        "rms_norm": lambda norm, x: import_module("flag_gems").rms_norm(
            x, norm.normalized_shape, norm.weight, norm.eps
        ),
    },
    "quack": {
        "layer_norm": _quack_layer_norm,
        "rms_norm": lambda norm, x: _quack(x, norm.weight, eps=norm.eps),
        "add_rms_norm": lambda norm, x, residual: _quack(
            x, norm.weight, residual=residual, eps=norm.eps, prenorm=True
        ),
    },
    "cudnn": {  # of the package nvidia-cudnn-frontend
        "layer_norm": _cudnn_layer_norm,
        "rms_norm": lambda norm, x: _cudnn("rms_norm")(x, norm.weight, eps=norm.eps),
    },
    "apex": {
        "layer_norm": lambda norm, x: _apex("fused_layer_norm_affine")(
            x, norm.weight, norm.bias, norm.normalized_shape, norm.eps
        ),
        "rms_norm": lambda norm, x: _apex("fused_rms_norm_affine")(
            x, norm.weight, norm.normalized_shape, norm.eps
        ),
    },
}


def _after_the_sum(function: Callable[..., Any], layer: Any) -> Any:
    """Replace only the norm of a layer that adds a bias: no package has both in one kernel."""
    layer.norm = _Called(function, layer.norm)
    return layer


def of(op: str) -> dict[str, Change]:
    """Provider -> what it does to the stock layer of an operation."""
    change: Callable[..., Any] = _Called
    if op == "add_bias_layer_norm":
        change = _after_the_sum
        op = "layer_norm"
    found: dict[str, Change] = {}
    for package, functions in _RIVALS.items():
        if op in functions and find_spec(package) is not None:
            provider = package.removesuffix("_kernel").replace("_", "")
            found[provider] = partial(change, functions[op])
    return found


def liger_llama(net: nn.Module) -> nn.Module:
    """Replace only the RMSNorms of a Llama by Liger-Kernel's, in place.

    Raises:
        ValueError: it is no Llama.
    """
    norms = [(p, n) for p, n in net.named_modules() if type(n).__name__ == "LlamaRMSNorm"]
    if not norms:
        raise ValueError("the arm liger is for a Llama only")
    for path, norm in norms:
        made = import_module("liger_kernel.transformers").LigerRMSNorm(
            norm.weight.numel(), norm.variance_epsilon
        )
        made.weight = norm.weight
        net.set_submodule(path, made)
    return net
