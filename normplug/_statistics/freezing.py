"""`freeze` and `thaw`: norms that stay on their running statistics, whatever `train()` says."""

from __future__ import annotations

from typing import Any

from torch import nn

from normplug import _checks
from normplug._statistics.runs import is_frozen, running_layers
from normplug._swap.inventory import Filters, matching


class _StayInEvaluation:
    """A frozen layer's `train`, an attribute of the instance; copies and pickles keep it.

    An attribute works for every class, and a later swap, unswap or fuse leaves it alone.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.training = layer.training  # as it would be without the freeze
        self.trained: list[str] = []  # the parameters that `thaw` lets train again

    def __call__(self, mode: bool = True) -> nn.Module:
        """Record the mode, and stay in evaluation."""
        self.training = mode
        self.layer.training = False
        for child in self.layer.children():  # such as the dropout of timm's BatchNormAct2d
            child.train(mode)
        return self.layer


def freeze(
    model: nn.Module, include: Filters = None, exclude: Filters = None, affine: bool = True
) -> nn.Module:
    """Keep norms on their running statistics, unchanged, whatever `model.train()` says.

    It takes BatchNorms and InstanceNorms with running statistics, swapped or stock, in place; a
    later `swap`, `fuse` or `unswap` keeps them frozen, and so do copies and pickles. Frozen with
    `affine`, a swapped layer saves nothing for the backward; fused with relu, one bit per element.

    Args:
        model: any module.
        include: freeze only layers that match; `normplug.plan` lists what a filter may be.
        exclude: leave layers that match, whatever `include` says.
        affine: whether their weights and biases stop training, too: they get
            `requires_grad=False`, and their gradients are removed, so that no optimizer moves them.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module; an option of another type.
        ValueError: there is no layer with running statistics, or `include` matches none.

    Examples:
        >>> model = freeze(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).train()
        >>> model[0].training, model[1].training
        (True, False)
    """
    _checks.module("freeze", model)
    _checks.flags("freeze", affine=affine)
    norms = {layer: [path] for path, layer in running_layers(model).items()}
    if not norms:
        raise ValueError(
            f"normplug.freeze: {type(model).__name__} has no BatchNorm or InstanceNorm with "
            "running statistics."
        )
    chosen = set(norms) if include is None else matching("include", include, norms)
    for layer in chosen - matching("exclude", exclude, norms):
        own: Any = vars(layer)
        if not is_frozen(layer):
            own["train"] = _StayInEvaluation(layer)
            layer.training = False
        for name, parameter in layer._parameters.items() if affine else ():
            if parameter is not None and parameter.requires_grad:
                own["train"].trained.append(name)
                parameter.requires_grad_(False)
                parameter.grad = None
    return model


def thaw(model: nn.Module) -> nn.Module:
    """Undo `normplug.freeze`: layers follow `train()` again, and their weights train.

    Each layer gets the mode that it would have without the freeze. Parameters that did not train
    before the freeze stay as they are, and so does a frozen class, such as FrozenBatchNorm2d.

    Args:
        model: any module.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module.

    Examples:
        >>> thaw(freeze(nn.BatchNorm2d(8))).training
        True
    """
    _checks.module("thaw", model)
    for layer in model.modules():
        if is_frozen(layer):
            stay: Any = vars(layer).pop("train")
            layer.training = stay.training
            for name in stay.trained:
                parameter = layer._parameters.get(name)
                if parameter is not None:
                    parameter.requires_grad_(True)
    return model
