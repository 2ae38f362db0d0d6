"""Swap a model's norm layers for normplug's in place, set their mode, and swap them back."""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypedDict

from torch import nn

from normplug import _checks, _convert
from normplug._choices import AutocastOutput, Backend, Model, Statistics
from normplug._swap import fold as _fold
from normplug._swap import plan as _plan
from normplug._swap import record as _record
from normplug._swap.inventory import Filters, Inventory
from normplug._swap.layer_modes import ModesLike, assign, read
from normplug._table import counts, shown, some
from normplug._torch import is_patched
from normplug.modules import TargetVarianceNorm

if TYPE_CHECKING:
    from typing_extensions import Unpack  # of typing since Python 3.11

# Module of a tool -> the names of its registries, which map a class to what the tool does with its
# layers. For a tool that is imported later, the next swap adds the entries.
_REGISTRIES = {
    "captum.attr._core.lrp": ("SUPPORTED_LAYERS_WITH_RULES",),
    "opacus.validators": ("ModuleValidator.VALIDATORS", "ModuleValidator.FIXERS"),
    "ptflops.pytorch_ops": ("MODULES_MAPPING",),
    "thop.profile": ("register_hooks",),
    "torch.ao.quantization.quantization_mappings": (
        "DEFAULT_STATIC_QUANT_MODULE_MAPPINGS",
    ),
}


class SwapOptions(TypedDict, total=False):
    """The options of `swap` after the mode, for functions that hand them on."""

    include: Filters
    exclude: Filters
    track_running_stats: bool | None
    preserve_output: bool | None
    sync: bool
    statistics: Statistics
    autocast_output: AutocastOutput
    backend: Backend


def swap(
    model: Model,
    mode: ModesLike = "standard",
    *,
    include: Filters = None,
    exclude: Filters = None,
    track_running_stats: bool | None = None,
    preserve_output: bool | None = None,
    sync: bool = False,
    statistics: Statistics = "torch",
    autocast_output: AutocastOutput = "low",
    backend: Backend = "auto",
) -> Model:
    """Replace a model's norms by normplug's: the same function in mode standard, but faster.

    Other modes set another target variance for the norms to normalise to.

    The swap is in place, by assignment to each layer's `__class__`: modules, parameters and buffers
    stay the same objects. So hooks, aliases, shared layers and existing optimizers stay valid.
    Layers that are normplug's already get the new mode. Known norms of timm, torchvision,
    transformers and diffusers are swapped, too, and so are norms of any class whose forward
    computes a LayerNorm or an RMSNorm: docs/layers.md says how they are recognised. Other
    subclasses of the torch classes are left unchanged, since they may have their own forward. So
    are layers whose forward was replaced, on the class or the instance. `normplug.plan` lists which
    layers are swapped and which are left.

    On CUDA, Triton compiles a kernel for each class of shapes at the first step that needs it, and
    caches it in `~/.triton/cache` or `TRITON_CACHE_DIR`. With an empty cache the first step takes
    seconds longer.

    Args:
        model: any module; it may itself be a norm layer.
        mode: "standard" (1), "golden" (1/phi), a finite number above 0, or a `NormMode`. For a
            mode per layer: `normplug.by_depth(schedule)`; a callable (path, module) -> mode; or a
            mapping from filters, as for `include`, to modes. The first filter that matches a layer
            wins.
        include: take only layers that match; `normplug.plan` lists what a filter may be.
        exclude: skip layers that match, even if they match `include`.
        track_running_stats: whether LayerNorm, RMSNorm and GroupNorm get running statistics to
            watch; None gives them to LayerNorm only, and updates them only where normplug's kernels
            run, in eager steps. BatchNorm and InstanceNorm keep their own setting.
        preserve_output: True divides each weight by sqrt(tv), so that the model computes what it
            did before and only its parametrisation changes. A layer without a weight gets a frozen
            one, with the dtype and device of its own tensors or of the nearest parameter, or with
            torch's defaults if there are none. False leaves the weights. So does None, but it warns
            if layers that get another target variance have been trained.
        sync: make every BatchNorm a `normplug.SyncBatchNorm` over all processes, until `unswap`.
            With False, SyncBatchNorms stay synchronised in their own process group.
        statistics: "torch" updates running statistics as torch does. "safe" keeps BatchNorms and
            InstanceNorms from being poisoned: a channel keeps its running statistics if the batch's
            mean or variance in it is not finite. `num_batches_tracked` counts a batch if its first
            channel is finite, or with a momentum of None if any channel is. A forward that
            activation checkpointing repeats inside a backward updates nothing.
        autocast_output: the dtype that LayerNorm, RMSNorm and GroupNorm return under autocast:
            "low", the autocast dtype, or "float32", torch's rule.
        backend: "auto", "triton" or "torch".

    Returns:
        `model` itself.

    Raises:
        ValueError: an unknown mode, autocast_output or backend; a layer that gets no mode; an
            `include` pattern or a key of `mode` that matches nothing; `preserve_output` with a
            weight that cannot be divided. The model is left unchanged.
        TypeError: `model` is not a module, or is TorchScript; an option of another type.

    Warns:
        UserWarning: the outputs of a trained model change (see `preserve_output`); there is
            nothing to swap (the warning lists the norm layers that were seen); layers of an earlier
            swap have been rebuilt since (`unswap` and `set_mode` warn, too).

    Examples:
        >>> print(swap(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].mode)
        standard
        >>> swap(nn.LayerNorm(8), "golden").target_variance
        0.6180339887498949
    """
    rule = read(mode)
    _checks.module("swap", model)
    _checks.swap_options(
        "swap", autocast_output=autocast_output, backend=backend, preserve_output=preserve_output,
        statistics=statistics, sync=sync, track_running_stats=track_running_stats,
    )  # fmt: skip
    inventory = Inventory(model)
    planned = _plan.make("swap", inventory, rule, include, exclude, sync)
    targets = {
        row.path: row.mode.target_variance for row in planned if row.mode is not None
    }
    taken = [row for row in planned if row.becomes]
    if not taken:
        seen = Counter(f"{row.kind} ({row.note})" for row in planned)
        more = " print(normplug.plan(model)) lists them." if seen else ""
        _checks.warn(
            f"normplug.swap: nothing to swap in {type(model).__name__}; norm layers seen: "
            f"{counts(seen)}.{more}"
        )
        return model
    factors: _fold.Factors = {}
    trained = []
    for row in taken:
        before = _convert.target_variance(row.module)
        if before == targets[row.path]:
            continue
        if preserve_output:
            factors[row.module] = math.sqrt(before / targets[row.path])
        elif preserve_output is None and _fold.is_trained(row.module):
            trained.append(shown(row.path))
    if trained:
        _checks.warn(
            f"normplug.swap: trained norms ({some(trained)}) get another target "
            "variance with the same weights, so the model's outputs change. Pass "
            "preserve_output=True to keep them, or preserve_output=False if this is intended."
        )
    _fold.refuse_unscalable("swap(preserve_output=True)", inventory, factors)
    _record.warn_of_lost("swap", inventory)

    with _all_or_nothing([row.module for row in taken]):
        _fold.scale(inventory, factors)
        for row in taken:
            weight = _convert.weight_name(row.module)
            weighted = getattr(row.module, weight, None) is not None
            _convert.convert(
                row.module,
                targets[row.path],
                backend=backend,
                autocast_output=autocast_output,
                statistics=statistics,
                track_running_stats=track_running_stats,
                device=None if weighted else _fold.kind_of_data(inventory, row.module)[1],
            )
            if sync:
                _convert.synchronise(row.module)
        _record.renew(inventory)
    _tell_tools()
    return model


def unswap(model: Model, *, fold: bool = True) -> Model:
    """Turn every normplug layer back into its stock layer, in place, with the same outputs.

    Each weight is multiplied by sqrt(tv), so the model computes what it did before. It can then be
    loaded, exported, fused or quantised without normplug. A layer without a weight gets a frozen
    one: see `preserve_output` of `swap`. Running statistics that are only watched are removed. This
    also undoes `normplug.fuse`.

    Args:
        model: any module.
        fold: False leaves the weights as they are, bit for bit; the layers then normalise to
            variance 1.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
        ValueError: a weight that cannot be multiplied (parametrized, computed, or shared with a
            layer that would change), or a forward that was replaced on the instance of a layer. The
            model is left unchanged.

    Warns:
        UserWarning: a layer stays because it is a user's own subclass of a normplug class; there
            is nothing to unswap.
    """
    _checks.module("unswap", model)
    _checks.flags("unswap", fold=fold)
    inventory = Inventory(model)
    found = {layer: shown(path) for path, layer in _convert.normplug_layers(model)}
    layers = [layer for layer in found if _convert.is_revertible(layer)]
    stuck = [found[layer] for layer in found if not _convert.is_revertible(layer)]
    if stuck:
        text = "subclasses of normplug classes have no stock class to revert to and stay"
        _checks.warn(f"normplug.unswap: {text}: {', '.join(stuck)}.")
    patched = [found[layer] for layer in layers if is_patched(layer)]
    if patched:
        raise ValueError(
            f"normplug.unswap: the forward of {', '.join(patched)} was replaced on the instance "
            "since normplug.swap, by a patch or by accelerate's hooks. Remove these first, e.g. "
            "with accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    scaled = [m for m in layers if fold and m.target_variance != 1.0]
    factors: _fold.Factors = {m: math.sqrt(m.target_variance) for m in scaled}
    _fold.refuse_unscalable("unswap", inventory, factors)
    fused = _convert.fused_modules(model).values()
    if not (_record.warn_of_lost("unswap", inventory) or layers or stuck or fused):
        _checks.warn(
            f"normplug.unswap: {type(model).__name__} has no normplug layers: it was not swapped, "
            "or is unswapped already."
        )
    with _all_or_nothing(layers):
        _fold.scale(inventory, factors)
        for layer in layers:
            _convert.revert(layer)
        _record.renew(inventory)
    _convert.release(fused)
    return model


@contextmanager
def swapped(
    model: Model, mode: ModesLike = "standard", **options: Unpack[SwapOptions]
) -> Iterator[Model]:
    """Swap inside a `with` block, and restore every layer after it.

    After the block, even after an exception, each layer has its former class, attributes and
    buffers, and its former mode and options if it had any. Parameters and BatchNorm's statistics
    keep the values from the block. So stock layers then have weights that were trained in the
    block's mode, and the outputs differ. With `preserve_output=True`, entry and exit leave the
    outputs unchanged.

    Args:
        model: any module.
        mode: a `mode` of `normplug.swap`.
        **options: the other options of `normplug.swap`.

    Yields:
        `model` itself.

    Raises:
        ValueError, TypeError: `normplug.swap` refuses the arguments.

    Examples:
        >>> model = nn.Sequential(nn.LayerNorm(8))
        >>> with swapped(model, 0.5):
        ...     print(model[0].mode)
        0.5
        >>> type(model[0])
        <class 'torch.nn.modules.normalization.LayerNorm'>
    """
    _checks.module("swapped", model)
    inventory = Inventory(model)
    fused = set(_convert.fused_modules(model).values())
    before = {m: _convert.state(m) for _, m in _convert.norm_layers(model)}
    swap(model, mode, **options)
    factors: _fold.Factors = {}
    if options.get("preserve_output"):
        for layer, state in before.items():
            now = _convert.target_variance(layer)
            then = 1.0 if state is None else state.target_variance
            if now != then:
                factors[layer] = math.sqrt(now / then)
    try:
        yield model
    finally:
        # `unswap` in the block has scaled a layer that is stock now.
        for layer in list(factors):
            if not isinstance(layer, TargetVarianceNorm):
                del factors[layer]
        _fold.scale(inventory, factors)
        for layer, state in before.items():
            _convert.restore(layer, state)
        _record.renew(Inventory(model))
        now_fused = _convert.fused_modules(model).values()
        _convert.release(module for module in now_fused if module not in fused)


def set_mode(model: Model, mode: ModesLike) -> Model:
    """Set the mode of every normplug layer of a model; weights stay as they are.

    Args:
        model: any module.
        mode: a `mode` of `normplug.swap`: one mode, or one for each normplug layer.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
        ValueError: an unknown mode, a layer that gets none, or a model without normplug layers. All
            layers keep their modes.
    """
    rule = read(mode)
    _checks.module("set_mode", model)
    inventory = Inventory(model)
    layers = [layer for _, layer in _convert.normplug_layers(model)]
    if not layers:
        raise ValueError(
            f"normplug.set_mode: {type(model).__name__} has no normplug layers. "
            "Use normplug.swap(model, mode) first."
        )
    assigned = assign(rule, "set_mode", inventory, layers)
    _record.warn_of_lost("set_mode", inventory)
    for layer in layers:
        layer.mode = assigned[layer][0]
    _record.renew(inventory)
    return model


@contextmanager
def _all_or_nothing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Restore every layer if the block raises."""
    # A conversion mutates these in place.
    tables = ("_parameters", "_buffers", "_non_persistent_buffers_set")
    before = []
    for module in layers:
        state = dict(vars(module))
        for name in tables:
            state[name] = copy.copy(state[name])
        before.append((module, module.__class__, state))
    weights = (m._parameters.get(_convert.weight_name(m)) for m in layers)
    values = [(w, w.detach().clone()) for w in weights if w is not None]
    try:
        yield
    except BaseException:
        for module, cls, state in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for weight, value in values:
            _fold.write(weight, value)
        raise


def _tell_tools() -> None:
    """Have the tools that are in use treat normplug's layers like the stock ones."""
    for module, names in _REGISTRIES.items():
        tool = sys.modules.get(module)
        if tool is None:
            continue
        for name in names:
            registry = attrgetter(name)(tool)
            for stock, ours in _convert.REPLACEMENTS.items():
                if stock in registry:
                    entry = registry[stock]
                    quantised = hasattr(entry, "from_float")
                    registry.setdefault(ours, _Unswapped(entry) if quantised else entry)
    opacus: Any = sys.modules.get("opacus.validators")
    if opacus is not None:
        # Watched statistics are not differentially private, so Opacus's fixer removes them.
        for ours in _convert.REPLACEMENTS.values():
            opacus.ModuleValidator.FIXERS.setdefault(ours, _without_watching)


class _Unswapped:
    """Quantise a layer as its stock layer, with the target variance in the weight."""

    def __init__(self, quantised: Any) -> None:
        self.quantised = quantised

    def from_float(self, mod: Any, **options: Any) -> Any:
        """Called by torch.ao, with the layer."""
        return self.quantised.from_float(unswap(copy.deepcopy(mod)), **options)


def _without_watching(layer: Any, **options: Any) -> Any:
    layer._leave(layer)
    return layer
