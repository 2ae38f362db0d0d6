"""`param_groups`: which parameters decay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from normplug import _checks
from normplug._swap.inventory import is_known_norm, is_norm

# Their matrices decay, whatever a subclass is called.
_MATRICES = (
    nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d,
    nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Embedding, nn.EmbeddingBag, nn.RNNBase,
    nn.RNNCellBase, nn.MultiheadAttention,
)  # fmt: skip


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's parameters into two groups for an optimizer: with and without weight decay.

    Matrices decay: parameters of two or more dimensions. Every parameter of a norm layer, whatever
    its shape, every bias and every parameter of fewer dimensions has no decay. A norm is recognised
    by its class. If only the name of a class says that it is a norm, just its parameters with one
    dimension above 1 have no decay. The parameters of a parametrized tensor count as the tensor. A
    tied parameter appears once, and has no decay if any of its names has none. The groups are the
    same before and after `normplug.swap` and `fuse`, and under FSDP2. Parameters that do not
    require a gradient are included, since an optimizer skips them until they do.

    Args:
        model: any module.
        weight_decay: the decay of the first group.

    Returns:
        Two groups, `{"params": [...], "weight_decay": ...}`, in the order of `named_parameters`.

    Raises:
        TypeError: `model` is not a module; `weight_decay` is not a number.
        ValueError: `weight_decay` is below 0, or a parameter has no shape yet.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> groups = param_groups(model, 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (3, 0.0)]
    """
    _checks.module("param_groups", model)
    _checks.number("param_groups", "weight_decay", weight_decay)
    if not weight_decay >= 0:
        rule, got = "at least 0", str(weight_decay)
        raise ValueError(_checks.must("param_groups", "weight_decay", rule, got))
    plain: set[int] = set()
    for module in model.modules():
        plain.update(id(p) for p in norm_parameters(module))
        for name, parameter in _parameters(module):
            if parameter.dim() < 2 or name.endswith("bias"):
                plain.add(id(parameter))
    decaying = [p for p in model.parameters() if id(p) not in plain]
    others = [p for p in model.parameters() if id(p) in plain]
    return [
        {"params": decaying, "weight_decay": float(weight_decay)},
        {"params": others, "weight_decay": 0.0},
    ]


def norm_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a norm layer, which should not decay; none for another module.

    If only the name of its class says that a module is a norm, they are those with one dimension
    above 1, such as (1, C, 1, 1): its matrices may belong to a projection.
    """
    parameters = [parameter for _, parameter in _parameters(module)]
    if is_known_norm(module):
        return parameters
    if isinstance(module, _MATRICES) or not is_norm(module):
        return []
    return [p for p in parameters if sum(size > 1 for size in p.shape) < 2]


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module without those inside it, with their names there.

    A parametrized tensor keeps its name: its parameters are in a module of `parametrizations`.
    """
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    if parametrize.is_parametrized(module):
        parametrizations: Any = module.parametrizations
        for name, parametrization in parametrizations.items():
            for parameter in parametrization.parameters(recurse=False):
                yield name, parameter
