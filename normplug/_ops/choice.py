"""Which route carries a call out: what is asked for, can run, and was measured faster."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops import aten
from normplug._ops.batch_norm import compiled as batch_norm_library
from normplug._ops.batch_norm import pooled_compiled as pool_library
from normplug._ops.layer_norm import compiled as layer_norm_library
from normplug._torch import (
    dispatch_modes,
    in_forward_ad,
    interposed,
    is_exporting,
    is_tracing,
    transforms_active,
)

_HAS_TRITON = find_spec("triton") is not None  # not imported before a kernel is wanted
# Bytes of input, by itemsize, below which torch's own norm is over sooner in stock mode: the host
# takes less time over it (in training 15 us for BatchNorm, 60 to 100 for LayerNorm), and until here
# the GPU waits for the host (docs/kernels.md). BatchNorm of halves in channels_last never gains.
_HOST_BOUND = {2: 8 << 20, 4: 16 << 20, 8: 16 << 20}
# Bytes of input from which fused norms are operators of ours under torch.compile. Dispatching one
# took the host some 80 us more, both directions, than what Inductor makes of a norm: with operators
# for less, a model that waits for the host was slower than compiled by itself (docs/kernels.md).
_BATCH_NORM_OPERATOR_BYTES = 96 << 20
_LAYER_NORM_OPERATOR_BYTES = 16 << 20
_ADD_LAYER_NORM_OPERATOR_BYTES = 32 << 20

_Signature = tuple[Any, ...]
_Route = Callable[..., Any]

# Calls that went through every check once, by all that the checks looked at.
_known: dict[_Signature, _Route] = {}
_KEPT = 4096


def signature(
    who: str, settings: tuple[Any, ...], tensors: tuple[Tensor | None, ...]
) -> _Signature:
    """All that decides whether a call of `who` is right, and by which route it goes.

    () where an argument has no shape: it is no tensor, which the checks refuse, or a nested one.
    """
    # In one expression: this is called before every kernel.
    try:
        kinds = [
            None if t is None else (t.shape, t.stride(), t.dtype, t.device, type(t))
            for t in tensors
        ]
    except (AttributeError, RuntimeError):
        return ()
    return (who, settings, *kinds)


def known(signature: _Signature) -> _Route | None:
    """What carries out a call that has been checked before; it takes the tensors."""
    if interposed():
        return None
    try:
        return _known.get(signature)
    except TypeError:  # a setting that cannot be hashed, and is about to be refused
        return None


def remember(
    signature: _Signature, route: _Route, tensors: tuple[Tensor | None, ...], *settings: Any
) -> None:
    """Let calls like this one skip their checks, and go straight to their plan if they have one."""
    if interposed():
        return
    if len(_known) >= _KEPT:
        _known.clear()
    # Only modules whose routes have plans have this.
    find_plan = getattr(sys.modules[route.__module__], "straight", None)
    straight = find_plan and find_plan(route, tensors, settings)
    _known[signature] = straight or (lambda *tensors: route(*tensors, *settings))


def batch_norm(
    who: str,
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    fused: bool,
    lone: bool,
    stock: bool,
    keeps_residual: bool,
) -> _Route:
    """The route for `functional.batch_norm`: `aten`'s, the kernels' or, for a compiler, theirs.

    fused: with residual or activation. lone: a compiler would have nothing to fuse it with. stock:
    in training, with target variance 1: what torch has a kernel for. keeps_residual: so that the
    kernels' result can be recomputed.
    """
    if not _asked_for(backend, x):
        return aten.batch_norm
    why = _refusal()
    if why is None:
        from normplug._ops.batch_norm import eager as batch_norm_gpu

        why = batch_norm_gpu.refusal(x, residual, tracked, vectors)
    if why is not None:
        if backend == "triton":
            raise _checks.no_kernel(who, why)
        return aten.batch_norm
    if _compiling():
        # Inductor fuses a norm by itself with what follows it, and an operator ends that: only what
        # has fused more itself, or has nothing to be fused with, is worth one.
        worth = (fused or lone) and _bytes(x) >= _BATCH_NORM_OPERATOR_BYTES
        pays = backend == "triton" or worth
        return batch_norm_library.batch_norm if pays else aten.batch_norm
    if backend == "auto" and not (fused or _pays(x, stock)):
        return aten.batch_norm
    return batch_norm_gpu.recomputable if keeps_residual else batch_norm_gpu.batch_norm


def batch_norm_max_pool(
    backend: str,
    x: Tensor,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    pool: aten.Pool,
) -> _Route | None:
    """The route for BatchNorm, relu and max pooling in one; None where they go one by one."""
    if not _asked_for(backend, x) or _refusal() is not None:
        return None
    from normplug._ops.batch_norm import pooled as pool_gpu

    if pool_gpu.refusal(x, tracked, vectors, pool) is not None:
        return None
    if _compiling():
        pays = backend == "triton" or _bytes(x) >= _BATCH_NORM_OPERATOR_BYTES
        return pool_library.batch_norm_max_pool if pays else None
    return pool_gpu.batch_norm_max_pool


def layer_norm(
    who: str,
    backend: str,
    x: Tensor,
    row_dims: int,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    fused: bool,
    channels_first: bool,
    stock: bool,
) -> _Route:
    """The route for `functional.layer_norm`.

    fused: with input_bias. channels_first: x is a view of images that are. stock: what torch has a
    kernel for.
    """
    why = _refusal_of_rows(backend, x, row_dims, None, tracked, vectors)
    if why is not None:
        if backend == "triton":
            raise _checks.no_kernel(who, why)
        return aten.layer_norm
    if _compiling():
        # As a lone BatchNorm: Inductor fuses it with the residual add before it. But over images'
        # channels, innermost in memory, it loses to the kernels all the same (docs/kernels.md).
        slow = channels_first and x.is_contiguous()
        worth = (fused or slow) and _bytes(x) >= _LAYER_NORM_OPERATOR_BYTES
        pays = backend == "triton" or worth
        return layer_norm_library.layer_norm if pays else aten.layer_norm
    if backend == "auto" and stock and _host_bound(x):
        return aten.layer_norm
    from normplug._ops.layer_norm import eager as layer_norm_gpu

    return layer_norm_gpu.layer_norm


def add_layer_norm(
    who: str,
    backend: str,
    x: Tensor,
    row_dims: int,
    residual: Tensor,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
) -> _Route:
    """The route for `functional.add_layer_norm`."""
    why = _refusal_of_rows(backend, x, row_dims, residual, tracked, vectors)
    if why is not None:
        if backend == "triton":
            raise _checks.no_kernel(who, why)
        return aten.add_layer_norm
    if _compiling():  # Inductor fuses this too, forward as fast, backward slower
        pays = backend == "triton" or _bytes(x) >= _ADD_LAYER_NORM_OPERATOR_BYTES
        return layer_norm_library.add_layer_norm if pays else aten.add_layer_norm
    from normplug._ops.layer_norm import eager as layer_norm_gpu

    return layer_norm_gpu.add_layer_norm


def has_kernels(who: str, backend: str, x: Tensor) -> bool:
    """Whether a norm with this backend would be by kernel where x is, for all that can be told."""
    if not _asked_for(_checks.backend(who, backend), x) or _refusal() is not None:
        return False
    from normplug._ops import eligible as gpu

    return gpu.refusal_of_device(x) is None


def _refusal_of_rows(
    backend: str,
    x: Tensor,
    row_dims: int,
    residual: Tensor | None,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
) -> str | None:
    """Why the kernels cannot run a LayerNorm; None where they can."""
    if not _asked_for(backend, x):
        return "not asked for"
    why = "the input is a nested tensor" if x.is_nested else _refusal()
    if why is None:
        from normplug._ops.layer_norm import eager as layer_norm_gpu

        why = layer_norm_gpu.refusal(x, row_dims, residual, tracked, vectors)
    return why


def _asked_for(backend: str, x: Tensor) -> bool:
    """Whether a backend stands for the kernels, if they can run."""
    return backend == "triton" or (backend == "auto" and x.is_cuda)


def _compiling() -> bool:
    return torch.compiler.is_compiling() or dispatch_modes() > 0


def _pays(x: Tensor, stock: bool) -> bool:
    """Whether the kernels were measured faster than torch's, host time included."""
    if not stock or (x.element_size() == 2 and not x.is_contiguous()):
        return True
    return not _host_bound(x)


def _host_bound(x: Tensor) -> bool:
    return _bytes(x) < _HOST_BOUND[x.element_size()]


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """By kernel where one can run, and no gradient is asked for; else None."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if torch.compiler.is_compiling() or interposed() or _refusal() is not None:
        return None
    from normplug._ops.batch_norm import eager as batch_norm_gpu

    if batch_norm_gpu.refusal(x, None, None, ()) is not None:
        return None
    return batch_norm_gpu.channel_stats(x)


def _refusal() -> str | None:
    """Why no kernel can be called now, whatever the tensors; None where one may."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if transforms_active():
        return "a torch.func transform is active"
    if is_tracing():
        return "torch.jit.trace records torch's operations only"
    if in_forward_ad():
        return "forward-mode differentiation is active"
    if is_exporting():
        return "torch.export is tracing, for machines that may have no GPU"
    return None
