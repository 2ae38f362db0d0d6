"""Find where in a forward a norm and the operations around it can be one call.

A norm's class declares these operations by `FusionSites`. Nothing here knows a norm by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from normplug import _activations
from normplug._activations import ActivationLike
from normplug._fuse import forward
from normplug._fuse.calls import (
    CONVOLUTIONS,
    add_in_place,
    add_norm,
    convolution_norm,
    isolated_norm,
    norm_add_activation,
    norm_max_pool,
)
from normplug._fuse.forward import Forward, addition, reader
from normplug.modules import TargetVarianceNorm
from normplug.modules.base import FusionSites

IN_PLACE = "the addition before it is in place, and other code may read its result"
FROM_OUTSIDE = (
    "its input is an argument of the forward; an addition before that is in another module"
)
# Their output is a new tensor, which no other code can mutate.
_FRESH = {
    cls.forward
    for cls in (
        *CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """A norm, and the operations that run in one call with it.

    Attributes:
        norm: the node of the norm.
        nodes: the nodes of the norm and the operations, in order. `isolated_norm` replaces only the
            norm.
        function: the function that runs them.
        arguments: its arguments after the norm, given a function that returns a node for the module
            that a node calls. They are read late, since a site may replace another one's input.
        adds: whether the addition of a residual, after the norm, is among them.
        label: the operations, for a report; "" for none.
    """

    norm: fx.Node
    nodes: tuple[fx.Node, ...]
    function: Callable[..., Any]
    arguments: Callable[[Callable[[fx.Node], fx.Node]], tuple[Any, ...]]
    adds: bool = False
    label: str = ""

    @property
    def add(self) -> fx.Node | None:
        """The addition of a residual after the norm, or None."""
        after = (node for node in self.nodes[self.nodes.index(self.norm) :] if addition(node))
        return next(after, None) if self.adds else None


def find(graph: fx.Graph, root: nn.Module) -> tuple[list[Site], dict[nn.Module, str]]:
    """Return the sites of a graph, and for each normplug layer without a site, the reason."""
    traced = Forward(graph, root)
    norms = [
        (node, m)
        for node in graph.nodes
        if isinstance(m := traced.module(node), TargetVarianceNorm)
    ]
    sites, reasons, taken, left = list[Site](), dict[nn.Module, str](), set[fx.Node](), []
    for node, norm in norms:
        times = sum(m is norm for _, m in norms)
        refused = _refusal(node, norm, times)
        found = refused or _site(traced, node, norm)
        if isinstance(found, Site) and not taken.isdisjoint(found.nodes):
            found = "its addition is another norm's"
        if isinstance(found, str):
            reasons[norm] = found
            if not refused:
                left.append((node, norm._fusion_sites))
        else:
            sites.append(found)
            taken.update(found.nodes)
    return [*sites, *_single_sites(left, sites)], reasons


def _refusal(node: fx.Node, norm: TargetVarianceNorm, times: int) -> str:
    """Why a call of a norm has no site, whatever is around it; "" if it may have one."""
    if times > 1:
        return "called more than once"
    if why := refusal(norm):
        return why
    if len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
        return "not called with one tensor"
    return ""


def refusal(norm: nn.Module) -> str:
    """Why no call of a layer can be fused; "" if one may be."""
    declared: FusionSites | None = getattr(norm, "_fusion_sites", None)
    if declared is None:
        return f"no fusion for {type(norm).__name__}"
    return "" if declared.apply_to(type(norm)) else "a subclass with a forward of its own"


def _site(traced: Forward, node: fx.Node, norm: TargetVarianceNorm) -> Site | str:
    """The site of a norm, or why it has none."""
    declared: Any = norm._fusion_sites
    reason = ""
    for name in declared.before:
        found = _BEFORE[name](traced, node)
        if not isinstance(found, str):
            return found
        reason = reason or found
    if declared.after:
        return _after(traced, node, declared)
    source = node.all_input_nodes[0]
    if source.op == "placeholder":
        return FROM_OUTSIDE
    return reason or f"preceded by {traced.shown(source)}"


def _single_sites(
    left: list[tuple[fx.Node, FusionSites | None]], sites: list[Site]
) -> Iterator[Site]:
    """Sites for the norms left whose result only the addition of another site reads."""
    additions = {site.add for site in sites}
    for node, declared in left:
        add = reader(node)
        if add is not None and add in additions and declared and "addition" in declared.after:
            yield _single(node, add)


def _single(node: fx.Node, add: fx.Node) -> Site:
    return Site(node, (node, add), isolated_norm, lambda _: node.args)


def _after(traced: Forward, node: fx.Node, declared: FusionSites) -> Site | str:
    """The site of a norm and what follows it."""
    add, between, last = None, list[fx.Node](), node
    while True:
        user = reader(last)
        if user is None:
            reason = f"its result is used {len(last.users)} times"
            break
        name = traced.activation(user) if "activation" in declared.after else None
        if name is not None:
            pool = None
            if add is None and name == "relu" and "max_pool" in declared.after:
                pool = traced.max_pool(reader(user), user)
            return _site_after(node, tuple(between), add, user, name, pool)
        if add is None and type(traced.module(user)) is nn.Identity:
            between.append(user)
        elif add is None and "addition" in declared.after and forward.adds(user, last):
            reason = _moves(traced, node, user, between)
            if reason:
                break
            add = user
        else:
            reason = f"followed by {traced.shown(user)}"
            break
        last = user
    if add is None:
        return reason
    return _site_after(node, tuple(between), add, None, None)


def _site_after(
    node: fx.Node,
    between: tuple[fx.Node, ...],
    add: fx.Node | None,
    activation: fx.Node | None,
    name: ActivationLike,
    pool: fx.Node | None = None,
) -> Site:
    """The site of a norm, an addition or a pooling, and an activation, of this name."""
    labels = ["add"] * (add is not None) + ["max pool"] * (pool is not None)
    if activation is not None:
        labels.insert(0 if add is None else 1, _activations.label(name))

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        value: Any = name
        if activation is not None and activation.op == "call_module":
            value = module(activation)
        first = node.args[0], value, tuple(map(module, between))
        if pool is not None:
            of_module = pool.op == "call_module"
            return *first, module(pool) if of_module else forward.pool_settings(pool)
        if add is None:
            return first
        flipped = add.args[1] is (node, *between)[-1]
        residual = add.args[0 if flipped else 1]
        return *first, residual, addition(add) is add_in_place, flipped

    nodes = (node, *between, *(n for n in (add, activation, pool) if n is not None))
    function = norm_add_activation if pool is None else norm_max_pool
    return Site(node, nodes, function, arguments, add is not None, ", ".join(labels))


def _moves(traced: Forward, node: fx.Node, add: fx.Node, between: list[fx.Node]) -> str:
    """Why a norm cannot be deferred until an addition; "" if it can."""
    source = node.all_input_nodes[0]
    module = traced.module(source)
    fresh = module is not None and type(module).forward in _FRESH and len(source.users) == 1
    amid = [n for n in traced.amid(node, add) if n not in between]
    if traced.calls(amid, node):
        return "called inside another module, too"
    if fresh or all(n.op in ("get_attr", "placeholder") for n in amid):
        return ""
    return "its input may change before the addition"


def _add_before(traced: Forward, node: fx.Node) -> Site | str:
    """The site of a norm of a sum."""
    add = node.all_input_nodes[0]
    how = addition(add)
    if how is None:
        return ""
    if how is add_in_place:
        return IN_PLACE
    if traced.first(user for user in add.users if not forward.reads_metadata(user)) is not node:
        return "its input is used before it, and may change"
    if traced.calls(traced.amid(add, node), node):
        return "called inside another module, too"
    return Site(node, (add, node), add_norm, lambda _: add.args, label="add before it")


def _bias_before(traced: Forward, node: fx.Node) -> Site | str:
    """The site of a norm over a convolution's channels, if they are moved last."""
    permute = node.all_input_nodes[0]
    dims = traced.permutation(permute)
    source: Any = permute.args[0] if dims else None
    layer: Any = traced.module(source)
    if dims is None or type(layer) not in CONVOLUTIONS or layer.bias is None:
        return ""
    norm: Any = traced.module(node)
    of_rows = norm.normalized_shape == (layer.out_channels,)
    channels_last = len(dims) == layer.weight.dim() and dims[-1] == 1
    called = len(source.args) == 1 and not source.kwargs
    read_once = reader(source) is permute and reader(permute) is node
    if not (of_rows and channels_last and called and read_once):
        return ""
    if traced.calls(traced.amid(source, node), node):
        return ""

    def arguments(module: Callable[[fx.Node], fx.Node]) -> tuple[Any, ...]:
        permutation = module(permute) if permute.op == "call_module" else None
        return module(source), permutation, dims, source.args[0]

    label = f"bias of {type(layer).__name__}"
    return Site(node, (source, permute, node), convolution_norm, arguments, label=label)


# Finders of the sites that a class declares in `before`. Each returns the site, why there is none,
# or "" if the operation before the norm is another one.
_BEFORE: dict[str, Callable[[Forward, fx.Node], Site | str]] = {
    "addition": _add_before,
    "convolution_bias": _bias_before,
}
