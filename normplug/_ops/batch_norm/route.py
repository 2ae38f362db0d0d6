"""Choose the route of a BatchNorm: by backend, by eligibility, and by measured speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops import eligible
from normplug._ops.batch_norm.aten import ATEN
from normplug._ops.batch_norm.compiled import COMPILED
from normplug._ops.spec import BatchNormSpec, Route, Tensors

if TYPE_CHECKING:
    from normplug._ops.plans import KernelRoute

# Bytes of input from which torch.compile calls a fused norm as an operator. That takes the host
# some 80 us more, in both directions together, than the code that Inductor generates.
_OPERATOR_BYTES = 96 << 20


def choose(caller: str, backend: str, t: Tensors, spec: BatchNormSpec, isolated: bool) -> Route:
    """Choose the route of a call.

    Args:
        caller: for the error.
        backend: "auto", "triton" or "torch".
        t: the call's tensors.
        spec: the call's non-tensor arguments.
        isolated: whether a compiler would have nothing to fuse the norm with.

    Raises:
        NotImplementedError: backend "triton" where the kernels cannot run.
    """
    if not eligible.is_asked_for(backend, t.x):
        return ATEN
    why = eligible.refusal_now() or kernels(spec).refusal(t, spec)
    if why is not None:
        if spec.pool is not None:  # there may be kernels for the norm alone
            return _PoolingApart(choose(caller, backend, t, spec.without_pool(), isolated))
        if backend == "triton":
            raise _checks.no_kernel(caller, why)
        return ATEN
    if eligible.is_compiling():
        fuses = t.residual is not None or spec.activation is not None
        # Inductor fuses a norm with what follows it, and an operator prevents that. So an operator
        # pays only if it fuses more itself, or if there is nothing to fuse the norm with.
        worth = (fuses or isolated) and eligible.size_of(t.x) >= _OPERATOR_BYTES
        return COMPILED if backend == "triton" or worth else ATEN
    return kernels(spec)


class _PoolingApart(Route):
    """The norm by another route, and the pooling as a separate call."""

    def __init__(self, norm: Route) -> None:
        self._norm = norm

    def __call__(self, t: Tensors, spec: BatchNormSpec) -> Tensor:
        assert spec.pool is not None
        return spec.pool(self._norm(t, spec.without_pool()))

    def bind(self, t: Tensors, spec: BatchNormSpec) -> Callable[[Tensors], Tensor]:
        norm, pool = self._norm.bind(t, spec.without_pool()), spec.pool
        assert pool is not None
        return lambda t: pool(norm(t))


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """`functional.channel_stats` by kernel; None if it cannot run, or a gradient is required."""
    if not x.is_cuda or (x.requires_grad and torch.is_grad_enabled()):
        return None
    if torch.compiler.is_compiling():
        return None
    from normplug._ops.batch_norm import eager

    return eager.channel_stats(x)


def kernels(spec: BatchNormSpec) -> KernelRoute:
    """The route to the kernels of a call."""
    if spec.pool is None:
        from normplug._ops.batch_norm.eager import KERNELS
    else:
        from normplug._ops.batch_norm.pooled import KERNELS
    return KERNELS
