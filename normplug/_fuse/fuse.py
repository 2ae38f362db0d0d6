"""Run norms together with the activations and additions around them, in one kernel each."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from normplug import _checks, _convert
from normplug._fuse import sites as _sites
from normplug._fuse import trace as _trace
from normplug._fuse.fused_class import FUSION, Code, Fusion, Guard, fused_class, plain_class
from normplug._fuse.fused_class import Fused as _Fused
from normplug._fuse.fused_class import restore as _restore  # noqa: F401 - named in pickles of before
from normplug._fuse.hooks import has_hooks
from normplug._fuse.trace import Reads, Untraceable
from normplug._ops import recompute as _recompute
from normplug._table import counts, shown, table
from normplug.modules import TargetVarianceNorm


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
        rows = [("path", "class", "fused with", "notes")]
        for row in self.rows:
            note = f"in {shown(row.owner)}" if row.label else row.note
            rows.append((shown(row.path), row.kind, row.label or "-", note))
        return f"{table(rows)}\n{self.summary()}"

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
    aliases stay valid. torch.fx traces the forward, for training and for evaluation, and only
    where its source shows that it depends on nothing but its inputs and the module's attributes.
    Those attributes are compared at each call. A module runs as it was written if it has changed
    since, itself or in a module or container that its forward reaches at any depth, and if it gets
    hooks, other arguments or other tensors than these calls take. Other threads can run other
    models meanwhile: nothing of torch is patched.

    With `recompute`, training takes less memory: the next layer's backward recomputes a fused
    norm's output, bit for bit, instead of storing it. That costs one more read and write of the
    output, and one more launch. It applies to BatchNorm with an activation, to an addition with
    LayerNorm, and to every second of a chain of residual blocks, where only modules and fused
    additions read the output, in the same forward or in that of the next block. It needs the
    kernels: the flag has no effect on the CPU, under torch.compile, whose partitioner decides, and
    inside activation checkpointing or other `torch.autograd.graph.saved_tensors_hooks`. The last
    call of `fuse` decides.

    Copies and pickles are fused as the model is, with the same flag, without another trace. Where
    torch, normplug or the code of a fused forward has changed, a loaded pickle runs as its modules
    are written, and warns once: call `fuse` again. So do pickles of normplug before this rule.

    Args:
        model: a module that `normplug.swap` has swapped, or that has normplug's layers.
        recompute: recompute outputs in the backward instead of storing them; needs torch 2.8.

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
    classes = {module: fused_class(plain_class(module)) for module in analysis.fusions}
    for module, fusion in analysis.fusions.items():
        vars(module)[FUSION] = fusion
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
        vars(module).pop(FUSION, None)
        _convert.assign_class(module, plain_class(module))


@dataclass(frozen=True)
class _Traced:
    """A module's forward as a graph, with the sites in it."""

    trace: _trace.Trace
    sites: list[_sites.Site]
    reasons: dict[nn.Module, str]

    def own_sites(self) -> Iterator[tuple[_sites.Site, set[nn.Module]]]:
        """The sites that are no inner module's, each with the modules that its nodes stem from."""
        for site in self.sites:
            scopes = [self.trace.scopes[node] for node in site.nodes]
            if not scopes[0] or len({scope[:1] for scope in scopes}) > 1:
                yield site, {m for scope in scopes for m in scope}


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
        self.fusions: dict[nn.Module, Fusion] = {}
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
            self._look_inside(module)
        except Untraceable:
            del self._reads[module]
            raise

    def _look_inside(self, module: nn.Module) -> None:
        traceable = {
            m
            for m in module.modules()
            if m is not module
            and m in self._reads
            and not has_hooks(m)
            # A graph does not tell what it would hand them.
            and not self._reads[m].sequences
        }
        traced = self._traced(module, traceable)
        labels, needed, found = [], set[nn.Module](), False
        for training, each in traced.items():
            self._reasons |= each.reasons
            for site, origins in each.own_sites():
                found = True
                needed |= origins.union(*(self._inner[m] for m in origins if m in self._inner))
                if not site.lone:
                    norm = module.get_submodule(str(site.norm.target))
                    labels.append((norm, training, (site.label, self._paths[module])))
        if not found:
            return
        if any(set(each.trace.followed) != needed for each in traced.values()):
            traced = self._traced(module, needed)
        self._fuse(module, traced)
        self._inner[module] = needed
        for norm, training, label in labels:
            # That of the outermost, which is the one that runs.
            self._labels.setdefault(norm, {})[training] = label

    def _traced(self, module: nn.Module, inner: set[nn.Module]) -> dict[bool, _Traced]:
        """By training flag; the same for both where nothing asks for it."""
        traced: dict[bool, _Traced] = {}
        for training in (False, True):
            trace = _trace.trace(module, self._reads, inner, training)
            traced[training] = _Traced(trace, *_sites.find(trace.graph, module))
            if not any(self._reads[m].training for m in (module, *trace.followed)):
                return dict.fromkeys((False, True), traced[training])
        return traced

    def _fuse(self, module: nn.Module, traced: dict[bool, _Traced]) -> None:
        title = f"<normplug.fuse of {type(module).__name__}>"
        codes: dict[bool, Code] = {}
        for training, each in traced.items():
            graph = each.trace.graph
            if not (training and traced[False] is each):  # else it is rewritten already
                _sites.rewrite(graph, each.sites, module)
            if training and self._recompute:
                _sites.recompute_results(graph, module)
            codes[training] = Code.of_graph(graph, title)
        reached = dict.fromkeys(m for each in traced.values() for m in each.trace.reached)
        followed = {m for each in traced.values() for m in each.trace.followed}
        methods = {
            (self._reads[m].cls, name): function
            for m in (module, *followed)
            for name, function in self._reads[m].methods.items()
        }
        reads = self._reads[module]
        self.fusions[module] = Fusion(
            tuple(name in reads.sequences for name in reads.inputs),
            codes,
            self._guard(module, False),
            tuple((m, self._guard(m, m in followed)) for m in reached if m is not module),
            tuple((cls, name, function) for (cls, name), function in methods.items()),
            self._recompute,
        )

    def _guard(self, module: nn.Module, called: bool) -> Guard:
        cls, children = plain_class(module), module._modules
        reads = self._reads.get(module) or Reads(cls, ())  # of a container nothing is read
        return Guard(
            cls,
            tuple(children),
            tuple(children.values()),
            tuple(reads.methods),
            tuple(reads.values.items()),
            tuple(reads.tensors.items()),
            called,
            reads.training,
        )
