"""Fused modules: their class, their forwards, and when each forward runs."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

from torch import Tensor, nn

from normplug import _checks, _convert
from normplug._convert import FORWARDS, has_fused_class, unfused_class
from normplug._fuse.edit import Edited
from normplug._fuse.trace import Reads
from normplug._ops.guess import Fusion
from normplug._torch import GLOBAL_HOOKS, has_hooks
from normplug.modules import TargetVarianceNorm
from normplug.modules.frozen import unseen_subclass
from normplug.modules.probe import is_copied, without_probe

# The fused class of each class that has one; `fused_class` fills it.
FUSED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
_warn_once = functools.cache(_checks.warn)


@dataclass(frozen=True)
class Guard:
    """What a traced forward depends on in one module that it reached, checked at each call.

    The check takes 1.5 us for each fused module of a ResNet-50. The loops are plain for speed.
    A guard holds no reference to its own module: a cycle would delay freeing the module.
    """

    reads: Reads  # for a container, only its class
    names: tuple[str, ...]  # of its children
    children: tuple[nn.Module | None, ...]
    called: bool = False  # and not only read as a container

    def holds(self, module: nn.Module, inside: bool = True) -> bool:
        """Whether the module is unchanged; inside: False for the module that was traced itself."""
        reads, children = self.reads, module._modules
        if inside and type(module) not in (reads.cls, FUSED_CLASSES.get(reads.cls)):
            return False
        if self.called and has_hooks(module):
            return False
        if (*children,) != self.names or not all(
            map(is_, children.values(), self.children)
        ):
            return False
        state = module.__dict__
        for name, method in reads.methods.items():
            wrapped = name in state and name != "forward"  # a wrapper calls it
            if wrapped or getattr(reads.cls, name, None) is not method:
                return False
        for name, value in reads.values.items():
            if name not in state or not _same(state[name], value):
                return False
        for name, present in reads.proxies.items():
            if (getattr(module, name, None) is not None) != present:
                return False
        return True


def _same(now: Any, then: Any) -> bool:
    """Whether two values of an attribute mean the same; 1, 1.0 and True do not."""
    if now is then:
        return True
    if type(now) is not type(then) or now != then:
        return False
    return type(now) is not tuple or all(map(_same, now, then))


@dataclass(frozen=True)
class Traced:
    """A traced forward with its sites fused, and what it depends on."""

    forward: Callable[..., Any]  # of the module, then its required inputs
    guard: Guard  # of the module itself
    # Each other module that the trace followed or read children of.
    inner: tuple[tuple[nn.Module, Guard], ...]
    fusions: dict[str, Fusion]  # path of a norm in the module -> what it is fused with

    def fits(self, inputs: tuple[Any, ...]) -> bool:
        """Whether the required inputs are of the types that the trace assumes."""
        reads = self.guard.reads
        for name, value in zip(reads.inputs, inputs, strict=False):
            if name not in reads.sequences:
                if not isinstance(value, Tensor):
                    return False
            elif not isinstance(value, (list, tuple)) or not all(
                isinstance(item, Tensor) for item in value
            ):
                return False
        return True

    def holds(self, root: nn.Module) -> bool:
        """Whether the modules have not changed; root: the module that was traced."""
        for module, guard in self.inner:
            if not guard.holds(module):
                return False
        return self.guard.holds(root, inside=False)


@dataclass(frozen=True)
class FusedForwards:
    """The fused forwards of a module."""

    traced: Traced | None  # runs while what it depends on is unchanged
    edited: Edited | None  # runs otherwise

    def fusions(self, root: nn.Module) -> dict[nn.Module, Fusion]:
        """Fused norm -> what it is fused with now; root: the module."""
        found = dict[nn.Module, Fusion]()
        if (
            self.edited is not None
            and unfused_class(root).forward is self.edited.original
        ):
            for name in self.edited.calls:
                child = root._modules.get(name)
                fusion = self.edited.fusion(name, root)
                if child is not None and fusion is not None:
                    found[child] = fusion
        if self.traced is not None and self.traced.holds(root):
            found |= {
                root.get_submodule(path): fusion
                for path, fusion in self.traced.fusions.items()
            }
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> FusedForwards:
        return replace(self, traced=copy.deepcopy(self.traced, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle None: the functions are compiled here, and valid for this process's code only."""
        return type(None), ()


class FusedModule(nn.Module):
    """The first base of every fused class; the second is the module's own class."""

    def __init_subclass__(cls, **options: Any) -> None:
        # The module's class may register or change its subclasses, but must not see this one.
        if _convert.FUSED not in vars(cls):
            super().__init_subclass__(**options)

    def extra_repr(self) -> str:
        """The `extra_repr` of the module's own class, and that it is fused."""
        parts = [super().extra_repr(), "fused" if FORWARDS in vars(self) else ""]
        return ", ".join(filter(None, parts))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the module without its fusion: nothing in the file needs normplug."""
        if is_copied() or not has_fused_class(self):
            return super().__reduce_ex__(protocol)
        layers = [m for m in self.modules() if isinstance(m, TargetVarianceNorm)]
        if not all(layer.is_stock_in_files() for layer in layers):
            _warn_once(
                "normplug: a fused model is pickled without its fusion. Where it is loaded, it is "
                "swapped, but not fused until you call normplug.fuse(model)."
            )
        # Protocols above 1 refuse a class other than the module's.
        return self._unfused_twin().__reduce_ex__(1)

    def _unfused_twin(self) -> nn.Module:
        """A shallow copy that is not fused."""
        twin = without_probe(self)
        _convert.release([twin])
        return twin

    def __prepare_scriptable__(self) -> nn.Module:
        twin = self._unfused_twin()
        prepare = getattr(twin, "__prepare_scriptable__", None)
        return twin if prepare is None else prepare()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if vars(self).get(FORWARDS) is None:  # from a pickle
            _convert.release([self])


def restore(cls: type[nn.Module], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Rebuild a fused module from a pickle of an earlier version."""
    return make(fused_class(cls), *args)


def fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the fused class of a class: always the same one, until the forward changes."""
    original: Any = cls.forward
    known: Any = FUSED_CLASSES.get(cls)
    if known is not None and known.forward.__wrapped__ is original:
        return known

    def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        now = type(module)
        # A class that other code derived from this one may have other attributes.
        if now is made or (now.__module__.startswith("torch.") and made in now.__bases__):
            fusion: FusedForwards | None = module.__dict__.get(FORWARDS)
            if fusion is not None and cls.forward is original and not any(GLOBAL_HOOKS):
                traced, edited = fusion.traced, fusion.edited
                if traced is not None:
                    inputs = traced.guard.reads.required(args, kwargs)
                    if (
                        inputs is not None
                        and traced.fits(inputs)
                        and traced.holds(module)
                    ):
                        return traced.forward(module, *inputs)
                if edited is not None:
                    return edited.forward(module, *args, **kwargs)
        return cls.forward(module, *args, **kwargs)

    # torch.compile limits the recompilations of a code object, so each class has a copy.
    forward.__code__ = forward.__code__.replace()
    functools.update_wrapper(forward, original)
    # `inspect.getfullargspec` does not look at `__wrapped__`.
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    namespace = {
        _convert.FUSED: cls,
        "__module__": cls.__module__,
        # The name stays: libraries write it into configurations, and compare it with lists.
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "forward": forward,
    }
    made: type[nn.Module] = unseen_subclass(cls, (FusedModule, cls), namespace)
    FUSED_CLASSES[cls] = made
    return made
