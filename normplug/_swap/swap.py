"""Swap a model's norm layers for normplug's, in place; change their mode; take them out again."""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from normplug import _checks, _convert
from normplug._fuse.fuse import fused_modules, releasable, release
from normplug._swap import record as _record
from normplug._swap.plan import Filters, Plan, plan
from normplug._table import counts, shown
from normplug.modes import ModeLike, target_variance
from normplug.modules import TargetVarianceNorm
from normplug.modules import eps_reader as _guards


class _Scaling(NamedTuple):
    """A layer whose weight is to be multiplied; a missing weight is one of ones."""

    path: str
    module: nn.Module
    factor: float


def swap(
    model: nn.Module,
    mode: ModeLike = "golden",
    *,
    include: Filters = None,
    exclude: Filters = None,
    track_running_stats: bool = True,
    preserve_output: bool = False,
    sync: bool = False,
    autocast_output: str = "low",
    backend: str = "auto",
) -> nn.Module:
    """Make every BatchNorm and LayerNorm of a model normalise to the target variance of `mode`.

    In place, by assignment of each layer's `__class__`: the same modules, parameters and buffers,
    so that hooks, aliases, shared layers and an optimizer that was built before all stay valid.
    Layers that are normplug's already take the new mode. Subclasses of the torch classes are
    left, as their forward is their own, but for those of timm, torchvision and transformers that
    `normplug.adapters` knows; `normplug.plan` lists what is taken and what is left.

    On CUDA, Triton compiles a kernel for each class of shapes at the first step that needs it.
    With an empty cache that adds 5 to 14 seconds to the first step of ResNet-50, MobileNetV3-L and
    ViT-B/16 on an H100, and 6 to 39 after `normplug.fuse`. Compiled kernels are kept on disk, in
    `~/.triton/cache` or `TRITON_CACHE_DIR`, so that later runs start at once.

    Args:
        model: any module; itself a norm layer, too.
        mode: "golden" (1/phi), "standard" (1), a finite number above 0, or a `NormMode`.
        include: as in `normplug.plan`: take only what matches.
        exclude: as in `normplug.plan`: leave what matches; wins over `include`.
        track_running_stats: give LayerNorm running statistics to watch (BatchNorm keeps its own
            setting).
        preserve_output: divide each weight by sqrt(tv), so that the model's function stays what
            it was, and only its parametrisation changes. A layer without a weight gets a frozen
            one, in the dtype and on the device of its own tensors or of the nearest parameter.
            For swapping into a trained model.
        sync: make every BatchNorm a `normplug.SyncBatchNorm` over all processes, until `unswap`.
            False leaves those that are SyncBatchNorms so, in the process group that they have.
        autocast_output: what LayerNorm returns under autocast: "low", the autocast dtype, or
            "float32", torch's rule.
        backend: "auto", "triton" or "torch".

    Returns:
        `model` itself.

    Raises:
        ValueError: an unknown mode, autocast_output or backend, an `include` pattern that matches
            nothing, or `preserve_output` where a weight cannot be divided. The model is as before.
        TypeError: where `model` is no module, or TorchScript; an option of another type.
        NotImplementedError: backend "triton" where there is no kernel.

    Warns:
        UserWarning: where there was nothing to swap, with what was seen instead; where layers of
            an earlier swap have been rebuilt since, as for `unswap` and `set_mode`.

    Example:
        >>> swap(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].mode.name
        'golden'
    """
    tv = target_variance(mode)
    _checks.module("swap", model)
    _checks.swap_options(
        "swap",
        autocast_output=autocast_output,
        backend=backend,
        preserve_output=preserve_output,
        sync=sync,
        track_running_stats=track_running_stats,
    )
    planned = plan(model, include=include, exclude=exclude, sync=sync)
    taken = [row for row in planned if row.becomes]
    if not taken:
        warnings.warn(_nothing_swapped(model, planned), stacklevel=2)
        return model

    scalings = []
    if preserve_output:
        for row in taken:
            now = row.module.target_variance if isinstance(row.module, TargetVarianceNorm) else 1.0
            scalings.append(_Scaling(row.path, row.module, math.sqrt(now / tv)))
    _check_scalings("swap(preserve_output=True)", model, scalings)

    with _all_or_nothing([row.module for row in taken]):
        _scale(scalings, model)
        for row in taken:
            _convert.convert(
                row.module,
                tv,
                backend=backend,
                autocast_output=autocast_output,
                track_running_stats=track_running_stats,
                device=None if _has_weight(row.module) else _like(model, row.path).device,
            )
            if sync:
                _convert.synchronise(row.module)
    _guards.tell_opacus(_convert.REPLACEMENTS)
    _record.renew("swap", model)
    return model


def unswap(model: nn.Module, *, fold: bool = True) -> nn.Module:
    """Make every normplug layer the stock layer that it was, in place, with the same outputs.

    sqrt(tv) is multiplied into each weight, so that the model computes what it did and needs no
    normplug to be loaded, exported, fused or quantised. A layer without a weight gets a frozen
    one, as `swap(preserve_output=True)` makes it. LayerNorm's running statistics go. What
    `normplug.fuse` has fused is undone too.

    Args:
        model: any module.
        fold: False leaves the weights as they are, bit for bit: the layers then normalise to
            variance 1.

    Returns:
        `model` itself.

    Raises:
        TypeError: where `model` is no module, or TorchScript.
        ValueError: where a weight cannot be multiplied: a parametrized or computed one, or one
            that is shared with a layer that would change; where a layer's forward, or that of a
            fused module, has been replaced on the instance. The model is as before.

    Warns:
        UserWarning: where a layer stays because it is a user's own subclass of a normplug class.
    """
    _checks.module("unswap", model)
    _checks.flags("unswap", fold=fold)
    layers = list(_convert.normplug_layers(model))
    stuck = [shown(path) for path, m in layers if not _convert.is_revertible(m)]
    if stuck:
        text = "subclasses of normplug classes have no torch class to go back to and stay"
        warnings.warn(f"normplug.unswap: {text}: {', '.join(stuck)}.", stacklevel=2)
    layers = [(path, m) for path, m in layers if _convert.is_revertible(m)]
    patched = [shown(path) for path, m in layers if _convert.is_patched(m)]
    if patched:
        raise ValueError(
            f"normplug.unswap: the forward of {', '.join(patched)} was replaced on the instance "
            "since the swap, by a patch or accelerate's hooks; remove that first, as with "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    scalings = [_Scaling(p, m, math.sqrt(m.target_variance)) for p, m in layers if fold]
    _check_scalings("unswap", model, scalings)
    fused = releasable("unswap", fused_modules(model))
    with _all_or_nothing([m for _, m in layers]):
        _scale(scalings, model)
        for _, module in layers:
            _convert.revert(module)
    release(fused)
    _record.renew("unswap", model)
    return model


@contextmanager
def swapped(model: nn.Module, mode: ModeLike = "golden", **options: Any) -> Iterator[nn.Module]:
    """Swap for the length of a `with` block, and put every layer back after it.

    Afterwards, on an exception too, each layer has the class, attributes and buffers it had, and a
    layer that was normplug's has its own mode and options. Parameters and BatchNorm's statistics
    stay as the block left them, since it may train: weights trained in golden are then in a stock
    layer, which is another function. With `preserve_output=True` they are divided before the block
    and multiplied after it, so that the function is the same on both sides of either end.

    Args:
        model: any module.
        mode: as in `normplug.swap`.
        **options: those of `normplug.swap`.

    Yields:
        `model` itself.

    Raises:
        ValueError: as `normplug.swap` does.
        TypeError: as `normplug.swap` does.

    Example:
        >>> model = nn.Sequential(nn.LayerNorm(8))
        >>> with swapped(model, 0.5):
        ...     print(model[0].mode)
        0.5
        >>> type(model[0])
        <class 'torch.nn.modules.normalization.LayerNorm'>
    """
    _checks.module("swapped", model)
    before = {
        path: (m, _settings(m))
        for path, m in model.named_modules()
        if isinstance(m, TargetVarianceNorm) or _convert.replacement(m) is not None
    }
    synchronised = {m for m, _ in before.values() if "_unsynced_class" in vars(m)}
    records, fused = _record.take(model), fused_modules(model)
    swap(model, mode, **options)
    scalings = [
        _Scaling(path, m, math.sqrt(m.target_variance / settings.get("target_variance", 1.0)))
        for path, (m, settings) in before.items()
        if options.get("preserve_output") and isinstance(m, TargetVarianceNorm)
    ]
    try:
        yield model
    finally:
        now = [s for s in scalings if isinstance(s.module, TargetVarianceNorm)]
        _scale(now, model)
        for m, settings in before.values():
            if isinstance(m, TargetVarianceNorm) and not settings:
                _convert.revert(m)
            elif m not in synchronised:
                _convert.desynchronise(m)
            for name, value in settings.items():
                setattr(m, name, value)
        _record.put(model, records)
        inside = {path: m for path, m in fused_modules(model).items() if path not in fused}
        release(releasable("swapped", inside))


def _settings(layer: nn.Module) -> dict[str, Any]:
    """What a swap sets on a layer that is normplug's already; nothing for a stock layer."""
    names = ("target_variance", "backend", "autocast_output")
    return {name: vars(layer)[name] for name in names if name in vars(layer)}


def set_mode(model: nn.Module, mode: ModeLike) -> nn.Module:
    """Set the mode of every normplug layer of a model; weights stay as they are.

    Args:
        model: any module.
        mode: "golden" (1/phi), "standard" (1), a finite number above 0, or a `NormMode`.

    Returns:
        `model` itself.

    Raises:
        TypeError: where `model` is no module, or TorchScript.
        ValueError: an unknown mode, or a model without normplug layers.
    """
    tv = target_variance(mode)
    _checks.module("set_mode", model)
    layers = [layer for _, layer in _convert.normplug_layers(model)]
    if not layers:
        raise ValueError(
            f"normplug.set_mode: {type(model).__name__} has no normplug layers. "
            "Use normplug.swap(model, mode) first."
        )
    for layer in layers:
        layer.target_variance = tv
    _record.renew("set_mode", model)
    return model


def _nothing_swapped(model: nn.Module, planned: Plan) -> str:
    seen = Counter(f"{row.kind} ({row.note})" for row in planned)
    return (
        f"normplug.swap: nothing to swap in {type(model).__name__}; norm layers seen: "
        f"{counts(seen)}. print(normplug.plan(model)) lists them."
    )


def _has_weight(module: nn.Module) -> bool:
    return getattr(module, "weight", None) is not None


def _like(model: nn.Module, path: str) -> Tensor:
    """A tensor of the dtype and on the device that new tensors of the layer under `path` take.

    One of the layer's own; else the nearest parameter in the tree of modules, else the nearest
    buffer, else torch's default. A layer has its input from the module before it, so that module
    is nearer than the one after it.
    """
    parents = [model]
    for name in filter(None, path.split(".")):
        parents.append(parents[-1]._modules[name])  # type: ignore[arg-type]
    layer = parents.pop()

    def around(kind: str) -> Iterator[Tensor]:
        inner = layer
        for parent in reversed(parents):
            children = list(parent.children())
            place = children.index(inner)
            for module in reversed(children[:place]):
                yield from reversed(list(getattr(module, kind)()))
            for module in children[place + 1 :]:
                yield from getattr(module, kind)()
            yield from getattr(parent, kind)(recurse=False)
            inner = parent

    near = chain(layer.parameters(), layer.buffers(), around("parameters"), around("buffers"))
    return next(filter(_is_decisive, near), torch.empty(0))


def _is_decisive(t: Tensor) -> bool:
    """Whether the input of a norm beside this tensor has its dtype: no index, scale or code."""
    return t.is_floating_point() and t.dtype.itemsize > 1 and (is_lazy(t) or t.dim() > 0)


def _check_scalings(who: str, model: nn.Module, scalings: list[_Scaling]) -> None:
    """Refuse to multiply a weight that is computed, missing its shape, or someone else's too."""
    factors = {id(s.module): s.factor for s in scalings}
    owners: dict[int, list[tuple[str, float]]] = {}
    for path, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owner = (shown(path), factors.get(id(module), 1.0))
                owners.setdefault(id(parameter), []).append(owner)
    for path, module, factor in scalings:
        if factor == 1.0:
            continue
        where = f"normplug.{who}: the weight of {shown(path)}"
        if parametrize.is_parametrized(module, "weight"):
            raise ValueError(f"{where} is parametrized; use remove_parametrizations first.")
        if is_lazy(module.weight):  # type: ignore[arg-type]
            raise ValueError(f"{where} has no shape yet; run one forward first.")
        if "weight" not in module._parameters:
            raise ValueError(
                f"{where} is no parameter but computed from one, by a hook (weight_norm, prune) or "
                "FSDP: remove the hook first, or act within FSDP.summon_full_params."
            )
        shared = owners.get(id(module.weight), []) if module.weight is not None else []
        others = [name for name, other in shared if other != factor]
        if others:
            raise ValueError(
                f"{where} is shared with {', '.join(others)}, which would change. Untie them "
                "first, or exclude both."
            )


def _scale(scalings: Iterable[_Scaling], model: nn.Module) -> None:
    done: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        for path, module, factor in scalings:
            weight: Tensor | None = module.weight  # type: ignore[assignment]
            if factor == 1.0 or id(weight) in done:
                continue
            if weight is None:
                module.weight = _frozen_weight(module, factor, _like(model, path))
            elif _made_here(module) and _is_constant(weight, 1.0 / factor):
                module.weight = None  # type: ignore[assignment]
            else:
                with _writing_to(weight):
                    weight.mul_(factor)
                done.add(id(weight))


@contextmanager
def _writing_to(weight: Tensor) -> Iterator[None]:
    # `inference_mode` sets the grad mode too, so that comes after it.
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        yield


def _made_here(module: nn.Module) -> bool:
    """Whether the layer was constructed without a weight, and has one from `_frozen_weight`."""
    return not getattr(module, "affine", True) or not getattr(module, "elementwise_affine", True)


def _is_constant(weight: Tensor, value: float) -> bool:
    """Whether each element is `value`, but for the rounding of a few scalings."""
    if weight.is_meta:
        return False
    rounding = 2 * torch.finfo(weight.dtype).eps
    return torch.allclose(weight, torch.full_like(weight, value), rtol=rounding, atol=0.0)


def _frozen_weight(module: nn.Module, value: float, like: Tensor) -> nn.Parameter:
    shape = getattr(module, "normalized_shape", None) or (module.num_features,)
    weight = torch.full(shape, value, dtype=like.dtype, device=like.device)  # type: ignore[arg-type]
    return nn.Parameter(weight, requires_grad=False)


@contextmanager
def _all_or_nothing(layers: list[nn.Module]) -> Iterator[None]:
    """Put every layer back as it was if anything in the block fails."""
    before = [
        (m, m.__class__, {k: copy.copy(v) if k in _TABLES else v for k, v in vars(m).items()})
        for m in layers
    ]
    weights = [(w, w.detach().clone()) for w in _weights(layers)]
    try:
        yield
    except BaseException:
        for module, cls, state in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for weight, value in weights:
            with _writing_to(weight):
                weight.copy_(value)
        raise


_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


def _weights(layers: list[nn.Module]) -> list[Tensor]:
    weights = (layer._parameters.get("weight") for layer in layers)
    return [w for w in weights if w is not None and not is_lazy(w)]
