"""Which route carries a call out: what is asked for, can run, and was measured faster."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normplug import _checks
from normplug._ops import aten, library

_HAS_TRITON = find_spec("triton") is not None  # not imported before a kernel is wanted
# Bytes of input below which torch's own BatchNorm, in stock mode and training, is over sooner: its
# host time is about 15 us less, and until here the GPU waits for the host (docs/kernels.md). Half
# inputs in channels_last never gain by it.
_HOST_BOUND = {2: 8 << 20, 4: 16 << 20, 8: 16 << 20}

_Signature = tuple[Any, ...]
_Route = Callable[..., Tensor]

# Calls that went through every check once, by all that the checks looked at.
_known: dict[_Signature, _Route] = {}
_KEPT = 4096


def batch_norm_signature(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    *settings: Any,
) -> _Signature:
    """All that decides whether a call is right, and by which route it goes."""
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        type(x),
        settings,
        _vector(running_mean),
        _vector(running_var),
        _vector(weight),
        _vector(bias),
        _vector(residual),
        _vector(num_batches_tracked),
    )


def _vector(t: Tensor | None) -> _Signature | None:
    return None if t is None else (t.shape, t.stride(), t.dtype, t.device, type(t))


def known(signature: _Signature) -> _Route | None:
    """What carries out a call that has been checked before; it takes the tensors."""
    if _watched():
        return None
    try:
        return _known.get(signature)
    except TypeError:  # a setting that cannot be hashed, and is about to be refused
        return None


def remember(signature: _Signature, route: _Route, tensors: _Signature, *settings: Any) -> None:
    """Let calls like this one skip their checks, and go straight to their plan if they have one."""
    if _watched():
        return
    if len(_known) >= _KEPT:
        _known.clear()
    _known[signature] = _straight(route, tensors, settings)


def _watched() -> bool:
    """Whether something interposes itself between torch's operations, and would miss a kernel."""
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
    )


def _straight(route: _Route, tensors: _Signature, settings: _Signature) -> _Route:
    if route is not aten.batch_norm:
        from normplug._ops import gpu

        x, running_mean, _, weight, bias, residual, count = tensors
        tracked = count is not None and running_mean is not None
        plan, x_as_it_runs, residual_as_it_runs = gpu.plan_of(
            x, weight, bias, residual, running_mean, tracked, *settings
        )
        if x_as_it_runs is x and residual_as_it_runs is residual:
            return plan.run
    return lambda *tensors: route(*tensors, *settings)


def batch_norm(
    who: str,
    backend: str,
    x: Tensor,
    residual: Tensor | None,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
    fused: bool,
    stock: bool,
) -> _Route:
    """The route for `functional.batch_norm`: `aten`'s, the kernels' or, for a compiler, theirs.

    fused: with residual or activation. stock: in training, with target variance 1: what torch has
    a kernel for.
    """
    if backend == "torch" or (backend == "auto" and not x.is_cuda):
        return aten.batch_norm
    why = _refusal(x, residual, tracked, (*vectors, tracked, residual))
    if why is not None:
        if backend == "triton":
            raise _checks.no_kernel(who, why)
        return aten.batch_norm
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        # Inductor fuses a lone norm with what follows it, and an operator ends that: only what has
        # fused more itself is worth one.
        return library.batch_norm if backend == "triton" or fused else aten.batch_norm
    if backend == "auto" and not (fused or _pays(x, stock)):
        return aten.batch_norm
    from normplug._ops import gpu

    return gpu.batch_norm


def _pays(x: Tensor, stock: bool) -> bool:
    """Whether the kernels were measured faster than torch's, host time included."""
    size = x.element_size()
    if not stock or (size == 2 and not x.is_contiguous()):
        return True
    return x.numel() * size >= _HOST_BOUND[size]


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """By kernel where one can run, and no gradient is asked for; else None."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if torch.compiler.is_compiling() or _watched() or _refusal(x, None, None, ()) is not None:
        return None
    from normplug._ops import gpu

    return gpu.channel_stats(x)


def _refusal(
    x: Tensor, residual: Tensor | None, tracked: Tensor | None, others: tuple[Tensor | None, ...]
) -> str | None:
    """Why the kernels cannot take a call; None where they can."""
    if not _HAS_TRITON:
        return "triton is not installed"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace records torch's operations only"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    # torch.compiler.is_exporting() holds while anything compiles. torch 2.6 has no such flag.
    if getattr(torch.compiler, "_is_exporting_flag", False):
        return "torch.export is tracing, for machines that may have no GPU"
    if residual is not None and residual.dtype != x.dtype:
        return f"the input is {x.dtype} and the residual {residual.dtype}"
    if tracked is not None and tracked.dtype != torch.int64:
        return f"num_batches_tracked is {tracked.dtype}, not torch.int64"
    from normplug._ops import gpu

    return gpu.refusal(x, *others)
