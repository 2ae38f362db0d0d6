"""The class of a fused module."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from normplug import _convert
from normplug._fuse.fusion import FUSION, Fusion
from normplug._fuse.guard import FUSED_CLASSES
from normplug._torch import has_global_hooks


class Fused(nn.Module):
    """The first base of every fused class; the second is the module's own class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain class, since the fused one cannot be imported by its name."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, *rest = reduced
        if not args or args[0] is not type(self):
            return reduced
        return (restore, (plain_class(self), make, args[1:]), *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        fusion = state.get(FUSION)
        super().__setstate__({name: value for name, value in state.items() if name != FUSION})
        if isinstance(fusion, Fusion):
            vars(self)[FUSION] = fusion
            return
        cls = plain_class(self)
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
    """Return the fused class of a class: always the same one, in every thread."""
    if cls not in FUSED_CLASSES:
        namespace = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__doc__": cls.__doc__,
            "forward": _fused_forward(cls),
        }
        # The name stays: libraries write it into configurations, and compare it with lists.
        FUSED_CLASSES.setdefault(cls, type(cls.__name__, (Fused, cls), namespace))
    return FUSED_CLASSES[cls]


def _fused_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fusion: Fusion | None = self.__dict__.get(FUSION)
        if fusion is not None and not has_global_hooks():
            traced, edited = fusion.traced, fusion.edited
            if traced is not None and not kwargs and traced.holds(self, args):
                return traced.codes[self.training].forward(self, *args)
            if edited is not None and edited.holds():
                return edited.forward(self, *args, **kwargs)
        return cls.forward(self, *args, **kwargs)

    # torch.fx and other tools that inspect the signature then see the original one.
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    return forward


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's own class, without the subclasses that `fuse` and torch put before it."""
    cls = _convert.plain_class(module)
    return cls.__bases__[1] if issubclass(cls, Fused) else cls
