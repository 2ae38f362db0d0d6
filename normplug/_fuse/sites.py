"""Find the norms of a forward that can be one call with the operations around them; rewrite them.

A norm's class declares these operations, in a `FusionSites` of `modules.base`. Nothing here knows
a norm by name.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._fuse.calls import (
    CONVOLUTIONS,
    add_in_place,
    add_norm,
    convolution_norm,
    isolated_norm,
    modulated_norm,
    norm_add_activation,
    norm_max_pool,
)
from normplug._ops import recompute
from normplug._ops.guess import Fusion
from normplug.modules import TargetVarianceNorm
from normplug.modules.base import FusionSites

_ADDITIONS: dict[Any, Callable[[Any, Any], Any]] = {
    operator.add: operator.add, torch.add: operator.add, "add": operator.add,
    add_in_place: add_in_place, "add_": add_in_place,
}  # fmt: skip
_PRODUCTS = (operator.mul, torch.mul, "mul")
_VIEWS = (operator.getitem, torch.unsqueeze, "unsqueeze")
# What may run between a norm, and the scale and shift after it.
_PURE = (
    *_PRODUCTS, *_VIEWS, operator.add, torch.add, "add", torch.chunk, "chunk", torch.split, "split",
)  # fmt: skip
# Their output is a new tensor, which no other code can mutate.
FRESH = {
    cls.forward
    for cls in (
        *CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
        nn.AvgPool2d,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A norm, and the operations that run in one call with it."""

    norm: fx.Node
    nodes: tuple[fx.Node, ...]  # all, in order; `isolated_norm` replaces only the norm
    function: Callable[..., Any]  # that runs them
    # Makes the arguments after the norm. It takes a function: node that calls a module -> node of
    # that module. It is called late, since another site may replace an input.
    arguments: Callable[[Callable[[fx.Node], fx.Node]], tuple[Any, ...]]
    # The addition of a residual after the norm, if the site has one.
    add: fx.Node | None = None
    fusion: Fusion | None = None  # the operations; None for the norm alone
    left: str = ""  # why a norm alone is not in the call that adds its result
    other: fx.Node | None = None  # the norm of the residual, if the call runs it, too

    @property
    def fusions(self) -> dict[str, Fusion]:
        """Path of each norm -> what it is fused with."""
        if self.fusion is None:
            return {}
        fusions = {str(self.norm.target): self.fusion}
        if self.other is not None:
            other = Fusion("norm that adds it", for_residual=True)
            fusions[str(self.other.target)] = other
        return fusions


def find(graph: fx.Graph, root: nn.Module) -> list[Site]:
    """The sites of a graph."""
    traced = Forward(graph, root)
    modules = [(node, traced.module(node)) for node in graph.nodes]
    norms = [(node, m) for node, m in modules if isinstance(m, TargetVarianceNorm)]
    times = Counter(norm for _, norm in norms)
    sites, taken, left = list[Site](), set[fx.Node](), list[tuple[fx.Node, FusionSites]]()
    for node, norm in norms:
        alone = (
            len(node.args) == 1 and isinstance(node.args[0], fx.Node) and not node.kwargs
        )
        declared: Any = norm._fusion_sites
        if times[norm] > 1 or not alone or refusal(norm):
            continue
        # It saves more than a sum before the norm.
        site = _modulation(traced, node) if "modulation" in declared.after else None
        if site is None:
            before = (_BEFORE[name](traced, node) for name in declared.before)
            site = next(filter(None, before), None)
        if site is None and declared.after:
            site = _after(traced, node, declared)
        if site is None or not taken.isdisjoint(site.nodes):
            left.append((node, declared))
        else:
            sites.append(site)
            taken.update(site.nodes)
    additions = {site.add: site for site in sites}
    for node, declared in left:
        # A norm whose result only another site's addition reads.
        add = reader(node)
        if add is None or add not in additions:
            continue
        site = additions[add]
        why_not = _refusal_to_join(traced, node, declared, site)
        if not why_not:
            sites[sites.index(site)] = _joined(node, site)
        elif "addition" in declared.after:
            sites.append(_isolated(node, add, why_not))
    return sites


def _refusal_to_join(
    traced: Forward, node: fx.Node, declared: FusionSites, site: Site
) -> str:
    """Why a site may not run the norm whose result it adds, right before it; "" if it may."""
    norm: Any = traced.module(site.norm)
    for layer, sites in ((traced.module(node), declared), (norm, norm._fusion_sites)):
        if "norm" not in sites.after:
            return f"{type(layer).__name__} runs apart from the norm that adds it"
    assert site.add is not None
    if not _may_run_late(traced, node, site.add, []):
        return "an operation before the addition may change the input of the norm"
    return ""


def _joined(node: fx.Node, site: Site) -> Site:
    """A site with the norm whose result it adds."""

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        *first, _, in_place, flipped = site.arguments(module)
        return *first, node.args[0], in_place, flipped, module(node)

    assert site.fusion is not None
    return replace(
        site,
        nodes=(node, *site.nodes),
        arguments=arguments,
        fusion=replace(site.fusion, residual_norm=True),
        other=node,
    )


def _isolated(node: fx.Node, add: fx.Node, left: str) -> Site:
    return Site(node, (node, add), isolated_norm, lambda _: node.args, left=left)


def refusal(norm: nn.Module) -> str:
    """Why the calls of a layer cannot be fused; "" if they may be."""
    declared: FusionSites | None = getattr(norm, "_fusion_sites", None)
    if declared is None:
        return f"nothing to do: no fusion for {type(norm).__name__}"
    own = all(
        getattr(type(norm), name) is method for name, method in declared.methods.items()
    )
    return "" if own else "nothing to do: a subclass with a forward of its own"


def _after(traced: Forward, node: fx.Node, declared: FusionSites) -> Site | None:
    """The site of a norm and what follows it, or None."""
    add: fx.Node | None = None
    activation: fx.Node | None = None
    name: ActivationLike = None
    between, last = list[fx.Node](), node
    while activation is None and (user := reader(last)) is not None:
        name = traced.activation(user) if "activation" in declared.after else None
        if name is not None:
            activation = user
        elif add is not None:
            break
        elif type(traced.module(user)) is nn.Identity:
            between.append(user)
        elif "addition" in declared.after and _is_residual(traced, node, user, between):
            add = user
        else:
            break
        last = user
    may_pool = add is None and name == "relu" and "max_pool" in declared.after
    pool = traced.max_pool(reader(last), last) if may_pool else None

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        value: Any = name
        if activation is not None and activation.op == "call_module":
            value = module(activation)
        first = node.args[0], value, tuple(map(module, between))
        if add is None:
            return first if pool is None else (*first, module(pool))
        flipped = add.args[1] is (node, *between)[-1]
        residual = add.args[0 if flipped else 1]
        return *first, residual, addition(add) is add_in_place, flipped

    parts = {"add": add, _activations.label(name): activation, "max pool": pool}
    found = {label: part for label, part in parts.items() if part is not None}
    nodes = (node, *between, *found.values())
    function = norm_add_activation if pool is None else norm_max_pool
    if not found:
        return None
    fusion = Fusion(", ".join(found), adds=add is not None, activation=name)
    return Site(node, nodes, function, arguments, add, fusion)


def _is_residual(
    traced: Forward, node: fx.Node, add: fx.Node, between: list[fx.Node]
) -> bool:
    """Whether a node adds a residual to a norm's result, and the norm may run just before it."""
    how, result = addition(add), (node, *between)[-1]
    if how is None or add.args[0] is add.args[1]:
        return False
    if how is add_in_place and add.args[0] is not result:
        return False  # it mutates the residual
    return _may_run_late(traced, node, add, between)


def _may_run_late(
    traced: Forward, node: fx.Node, add: fx.Node, between: list[fx.Node]
) -> bool:
    """Whether a norm may run just before the addition that reads its result."""
    source = node.all_input_nodes[0]
    module = traced.module(source)
    fresh = (
        module is not None and type(module).forward in FRESH and len(source.users) == 1
    )
    amid = [n for n in traced.amid(node, add) if n not in between]
    harmless = fresh or all(n.op in ("get_attr", "placeholder") for n in amid)
    return harmless and not traced.calls(amid, node)


def _modulation(traced: Forward, node: fx.Node) -> Site | None:
    """The site of a norm and a scale and a shift after it, or None."""
    product = reader(node)
    if product is None or product.target not in _PRODUCTS or product.kwargs:
        return None
    total = reader(product)
    if total is None or addition(total) is not operator.add:
        return None
    reads = product.args[0] is node and total.args[0] is product
    if not reads or not _is_scale(product.args[1]):
        return None
    amid = traced.amid(node, total)
    if not all(n.op in ("get_attr", "placeholder") or n.target in _PURE for n in amid):
        return None

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        return node.args[0], product.args[1], total.args[1]

    nodes = (node, product, total)
    fusion = Fusion("scale and shift after it")
    return Site(node, nodes, modulated_norm, arguments, fusion=fusion)


def _is_scale(node: Any) -> bool:
    """Whether a node computes 1 + a tensor, or a view of that."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or _ADDITIONS.get(node.target) is not operator.add:
        return False
    return 1 in node.args and not node.kwargs and len(node.args) == 2


def _add_before(traced: Forward, node: fx.Node) -> Site | None:
    """The site of a norm and the sum that it reads, or None."""
    add = node.all_input_nodes[0]
    if addition(add) is not operator.add:
        return None
    readers = [user for user in add.users if not reads_metadata(user)]
    earlier = min(readers, key=traced.order.__getitem__) is not node
    if earlier or traced.calls(traced.amid(add, node), node):
        return None
    fusion = Fusion("add before it", adds=True)
    return Site(node, (add, node), add_norm, lambda _: add.args, fusion=fusion)


def _bias_before(traced: Forward, node: fx.Node) -> Site | None:
    """The site of a norm over a convolution's channels, moved last; or None."""
    permute = node.all_input_nodes[0]
    dims = traced.permutation(permute)
    source: Any = permute.args[0] if dims else None
    layer: Any = traced.module(source)
    if dims is None or type(layer) not in CONVOLUTIONS or layer.bias is None:
        return None
    norm: Any = traced.module(node)
    of_rows = norm.normalized_shape == (layer.out_channels,)
    channels_last = len(dims) == layer.weight.dim() and dims[-1] == 1
    called = len(source.args) == 1 and not source.kwargs
    read_once = reader(source) is permute and reader(permute) is node
    if not (of_rows and channels_last and called and read_once):
        return None
    if traced.calls(traced.amid(source, node), node):
        return None

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        permutation = module(permute) if permute.op == "call_module" else None
        return module(source), permutation, dims, source.args[0]

    nodes = (source, permute, node)
    fusion = Fusion(f"bias of {type(layer).__name__}", adds_bias=True)
    return Site(node, nodes, convolution_norm, arguments, fusion=fusion)


# Operation in `FusionSites.before` -> the function that finds its site.
_BEFORE: dict[str, Callable[[Forward, fx.Node], Site | None]] = {
    "sum": _add_before,
    "convolution_bias": _bias_before,
}


# What the nodes of a graph are.


class Forward:
    """The graph of a module's forward; `root` is the module."""

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self.root = root
        self.order = {node: i for i, node in enumerate(graph.nodes)}

    def module(self, node: Any) -> nn.Module | None:
        """The module that a node calls; None for every other node."""
        if not isinstance(node, fx.Node) or node.op != "call_module":
            return None
        return self.root.get_submodule(str(node.target))

    def amid(self, first: fx.Node, last: fx.Node) -> list[fx.Node]:
        """The nodes that run between two."""
        return [
            n for n, i in self.order.items() if self.order[first] < i < self.order[last]
        ]

    def calls(self, nodes: Iterable[fx.Node], norm: fx.Node) -> bool:
        """Whether one of the nodes also calls the norm, even inside a module: order matters."""
        layer = self.module(norm)
        called = (self.module(node) for node in nodes)
        return any(
            m is not None and any(part is layer for part in m.modules()) for m in called
        )

    def activation(self, node: fx.Node) -> ActivationLike:
        """The activation that a node computes, or None."""
        module = self.module(node)
        if module is not None:
            alone = len(node.args) == 1 and not node.kwargs
            return _activations.of_module(module) if alone else None
        name = _activations.BY_FUNCTION.get(node.target) if _is_call(node) else None
        if name is None:
            return None
        slope = _activations.ACTIVATIONS[name].slope
        settings = {
            k: v for k, v in node.kwargs.items() if (k, v) != ("approximate", "none")
        }
        settings |= zip([slope] if slope else [], node.args[1:], strict=False)
        if len(node.args) > (2 if slope else 1) or not settings.keys() <= {
            "inplace",
            slope,
        }:
            return None
        if slope not in settings:
            return name
        value: Any = settings[slope]
        return (name, value) if _activations.is_slope(value) else None

    def max_pool(self, node: fx.Node | None, source: fx.Node) -> fx.Node | None:
        """The node itself if it max-pools the result of `source` and does no more; else None."""
        module = self.module(node)
        if node is None or type(module) is not nn.MaxPool2d or module.return_indices:
            return None
        return node if node.args == (source,) and not node.kwargs else None

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
        known = (
            alone and not node.kwargs and all(isinstance(d, int) and d >= 0 for d in dims)
        )
        return tuple(dims) if known else None


def _is_call(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method")


def reader(node: fx.Node) -> fx.Node | None:
    """The only node that reads this one; None if there are several, or none."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def addition(node: Any) -> Callable[[Any, Any], Any] | None:
    """How a node adds two values, `operator.add` or `add_in_place`; None if it does not."""
    if (
        not isinstance(node, fx.Node)
        or not _is_call(node)
        or node.kwargs
        or len(node.args) != 2
    ):
        return None
    return (
        _ADDITIONS.get(node.target)
        if all(isinstance(a, fx.Node) for a in node.args)
        else None
    )


def reads_metadata(node: fx.Node) -> bool:
    """Whether a node reads only a tensor's shape or other metadata."""
    if node.op == "call_method":
        return node.target in ("dim", "size", "numel", "ndimension")
    looks = ("shape", "ndim", "dtype", "device")
    return node.op == "call_function" and node.target is getattr and node.args[1] in looks


# The sites of a graph become calls.


def rewrite(graph: fx.Graph, sites: list[Site]) -> None:
    """Replace each site by one call."""
    module_of = partial(attribute, graph)
    for site in sites:
        # The scale and the shift may be computed after the norm.
        is_late = site.function is modulated_norm
        place = site.nodes[-1] if is_late else site.add or site.nodes[0]
        with graph.inserting_before(place):
            norm, arguments = module_of(site.norm), site.arguments(module_of)
            call = graph.call_function(site.function, (norm, *arguments))
            if site.function is not add_norm:
                replaced = site.nodes
                if site.function is isolated_norm:
                    replaced = (site.norm,)
                replace_nodes(graph, call, *replaced)
                continue
            y, total = (
                graph.call_function(operator.getitem, (call, i)) for i in range(2)
            )
        replace_nodes(graph, y, site.norm)
        replace_nodes(graph, total, site.nodes[0])


def attribute(graph: fx.Graph, call: fx.Node) -> fx.Node:
    """The module that a node calls, as a value."""
    return graph.create_node("get_attr", str(call.target))


def replace_nodes(graph: fx.Graph, call: fx.Node, *nodes: fx.Node) -> None:
    """Replace nodes, given in order, by a call that returns the result of the last node."""
    nodes[-1].replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)


def recompute_results(graph: fx.Graph, root: nn.Module) -> None:
    """Let the modules that read a site's result recompute it in their backward.

    The site may be in this graph or in an earlier module. Besides the modules, only fused additions
    whose backward does not need the result may read it.
    """
    for node in list(graph.nodes):
        readers = [user for user in node.users if not _adds_only(user, node, root)]
        if not readers or not _may_be_a_result(node):
            continue
        # A module takes the result directly, and not in a list or the like.
        takes = (node in user.args or node in user.kwargs.values() for user in readers)
        if not all(takes) or any(user.op != "call_module" for user in readers):
            continue
        for user in list(node.users):
            if user not in readers:
                # If the result is not recomputed, the modules save it, and the addition may, too.
                user.kwargs = {"keeps_residual": True}
        if node.target is operator.getitem:
            call = node.args[0]
            call.kwargs = {"saves_normalised": True}
        for reader in readers:
            with graph.inserting_before(reader):
                arguments = (node, attribute(graph, reader), *reader.args)
                call = graph.call_function(recompute.call, arguments, reader.kwargs)
            replace_nodes(graph, call, reader)


def _adds_only(node: fx.Node, residual: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a norm that adds the residual and does not read it in its backward."""
    # Five arguments come first. The eighth is the residual's norm, which reads it.
    added = node.target is norm_add_activation and 4 < len(node.args) < 8
    if not added or node.args[1] is residual:
        return False
    activation: Any = node.args[2]
    if isinstance(activation, fx.Node):
        activation = _activations.of_module(root.get_submodule(str(activation.target)))
    return activation in (None, "relu")


def _may_be_a_result(node: fx.Node) -> bool:
    """Whether a node's result may be recomputable; each call decides that at run time."""
    if node.op == "placeholder" or node.target is norm_add_activation:
        return True
    if node.target is not operator.getitem:
        return False
    both, place = node.args
    return isinstance(both, fx.Node) and (both.target, place) == (add_norm, 0)


def compiled(graph: fx.Graph, title: str) -> Callable[..., Any]:
    """Compile a graph: a call takes 1.3 us per module, compared with 17 by `fx.Interpreter`."""
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, title, "exec"), namespace)
    forward: Callable[..., Any] = namespace["forward"]
    return forward
