"""The class of a fused module."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
from abc import ABCMeta
from collections.abc import Callable
from typing import Any

from torch import nn

from normplug import _convert
from normplug._fuse.fusion import FUSION, Fusion
from normplug._fuse.guard import FUSED_CLASSES
from normplug._torch import has_global_hooks


class Fused(nn.Module):
    """The first base of every fused class; the second is the module's own class."""

    def __init_subclass__(cls, **options: Any) -> None:
        # A fused class is none of the subclasses that the module's class registers or changes.
        if _convert.FUSED not in vars(cls):
            super().__init_subclass__(**options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain class, since the fused one cannot be imported by its name."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        if not has_fused_class(self) or not args or args[0] is not type(self):
            return reduced
        return (restore, (plain_class(self), make, args[1:]), *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        fusion = state.get(FUSION)
        super().__setstate__({name: value for name, value in state.items() if name != FUSION})
        if isinstance(fusion, Fusion):
            vars(self)[FUSION] = fusion
            return
        cls = plain_class(self)
        if has_fused_class(self):
            _convert.assign_class(self, cls)
        if FUSION in state:
            warnings.warn(
                f"normplug: a {cls.__name__} was fused with other versions or other code, and is "
                "not fused now. Call normplug.fuse(model) again.",
                stacklevel=2,
            )


def restore(cls: type[nn.Module], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Rebuild a fused module from what `Fused.__reduce_ex__` returned."""
    return make(fused_class(cls), *args)


def fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the fused class of a class: always the same one, until the forward changes."""
    made = FUSED_CLASSES.get(cls)
    if made is None:
        return FUSED_CLASSES.setdefault(cls, _made(cls))
    if made.forward.__wrapped__ is not cls.forward:  # type: ignore[attr-defined]
        made = FUSED_CLASSES[cls] = _made(cls)
    return made


def has_fused_class(module: nn.Module) -> bool:
    """Whether a module's class is a fused one, and not one that others derived from it."""
    return _convert.FUSED in vars(_convert.plain_class(module))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclasses that `fuse` and torch put before it."""
    cls = _convert.plain_class(module)
    found: type[nn.Module] = vars(cls).get(_convert.FUSED, cls)
    return found


def _made(cls: type[nn.Module]) -> type[nn.Module]:
    original: Any = cls.forward

    def choose(module: nn.Module, inputs: tuple[Any, ...], alone: bool) -> Any:
        if cls.forward is not original and alone:  # a patch, which may take other arguments
            return lambda *_, **__: cls.forward(module, *inputs)
        now = type(module)
        # A class that others derived from this one may have other attributes.
        if now is not made and not (now.__module__.startswith("torch.") and made in now.__bases__):
            return cls.forward
        fusion: Fusion | None = module.__dict__.get(FUSION)
        if fusion is not None and not has_global_hooks():
            traced, edited = fusion.traced, fusion.edited
            if traced is not None and alone and traced.holds(module, inputs):
                return traced.codes[module.training].forward
            if edited is not None and edited.holds():
                return edited.forward
        return cls.forward

    namespace = {
        _convert.FUSED: cls,
        "__module__": cls.__module__,
        # The name stays: libraries write it into configurations, and compare it with lists.
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "forward": _with_parameters_of(original, choose),
    }
    # A metaclass of the user's may have effects, such as an entry in a registry.
    meta = ABCMeta if isinstance(cls, ABCMeta) else type
    made: type[nn.Module] = meta.__new__(type(cls), cls.__name__, (Fused, cls), namespace)
    return made


# `choose` gets the inputs that have no default, and whether the call gives no others.
_FORWARD = """
def around(_normplug_choose, {defaults}):
    def forward({parameters}):
        return _normplug_choose({me}, ({required}), {alone})({arguments})
    return forward
"""


def _with_parameters_of(like: Any, choose: Callable[..., Any]) -> types.FunctionType:
    """A forward that calls what `choose` returns, with the parameters of the function `like`.

    Tools find the inputs of a model by the names of its parameters, also in `__code__`.
    """
    code: types.CodeType = like.__code__
    names = iter(code.co_varnames)
    positional = [next(names) for _ in range(code.co_argcount)]
    named = [next(names) for _ in range(code.co_kwonlyargcount)]
    rest = [next(names)] if code.co_flags & inspect.CO_VARARGS else []
    others = [next(names)] if code.co_flags & inspect.CO_VARKEYWORDS else []
    values = like.__defaults__ or ()
    defaults = dict(zip(positional[len(positional) - len(values) :], values, strict=True))
    defaults |= like.__kwdefaults__ or {}
    star, stars = [f"*{name}" for name in rest], [f"**{name}" for name in others]
    parameters = [*positional, *(star or ["*"] * bool(named)), *named, *stars]
    if code.co_posonlyargcount:
        parameters.insert(code.co_posonlyargcount, "/")
    alone = [f"{name} is _normplug_{name}" for name in defaults]
    alone += [f"not {name}" for name in (*rest, *others)]
    alone += ["False"] * any(name not in defaults for name in named)
    source = _FORWARD.format(
        defaults=", ".join(f"_normplug_{name}" for name in defaults),
        parameters=", ".join(parameters),
        me=positional[0] if positional else f"{rest[0]}[0]",
        required="".join(f"{name}, " for name in positional[1:] if name not in defaults),
        alone=" and ".join(alone) or True,
        arguments=", ".join([*positional, *star, *(f"{name}={name}" for name in named), *stars]),
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<normplug.fuse of {like.__qualname__}>", "exec"), namespace)
    written = namespace["around"](choose, *defaults.values())
    made = types.FunctionType(
        written.__code__, like.__globals__, like.__name__, like.__defaults__, written.__closure__
    )
    made.__kwdefaults__ = like.__kwdefaults__
    functools.update_wrapper(made, like)
    return made
