"""Run norms together with the activations and additions around them, in one kernel each."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from normplug import _checks, _convert, _sites, _trace
from normplug._hooks import has_global_hooks, has_hooks
from normplug._ops import recompute as _recompute
from normplug._trace import Reads, Untraceable
from normplug.modules import TargetVarianceNorm
from normplug.plan import counts, shown

_FUSION = "_normplug_fusion"

_Scope: TypeAlias = tuple[nn.Module, ...]


@dataclass(frozen=True)
class Fused:
    """One norm layer, and what it runs together with.

    Attributes:
        path: its name in the model; "" is the model itself.
        kind: its class's name.
        label: what it is fused with, or would be; None where it is called by itself.
        owner: the module whose forward that concerns.
        note: why it is called by itself; "" otherwise.
    """

    path: str
    kind: str
    label: str | None
    owner: str
    note: str


@dataclass(frozen=True)
class Fusions:
    """Every norm layer of a model, in order; `print` it for a table."""

    rows: tuple[Fused, ...]

    def __iter__(self) -> Iterator[Fused]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        table = [("path", "class", "fused with", "notes")]
        for row in self.rows:
            note = f"in {shown(row.owner)}" if row.label else row.note
            table.append((shown(row.path), row.kind, row.label or "-", note))
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [
            "  ".join([*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3]]).rstrip()
            for line in table
        ]
        return "\n".join([*lines, self.summary()])

    def summary(self) -> str:
        """One line: how many are fused with what, how many are not, and why."""
        fused = Counter(f"with {row.label}" for row in self.rows if row.label)
        left = Counter(row.note for row in self.rows if not row.label)
        parts = [f"{fused.total()} of {len(self.rows)} norm layers fused: {counts(fused)}"]
        if left:
            parts.append("by themselves: " + ", ".join(f"{n} ({why})" for why, n in left.items()))
        return "; ".join(parts)


def fuse(model: nn.Module, *, recompute: bool = False) -> nn.Module:
    """Run normplug's layers together with what stands around them, where that is safe.

    BatchNorm with the activation after it, BatchNorm with a residual addition and the activation
    after that (ReLU, ReLU6, SiLU, Hardswish, exact GELU), BatchNorm with ReLU and the max pooling
    after that, a residual addition with the LayerNorm after it, and the bias of a convolution with
    the LayerNorm over its channels, moved last, become one call each: on CUDA one kernel a
    direction, or two with max pooling, which keep less for the backward. Under torch.compile those
    calls take what was measured faster; elsewhere they are PyTorch's operations, one by one. Max
    pooling is by kernel for channels_last input, and compares values before they are rounded.
    Fused kernels are compiled at the first step too: see `normplug.swap`.

    In place: the modules that call the norms get a subclass of their class, with another forward.
    Modules, parameters, buffers, hooks, names and flags stay, so that checkpoints, optimizers and
    aliases stay valid. The forward is taken down by torch.fx, for training and evaluation, and
    only where its source shows that it depends on nothing but its inputs and the module's
    attributes; those are compared at each call. A module that has changed since, or that gets
    hooks, other arguments or other tensors than these calls take, runs as it was written.

    What such a call gives, the convolution or linear layer after it keeps for its backward. With
    `recompute`, in training and where only modules and fused additions read it, in the same forward
    or in that of the block after it, each reader has it computed anew in the backward, to the bit,
    from what the norm keeps anyway: less memory, for one more read and write of it, and the host's
    time for one more launch. That goes for BatchNorm with an activation, for an addition with
    LayerNorm, and for BatchNorm with an addition where what is added is kept: of a chain of
    residual blocks, for every second. It takes the kernels: on the CPU the flag has no effect, nor
    under torch.compile, whose partitioner decides, nor inside activation checkpointing or other
    `torch.autograd.graph.saved_tensors_hooks`. The last call decides, and copies and pickles keep
    the flag.

    Args:
        model: a module that `normplug.swap` has swapped, or that has normplug's layers.
        recompute: whether to compute results anew in the backward; needs torch 2.8.

    Returns:
        `model` itself.

    Raises:
        TypeError: where `model` is no module, or TorchScript.
        NotImplementedError: `recompute`, where torch is older than 2.8.

    Warns:
        UserWarning: where there was nothing to fuse, with the reasons.

    Example:
        >>> import normplug
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> print(fusions(fuse(normplug.swap(model))).summary())
        1 of 1 norm layers fused: 1 with ReLU
    """
    _checks.module("fuse", model)
    _checks.flags("fuse", recompute=recompute)
    if recompute and not _recompute.AVAILABLE:
        raise NotImplementedError(
            f"normplug.fuse: recompute needs torch 2.8 or newer; this is {torch.__version__}. "
            "normplug.fuse(model) does without."
        )
    analysis = _Analysis(model, recompute)
    if not analysis.fusions:
        warnings.warn(
            f"normplug.fuse: nothing to fuse in {type(model).__name__}; "
            f"{analysis.report().summary()}.",
            stacklevel=2,
        )
    classes = {module: _fused_class(plain_class(module)) for module in analysis.fusions}
    for module, fusion in analysis.fusions.items():
        vars(module)[_FUSION] = fusion
        _convert.assign_class(module, classes[module])
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: every module has the class and the forward again that it had.

    Args:
        model: any module.

    Returns:
        `model` itself.

    Raises:
        TypeError: where `model` is no module, or TorchScript.
        ValueError: where the forward of a fused module has been replaced on the instance since.
            The model is as before.
    """
    _checks.module("unfuse", model)
    release(releasable("unfuse", fused_modules(model)))
    return model


def fusions(model: nn.Module) -> Fusions:
    """List what `fuse` fuses, what it leaves, and why; change nothing.

    Args:
        model: any module, fused or not.

    Returns:
        A `Fusions`: printable, and iterable over one `Fused` a norm layer.

    Raises:
        TypeError: where `model` is no module, or TorchScript.
    """
    _checks.module("fusions", model)
    return _Analysis(model).report()


def fused_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward has been fused, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, _Fused)}


def releasable(who: str, fused: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules, if all can have their class back.

    Raises:
        ValueError: as `unfuse` does.
    """
    patched = [shown(path) for path, m in fused.items() if _convert.is_patched(m)]
    if patched:
        raise ValueError(
            f"normplug.{who}: the forward of {', '.join(patched)}, which is fused, was replaced on "
            "the instance since, by a patch or accelerate's hooks; remove that first, as with "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    return list(fused.values())


def release(fused: list[nn.Module]) -> None:
    """Give modules their class back."""
    for module in fused:
        vars(module).pop(_FUSION, None)
        _convert.assign_class(module, plain_class(module))


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The module's class, behind what `fuse` and torch's own private subclasses put before it."""
    cls = _convert.plain_class(module)
    return cls.__bases__[1] if issubclass(cls, _Fused) else cls


@dataclass(frozen=True)
class _Guard:
    """What a traced forward depended on, of one module.

    It does not hold the module, which holds it: that would be a cycle, to be freed some time.
    """

    cls: type[nn.Module]
    children: tuple[nn.Module | None, ...]
    lists: tuple[tuple[nn.Module, tuple[nn.Module | None, ...]], ...]
    methods: tuple[tuple[str, Any], ...]
    values: tuple[tuple[str, Any], ...]
    tensors: tuple[tuple[str, bool], ...]
    asks_training: bool

    @classmethod
    def of(cls, module: nn.Module, reads: Reads) -> _Guard:
        return cls(
            plain_class(module),
            tuple(module._modules.values()),
            tuple((m, tuple(m._modules.values())) for m in reads.lists),
            tuple(reads.methods.items()),
            tuple(reads.values.items()),
            tuple(reads.tensors.items()),
            reads.training,
        )

    def holds(self, module: nn.Module) -> bool:
        """Whether all is as it was."""
        state = module.__dict__
        if not _same(module._modules.values(), self.children):
            return False
        for holder, children in self.lists:
            if not _same(holder._modules.values(), children):
                return False
        for name, method in self.methods:
            if getattr(self.cls, name) is not method or name in state:
                return False
        for name, value in self.values:
            if name not in state or state[name] != value:
                return False
        return all((getattr(module, name) is not None) == there for name, there in self.tensors)

    def holds_inside(self, module: nn.Module, training: bool) -> bool:
        """`holds`, of a module that was followed into, and so is not called."""
        return (
            type(module) in (self.cls, _fused_classes.get(self.cls))
            and not has_hooks(module)
            and (not self.asks_training or module.training == training)
            and self.holds(module)
        )


@dataclass(frozen=True)
class _Fusion:
    """The forward of a module with its sites fused, by training flag, and what it depended on."""

    sequences: tuple[bool, ...]
    forwards: dict[bool, Callable[..., Any]]
    guard: _Guard
    inner: tuple[tuple[nn.Module, _Guard], ...]
    recompute: bool

    def holds(self, root: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether the forward stands for the module's own, in a call with these arguments."""
        return (
            len(args) == len(self.sequences)
            and all(map(_is_of_kind, args, self.sequences))
            and not has_global_hooks()
            and self.guard.holds(root)
            and all(guard.holds_inside(m, root.training) for m, guard in self.inner)
        )


def _is_of_kind(x: Any, sequence: bool) -> bool:
    if sequence:
        return isinstance(x, (list, tuple)) and all(isinstance(t, Tensor) for t in x)
    return isinstance(x, Tensor)


def _same(some: Collection[Any], others: Collection[Any]) -> bool:
    return len(some) == len(others) and all(
        one is other for one, other in zip(some, others, strict=True)
    )


class _Fused(nn.Module):
    """What comes before a module's class where it is fused."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As its plain class, to be fused anew where it is loaded."""
        reduced: Any = super().__reduce_ex__(protocol)
        make, args, state, *rest = reduced
        if not args or args[0] is not type(self) or not isinstance(state, dict):
            return reduced
        fusion = state.get(_FUSION)
        state = {**state, _FUSION: fusion is not None and fusion.recompute}
        return (_restore, (plain_class(self), make, args[1:]), state, *rest)

    def __setstate__(self, state: dict[str, Any]) -> None:
        recompute = state.get(_FUSION, False)
        super().__setstate__({name: value for name, value in state.items() if name != _FUSION})
        # Inside a cycle of references a part may not have its state yet: then as it was written.
        with contextlib.suppress(AttributeError):
            if (fusion := _Analysis(self, recompute).fusions.get(self)) is not None:
                vars(self)[_FUSION] = fusion


def _restore(cls: type[nn.Module], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return make(_fused_class(cls), *args)


_fused_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _fused_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls not in _fused_classes:
        namespace = {
            "__module__": cls.__module__,
            "__doc__": cls.__doc__,
            "forward": _forward_before(cls),
        }
        _fused_classes[cls] = type(f"Fused{cls.__name__}", (_Fused, cls), namespace)
    return _fused_classes[cls]


def _forward_before(cls: type[nn.Module]) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fusion: _Fusion | None = self.__dict__.get(_FUSION)
        if fusion is not None and not kwargs and fusion.holds(self, args):
            return fusion.forwards[self.training](self, *args)
        return cls.forward(self, *args, **kwargs)

    # Whoever asks for the signature, as torch.fx does, is to see the one that was written.
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    return forward


class _Analysis:
    """What can be fused in a model; the model stays as it is.

    From the inside out, each module's forward is traced with those in it that could be traced
    themselves. A site whose nodes all stem from one of these is that one's; the others are the
    module's own, and only for them it is fused, following into no more than they need.
    """

    def __init__(self, model: nn.Module, recompute: bool = False) -> None:
        self._model = model
        self._recompute = recompute
        self._paths = {module: path for path, module in model.named_modules()}
        self._reads: dict[nn.Module, Reads] = {}
        self._inner: dict[nn.Module, set[nn.Module]] = {}
        self._labels: dict[nn.Module, dict[bool, tuple[str, str]]] = {}
        self._reasons: dict[nn.Module, str] = {}
        self.fusions: dict[nn.Module, _Fusion] = {}
        callers = self._callers()
        for module in reversed(self._paths):
            if module in callers:
                try:
                    self._look(module)
                except Untraceable as why:
                    reason = f"{plain_class(module).__name__}: {why}"
                    self._reasons |= dict.fromkeys(callers[module], reason)

    def report(self) -> Fusions:
        """A row for each norm layer."""
        rows = []
        for module, path in self._paths.items():
            if isinstance(module, TargetVarianceNorm):
                found = self._labels.get(module, {})
                label, owner = next(iter(found.values()), (None, ""))
                if label is not None and len(found) == 1:
                    label += " (in training)" if True in found else " (in evaluation)"
                why = "" if label else self._reasons.get(module, "nothing that was traced calls it")
            elif _convert.replacement(module) is not None:
                label, owner, why = None, "", "not swapped"
            else:
                continue
            kind = _convert.plain_class(module).__name__
            rows.append(Fused(path, kind, label, owner, why))
        return Fusions(tuple(rows))

    def _callers(self) -> dict[nn.Module, list[nn.Module]]:
        """Each module with norms inside, and those that it calls itself, as far as names tell."""
        callers: dict[nn.Module, list[nn.Module]] = {}
        modules = {path: module for module, path in self._paths.items()}
        for norm, path in self._paths.items():
            if not isinstance(norm, TargetVarianceNorm):
                continue
            nearest = True
            while path:
                path = path.rpartition(".")[0]
                module = modules.get(path)
                if module is None or type(module).forward is nn.Module.forward:
                    continue  # a container, such as nn.ModuleList
                callers.setdefault(module, []).extend([norm] * nearest)
                nearest = False
        return callers

    def _look(self, module: nn.Module) -> None:
        """Find the sites that are a module's own, and fuse them."""
        if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
            raise Untraceable("compiled already")
        if _convert.is_patched(module):
            raise Untraceable("its forward was replaced on the instance")
        if _convert.plain_class(module) is not type(module):
            raise Untraceable("parametrized, or sharded by FSDP")
        self._reads[module] = _trace.read(module, plain_class(module))
        try:
            sites = self._own_sites(module)
            if sites:
                followed = {m for _, _, scopes in sites for scope in scopes for m in scope}
                self._fuse(module, followed.union(*(self._inner.get(m, ()) for m in followed)))
            for training, site, _ in sites:
                if not site.lone:
                    norm = module.get_submodule(str(site.norm.target))
                    label = (site.label, self._paths[module])
                    # That of the outermost, which is the one that runs.
                    self._labels.setdefault(norm, {})[training] = label
        except Untraceable:
            del self._reads[module]
            raise

    def _own_sites(self, module: nn.Module) -> list[tuple[bool, _sites.Site, list[_Scope]]]:
        """The sites that are no inner module's, with the training flag and their nodes' origins."""
        traceable = {
            m
            for m in module.modules()
            if m is not module
            and m in self._reads
            and not has_hooks(m)
            # A graph does not tell what it would hand them.
            and not self._reads[m].sequences
        }
        own = []
        for training in (False, True):
            traced = _trace.trace(module, self._reads, traceable, training)
            sites, reasons = _sites.find(traced.graph, module)
            self._reasons |= reasons
            for site in sites:
                scopes = [traced.scopes[node] for node in site.nodes]
                inside = len({scope[:1] for scope in scopes}) == 1 and scopes[0]
                if not inside:
                    own.append((training, site, scopes))
        return own

    def _fuse(self, module: nn.Module, inner: set[nn.Module]) -> None:
        followed = [m for m in self._paths if m in inner]
        forwards = {}
        for training in (True, False):
            graph = _trace.trace(module, self._reads, followed, training).graph
            _sites.rewrite(graph, _sites.find(graph, module)[0], module)
            if self._recompute and training:
                _sites.recompute_results(graph, module)
            forwards[training] = _compiled(graph, module)
        self._inner[module] = inner
        reads = self._reads[module]
        guards = tuple((m, _Guard.of(m, self._reads[m])) for m in followed)
        sequences = tuple(name in reads.sequences for name in reads.inputs)
        self.fusions[module] = _Fusion(
            sequences, forwards, _Guard.of(module, reads), guards, self._recompute
        )


def _compiled(graph: fx.Graph, module: nn.Module) -> Callable[..., Any]:
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<normplug.fuse of {type(module).__name__}>", "exec"), namespace)
    return namespace["forward"]
