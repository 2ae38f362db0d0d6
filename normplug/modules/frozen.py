"""The classes of frozen norms, which stay in evaluation regardless of `train()`.

`normplug.freeze` assigns such a class to a layer, as a swap does. `thaw` restores the old one.

The frozen class of a norm of torch, of a known library or of normplug is not a subclass of torch's
`_BatchNorm`, and neither is torchvision's FrozenBatchNorm2d. Tools look for `_BatchNorm` to reset
statistics or to rebuild layers: `update_bn`, stochastic weight averaging, and
`convert_sync_batchnorm`. A user's subclass may call its base, so its frozen class derives from it.

While a layer is frozen, `vars(layer)["training"]` is the mode that it would have.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normplug._torch import BatchNormBase, InstanceNormBase, NormBase, is_class_patched
from normplug.modules.base import TargetVarianceNorm
from normplug.modules.probe import deepcopied, without_probe
from normplug.modules.table import class_of, name_of

# The attribute of a frozen layer with what `thaw` needs. A pickle of it loads without
# normplug. "trained": the names of the parameters that `freeze` stopped. In a stock layer
# from a pickle also "training", its mode, and "train", the result of `_stay`. It is
# replaced, never changed, since shallow copies share it.
RECORD = "_normplug_frozen"
# The attribute of a frozen class: the class that `thaw` gives back.
THAWED = "_thawed_class"


def is_frozen(module: nn.Module) -> bool:
    """Whether `normplug.freeze` has frozen the layer, here or before it was pickled."""
    return isinstance(module, Frozen) or RECORD in vars(module)


class Frozen(nn.Module):
    """A norm that stays in evaluation. Each frozen class derives from it."""

    _thawed_class: ClassVar[type[nn.Module]]
    # TorchScript then keeps the flag as an attribute of its own.
    __jit_unused_properties__: ClassVar[list[str]] = ["training"]

    def __init_subclass__(cls, **options: Any) -> None:
        # A user's class may register its subclasses, but must not see its frozen class.
        if THAWED not in vars(cls):
            super().__init_subclass__(**options)

    @property
    def training(self) -> bool:
        """Always False. A value that `train()` assigns takes effect after `normplug.thaw`."""
        return False

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self)["training"] = mode

    def reset_running_stats(self) -> None:
        """Do nothing: tools that average weights call this, and would lose the statistics."""

    def reset_parameters(self) -> None:
        """Initialise weight, bias and statistics, for code that creates a layer."""
        super().reset_running_stats()  # type: ignore[misc]
        super().reset_parameters()  # type: ignore[misc]

    def extra_repr(self) -> str:
        """The `extra_repr` of the layer's own class, and that it is frozen."""
        return ", ".join(filter(None, [super().extra_repr(), "frozen"]))

    def __copy__(self) -> nn.Module:
        return without_probe(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        of_class: Any = getattr(super(), "__deepcopy__", None)
        copied: nn.Module = of_class(memo) if of_class else deepcopied(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that the layer would have without the freeze.

        Nothing in the pickle of a stock layer needs normplug where it is loaded.
        """
        # Protocols above 1 refuse a class other than the layer's.
        reduced: Any = super().__reduce_ex__(1)
        make, args, *rest = reduced
        if THAWED not in vars(type(self)) or not args or args[0] is not type(self):
            return reduced
        cls = self._thawed_class
        if issubclass(cls, TargetVarianceNorm):
            return (restore, name_of(cls), *rest)
        if rest and isinstance(rest[0], dict):
            rest[0] = _packed(self, rest[0])
        return (make, (cls, *args[1:]), *rest)


def restore(cls: type[nn.Module], relation: Any) -> nn.Module:
    """A frozen layer without attributes, as `table.restore` makes others."""
    made = frozen_class(class_of(cls, relation))
    return made.__new__(made)


def _packed(layer: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A stock layer's state for a pickle: in evaluation, with a `train` that keeps it."""
    record = {"trained": [], **state.get(RECORD, {}), "training": state["training"]}
    record["train"] = _stay(layer)
    # A `train` that other code put there comes first.
    return {"train": record["train"], **state, RECORD: record, "training": False}


def _stay(layer: nn.Module) -> Callable[[bool], Any]:
    """A `train` for a layer's `__dict__` that ignores the mode, and needs only torch."""
    children = list(layer.children())
    if children:  # such as the dropout of timm's BatchNormAct2d, which follows the mode
        return nn.ModuleList(children).train
    # `getattr(layer.eval, "__self__", mode)` is the layer.
    return functools.partial(getattr, layer.eval, "__self__")


def unpack(module: nn.Module) -> None:
    """Undo `_packed` in a layer from a pickle; any other layer is left unchanged."""
    state: Any = vars(module)
    record = state.get(RECORD, {})
    if "training" not in record:
        return
    state["training"] = record["training"]
    if state.get("train") is record["train"]:
        state.pop("train", None)
    state[RECORD] = {"trained": record["trained"]}


class FrozenNorm(Frozen, NormBase):
    """The base of the frozen classes of stock norms; TorchScript compiles its forward."""

    # The methods that a frozen class takes from the class that it freezes.
    _methods: ClassVar[tuple[str, ...]] = ("_check_input_dim",)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` by the running statistics."""
        # TorchScript skips the inner `if` only where it is nested.
        if not torch.jit.is_scripting():  # noqa: SIM102
            if isinstance(input, fx.Proxy):
                return TargetVarianceNorm._as_leaf(self, input)
        return self._finish(self._normalise(input))

    def _normalise(self, input: Tensor) -> Tensor:
        raise NotImplementedError

    def _finish(self, y: Tensor) -> Tensor:
        return y


class FrozenBatchNorm(FrozenNorm):
    """The base of the frozen classes of torch's BatchNorms."""

    def _normalise(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        mean, var = self.running_mean, self.running_var
        weight, bias = self.weight, self.bias
        return F.batch_norm(input, mean, var, weight, bias, False, 0.0, self.eps)


class FrozenInstanceNorm(FrozenNorm):
    """The base of the frozen classes of torch's InstanceNorms."""

    _methods = ("_check_input_dim", "_get_no_batch_dim")
    _get_no_batch_dim: ClassVar[Callable[[Any], int]]
    # The result of that method, which Dynamo of torch 2.6 cannot call.
    _no_batch_dim: ClassVar[int]
    __constants__ = [*NormBase.__constants__, "_no_batch_dim"]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._no_batch_dim = cls._get_no_batch_dim(cls)

    def _normalise(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        is_batch = input.dim() != self._no_batch_dim
        x = input if is_batch else input.unsqueeze(0)
        # Without `track_running_stats`, evaluation uses the statistics of the input.
        of_input = not self.track_running_stats
        mean = None if of_input else self.running_mean
        var = None if of_input else self.running_var
        weight, bias = self.weight, self.bias
        y = F.instance_norm(x, mean, var, weight, bias, of_input, 0.0, self.eps)
        return y if is_batch else y.squeeze(0)


# Stock class -> the base of its frozen class. `register` adds rows for other libraries.
_BASES: dict[type[nn.Module], type[Frozen]] = {
    nn.BatchNorm1d: FrozenBatchNorm,
    nn.BatchNorm2d: FrozenBatchNorm,
    nn.BatchNorm3d: FrozenBatchNorm,
    nn.SyncBatchNorm: FrozenBatchNorm,
    nn.InstanceNorm1d: FrozenInstanceNorm,
    nn.InstanceNorm2d: FrozenInstanceNorm,
    nn.InstanceNorm3d: FrozenInstanceNorm,
}


def register(cls: type[nn.Module], base: type[Frozen]) -> None:
    """Have the frozen class of exactly `cls` derive from `base`, and not from `cls`."""
    _BASES[cls] = base


def frozen_class(cls: Any) -> type[nn.Module]:
    """The frozen class of a class: always the same one."""
    if cls in _BASES and not is_class_patched(cls):
        return _of_stock(cls)
    if cls.__module__.startswith("normplug."):
        return _of_normplug(cls)
    return _derived(cls)


@functools.cache
def _of_stock(cls: Any) -> Any:
    """A class of its own, with the methods of `cls` that check an input."""
    base: Any = _BASES[cls]
    methods = {name: getattr(cls, name) for name in base._methods}
    return _class_like(cls, (base,), methods)


@functools.cache
def _of_normplug(cls: Any) -> Any:
    """Like the class itself, on the frozen classes of its stock bases."""
    stock = (BatchNormBase, InstanceNormBase)
    bases = []
    for base in cls.__bases__:
        bases.append(frozen_class(base) if issubclass(base, stock) else base)
    methods = {**vars(cls)}
    for name in ("__dict__", "__weakref__"):
        methods.pop(name, None)
    return _class_like(cls, tuple(bases), methods)


@functools.cache
def _derived(cls: Any) -> Any:
    """A subclass, so that the forward of `cls` may call that of its base."""
    unused = getattr(cls, "__jit_unused_properties__", [])
    return _class_like(
        cls, (Frozen, cls), {"__jit_unused_properties__": [*unused, "training"]}
    )


def _class_like(cls: Any, bases: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """A class with the names and the text of `cls`, which `thaw` gives back."""
    namespace = {
        **attributes,
        "__module__": __name__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        THAWED: cls,
    }
    return unseen_subclass(cls, bases, namespace)


def unseen_subclass(cls: Any, bases: tuple[Any, ...], namespace: dict[str, Any]) -> Any:
    """Make a class with the name of `cls`, and without the effects of its metaclass.

    A user's metaclass may have effects, such as adding the class to a registry.
    """
    meta = ABCMeta if isinstance(cls, ABCMeta) else type
    return meta.__new__(type(cls), cls.__name__, bases, namespace)
