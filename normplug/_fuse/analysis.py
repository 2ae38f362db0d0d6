"""Find what can be fused in a model, without changing the model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from normplug import _activations, _convert
from normplug._fuse import source
from normplug._fuse.edit import REASON, Edited, Parts, edit
from normplug._fuse.fusion import (
    FusedForwards,
    FusedModule,
    Guard,
    Traced,
    has_fused_class,
    plain_class,
)
from normplug._fuse.rewrite import compiled, recompute_results, rewrite
from normplug._fuse.sites import Site, find, refusal
from normplug._fuse.source import Reads, Untraceable
from normplug._fuse.trace import Trace
from normplug._torch import has_hooks, is_patched
from normplug.modules import TargetVarianceNorm


@dataclass(frozen=True)
class _Found:
    """A module's forward as a graph, with the sites in it."""

    trace: Trace
    sites: list[Site]
    reasons: dict[nn.Module, str]

    def own_sites(self) -> Iterator[tuple[Site, set[nn.Module]]]:
        """The sites that belong to no inner module, each with the modules that made its nodes."""
        for site in self.sites:
            scopes = [self.trace.scopes[node] for node in site.nodes]
            if not scopes[0] or len({scope[:1] for scope in scopes}) > 1:
                yield site, {m for scope in scopes for m in scope}


class Analysis:
    """What can be fused in a model.

    Each module's forward is traced, innermost modules first. The trace inlines the forwards of the
    inner modules that could be traced themselves. A site whose nodes all come from one inner module
    belongs to that module. The other sites are the module's own. A module is fused only if it has
    such sites, and its fused forward then inlines only the inner modules that they need. A forward
    that cannot be traced, or is called with arguments that do not fit the trace, may run an edited
    copy of its source instead.

    Attributes:
        fusions: the modules to fuse, and their new forwards.
        reasons: why other norms are not fused; may also have norms that an outer module fuses.
    """

    def __init__(self, model: nn.Module, recompute: bool = False) -> None:
        self._recompute = recompute
        self._reads: dict[nn.Module, Reads] = {}
        self._inner: dict[nn.Module, set[nn.Module]] = {}
        self._traces: dict[nn.Module, Traced] = {}
        self._edits: dict[nn.Module, Edited] = {}
        self.reasons: dict[nn.Module, str] = {}
        callers = {
            module: list(_norms_below(module))
            for module in _inner_first(model, set())
            if type(module).forward is not nn.Module.forward  # a container has none
            and not isinstance(module, TargetVarianceNorm)
            and any(isinstance(inside, TargetVarianceNorm) for inside in module.modules())
        }
        for module, norms in callers.items():
            self._look(module, norms)
        self.fusions = {
            module: FusedForwards(self._traces.get(module), self._edits.get(module))
            for module in callers
            if module in self._traces or module in self._edits
        }

    def _look(self, module: nn.Module, norms: list[TargetVarianceNorm]) -> None:
        """Find the sites that are a module's own, and fuse them; norms: the norms that it calls."""
        name, untraced = plain_class(module).__name__, ""
        try:
            _check(module)
        except Untraceable as why:
            self.reasons |= dict.fromkeys(norms, f"{name}: {why}")
            return
        try:
            self._reads[module] = source.read(module, plain_class(module))
            self._trace(module)
        except Untraceable as why:
            self._reads.pop(module, None)
            untraced = f"{name}: {why}"
            self.reasons |= {norm: refusal(norm) or untraced for norm in norms}
        self._edit(module, untraced)

    def _edit(self, module: nn.Module, untraced: str) -> None:
        """Edit a module's forward where its norms come after additions or before activations.

        untraced: why the forward was not traced, for the report; "" if it was.
        """
        parts = _parts(module)
        norms = (*parts.summed, *parts.activated)
        if not norms:
            return
        try:
            edited = edit(plain_class(module), parts, self._recompute)
        except Untraceable:
            return
        for name in norms:
            norm: Any = module._modules[name]
            if edited.label(name, module):
                self._edits[module] = edited
            elif untraced:
                self.reasons[norm] = f"{untraced}, and {REASON}"

    def _trace(self, module: nn.Module) -> None:
        """Trace a module's forward, and fuse the sites that are its own."""
        traceable = {
            m
            for m in module.modules()
            if m is not module
            and m in self._reads
            and not has_hooks(m)
            # A graph does not show whether an argument that it passes to them is a sequence.
            and not self._reads[m].sequences
        }
        traced = self._traced(module, traceable)
        labels, needed, found = dict[str, dict[bool, str]](), set[nn.Module](), False
        for training, each in traced.items():
            self.reasons |= each.reasons
            for site, origins in each.own_sites():
                found = True
                needed |= origins.union(*(self._inner[m] for m in origins if m in self._inner))
                if site.label:
                    path = str(site.norm.target)
                    labels.setdefault(path, {})[training] = site.label
        if not found:
            return
        if any(set(each.trace.followed) != needed for each in traced.values()):
            traced = self._traced(module, needed)
        self._fuse(module, traced, {path: _label(each) for path, each in labels.items()})
        self._inner[module] = needed

    def _traced(self, module: nn.Module, inner: set[nn.Module]) -> dict[bool, _Found]:
        """Trace a module for each training flag; one trace serves both if no forward reads it."""
        traced: dict[bool, _Found] = {}
        for training in (False, True):
            made = Trace(module, self._reads, inner, training)
            traced[training] = _Found(made, *find(made.graph, module))
            if not any(self._reads[m].training for m in (module, *made.followed)):
                return dict.fromkeys((False, True), traced[training])
        return traced

    def _fuse(self, module: nn.Module, traced: dict[bool, _Found], labels: dict[str, str]) -> None:
        title = f"<normplug.fuse of {type(module).__name__}>"
        forwards = {}
        for training, each in traced.items():
            graph = each.trace.graph
            if not (training and traced[False] is each):  # else it is rewritten already
                rewrite(graph, each.sites)
            if training and self._recompute:
                recompute_results(graph, module)
            forwards[training] = compiled(graph, title)
        reached = dict.fromkeys(m for each in traced.values() for m in each.trace.reached)
        followed = {m for each in traced.values() for m in each.trace.followed}
        methods = {
            (self._reads[m].cls, name): function
            for m in (module, *followed)
            for name, function in self._reads[m].methods.items()
        }
        reads = self._reads[module]
        self._traces[module] = Traced(
            tuple(name in reads.sequences for name in reads.inputs),
            forwards,
            self._guard(module, False),
            tuple((m, self._guard(m, m in followed)) for m in reached if m is not module),
            tuple((cls, name, function) for (cls, name), function in methods.items()),
            labels,
        )

    def _guard(self, module: nn.Module, called: bool) -> Guard:
        cls, children = plain_class(module), module._modules
        reads = self._reads.get(module) or Reads(cls, ())  # a container's forward is not read
        return Guard(
            cls,
            tuple(children),
            tuple(children.values()),
            tuple(name for name in reads.methods if name != "forward"),  # may be wrapped
            tuple(reads.values.items()),
            tuple(reads.tensors.items()),
            called,
            reads.training,
        )


def _label(found: dict[bool, str]) -> str:
    """A norm's label, given its label for each value of the training flag for which it has one."""
    label = next(iter(found.values()))
    if len(found) == 2:
        return label
    return label + (" (in training)" if True in found else " (in evaluation)")


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a model, each once, and after all modules that are inside it."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _inner_first(child, seen)
    yield module


def _norms_below(module: nn.Module) -> Iterator[TargetVarianceNorm]:
    """The norms among a module's children, and inside the containers among them."""
    for child in module._modules.values():
        if isinstance(child, TargetVarianceNorm):
            yield child
        elif child is not None and type(child).forward is nn.Module.forward:
            yield from _norms_below(child)


def _check(module: nn.Module) -> None:
    """Refuse a module whose forward is not its class's.

    Raises:
        Untraceable: with the reason.
    """
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        raise Untraceable("it is TorchScript or a GraphModule")
    if is_patched(module):
        raise Untraceable("its forward was replaced on the instance")
    if not has_fused_class(module) and isinstance(module, FusedModule):
        raise Untraceable("its class derives from one that normplug.fuse made")
    if _convert.plain_class(module) is not type(module):
        raise Untraceable("it is parametrized, or sharded by FSDP")


def _parts(module: nn.Module) -> Parts:
    """The children that edits of a module's forward concern."""
    summed, activated, activations = list[str](), list[str](), list[str]()
    for name, child in module._modules.items():
        if isinstance(child, TargetVarianceNorm):
            sites = None if refusal(child) else child._fusion_sites
            if sites and "addition" in sites.before:
                summed.append(name)
            elif sites and "activation" in sites.after:
                activated.append(name)
        elif child is not None and _activations.of_module(child) is not None:
            activations.append(name)
    return Parts(tuple(summed), tuple(activated), tuple(activations))
