"""Find what can be fused in a model, without changing the model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from normplug import _activations, _convert
from normplug._fuse import source
from normplug._fuse.edit import REASON, Edited, edit
from normplug._fuse.fusion import (
    FusedForwards,
    FusedModule,
    Guard,
    Traced,
    has_fused_class,
    plain_class,
)
from normplug._fuse.sites import compiled, find, recompute_results, refusal, rewrite
from normplug._fuse.source import Reads, Untraceable
from normplug._fuse.trace import Trace
from normplug._torch import has_hooks, is_patched
from normplug.modules import TargetVarianceNorm


class Analysis:
    """What can be fused in a model.

    Each module's forward is traced, innermost modules first. The trace inlines the forwards of the
    inner modules that could be traced themselves. A site whose nodes all come from one inner module
    belongs to that module. The other sites are the module's own. A module is fused only if it has
    sites of its own. Its fused forward inlines only the inner modules that these sites need. If a
    forward cannot be traced, or is called with arguments that do not fit the trace, an edited copy
    of its source may run instead.
    """

    def __init__(self, model: nn.Module, recompute: bool = False) -> None:
        self._recompute = recompute
        self._reads: dict[nn.Module, Reads] = {}
        self._inner: dict[nn.Module, set[nn.Module]] = {}
        self.fusions: dict[nn.Module, FusedForwards] = {}  # module to fuse -> its new forwards
        # Norm -> why the forward that calls it is not fused. An outer module may still fuse it.
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

    def _look(self, module: nn.Module, norms: list[TargetVarianceNorm]) -> None:
        """Find a module's own sites, and fuse them; norms: the norms that its forward may call."""
        name, untraced, traced = plain_class(module).__name__, "", None
        try:
            _check(module)
        except Untraceable as why:
            self.reasons |= dict.fromkeys(norms, f"{name}: {why}")
            return
        try:
            self._reads[module] = source.read(module, plain_class(module))
            traced = self._trace(module)
        except Untraceable as why:
            self._reads.pop(module, None)
            untraced = f"{name}: {why}"
            self.reasons |= dict.fromkeys(norms, untraced)
        edited = self._edit(module, untraced)
        if traced is not None or edited is not None:
            self.fusions[module] = FusedForwards(traced, edited)

    def _edit(self, module: nn.Module, untraced: str) -> Edited | None:
        """Edit a module's forward where its norms come after additions or before activations.

        untraced: why the forward was not traced, for the report; "" if it was.
        """
        cls: Any = plain_class(module)  # to mypy, a class of modules has no hash
        children = tuple(_children(module))
        norms = [name for name, kind in children if kind != "activation"]
        if not norms:
            return None
        try:
            edited = edit(cls, inspect.getattr_static(cls, "forward"), children)
        except Untraceable:
            return None
        found = False
        for name in norms:
            norm: Any = module._modules[name]
            if edited.label(name, module):
                found = True
            elif untraced:
                self.reasons[norm] = f"{untraced}, and {REASON}"
        return edited if found else None

    def _trace(self, module: nn.Module) -> Traced | None:
        """Trace a module's forward, and fuse its own sites."""
        traceable = {
            m
            for m in module.modules()
            if m is not module
            and m in self._reads
            and not has_hooks(m)
            # A graph does not show whether an argument of an inner module is a sequence.
            and not self._reads[m].sequences
        }
        trace = Trace(module, self._reads, traceable)
        labels, needed, own_sites = dict[str, str](), set[nn.Module](), 0
        for site in find(trace.graph, module):
            scopes = [trace.scopes[node] for node in site.nodes]
            if scopes[0] and len({scope[:1] for scope in scopes}) == 1:
                continue  # it belongs to an inner module
            own_sites += 1
            origins = {m for scope in scopes for m in scope}
            needed |= origins.union(*(self._inner[m] for m in origins if m in self._inner))
            if site.label:
                labels[str(site.norm.target)] = site.label
        if not own_sites:
            return None
        if set(trace.followed) != needed:
            trace = Trace(module, self._reads, needed)
        self._inner[module] = needed
        graph, followed = trace.graph, trace.followed
        rewrite(graph, find(graph, module))
        if self._recompute:
            recompute_results(graph, module)
        return Traced(
            compiled(graph, f"<normplug.fuse of {type(module).__name__}>"),
            self._guard(module, False),
            tuple((m, self._guard(m, m in followed)) for m in trace.reached if m is not module),
            labels,
        )

    def _guard(self, module: nn.Module, called: bool) -> Guard:
        children = module._modules
        reads = self._reads.get(module) or Reads(plain_class(module), ())  # a container
        return Guard(reads, tuple(children), tuple(children.values()), called)


def _inner_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield each module of a model once, after all modules inside it."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _inner_first(child, seen)
    yield module


def _norms_below(module: nn.Module) -> Iterator[TargetVarianceNorm]:
    """Yield the norms among a module's children, and inside children that are containers."""
    for child in module._modules.values():
        if isinstance(child, TargetVarianceNorm):
            yield child
        elif child is not None and type(child).forward is nn.Module.forward:
            yield from _norms_below(child)


def _check(module: nn.Module) -> None:
    """Refuse a module that may not run the forward of its class.

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


def _children(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the children that `edit` needs: a pair of name and kind for each."""
    for name, child in module._modules.items():
        if isinstance(child, TargetVarianceNorm):
            sites = None if refusal(child) else child._fusion_sites
            if sites and "sum" in sites.before:
                yield name, "sum"
            elif sites and "activation" in sites.after:
                yield name, "norm"
        elif child is not None and _activations.of_module(child) is not None:
            yield name, "activation"
