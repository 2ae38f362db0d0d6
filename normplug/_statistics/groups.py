"""`param_groups`: which parameters decay."""

from __future__ import annotations

from typing import Any

from torch import nn

from normplug import _checks
from normplug._swap.inventory import Inventory


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split a model's parameters into two groups for an optimizer: with and without weight decay.

    Matrices decay: parameters of two or more dimensions. Every parameter of a norm layer, whatever
    its shape, every bias and every parameter of fewer dimensions has no decay. A tied parameter
    appears once, and has no decay if any of its names has none. The groups are the same before and
    after `normplug.swap` and `fuse`, and under FSDP2. Parameters that do not require a gradient are
    included, since an optimizer skips them until they do.

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
    norms = Inventory(model).norms
    plain: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if module in norms or parameter.dim() < 2 or name.endswith("bias"):
                plain.add(id(parameter))
    decaying = [p for p in model.parameters() if id(p) not in plain]
    others = [p for p in model.parameters() if id(p) in plain]
    return [
        {"params": decaying, "weight_decay": float(weight_decay)},
        {"params": others, "weight_decay": 0.0},
    ]
