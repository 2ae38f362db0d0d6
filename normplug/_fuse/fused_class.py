"""Fused forwards: the class that runs one, when it may run, and how it is copied and pickled."""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib
import types
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, fx, nn

import normplug
from normplug import _convert
from normplug._fuse.hooks import has_global_hooks, has_hooks

FUSION = "_normplug_fusion"


@dataclass(frozen=True)
class Guard:
    """What a traced forward depended on, of one module that it reached.

    The module is not part of it: it holds its guard, and a cycle would delay its release.

    Attributes:
        cls: the module's class, without `Fused`.
        names: of its children.
        children: the children themselves.
        methods: the methods that ran, by name.
        values: the attributes that were read, and their values.
        tensors: the parameters and buffers that were read, and whether they were not None.
        called: whether the module was called, and not only gone through.
        asks_training: whether the training flag was read.
    """

    cls: type[nn.Module]
    names: tuple[str, ...]
    children: tuple[nn.Module | None, ...]
    methods: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[tuple[str, bool], ...] = ()
    called: bool = False
    asks_training: bool = False

    def holds(self, module: nn.Module) -> bool:
        """Whether all is as it was."""
        children = module._modules
        if (*children,) != self.names or not all(map(is_, children.values(), self.children)):
            return False
        state = module.__dict__
        for name in self.methods:
            if name in state:
                return False
        for name, value in self.values:
            if name not in state or not _same(state[name], value):
                return False
        for name, present in self.tensors:
            if (getattr(module, name, None) is not None) != present:
                return False
        return True

    def holds_inside(self, module: nn.Module, training: bool) -> bool:
        """`holds`, for a module whose forward is part of another's."""
        if type(module) is not self.cls and type(module) is not _fused_classes.get(self.cls):
            return False
        if self.called and has_hooks(module):
            return False
        if self.asks_training and module.training != training:
            return False
        return self.holds(module)


def _same(now: Any, then: Any) -> bool:
    """Whether two values of an attribute mean the same; 1, 1.0 and True do not."""
    if now is then:
        return True
    if type(now) is not type(then) or now != then:
        return False
    return type(now) is not tuple or all(map(_same, now, then))


@dataclass(frozen=True)
class Code:
    """A generated forward.

    Attributes:
        forward: the function; takes the module, then its inputs.
        source: its source.
        title: what tracebacks and profilers show as its file.
        names: what the source names beside what fx gives every graph.
    """

    forward: Callable[..., Any]
    source: str
    title: str
    names: dict[str, Any]

    @classmethod
    def of(cls, source: str, title: str, names: dict[str, Any]) -> Code:
        """Compile the source of a function `forward`."""
        namespace = _names_of_fx() | names
        exec(compile(source, title, "exec"), namespace)
        return cls(namespace["forward"], source, title, names)

    @classmethod
    def of_graph(cls, graph: fx.Graph, title: str) -> Code:
        """Compile a graph."""
        code = graph.python_code("self")
        own = {name: v for name, v in code.globals.items() if name not in _names_of_fx()}
        return cls.of(code.src, title, own)


@functools.cache
def _names_of_fx() -> dict[str, Any]:
    return fx.Graph().python_code("self").globals


@dataclass(frozen=True)
class Fusion:
    """The forward of a module with its sites fused, and what it depended on.

    Attributes:
        sequences: for each input, whether it is a sequence of tensors.
        codes: the forward for each value of the training flag.
        guard: of the module itself.
        inner: every other module that the forward reaches and does not just call, with its guard.
        methods: class, name and function of each method that the forward consists of.
        recompute: whether results are recomputed in the backward.
    """

    sequences: tuple[bool, ...]
    codes: dict[bool, Code]
    guard: Guard
    inner: tuple[tuple[nn.Module, Guard], ...]
    methods: tuple[tuple[type[nn.Module], str, Any], ...]
    recompute: bool

    def holds(self, root: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether the forward stands for the module's own, in a call with these arguments."""
        if len(args) != len(self.sequences) or has_global_hooks():
            return False
        for x, sequence in zip(args, self.sequences, strict=True):
            if not (_are_tensors(x) if sequence else isinstance(x, Tensor)):
                return False
        for cls, name, method in self.methods:
            if getattr(cls, name, None) is not method:
                return False
        training = root.training
        for module, guard in self.inner:
            if not guard.holds_inside(module, training):
                return False
        return self.guard.holds(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        """The same code, for copies of the modules."""
        guard, inner = copy.deepcopy((self.guard, self.inner), memo)
        return replace(self, guard=guard, inner=inner)

    def __reduce__(self) -> tuple[Any, ...]:
        """As plain values and a fingerprint, so that `load` can tell whether they still apply."""
        codes = [
            (training, code.source, code.title, {n: _address(v) for n, v in code.names.items()})
            for training, code in self.codes.items()
        ]
        methods = [(cls, name) for cls, name, _ in self.methods]
        inner = [(module, _fields(guard)) for module, guard in self.inner]
        contents = (self.sequences, codes, _fields(self.guard), inner, methods, self.recompute)
        functions = [method for *_, method in self.methods]
        return (load, (_versions(), _fingerprint(functions, self.codes), contents))


def _are_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(t, Tensor) for t in x)


def _fields(guard: Guard) -> tuple[Any, ...]:
    return tuple(getattr(guard, field.name) for field in fields(guard))


def _versions() -> str:
    return f"normplug {normplug.__version__}, torch {torch.__version__}"


def load(versions: str, fingerprint: str, contents: Any) -> Fusion | None:
    """What `Fusion.__reduce__` wrote; None where the code that it was made from has changed."""
    if versions != _versions():
        return None
    sequences, sources, guard, inner, named, recompute = contents
    methods = tuple((cls, name, getattr(cls, name, None)) for cls, name in named)
    try:
        codes = {
            training: Code.of(source, title, {n: _found(*where) for n, where in names.items()})
            for training, source, title, names in sources
        }
    except (ImportError, AttributeError):
        return None
    if fingerprint != _fingerprint([method for *_, method in methods], codes):
        return None
    guards = tuple((module, Guard(*values)) for module, values in inner)
    return Fusion(sequences, codes, Guard(*guard), guards, methods, recompute)


def _address(value: Any) -> tuple[str, str]:
    """Where a class or a function is imported from."""
    return value.__module__, value.__qualname__


def _found(module: str, name: str) -> Any:
    return attrgetter(name)(importlib.import_module(module))


def _fingerprint(methods: Iterable[Any], codes: dict[bool, Code]) -> str:
    """What tells whether functions, and those that the codes call, still are what they were."""
    functions = [*methods, *(f for code in codes.values() for f in code.names.values())]
    return hashlib.sha256(repr([_described(f) for f in functions]).encode()).hexdigest()


def _described(function: Any) -> Any:
    if not isinstance(function, types.FunctionType):
        return _plain(function)
    names, used = function.__globals__, function.__code__.co_names
    meanings = [(name, _plain(names[name], deep=False)) for name in used if name in names]
    defaults = (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()))
    return _plain(function.__code__), _plain(defaults), meanings


def _plain(value: Any, deep: bool = True) -> Any:
    """A description that is the same in every process. deep: of constants, what they are."""
    if isinstance(value, types.CodeType):
        return value.co_code.hex(), value.co_names, value.co_varnames, _plain(value.co_consts)
    if isinstance(value, types.ModuleType):
        return value.__name__
    if callable(value):
        names = ("__module__", "__qualname__", "__name__")
        return [getattr(value, name, None) for name in names]
    if deep and isinstance(value, tuple):
        return [_plain(part) for part in value]
    if deep and isinstance(value, frozenset):
        return sorted(repr(_plain(part)) for part in value)
    if isinstance(value, torch.dtype) or (deep and type(value).__module__ == "builtins"):
        return repr(value)
    return type(value).__qualname__


class Fused(nn.Module):
    """What comes before a module's class where it is fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As its plain class, since nothing can be imported under the name of the fused one."""
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
                f"normplug: a {cls.__name__} was fused under other code than is there now, and "
                "runs as it is written. Call normplug.fuse(model) again.",
                stacklevel=2,
            )


def restore(cls: type[nn.Module], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Make the fused module that `Fused.__reduce_ex__` has taken apart."""
    return make(fused_class(cls), *args)


_fused_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of fused modules of a class; always the same, in every thread."""
    if cls not in _fused_classes:
        namespace = {
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "forward": _forward_before(cls),
        }
        _fused_classes.setdefault(cls, type(f"Fused{cls.__name__}", (Fused, cls), namespace))
    return _fused_classes[cls]


def _forward_before(cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fusion: Fusion | None = self.__dict__.get(FUSION)
        if fusion is not None and not kwargs and fusion.holds(self, args):
            return fusion.codes[self.training].forward(self, *args)
        return cls.forward(self, *args, **kwargs)

    # Whoever asks for the signature, as torch.fx does, is to see the one that was written.
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    return forward


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, behind what `fuse` and torch's own private subclasses put before it."""
    cls = _convert.plain_class(module)
    return cls.__bases__[1] if issubclass(cls, Fused) else cls
