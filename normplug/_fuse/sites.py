"""Where in a graph a norm can be fused with what stands around it, and the calls that do it.

Each call that is put into a graph decides as it runs: where a layer has hooks, is measured, or gets
a residual that is not shaped as what it is added to, the modules are called one by one, as before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from normplug import modules
from normplug._fuse.hooks import has_hooks
from normplug._fuse.trace import add_in_place
from normplug._ops import eligible, recompute
from normplug._ops.aten import ACTIVATIONS, MODULES, Pool, activation_of
from normplug.modules import LayerNorm, TargetVarianceNorm

_FUNCTIONS: dict[Any, str] = {function: name for name, function in ACTIVATIONS.items()} | {
    torch.relu: "relu", torch.relu_: "relu", "relu": "relu", "relu_": "relu",
}  # fmt: skip
_SHOWN = {name: cls.__name__ for cls, name in MODULES.items()}
_ADDITIONS: dict[Any, Callable[[Any, Any], Any]] = {
    operator.add: operator.add, torch.add: operator.add, "add": operator.add,
    add_in_place: add_in_place, "add_": add_in_place,
}  # fmt: skip
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
# What gives a tensor of its own: nobody else can change it.
_FRESH = {
    cls.forward
    for cls in (
        *_CONVOLUTIONS, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
    )
}  # fmt: skip
_MAX_POOLS = {F.max_pool2d, torch.max_pool2d}
_FORWARDS = (
    modules.batch_norm._BatchNormForward.forward,
    modules.sync_batch_norm._SyncBatchNormForward.forward,
    modules.LayerNorm.forward,
)


@dataclass(frozen=True)
class Site:
    """What becomes one call.

    Attributes:
        norm: the node of the norm layer.
        add: the node of the addition after a BatchNorm or before a LayerNorm, or None.
        activation: the node of the activation, or None.
        pool: the node of the max pooling after relu, or None.
        between: nodes of `nn.Identity` after the norm.
        before: whether the addition, or the convolution, comes before the norm.
        label: what the norm is fused with, for people; "" for nothing.
        lone: whether the addition is another norm's, and only reads this one's result.
        convolution: the node of the convolution before a LayerNorm, whose bias that adds, or None.
        permute: the node that moves the convolution's channels last, or None.
    """

    norm: fx.Node
    add: fx.Node | None
    activation: fx.Node | None
    pool: fx.Node | None
    between: tuple[fx.Node, ...]
    before: bool
    label: str
    lone: bool = False
    convolution: fx.Node | None = None
    permute: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All that the call takes the place of; of a lone norm, the addition as well."""
        others = (self.add, self.activation, self.pool, self.permute, self.convolution)
        return (self.norm, *self.between, *(n for n in others if n is not None))


def find(graph: fx.Graph, root: nn.Module) -> tuple[list[Site], dict[nn.Module, str]]:
    """The sites of a graph; and for each other normplug layer in it, why it is at none."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    norms = [
        (node, m)
        for node in graph.nodes
        if isinstance(m := _module(node, root), TargetVarianceNorm)
    ]
    sites, reasons, taken = list[Site](), dict[nn.Module, str](), set[fx.Node]()
    left = list[fx.Node]()
    for node, norm in norms:
        if sum(m is norm for _, m in norms) > 1:
            reasons[norm] = "called more than once"
        elif not _can_be_fused(norm):
            reasons[norm] = "a subclass with a forward of its own"
        elif len(node.args) != 1 or node.kwargs or not isinstance(node.args[0], fx.Node):
            reasons[norm] = "not called with one tensor"
        else:
            look = _layer_norm_site if isinstance(norm, LayerNorm) else _batch_norm_site
            site = look(node, root, order)
            if isinstance(site, Site) and site.add in taken:
                site = "its addition is another norm's"
            if isinstance(site, str):
                reasons[norm] = site
                left.append(node)
            else:
                sites.append(site)
                taken.add(site.add or node)
    return [*sites, *_lone_sites(left, sites, root)], reasons


def _lone_sites(left: list[fx.Node], sites: list[Site], root: nn.Module) -> Iterator[Site]:
    """Of the norms left, the BatchNorms that only an addition of another's site reads."""
    additions = {site.add for site in sites if not site.before}
    for node in left:
        reader = next(iter(node.users)) if len(node.users) == 1 else None
        if reader in additions and not isinstance(_module(node, root), LayerNorm):
            yield Site(node, reader, None, None, (), False, "", lone=True)


def _can_be_fused(norm: TargetVarianceNorm) -> bool:
    """Whether a layer's forward is one that its `fused` stands for; an adapter's may do more."""
    cls: Any = type(norm)
    own = isinstance(norm, LayerNorm) and cls._normalise is not LayerNorm._normalise
    return cls.forward in _FORWARDS and not own


def _batch_norm_site(node: fx.Node, root: nn.Module, order: dict[fx.Node, int]) -> Site | str:
    add, between, last, reason = None, list[fx.Node](), node, ""
    while True:
        user = next(iter(last.users)) if len(last.users) == 1 else None
        if user is None:
            reason = f"its result is used {len(last.users)} times"
            break
        name = _activation_name(user, root)
        if name is not None:
            label = "add, " * (add is not None) + _SHOWN[name]
            pool = _pooling(user, root) if label == "ReLU" else None
            label += ", max pool" * (pool is not None)
            return Site(node, add, user, pool, tuple(between), False, label)
        if add is None and type(_module(user, root)) is nn.Identity:
            between.append(user)
        elif add is None and _operands(user, last, root):
            moved = _moved(node, user, between, root, order)
            if moved:
                reason = moved
                break
            add = user
        else:
            reason = f"followed by {_named(user, root)}"
            break
        last = user
    return reason if add is None else Site(node, add, None, None, tuple(between), False, "add")


def _moved(
    node: fx.Node, add: fx.Node, between: list[fx.Node], root: nn.Module, order: dict[fx.Node, int]
) -> str:
    """Why a norm cannot run as late as the addition; "" where it can."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    module = _module(source, root)
    fresh = module is not None and type(module).forward in _FRESH and len(source.users) == 1
    amid = [n for n in order if order[node] < order[n] < order[add] and n not in between]
    if _calls(amid, node, root):
        return "called inside another module, too"
    if fresh or all(n.op in ("get_attr", "placeholder") for n in amid):
        return ""
    return "what it normalises may change before the addition"


def _layer_norm_site(node: fx.Node, root: nn.Module, order: dict[fx.Node, int]) -> Site | str:
    add = node.args[0]
    assert isinstance(add, fx.Node)
    if not _operands(add, None, root):
        return _convolution_site(node, root, order) or f"preceded by {_named(add, root)}"
    if _addition(add) is add_in_place:
        return "the addition before it is in place, and others may see that"
    users = [user for user in add.users if not _only_looks(user)]
    if min(users, key=order.__getitem__) is not node:
        return "what it normalises is used before it, and may change"
    amid = [n for n in order if order[add] < order[n] < order[node]]
    if _calls(amid, node, root):
        return "called inside another module, too"
    return Site(node, add, None, None, (), True, "add before it")


def _convolution_site(node: fx.Node, root: nn.Module, order: dict[fx.Node, int]) -> Site | None:
    """A LayerNorm of what a convolution gives, channels last, if that has a bias to be added."""
    permute: Any = node.args[0]
    dims = _permutation(permute, root)
    if dims is None:
        return None
    source = permute.args[0]
    layer: Any = _module(source, root)
    if type(layer) not in _CONVOLUTIONS or layer.bias is None:
        return None
    norm: Any = _module(node, root)
    of_rows = norm.normalized_shape == (layer.out_channels,)
    channels_last = len(dims) == layer.weight.dim() and dims[-1] == 1
    called = len(source.args) == 1 and not source.kwargs
    if not (of_rows and channels_last and called):
        return None
    amid = [n for n in order if order[source] < order[n] < order[node]]
    if len(source.users) > 1 or len(permute.users) > 1 or _calls(amid, node, root):
        return None
    label = f"bias of {type(layer).__name__}"
    return Site(node, None, None, None, (), True, label, convolution=source, permute=permute)


def _permutation(node: fx.Node, root: nn.Module) -> tuple[int, ...] | None:
    """The order that a node puts dimensions in; None where it does anything else."""
    module: Any = _module(node, root)
    dims: Any
    if module is not None:
        cls = type(module)
        if (cls.__module__, cls.__name__) != ("torchvision.ops.misc", "Permute"):
            return None
        dims = module.dims
        alone = len(node.args) == 1
    else:
        alone = node.op != "get_attr" and node.target in (torch.permute, "permute")
        dims = node.args[1:]
        if len(dims) == 1 and isinstance(dims[0], (list, tuple)):
            dims = dims[0]
    known = alone and not node.kwargs and all(isinstance(d, int) and d >= 0 for d in dims)
    return tuple(dims) if known else None


def _calls(amid: list[fx.Node], norm: fx.Node, root: nn.Module) -> bool:
    """Whether some of the nodes call the norm as well, and so move its statistics."""
    layer = _module(norm, root)
    called = (_module(n, root) for n in amid)
    return any(m is not None and any(part is layer for part in m.modules()) for m in called)


def _only_looks(node: fx.Node) -> bool:
    """Whether a node asks a tensor for its shape or the like."""
    if node.op == "call_method":
        return node.target in ("dim", "size", "numel", "ndimension")
    looks = ("shape", "ndim", "dtype", "device")
    return node.op == "call_function" and node.target is getattr and node.args[1] in looks


def _addition(node: fx.Node) -> Callable[[Any, Any], Any] | None:
    if node.op not in ("call_function", "call_method") or node.kwargs or len(node.args) != 2:
        return None
    return _ADDITIONS.get(node.target)


def _operands(node: fx.Node, norm: fx.Node | None, root: nn.Module) -> bool:
    """Whether a node adds two tensors, one of them a norm's result where that is given."""
    addition = _addition(node)
    if addition is None or not all(isinstance(a, fx.Node) for a in node.args):
        return False
    if norm is None:
        return True
    if node.args[0] is node.args[1]:
        return False
    return addition is not add_in_place or node.args[0] is norm


def _module(node: Any, root: nn.Module) -> nn.Module | None:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return root.get_submodule(str(node.target))


def _activation_name(node: fx.Node, root: nn.Module) -> str | None:
    module = _module(node, root)
    if module is not None:
        return activation_of(module) if len(node.args) == 1 and not node.kwargs else None
    if node.op not in ("call_function", "call_method") or len(node.args) != 1:
        return None
    settings = {k: v for k, v in node.kwargs.items() if (k, v) != ("approximate", "none")}
    return _FUNCTIONS.get(node.target) if settings.keys() <= {"inplace"} else None


def _pooling(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """The max pooling of what a node gives, if nothing else uses that."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    if user is None or user.all_input_nodes != [node] or user.args[:1] != (node,):
        return None
    module = _module(user, root)
    if module is None:
        return user if user.target in _MAX_POOLS and _pool_settings(user) is not None else None
    plain = type(module) is nn.MaxPool2d and len(user.args) == 1 and not user.kwargs
    return user if plain and not module.return_indices else None


def _pool_settings(node: fx.Node) -> tuple[Any, ...] | None:
    """Kernel, stride, padding, dilation and ceil_mode of a function's call, if these are all."""
    settings: dict[str, Any] = {"stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
    names = ("kernel_size", *settings)
    settings |= dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    alone = not settings.pop("return_indices", False) and settings.keys() == set(names)
    return tuple(settings[name] for name in names) if alone else None


def _named(node: fx.Node, root: nn.Module) -> str:
    module = _module(node, root)
    if module is not None:
        return type(module).__name__
    if node.op == "output":
        return "the end of the module"
    if node.op == "placeholder":
        return "the start of the module"
    if node.target is add_in_place:
        return "an addition in place to another tensor"
    return str(getattr(node.target, "__name__", node.target))


def rewrite(graph: fx.Graph, sites: list[Site], root: nn.Module) -> None:
    """Put one call in place of each site."""
    for site in sites:
        path = str(site.norm.target)
        place = site.norm if site.lone else site.add or site.convolution or site.norm
        with graph.inserting_before(place):
            norm = graph.create_node("get_attr", path)
            if site.lone:
                result = graph.call_function(lone_batch_norm, (norm, site.norm.args[0]))
                last = site.norm
            elif site.convolution is not None:
                arguments = _around_convolution(graph, site, norm, root)
                result = graph.call_function(convolution_layer_norm, arguments)
                last = site.norm
            elif site.before:
                assert site.add is not None
                both = graph.call_function(add_layer_norm, (norm, *site.add.args))
                y = graph.call_function(operator.getitem, (both, 0))
                last, result = site.add, graph.call_function(operator.getitem, (both, 1))
                site.norm.replace_all_uses_with(y)
            else:
                function = batch_norm if site.pool is None else batch_norm_max_pool
                result = graph.call_function(function, tuple(_arguments(graph, site, norm)))
                last = site.nodes[-1]
        last.replace_all_uses_with(result)
        _erase(graph, site)


def _arguments(graph: fx.Graph, site: Site, norm: fx.Node) -> Iterator[Any]:
    """What `batch_norm` takes, or `batch_norm_max_pool`."""
    yield norm
    yield site.norm.args[0]
    if site.activation is None:
        yield None
    elif site.activation.op == "call_module":
        yield graph.create_node("get_attr", str(site.activation.target))
    else:
        yield _FUNCTIONS[site.activation.target]
    yield tuple(graph.create_node("get_attr", str(n.target)) for n in site.between)
    if site.pool is not None:
        if site.pool.op == "call_module":
            yield graph.create_node("get_attr", str(site.pool.target))
        else:
            yield _pool_settings(site.pool)
    if site.add is None:
        return
    of_norm = (site.norm, *site.between)[-1]
    flipped = site.add.args[1] is of_norm
    yield site.add.args[0 if flipped else 1]
    yield _addition(site.add) is add_in_place
    yield flipped


def _around_convolution(
    graph: fx.Graph, site: Site, norm: fx.Node, root: nn.Module
) -> tuple[Any, ...]:
    """What `convolution_layer_norm` takes."""
    assert site.convolution is not None
    assert site.permute is not None
    convolution = graph.create_node("get_attr", str(site.convolution.target))
    permute = None
    if site.permute.op == "call_module":
        permute = graph.create_node("get_attr", str(site.permute.target))
    dims = _permutation(site.permute, root)
    return norm, convolution, permute, dims, site.convolution.args[0]


def _erase(graph: fx.Graph, site: Site) -> None:
    # Later nodes first; a LayerNorm comes after its addition, a BatchNorm before it.
    nodes = (site.norm,) if site.lone else site.nodes
    for node in nodes if site.before else reversed(nodes):
        graph.erase_node(node)


def recompute_results(graph: fx.Graph, root: nn.Module) -> None:
    """Let modules that read a site's result, here or after an earlier module, not keep it.

    That is for what nothing else reads but additions, which keep nothing of what they add.
    """
    for node in list(graph.nodes):
        readers = [user for user in node.users if not _adds(user, node, root)]
        if not readers or not _may_be_a_result(node):
            continue
        if not all(user.op == "call_module" and _takes(user, node) for user in readers):
            continue
        for user in list(node.users):
            if user not in readers:
                # These modules keep it where it is not recomputed, so this can keep it as well.
                user.kwargs = {"kept": True}
        for reader in readers:
            with graph.inserting_before(reader):
                module = graph.create_node("get_attr", str(reader.target))
                arguments = (node, module, *reader.args)
                result = graph.call_function(recompute.call, arguments, reader.kwargs)
                reader.replace_all_uses_with(result)
            graph.erase_node(reader)


def _adds(node: fx.Node, residual: fx.Node, root: nn.Module) -> bool:
    """Whether a node is a BatchNorm that adds the residual, and whose backward does not read it."""
    if node.target is not batch_norm or len(node.args) == 4 or node.args[1] is residual:
        return False
    activation: Any = node.args[2]
    if isinstance(activation, fx.Node):
        activation = activation_of(root.get_submodule(str(activation.target)))
    return activation in (None, "relu")


def _may_be_a_result(node: fx.Node) -> bool:
    """Whether a node gives what can be recomputed: each call decides that as it runs."""
    if node.op == "placeholder" or node.target is batch_norm:
        return True
    if node.target is not operator.getitem:
        return False
    both, place = node.args
    return isinstance(both, fx.Node) and (both.target, place) == (add_layer_norm, 0)


def _takes(node: fx.Node, argument: fx.Node) -> bool:
    """Whether a call takes an argument as it is, and not in a list or the like."""
    return argument in node.args or argument in node.kwargs.values()


def batch_norm(
    norm: TargetVarianceNorm,
    x: Tensor,
    activation: nn.Module | str | None,
    between: tuple[nn.Module, ...],
    residual: Tensor | None = None,
    in_place: bool = False,
    flipped: bool = False,
    *,
    kept: bool = False,
) -> Tensor:
    """A BatchNorm, `between`, the addition and the activation: in one call where that is the same.

    activation: a module, the name of one, or None. in_place: the addition is. flipped: the residual
    is its left side. kept: a module keeps the residual, unless it is recomputed.
    """
    name = activation_of(activation) if isinstance(activation, nn.Module) else activation
    if (
        (name is not None or activation is None)
        and _are_plain(norm, x, activation, between)
        and (residual is None or _alike(x, residual))
    ):
        if not kept or torch.compiler.is_compiling() or recompute.will_recompute(residual):
            return norm.fused(x, residual, name)  # type: ignore[operator]
        return norm.fused(x, residual, name, keeps_residual=True)  # type: ignore[operator]
    y = norm(x)
    for module in between:
        y = module(y)
    if residual is not None:
        add = add_in_place if in_place else operator.add
        y = add(residual, y) if flipped else add(y, residual)
    if activation is None:
        return y
    return activation(y) if isinstance(activation, nn.Module) else ACTIVATIONS[activation](y)


def lone_batch_norm(norm: TargetVarianceNorm, x: Tensor) -> Tensor:
    """A BatchNorm that a fused call reads: a compiler has nothing to fuse it with."""
    if _is_plain(norm) and isinstance(x, Tensor):
        return norm.fused(x, lone=True)  # type: ignore[operator]
    return norm(x)


def batch_norm_max_pool(
    norm: TargetVarianceNorm,
    x: Tensor,
    activation: nn.Module | str,
    between: tuple[nn.Module, ...],
    pool: nn.Module | tuple[Any, ...],
) -> Tensor:
    """A BatchNorm, `between`, relu and max pooling: in one call where that is the same.

    pool: a module, or the settings of `F.max_pool2d`.
    """
    name = activation_of(activation) if isinstance(activation, nn.Module) else activation
    window = _window(pool)
    if name == "relu" and window is not None and _are_plain(norm, x, activation, between):
        return norm.fused(x, activation="relu", pool=window)  # type: ignore[operator]
    y = batch_norm(norm, x, activation, between)
    return pool(y) if isinstance(pool, nn.Module) else F.max_pool2d(y, *pool)


def _window(pool: nn.Module | tuple[Any, ...]) -> Pool | None:
    """What is pooled at a time; None where a module does more than pool, or otherwise."""
    if isinstance(pool, nn.Module):
        if type(pool) is not nn.MaxPool2d or pool.return_indices or has_hooks(pool):
            return None
        pool = (pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    *sizes, ceil_mode = pool
    kernel, stride, padding, dilation = (
        (v, v) if isinstance(v, int) else tuple(v or ()) for v in sizes
    )
    stride = stride or kernel
    pairs = all(len(v) == 2 for v in (kernel, stride, padding, dilation))
    return Pool(kernel, stride, padding, ceil_mode) if pairs and dilation == (1, 1) else None


def add_layer_norm(norm: TargetVarianceNorm, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The LayerNorm of a + b, and a + b: in one call where that is the same."""
    if (
        _is_plain(norm)
        and isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.is_floating_point()
        and b.is_floating_point()
    ):
        return norm.fused(a, b)  # type: ignore[operator]
    total = a + b
    return norm(total), total


def convolution_layer_norm(
    norm: LayerNorm,
    convolution: Any,
    permute: Any,
    dims: tuple[int, ...],
    x: Tensor,
) -> Tensor:
    """A convolution, its channels moved last, and a LayerNorm, which adds the convolution's bias.

    permute: a module that orders the dimensions as `dims`; None where a function did.
    """
    if (
        isinstance(x, Tensor)
        and eligible.has_kernels("fuse", norm.backend, x)  # elsewhere it is convolutions that add
        and _is_plain(norm)
        and _is_plain_convolution(convolution)
        and norm.normalized_shape == convolution.bias.shape
        and (permute is None or (tuple(permute.dims) == dims and not has_hooks(permute)))
    ):
        y = convolution._conv_forward(x, convolution.weight, None)
        return norm.fused_bias(y.permute(dims), convolution.bias)
    y = convolution(x)
    return norm(y.permute(dims) if permute is None else permute(y))


def _is_plain_convolution(module: Any) -> bool:
    """Whether calling a convolution comes to nothing more than convolving and adding a bias."""
    return type(module) in _CONVOLUTIONS and module.bias is not None and not has_hooks(module)


def _are_plain(
    norm: TargetVarianceNorm,
    x: Tensor,
    activation: nn.Module | str | None,
    between: tuple[nn.Module, ...],
) -> bool:
    """Whether calling these comes to nothing more than what `fused` computes."""
    return (
        _is_plain(norm)
        and not (isinstance(activation, nn.Module) and has_hooks(activation))
        and all(type(m) is nn.Identity and not has_hooks(m) for m in between)
        and isinstance(x, Tensor)
    )


def _alike(x: Tensor, residual: Any) -> bool:
    return (
        isinstance(residual, Tensor)
        and residual.shape == x.shape
        and residual.dtype == x.dtype
        and residual.device == x.device
    )


def _is_plain(norm: nn.Module) -> bool:
    """Whether calling a norm comes to nothing more than what `fused` computes."""
    return (
        isinstance(norm, TargetVarianceNorm)
        and _can_be_fused(norm)
        and not has_hooks(norm)
        and norm.computes_only()
    )
