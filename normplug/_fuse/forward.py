"""A traced forward, and what its nodes are: calls of modules, additions, activations, poolings."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._fuse.calls import add_in_place

_ADDITIONS: dict[Any, Callable[[Any, Any], Any]] = {
    operator.add: operator.add, torch.add: operator.add, "add": operator.add,
    add_in_place: add_in_place, "add_": add_in_place,
}  # fmt: skip
_MAX_POOLS = (F.max_pool2d, torch.max_pool2d)


class Forward:
    """The graph of a module's forward; `root` is the module."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self._order = {node: i for i, node in enumerate(graph.nodes)}

    def module(self, node: Any) -> nn.Module | None:
        """The module that a node calls; None for every other node."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self.root.get_submodule(str(node.target))

    def first(self, nodes: Iterable[fx.Node]) -> fx.Node:
        """The node that runs first."""
        return min(nodes, key=self._order.__getitem__)

    def amid(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """The nodes that run between two."""
        return [n for n, i in self._order.items() if self._order[first] < i < self._order[last]]

    def calls(self, nodes: Iterable[fx.Node], norm: fx.Node) -> bool:
        """Whether any of the nodes calls a norm too, directly or in a module: order matters."""
        layer = self.module(norm)
        called = (self.module(node) for node in nodes)
        return any(m is not None and any(part is layer for part in m.modules()) for m in called)

    def activation(self, node: fx.Node) -> ActivationLike:
        """The activation that a node computes, or None."""
        module = self.module(node)
        if module is not None:
            alone = len(node.args) == 1 and not node.kwargs
            return _activations.of_module(module) if alone else None
        name = _activations.of_function(node.target) if _is_call(node) else None
        if name is None:
            return None
        slope = _activations.ACTIVATIONS[name].slope
        settings = {k: v for k, v in node.kwargs.items() if (k, v) != ("approximate", "none")}
        settings |= zip([slope] if slope else [], node.args[1:], strict=False)
        if len(node.args) > (2 if slope else 1) or not settings.keys() <= {"inplace", slope}:
            return None
        if slope not in settings:
            return name
        value: Any = settings[slope]
        return (name, value) if _activations.is_slope(value) else None

    def max_pool(self, node: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """The node itself if it max-pools the result of `source` and does no more; else None."""
        if node is None or node.all_input_nodes != [source] or node.args[:1] != (source,):
            return None
        module = self.module(node)
        if module is None:
            known = node.target in _MAX_POOLS and pool_settings(node) is not None
        else:
            alone = len(node.args) == 1 and not node.kwargs
            known = type(module) is nn.MaxPool2d and alone and not module.return_indices
        return node if known else None

    def permutation(self, node: fx.Node) -> tuple[int, ...] | None:
        """The order into which a node permutes dimensions; None for every other node."""
        module: Any = self.module(node)
        dims: Any
        if module is not None:
            cls = type(module)
            if (cls.__module__, cls.__name__) != ("torchvision.ops.misc", "Permute"):
                return None
            dims, alone = module.dims, len(node.args) == 1
        else:
            alone = _is_call(node) and node.target in (torch.permute, "permute")
            dims = node.args[1:]
            if len(dims) == 1 and isinstance(dims[0], (list, tuple)):
                dims = dims[0]
        known = alone and not node.kwargs and all(isinstance(d, int) and d >= 0 for d in dims)
        return tuple(dims) if known else None

    def shown(self, node: fx.Node) -> str:
        """Describe a node for a report."""
        module = self.module(node)
        if module is not None:
            return type(module).__name__
        if node.op == "output":
            return "the end of the module"
        if node.target is add_in_place:
            return "an in-place addition to another tensor"
        return str(getattr(node.target, "__name__", node.target))


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def reader(node: fx.Node) -> fx.Node | None:
    """The only node that reads another; None if there are several, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def addition(node: Any) -> Callable[[Any, Any], Any] | None:
    """How a node adds two values, `operator.add` or `add_in_place`; None if it does not."""
    if not isinstance(node, fx.Node) or not _is_call(node) or node.kwargs or len(node.args) != 2:
        return None
    return _ADDITIONS.get(node.target) if all(isinstance(a, fx.Node) for a in node.args) else None


def adds(node: fx.Node, result: fx.Node) -> bool:
    """Whether a node adds another tensor to a result, and mutates nothing but the result."""
    how = addition(node)
    if how is None or node.args[0] is node.args[1]:
        return False
    return how is not add_in_place or node.args[0] is result


def reads_metadata(node: fx.Node) -> bool:
    """Whether a node reads only a tensor's shape or other metadata."""
    if node.op == "call_method":
        return node.target in ("dim", "size", "numel", "ndimension")
    looks = ("shape", "ndim", "dtype", "device")
    return node.op == "call_function" and node.target is getattr and node.args[1] in looks


def pool_settings(node: fx.Node) -> tuple[Any, ...] | None:
    """Kernel, stride, padding, dilation and ceil_mode of a function's call, if these are all."""
    settings: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
    names = ("kernel_size", *settings)
    settings |= dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    alone = not settings.pop("return_indices", False) and settings.keys() == set(names)
    return tuple(settings[name] for name in names) if alone else None
