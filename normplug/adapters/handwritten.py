"""Norms of any class, such as one written by hand, recognised by what their forward computes.

Names do not matter, neither the class's nor those of its weight, bias and eps: `behaviour` runs
the forward, once for each class and each setting of its other attributes.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normplug import _checks
from normplug._torch import interposed, is_class_patched
from normplug.adapters import ChannelsFirst, behaviour, class_for
from normplug.adapters.behaviour import Formula, Layer
from normplug.adapters.side_effects import CONSTANTS, constants_read, side_effect
from normplug.modules import TargetVarianceNorm
from normplug.modules.base import eps_property
from normplug.modules.row_norms import RowNorm, _GatedRMSNorm, _LayerNorm, _RMSNorm
from normplug.modules.table import LIBRARIES, register_formula

_MORE = "its forward takes more than one argument"
_NARROWEST = 3  # shorter rows cannot tell formulas apart
# The attributes that every module has.
_OF_MODULES = frozenset((*vars(nn.Module()), "forward"))
# The attributes of a class that its normplug class may replace.
_REPLACED = frozenset(("__init__", "extra_repr", "forward", "reset_parameters"))


class Recognised(NamedTuple):
    """What `recognise` learned of a layer.

    Attributes:
        ours: the normplug class of its class; None if it stays.
        note: what it computes, or why it stays.
        is_norm: whether it normalises rows, in any way.
    """

    ours: type[TargetVarianceNorm] | None
    note: str
    is_norm: bool


class AnyNorm(RowNorm):
    """A norm of rows of any class, with a weight that gives the shape of a row."""

    _formula: ClassVar[Formula]

    @classmethod
    def _adopt(
        cls, module: nn.Module, track_running_stats: bool | None, device: Any
    ) -> None:
        super()._adopt(module, track_running_stats, device)
        if cls._formula.eps_name is None:
            vars(module)["eps"] = cls._formula.eps

    @classmethod
    def _leave(cls, module: nn.Module) -> None:
        super()._leave(module)
        if cls._formula.eps_name is None:
            vars(module).pop("eps", None)

    def __setattr__(self, name: str, value: Any) -> None:
        before = vars(self).get(name, value)
        is_known = name in _OF_MODULES or name == self._eps_name or name.startswith("_")
        if not is_known and isinstance(before, CONSTANTS) and before != value:
            _checks.warn(
                f"normplug: {name} of a {type(self).__name__} is now {value!r}, and was {before!r} "
                "when the layer was recognised by what it computes. The new value has no effect. "
                "Call normplug.unswap(model), change it, and swap again."
            )
        super().__setattr__(name, value)

    def _affine_shape(self) -> tuple[int, ...]:
        weight: Tensor = getattr(self, self._formula.weight)
        return tuple(weight.shape)

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        formula = self._formula
        weight: Tensor = getattr(self, formula.weight)
        bias = None if formula.bias is None else getattr(self, formula.bias)
        return weight, bias


class AnyLayerNorm(AnyNorm, _LayerNorm):
    """A LayerNorm of any class."""


class AnyRMSNorm(AnyNorm, _RMSNorm):
    """An RMSNorm of any class."""


class AnyGatedRMSNorm(AnyNorm, _GatedRMSNorm):
    """An RMSNorm of any class, whose forward takes a gate."""

    forward = _GatedRMSNorm.forward
    _fusion_sites = None


@functools.cache
def class_of(cls: Any, formula: Formula) -> Any:
    """The normplug class of a class that computes this formula."""
    base: Any = AnyLayerNorm if formula.centred else AnyRMSNorm
    kind = "a LayerNorm" if formula.centred else "an RMSNorm"
    if formula.gate is not None:
        base = AnyGatedRMSNorm
        kind = "an RMSNorm with a gate"
    bases = (ChannelsFirst, base, cls) if formula.channels_first else (base, cls)
    eps_name = formula.eps_name or "eps"
    precision = "bit for bit" if formula.is_exact else "up to rounding"
    declarations = {
        "_formula": formula,
        "_note": f"recognised by what it computes: {kind}, {precision}",
        "_affine_names": (formula.weight, formula.bias or "bias"),
        "_eps_name": eps_name,
        eps_name: eps_property(eps_name),
        "_weight_offset": formula.weight_offset,
        "_gate": formula.gate,
        "_group_size": formula.group_size,
        "_rounding": formula.rounding,
        "_autocasts": formula.autocasts,
    }
    if formula.weight != "weight":
        declarations["weight"] = _alias(formula.weight)
    if formula.bias is None:
        declarations["bias"] = None
    elif formula.bias != "bias":
        declarations["bias"] = _alias(formula.bias)
    ours = class_for(cls, bases, **declarations)
    register_formula(ours, cls)
    return ours


def _alias(name: str) -> Any:
    """A property for a tensor that the class calls `name`."""
    return property(lambda layer: getattr(layer, name))


def recognise(module: nn.Module, cls: Any) -> Recognised | None:
    """What a leaf module of the class `cls` computes; None if it is not a norm of rows.

    The layer and the random number generators are left unchanged.
    """
    if not _may_be_norm(cls):
        return None
    layer = _layer_of(module, cls)
    if not isinstance(layer, Layer):
        return layer
    # 1, 1.0 and True are equal, but not alike.
    key = (layer, tuple(type(value) for _, value in layer.settings))
    if key not in _known:
        if interposed():
            return Recognised(
                None, "a tracer or a mode is active: exit it, then swap", False
            )
        _known[key] = _probed(layer)
    known = _known[key]
    if known is not None and known.ours is not None and is_class_patched(cls):
        text = "the forward of its class was replaced by other code: undo that, then swap"
        return Recognised(None, text, True)
    return known


_known: dict[tuple[Layer, tuple[type, ...]], Recognised | None] = {}


@functools.cache
def _may_be_norm(cls: Any) -> bool:
    """Whether a class has a forward with arguments, and is none of normplug's."""
    if issubclass(cls, TargetVarianceNorm):
        return False
    return inspect.isfunction(cls.forward) and len(_arguments(cls)) > 0


@functools.cache
def _arguments(cls: Any) -> list[inspect.Parameter]:
    """The parameters of a class's forward besides `self`."""
    return list(inspect.signature(cls.forward).parameters.values())[1:]


def _takes_tensors(cls: Any) -> bool:
    """Whether a forward takes one or two arguments: an input, and perhaps a gate."""
    arguments = _arguments(cls)
    kinds = {argument.kind for argument in arguments}
    return len(arguments) < 3 and kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def _layer_of(module: nn.Module, cls: Any) -> Layer | Recognised | None:
    """What the forward of a module may read; None if it has no vectors of one length."""
    parameters = module._parameters.items()
    buffers = module._buffers.items()
    vectors = [t for _, t in (*parameters, *buffers) if t is not None]
    if not 1 <= len(vectors) <= 2 or not any(t is not None for _, t in parameters):
        return None
    if any(is_lazy(t) or t.dim() != 1 or not t.is_floating_point() for t in vectors):
        return None
    width = vectors[0].shape[0]
    if vectors[-1].shape[0] != width or width < _NARROWEST:
        return None
    settings = []
    for name in sorted(vars(module).keys() - _OF_MODULES):
        if name.startswith("_normplug"):
            continue
        value = vars(module)[name]
        parts = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(part, CONSTANTS) for part in parts):
            return Recognised(
                None, f"its attribute {name} is more than a constant", False
            )
        settings.append((name, value))
    return Layer(
        cls,
        tuple((name, t is not None) for name, t in parameters),
        tuple((name, t is not None) for name, t in buffers),
        width,
        tuple(settings),
        has_gate=len(_arguments(cls)) == 2,
        constants=constants_read(cls),
    )


def _probed(layer: Layer) -> Recognised | None:
    cls: Any = layer.cls
    is_library = cls.__module__.startswith(LIBRARIES)
    if not _takes_tensors(cls):
        return Recognised(None, _MORE, False)
    # Classes of the libraries only compute, but call functions by tables.
    obstacle = _clash(layer) if is_library else side_effect(cls) or _clash(layer)
    if obstacle is not None:
        return Recognised(None, obstacle, False)
    try:
        formula = _formula_of(layer)
    except behaviour.NotANormError:
        return Recognised(None, _MORE, False) if layer.has_gate else None
    except behaviour.UnlikeError as difference:
        way_out = "" if is_library else ": change its forward, then swap"
        return Recognised(None, f"{difference}{way_out}", True)
    except behaviour.ImpureError as effect:
        return Recognised(None, str(effect), False)
    except Exception as error:
        text = str(error).partition("\n")[0]
        return Recognised(None, f"its forward fails for some inputs: {text}", False)
    ours = class_of(cls, formula)
    return Recognised(ours, ours._note, True)


@torch.no_grad()
def _formula_of(layer: Layer) -> Formula:
    with (
        warnings.catch_warnings(),
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        warnings.simplefilter("ignore")
        return behaviour.formula_of(layer)


def _clash(layer: Layer) -> str | None:
    """Why the class cannot have a subclass of normplug: the two use a name for different things."""
    theirs = {name for name, _ in layer.settings}
    for base in layer.cls.__mro__:
        if not base.__module__.startswith("torch.") and base is not object:
            theirs.update(vars(base))
    ours = {name for base in AnyNorm.__mro__ for name in vars(base)} - set(dir(nn.Module))
    names = theirs & (ours | {"__setattr__"}) - _REPLACED - {"eps", "weight", "bias"}
    if not names:
        return None
    return f"its attribute {min(names)} has another meaning in normplug's layers"
