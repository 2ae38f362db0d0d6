"""Fused forwards: their code, when they may run, and how they are copied and pickled."""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

import normplug
from normplug._fuse.definitions import Untraceable
from normplug._fuse.edited import Edited, edit
from normplug._fuse.fingerprint import fingerprint
from normplug._fuse.guard import Guard

# The attribute of a fused module that holds its `Fusion`.
FUSION = "_normplug_fusion"


@dataclass(frozen=True)
class Code:
    """A generated forward: 1.3 us for each call of a module, where `fx.Interpreter` takes 17.

    Attributes:
        forward: the function; takes the module, then all that its own forward takes.
        source: its source.
        title: the file name that tracebacks and profilers show.
        names: the globals of the source, besides those that fx gives every graph.
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
        # The inputs that have defaults come last, and the trace does not read them.
        source = code.src.replace("):\n", ", *_, **__):\n", 1)
        own = {name: v for name, v in code.globals.items() if name not in _names_of_fx()}
        return cls.of(source, title, own)


@functools.cache
def _names_of_fx() -> dict[str, Any]:
    return fx.Graph().python_code("self").globals


@dataclass(frozen=True)
class Traced:
    """A traced forward with its sites fused, and what it depends on.

    Attributes:
        sequences: for each input, whether it is a sequence of tensors.
        codes: the forward for each value of the training flag.
        guard: of the module itself.
        inner: every other module that the forward reaches and does not just call, with its guard.
        methods: class, name and function of each method that the forward consists of.
    """

    sequences: tuple[bool, ...]
    codes: dict[bool, Code]
    guard: Guard
    inner: tuple[tuple[nn.Module, Guard], ...]
    methods: tuple[tuple[type[nn.Module], str, Any], ...]

    def holds(self, root: nn.Module, args: tuple[Any, ...] | None) -> bool:
        """Whether the forward may run in place of the module's own.

        Args:
            root: the module.
            args: those of the call; None checks only whether the modules are unchanged.
        """
        if args is not None and len(args) != len(self.sequences):
            return False
        for x, sequence in zip(args or (), self.sequences, strict=False):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Traced:
        """The same code, for copies of the modules."""
        guard, inner = copy.deepcopy((self.guard, self.inner), memo)
        return replace(self, guard=guard, inner=inner)

    def contents(self) -> tuple[Any, ...]:
        """Plain values for a pickle, from which `of_contents` makes the forward again."""
        codes = [
            (training, code.source, code.title, {n: _address(v) for n, v in code.names.items()})
            for training, code in self.codes.items()
        ]
        methods = [(cls, name) for cls, name, _ in self.methods]
        inner = [(module, tuple(vars(guard).values())) for module, guard in self.inner]
        return self.sequences, codes, tuple(vars(self.guard).values()), inner, methods

    @classmethod
    def of_contents(
        cls, sequences: Any, sources: Any, guard: Any, inner: Any, named: Any
    ) -> Traced:
        """The inverse of `contents`.

        Raises:
            ImportError, AttributeError: a function that the code calls is gone.
        """
        codes = {
            training: Code.of(source, title, {n: _found(*where) for n, where in names.items()})
            for training, source, title, names in sources
        }
        methods = tuple((owner, name, getattr(owner, name, None)) for owner, name in named)
        guards = tuple((module, Guard(*values)) for module, values in inner)
        return cls(sequences, codes, Guard(*guard), guards, methods)

    def functions(self) -> list[Any]:
        """All functions that the forward consists of and calls, for its fingerprint."""
        called = [f for code in self.codes.values() for f in code.names.values()]
        return [*(method for *_, method in self.methods), *called]


@dataclass(frozen=True)
class Fusion:
    """The fused forwards of a module, and the report that `fuse` made for its model.

    Attributes:
        traced: the traced forward, which runs while what it depends on is unchanged.
        edited: the edited forward, which runs otherwise.
        path: the module's name in the model that was given to `fuse`.
        found: the rows of that model's `Fusions`, as plain tuples; all its modules share them.
    """

    traced: Traced | None
    edited: Edited | None
    path: str = ""
    found: tuple[tuple[Any, ...], ...] = ()

    def label(self, root: nn.Module, norm: str, then: str) -> str:
        """The present label of a norm for a report; "" if it is not fused.

        Args:
            root: the module.
            norm: the norm's name in it.
            then: its label when `fuse` was called.
        """
        if self.traced is not None and self.traced.holds(root, None):
            return then
        edited = self.edited
        if edited is None or norm not in edited.left or not edited.holds():
            return ""
        return edited.label(norm, root)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        return replace(self, traced=copy.deepcopy(self.traced, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle plain values and a fingerprint, so that `load` can tell if they still apply."""
        traced = None if self.traced is None else self.traced.contents()
        edited = None if self.edited is None else self.edited.contents()
        contents = (_versions(), self._fingerprint(), (traced, edited), self.path, self.found)
        return (load, contents)

    def _fingerprint(self) -> str:
        parts = [part for part in (self.traced, self.edited) if part is not None]
        return fingerprint([f for part in parts for f in part.functions()])


def _are_tensors(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and all(isinstance(t, Tensor) for t in x)


def _versions() -> str:
    return f"normplug {normplug.__version__}, torch {torch.__version__}"


def load(
    versions: str, digest: str, contents: Any, path: str, found: tuple[tuple[Any, ...], ...]
) -> Fusion | None:
    """Unpickle a `Fusion`; None if versions or the code that it was made from have changed."""
    if versions != _versions():
        return None
    traced, edited = contents
    try:
        fusion = Fusion(
            None if traced is None else Traced.of_contents(*traced),
            None if edited is None else edit(*edited),
            path,
            found,
        )
    except (ImportError, AttributeError, Untraceable):
        return None
    return fusion if digest == fusion._fingerprint() else None


def _address(value: Any) -> tuple[str, str]:
    """Where a class or a function is imported from."""
    return value.__module__, value.__qualname__


def _found(module: str, name: str) -> Any:
    return attrgetter(name)(importlib.import_module(module))
