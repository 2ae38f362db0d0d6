"""Run norms together with the activations and additions around them, in one kernel each."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from normplug import _activations, _checks, _convert
from normplug._choices import Model
from normplug._convert import (
    FORWARDS,
    fused_modules,
    has_fused_class,
    release,
    unfused_class,
)
from normplug._fuse import beside
from normplug._fuse.edit import REASON, Edited, edit
from normplug._fuse.fusion import FusedForwards, FusedModule, Guard, Traced, fused_class
from normplug._fuse.sites import (
    Site,
    compiled,
    find,
    recompute_results,
    refusal,
    rewrite,
)
from normplug._fuse.trace import Reads, Trace, Untraceable, read
from normplug._ops import guess
from normplug._ops import recompute as _recompute
from normplug._table import Table, counts, shown
from normplug._torch import has_hooks, is_patched
from normplug.modules import TargetVarianceNorm

NOT_SWAPPED = "not swapped"


class Row(NamedTuple):
    """One norm layer, and what it is fused with.

    Attributes:
        path: its path in the model; "" is the model itself.
        kind: the name of its class.
        label: what it is fused with, and "(in a branch)" if the fused call is in a branch of an
            `if` and so may not run; None if it is not fused.
        owner: the module whose forward makes the fused call.
        note: why it is not fused; or how the gradients of the convolution before it are computed;
            "" otherwise.
    """

    path: str
    kind: str
    label: str | None
    owner: str
    note: str


@dataclass(frozen=True)
class Fusions(Table[Row]):
    """Every norm layer of a model, in order; `print` it for a table."""

    is_done: bool = True  # False: the rows say what `fuse` would do

    def columns(self) -> dict[str, list[str]]:
        """The cells of each column."""
        return {
            "path": [shown(row.path) for row in self.rows],
            "class": [row.kind for row in self.rows],
            "fused with": [row.label or "-" for row in self.rows],
            "notes": [_note(row) for row in self.rows],
        }

    def summary(self) -> str:
        """One line: how many norms are fused with what, how many are not, and why."""
        fused = Counter(f"with {row.label}" for row in self.rows if row.label)
        left = Counter(row.note for row in self.rows if not row.label)
        done = "fused" if self.is_done else "can be fused by normplug.fuse(model)"
        head = f"{fused.total()} of {len(self.rows)} norm layers {done}"
        parts = [f"{head}: {counts(fused)}" if fused else head]
        if left:
            parts.append(
                "not fused: " + ", ".join(f"{n} ({why})" for why, n in left.items())
            )
        return "; ".join(parts)


def _note(row: Row) -> str:
    """The last cell of a row."""
    if not row.label:
        return row.note
    return "; ".join(filter(None, [f"in {shown(row.owner)}", row.note]))


def fuse(model: Model, *, recompute: bool = False) -> Model:
    """Run normplug's layers together with the operations next to them, where that is safe.

    Each of these becomes one call:

    - BatchNorm and the activation after it, with or without a residual addition in between
    - two BatchNorms whose results are added, with or without an activation after that, in training
    - BatchNorm, ReLU and max pooling
    - GroupNorm or InstanceNorm and the activation after it
    - a residual addition and the LayerNorm or RMSNorm after it
    - the bias of a convolution and the LayerNorm over its channels, moved last
    - a LayerNorm or RMSNorm and the scale and shift after it: y * (1 + scale) + shift

    The activations are ReLU, LeakyReLU, ReLU6, SiLU, Hardswish and exact GELU. On CUDA the call is
    one kernel per direction, and saves less for the backward. Max pooling takes two kernels, and so
    does the forward of two norms. Under torch.compile the call runs the way that was measured to be
    faster. Elsewhere PyTorch's operations run one by one. Max pooling runs in the kernel only for
    channels_last input, and compares values before they are rounded.

    On CUDA, the gradients of two kinds of convolutions before these norms cost less. A 1x1
    convolution at the start of a residual block adds its input's gradient to the shortcut's, in
    place if nothing else holds that. A depthwise convolution of stride 1 computes its input's
    gradient by a convolution with the flipped weight, where that was measured to be faster.

    In place: the modules that call the norms get a subclass of their class, with another forward.
    Modules, parameters, buffers, hooks, names and flags stay, so checkpoints, optimizers and
    aliases stay valid. torch.fx traces a forward only if its source shows that it depends on
    nothing but its inputs and the module's attributes; each call checks these attributes. The
    trace is not used if the module, or a module that its forward uses, has changed since; if it
    gets hooks; or for arguments that are not tensors. Such calls, and forwards that cannot be
    traced, run a copy of the source, which takes any arguments. In the copy, an addition right
    before a norm or an activation right after it is one call with the norm. Nothing in torch is
    patched, so other threads can run other models meanwhile.

    `recompute=True` saves memory: the next layer's backward recomputes the norm's output, bit for
    bit, instead of storing it. This costs one more read and write of the output. A float32 sum
    before a norm whose output has 16 bits, as under autocast, is saved as normalised values in
    float16; then the bits may differ, and there are no second derivatives. The option applies in
    traced forwards, to outputs that only modules and fused additions read: those of BatchNorm with
    an activation, of an addition with LayerNorm or RMSNorm, and of every second block in a chain of
    residual blocks. It has no effect on the CPU, under torch.compile, or inside activation
    checkpointing or other `torch.autograd.graph.saved_tensors_hooks`. The last call of `fuse`
    decides.

    Copies of a fused model are fused in the same way, and are not traced again. A pickle is not
    fused where it is loaded, and pickling says so once: call `fuse` there.

    Args:
        model: a module that `normplug.swap` has swapped, or that has normplug's layers.
        recompute: recompute outputs in the backward instead of storing them; needs torch 2.8.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
        NotImplementedError: `recompute` is set, and torch is older than 2.8.

    Warns:
        UserWarning: there was nothing to fuse; the warning says why.

    Examples:
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
            "Use normplug.fuse(model) without it."
        )
    analysis = _Analysis(model, recompute)
    if not analysis.fusions:
        found = _report(model, {}, analysis)
        why = found.summary()
        if found.rows and all(row.note == NOT_SWAPPED for row in found):
            why += ". Call normplug.swap(model) first"
        _checks.warn(f"normplug.fuse: nothing to fuse in {type(model).__name__}; {why}.")
    classes = {module: fused_class(unfused_class(module)) for module in analysis.fusions}
    of_earlier_calls = [m for m in fused_modules(model).values() if m not in classes]
    release(of_earlier_calls)
    try:
        for module, fusion in analysis.fusions.items():
            vars(module)[FORWARDS] = fusion
            _convert.assign_class(module, classes[module])
    except BaseException:
        release(analysis.fusions)
        raise
    for module, fusion in analysis.fusions.items():
        for norm, operations in fusion.fusions(module).items():
            guess.record(norm, operations)
    return model


def unfuse(model: Model) -> Model:
    """Undo `fuse`: every module gets back the class and the forward that it had.

    If other code has since put a wrapper on an instance, or derived a class from the fused class,
    these stay, and run the forward that is not fused.

    Args:
        model: any module.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
    """
    _checks.module("unfuse", model)
    release(fused_modules(model).values())
    return model


def fusions(model: nn.Module) -> Fusions:
    """List what `fuse` has fused in a model, and why the other norms are not fused.

    For a model that has not been fused, list what `fuse` would do. The model does not change.

    Args:
        model: any module, fused or not.

    Returns:
        A `Fusions`: print it for a table, or iterate over its rows, one `Row` per norm layer.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
    """
    _checks.module("fusions", model)
    analysis = _Analysis(model)
    fused = {
        m: vars(m)[FORWARDS]
        for m in model.modules()
        if FORWARDS in vars(m) and has_fused_class(m)
    }
    report = _report(model, fused or analysis.fusions, analysis)
    return replace(report, is_done=bool(fused or not analysis.fusions))


def _report(
    model: nn.Module, fused: dict[nn.Module, FusedForwards], analysis: _Analysis
) -> Fusions:
    """List the norms of a model; fused: its fused modules, or the modules to fuse."""
    found, possible = _fused(model, fused), _fused(model, analysis.fusions)
    rows = []
    for path, norm in _convert.norm_layers(model):
        label, owner, note = None, "", ""
        if not isinstance(norm, TargetVarianceNorm):
            note = NOT_SWAPPED
        elif norm in found:
            fusion, owner = found[norm]
            label = fusion.label
            note = fusion.note or analysis.left.get(norm, "")
        elif norm in possible:
            note = "not fused since the last change; normplug.fuse(model) fuses it"
        else:
            note = refusal(norm) or analysis.reasons.get(norm, REASON)
        rows.append(Row(path, _convert.plain_class(norm).__name__, label, owner, note))
    return Fusions(tuple(rows))


def _fused(
    model: nn.Module, forwards: dict[nn.Module, FusedForwards]
) -> dict[nn.Module, tuple[guess.Fusion, str]]:
    """Norm -> what it is fused with, and the path of the outermost module that fuses it."""
    found: dict[nn.Module, tuple[guess.Fusion, str]] = {}
    for path, module in model.named_modules():
        fusions = forwards[module].fusions(module) if module in forwards else {}
        for norm, fusion in fusions.items():
            found.setdefault(norm, (fusion, path))
    return found


# Find what can be fused, without changing the model.


class _Analysis:
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
        # Module to fuse -> its new forwards.
        self.fusions: dict[nn.Module, FusedForwards] = {}
        # Norm -> why the forward that calls it is not fused. An outer module may still fuse it.
        self.reasons: dict[nn.Module, str] = {}
        # Fused norm -> why PyTorch computes the gradients of the convolution before it.
        self.left: dict[nn.Module, str] = {}
        called = set[nn.Module]()  # the norms that the forwards so far may call
        named = [*model.named_modules(remove_duplicate=False)]
        # Inner modules before outer ones, whatever other names they have.
        for module in dict.fromkeys(module for _, module in reversed(named)):
            norms = [m for m in module.modules() if isinstance(m, TargetVarianceNorm)]
            is_container = type(module).forward is nn.Module.forward
            if norms and not is_container and module not in norms:
                self._look(module, [norm for norm in norms if norm not in called])
                called.update(norms)

    def _look(self, module: nn.Module, norms: list[TargetVarianceNorm]) -> None:
        """Find a module's own sites, and fuse them; norms: all that no inner forward calls."""
        name, untraced, traced = unfused_class(module).__name__, "", None
        if why_not := _refusal(module):
            self.reasons |= dict.fromkeys(norms, f"{name}: {why_not}")
            return
        try:
            self._reads[module] = read(module, unfused_class(module))
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
        cls: Any = unfused_class(module)  # to mypy, a class of modules has no hash
        children = tuple(_children(module))
        norms = [name for name, kind in children if kind != "activation"]
        if not norms:
            return None
        try:
            edited = edit(cls, inspect.getattr_static(cls, "forward"), children)
        except Untraceable:
            return None
        left = [name for name in norms if edited.fusion(name, module) is None]
        if untraced:
            reason = f"{untraced}; to fuse, write the addition or activation right next to the norm"
            self.reasons |= {module._modules[name]: reason for name in left}  # type: ignore[misc]
        return edited if len(left) < len(norms) else None

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
        fusions = dict[str, guess.Fusion]()
        needed = set[nn.Module]()
        own_sites = 0
        sites = find(trace.graph, module)
        found: list[Site | beside.Beside] = [*sites]
        found += self._beside(trace.graph, module, sites)
        for site in found:
            scopes = [trace.scopes[node] for node in site.nodes]
            if scopes[0] and len({scope[:1] for scope in scopes}) == 1:
                continue  # it belongs to an inner module
            own_sites += 1
            origins = {m for scope in scopes for m in scope}
            needed |= origins.union(
                *(self._inner[m] for m in origins if m in self._inner)
            )
            fusions |= site.fusions
            if site.left:
                norm = module.get_submodule(str(site.norm.target))
                self.reasons[norm] = f"nothing to do: {site.left}"
        if not own_sites:
            return None
        if set(trace.followed) != needed:
            trace = Trace(module, self._reads, needed)
        self._inner[module] = needed
        graph, followed = trace.graph, trace.followed
        sites = find(graph, module)
        convolutions = self._beside(graph, module, sites)
        beside.rewrite(graph, convolutions)
        rewrite(graph, sites)
        # If these modules get hooks, the hooks must run where the forward calls them.
        moved = {
            module.get_submodule(str(node.target))
            for each in convolutions
            for node in (each.convolution, each.shortcut)
            if each.moves and node is not None and node.op == "call_module"
        }
        if self._recompute:
            recompute_results(graph, module)
        return Traced(
            compiled(graph, f"<normplug.fuse of {type(module).__name__}>"),
            self._guard(module, False),
            tuple(
                (m, self._guard(m, m in followed or m in moved))
                for m in (*trace.reached, *moved)
                if m is not module
            ),
            fusions,
        )

    def _beside(
        self, graph: fx.Graph, module: nn.Module, sites: list[Site]
    ) -> list[beside.Beside]:
        """The convolutions whose gradients a graph may compute in another way."""
        if self._recompute:  # which saves the memory of their inputs
            return []
        found = [*beside.find(graph, module, sites)]
        for each in found:
            norm = module.get_submodule(str(each.norm.target))
            if each.refusal:
                self.left[norm] = each.note
        return [each for each in found if not each.refusal]

    def _guard(self, module: nn.Module, called: bool) -> Guard:
        children = module._modules
        reads = self._reads.get(module) or Reads(unfused_class(module), ())  # a container
        return Guard(reads, tuple(children), tuple(children.values()), called)


def _refusal(module: nn.Module) -> str:
    """Why a module may not run the forward of its class; "" if it does."""
    if isinstance(module, (torch.jit.ScriptModule, fx.GraphModule)):
        return "it is TorchScript or a GraphModule: fuse before it is made"
    if is_patched(module):
        return "its forward was replaced on the instance: fuse before that"
    if not has_fused_class(module) and isinstance(module, FusedModule):
        return "its class derives from one that normplug.fuse made: derive it before"
    if _convert.plain_class(module) is not type(module):
        return "it is parametrized, or sharded by FSDP: fuse before that"
    return ""


def _children(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the children that `edit` needs: a pair of name and kind for each."""
    for name, child in module._modules.items():
        if isinstance(child, TargetVarianceNorm):
            sites = None if refusal(child) else child._fusion_sites
            if sites and "sum" in sites.before:
                yield name, "rows" if "modulation" in sites.after else "sum"
            elif sites and "activation" in sites.after:
                yield name, "norm"
        elif child is not None and _activations.of_module(child) is not None:
            yield name, "activation"
