"""Trace a module's forward into a torch.fx graph, without changing the model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from normplug._convert import unfused_class
from normplug._fuse.calls import add_in_place
from normplug._fuse.source import Reads, Untraceable

_log = logging.getLogger("normplug.fuse")
# Containers that a forward may iterate over or index; subclasses may define that differently.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Proxy(fx.Proxy):
    # torch.fx records `a += b` as `a = a + b`, but other holders of `a` see the change, too.
    def __iadd__(self, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", add_in_place, (self, other), {})


@dataclass(frozen=True, eq=False)
class _Lazy(Mapping[str, Any]):
    """One of a module's dicts of children or tensors; each value is made when it is read."""

    entries: Callable[[], Mapping[str, Any]]
    make: Callable[[str, Any], Any]

    def __getitem__(self, name: str) -> Any:
        return self.make(name, self.entries()[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries())

    def __len__(self) -> int:
        return len(self.entries())


class Trace(fx.Tracer):
    """A module's forward as a graph, recorded on proxies, with stand-ins for the modules.

    `fx.Tracer.trace` patches `nn.Module` while it runs, and every thread of the process sees that.
    Here nothing is patched, so other threads can run the model meanwhile. A stand-in has the class
    of its module, so that the same forward runs. In its own dicts, children are stand-ins, and
    parameters and buffers are proxies. The training flag is a proxy, too: a forward can pass it on,
    but not branch on it. The graph calls modules by the paths that the forward took to them.
    A call of a module is one node, unless the module is `inner`: its forward is inlined.

    reads: what `source.read` returned for the root and for each of `inner`.
    """

    def __init__(
        self, root: nn.Module, reads: Mapping[nn.Module, Reads], inner: Collection[nn.Module]
    ) -> None:
        super().__init__()
        self.root, self.graph = root, fx.Graph()
        self.tensor_attrs = {}
        # For each node, the modules whose forward made it, outermost first.
        self.scopes: dict[fx.Node, tuple[nn.Module, ...]] = {}
        # The modules whose own forward is part of the graph, in order.
        self.followed: dict[nn.Module, None] = {}
        # On whose children it depends: the root, the followed modules, containers that were read.
        self.reached: dict[nn.Module, None] = {}
        self._reads, self._inner = reads, frozenset(inner)
        self._scope: tuple[nn.Module, ...] = ()
        self._stand_ins: dict[str, nn.Module] = {}
        self._tensors: dict[str, fx.Proxy] = {}
        _log.debug("tracing the forward of %s", type(root).__name__)
        try:
            inputs = [self.create_proxy("placeholder", n, (), {}) for n in reads[root].inputs]
            self.reached[root] = None
            result = reads[root].methods["forward"](self._with_forward(root, ""), *inputs)
            self.create_node("output", "output", (self.create_arg(result),), {})
        except Untraceable:
            raise
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Untraceable(f"torch.fx cannot follow its forward: {text}") from error
        finally:
            self._stand_ins.clear()  # breaks the reference cycle with this tracer

    def _child(self, path: str, module: nn.Module | None) -> nn.Module | None:
        if module is None:
            return None
        if path not in self._stand_ins:
            if module in self._inner:
                made = self._with_forward(module, path)
            elif unfused_class(module) in _CONTAINERS:
                made = _made(unfused_class(module), {"_modules": self._children(module, path)})
            else:
                made = _made(nn.Module, {"_parameters": {}, "_buffers": {}, "_modules": {}})
            # If this is set, `nn.Module.__call__` calls it and runs no hook.
            vars(made)["_compiled_call_impl"] = functools.partial(self._call, module, path)
            self._stand_ins[path] = made
        return self._stand_ins[path]

    def _with_forward(self, module: nn.Module, path: str) -> nn.Module:
        """A stand-in that can be `self` in the module's forward."""
        reads = self._reads[module]
        state: dict[str, Any] = {
            **vars(module),
            "_modules": self._children(module, path),
            "_parameters": self._table(module._parameters, path),
            "_buffers": self._table(module._buffers, path),
        }
        if "training" in reads.proxies:
            state["training"] = self.create_proxy("get_attr", _joined(path, "training"), (), {})
        return _made(reads.cls, state)

    def _children(self, module: nn.Module, path: str) -> _Lazy:
        def read() -> dict[str, nn.Module | None]:
            self.reached[module] = None
            return module._modules

        return _Lazy(read, lambda name, child: self._child(_joined(path, name), child))

    def _table(self, tensors: Mapping[str, Any], path: str) -> _Lazy:
        def read(name: str, tensor: Any) -> fx.Proxy | None:
            target = _joined(path, name)
            if tensor is not None and target not in self._tensors:
                self._tensors[target] = self.create_proxy("get_attr", target, (), {})
            return self._tensors.get(target)

        return _Lazy(lambda: tensors, read)

    def _call(self, module: nn.Module, path: str, *args: Any, **kwargs: Any) -> Any:
        plain = not kwargs and all(isinstance(a, fx.Proxy) for a in args)
        if module not in self._inner or not plain or len(args) != len(self._reads[module].inputs):
            return self.create_proxy("call_module", path, args, kwargs)
        self.followed[module] = self.reached[module] = None
        outer = self._scope
        self._scope = (*outer, module)
        try:
            return self._reads[module].methods["forward"](self._stand_ins[path], *args)
        finally:
            self._scope = outer

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):  # parameters and buffers come as proxies
            raise Untraceable("its forward makes a tensor")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        self.scopes[node] = self._scope
        return node


def _made(cls: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    """Make an instance without calling its constructor."""
    instance = object.__new__(cls)
    vars(instance).update(state)
    return instance


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
