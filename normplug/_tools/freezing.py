"""`freeze` and `thaw`: norms that keep to their running statistics, regardless of `train()`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from normplug import _checks, _convert
from normplug._choices import Model
from normplug._swap.inventory import Filters, Inventory, matching
from normplug._table import shown, some
from normplug._tools.runs import is_frozen, running_layers
from normplug.modules.frozen import RECORD


class _StayInEvaluation:
    """What version 0.3.0 pickled as the `train` of a frozen layer."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.layer: nn.Module = state["layer"]
        record = {name: state[name] for name in ("trained", "training")}
        vars(self.layer)[RECORD] = {**record, "train": self}

    def __call__(self, mode: bool = True) -> nn.Module:
        """Stay in evaluation."""
        return self.layer


def freeze(
    model: Model,
    include: Filters = None,
    exclude: Filters = None,
    affine: bool = True,
) -> Model:
    """Keep norms on their running statistics, unchanged, regardless of `model.train()`.

    It takes BatchNorms and InstanceNorms with running statistics, swapped or stock, in place,
    by assigning each layer's `__class__`. A later `swap`, `fuse` or `unswap` keeps them frozen,
    and so do copies and pickles. The new class is not a subclass of `torch.nn.BatchNorm2d` or
    the like, so tools that reset or rebuild such layers leave it alone. The frozen class of a
    user's subclass is the exception.

    Frozen with `affine`, a swapped layer saves nothing for the backward; fused with relu, one
    bit per element.

    Args:
        model: any module.
        include: freeze only layers that match; `normplug.plan` lists what a filter may be.
        exclude: skip layers that match, even if they match `include`.
        affine: whether their weights and biases stop training, too: they get
            `requires_grad=False`, and their gradients are removed, so that no optimizer moves them.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module; an option of another type.
        ValueError: there is no layer with running statistics, `include` matches none, or a
            layer is lazy and has no shape yet. No layer changes.

    Examples:
        >>> model = freeze(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).train()
        >>> model[0].training, model[1].training
        (True, False)
    """
    _checks.module("freeze", model)
    _checks.flags("freeze", affine=affine)
    inventory = Inventory(model)
    norms: dict[Any, list[str]] = {
        layer: inventory.names[layer] for layer in running_layers(model).values()
    }
    if not norms:
        raise ValueError(
            f"normplug.freeze: {type(model).__name__} has no BatchNorm or InstanceNorm with "
            "running statistics."
        )
    chosen: set[Any] = (
        set(norms) if include is None else matching("include", include, norms)
    )
    chosen -= matching("exclude", exclude, norms)
    lazy = [shown(norms[layer][0]) for layer in chosen if is_lazy(layer.running_mean)]
    if lazy:
        raise ValueError(
            f"normplug.freeze: lazy layers have no statistics yet: {some(sorted(lazy))}. "
            "Run one forward, then freeze, or exclude them."
        )
    for layer in chosen:
        _convert.freeze(layer)
        if affine:
            _stop_training(layer)
    return model


def thaw(model: Model) -> Model:
    """Undo `normplug.freeze`: layers follow `train()` again, and their weights train.

    Each layer gets the mode that it would have without the freeze: that of the last `train()`,
    and training if the module that holds it is in training. Parameters that did not train
    before the freeze still do not. A class that is always frozen, such as FrozenBatchNorm2d, is
    left unchanged.

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
    trains = {child for m in model.modules() if m.training for child in m.children()}
    for layer in model.modules():
        if is_frozen(layer):
            _train_again(layer, _convert.thaw(layer))
            # Code that restores modes, as Lightning does after validation, has read False.
            if layer in trains:
                layer.training = True
    return model


def _stop_training(layer: nn.Module) -> None:
    """Stop the training of weight and bias, and record which of them trained."""
    trained = list(vars(layer)[RECORD]["trained"])
    for name, parameter in _affine(layer).items():
        if parameter.requires_grad:
            trained.append(name)
            parameter.requires_grad_(False)
            parameter.grad = None
    vars(layer)[RECORD] = {"trained": trained}


def _train_again(layer: nn.Module, names: list[str]) -> None:
    """Let parameters train again, even if one has been parametrized since."""
    parameters = _affine(layer)
    for name in names:
        if name in parameters:
            parameters[name].requires_grad_(True)
            continue
        for other, parameter in parameters.items():
            if _attribute(other) == _attribute(name):
                parameter.requires_grad_(True)


def _attribute(name: str) -> str:
    """The attribute that a parameter makes: "weight" of `parametrizations.weight.original`."""
    return name.removeprefix("parametrizations.").partition(".")[0]


def _affine(layer: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of weight and bias, by name, and not those of the layer's activation."""
    return {
        name: parameter
        for name, parameter in layer.named_parameters()
        if "." not in name or name.startswith("parametrizations.")
    }
