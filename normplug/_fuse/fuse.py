"""Run norms together with the activations and additions around them, in one kernel each."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from normplug import _checks, _convert
from normplug._fuse.analysis import Analysis
from normplug._fuse.fused_class import Fused, fused_class, plain_class
from normplug._fuse.fusion import FUSION
from normplug._fuse.report import Fusions, kept
from normplug._ops import recompute as _recompute
from normplug._table import shown


def fuse(model: nn.Module, *, recompute: bool = False) -> nn.Module:
    """Run normplug's layers together with what stands around them, where that is safe.

    Each of these becomes one call: BatchNorm and the activation after it; BatchNorm, a residual
    addition and the activation after that (ReLU, LeakyReLU, ReLU6, SiLU, Hardswish, exact GELU);
    BatchNorm, ReLU and max pooling; GroupNorm or InstanceNorm and the activation after it; a
    residual addition and the LayerNorm after it; the bias of a convolution and the LayerNorm over
    its channels, moved last. On CUDA the call is one kernel a direction, or two with max pooling,
    and keeps less for the backward. Under torch.compile it takes what was measured faster;
    elsewhere it is PyTorch's operations, one by one. Max pooling runs in the kernel for
    channels_last input, and compares values before they are rounded.

    In place: the modules that call the norms get a subclass of their class, with another forward.
    Modules, parameters, buffers, hooks, names and flags stay, so that checkpoints, optimizers and
    aliases stay valid. torch.fx traces the forward, and only if its source shows that it depends on
    nothing but its inputs and the module's attributes, which each call compares. A module runs as
    it is written if it has changed since, itself or in a module that its forward reaches; if it
    gets hooks; and if it is called with arguments that the fused calls do not take. One call then
    still serves a norm whose source has the addition right before it, or the activation right after
    it: such statements are edited in a copy of the forward, which takes any arguments. So are those
    of a forward that cannot be traced. Nothing of torch is patched, so that other threads can run
    other models meanwhile.

    `recompute=True` saves memory: the next layer's backward recomputes the norm's output, bit for
    bit, instead of storing it, for one more read and write of it. It applies to BatchNorm with an
    activation, to an addition with LayerNorm, and to every second of a chain of residual blocks,
    if only modules and fused additions read the output. The flag has no effect on the CPU, under
    torch.compile, and inside activation checkpointing or other
    `torch.autograd.graph.saved_tensors_hooks`. The last call of `fuse` decides.

    Copies and pickles are fused as the model is, with the same flag, and are not traced again. If
    torch, normplug or the code of a fused forward has changed, a loaded pickle runs as its modules
    are written, and warns once: call `fuse` again. So do pickles of earlier versions of normplug.

    Args:
        model: a module that `normplug.swap` has swapped, or that has normplug's layers.
        recompute: recompute outputs in the backward instead of storing them; needs torch 2.8.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
        NotImplementedError: `recompute`, and torch is older than 2.8.

    Warns:
        UserWarning: there was nothing to fuse; the warning says why.

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
            "Use normplug.fuse(model) without it."
        )
    analysis = Analysis(model, recompute)
    if not analysis.fusions:
        warnings.warn(
            f"normplug.fuse: nothing to fuse in {type(model).__name__}; "
            f"{analysis.report.summary()}.",
            stacklevel=2,
        )
    classes = {module: fused_class(plain_class(module)) for module in analysis.fusions}
    for module in fused_modules(model).values():
        if module not in classes and not _convert.is_patched(module):
            release([module])  # fused by an earlier call, and not any more
    for module, fusion in analysis.fusions.items():
        vars(module)[FUSION] = fusion
        _convert.assign_class(module, classes[module])
    for norm, call in analysis.calls.items():
        norm._note_fused(*call)
    return model


def unfuse(model: nn.Module) -> nn.Module:
    """Undo `fuse`: every module has the class and the forward again that it had.

    Args:
        model: any module.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
        ValueError: the forward of a fused module has been replaced on the instance since. The model
            is as before.
    """
    _checks.module("unfuse", model)
    release(releasable("unfuse", fused_modules(model)))
    return model


def fusions(model: nn.Module) -> Fusions:
    """List what `fuse` has fused in a model, what it has left, and why; change nothing.

    For a model that has not been fused, list what `fuse` would do.

    Args:
        model: any module, fused or not.

    Returns:
        A `Fusions`: printable, and iterable over one `Fused` a norm layer.

    Raises:
        TypeError: `model` is not a module, or is TorchScript.
    """
    _checks.module("fusions", model)
    found = kept(model)
    return Analysis(model).report if found is None else found


def fused_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward has been fused, by path."""
    return {path: m for path, m in model.named_modules() if isinstance(m, Fused)}


def releasable(caller: str, fused: dict[str, nn.Module]) -> list[nn.Module]:
    """The modules, if all can have their class back.

    Raises:
        ValueError: as `unfuse` does.
    """
    patched = [shown(path) for path, m in fused.items() if _convert.is_patched(m)]
    if patched:
        raise ValueError(
            f"normplug.{caller}: the forward of {', '.join(patched)}, which is fused, was replaced "
            "on the instance since, by a patch or accelerate's hooks; remove that first, as with "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    return list(fused.values())


def release(fused: list[nn.Module]) -> None:
    """Give modules their class back."""
    for module in fused:
        vars(module).pop(FUSION, None)
        _convert.assign_class(module, plain_class(module))
