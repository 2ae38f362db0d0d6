"""The way of every call, whichever norm it is of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from normplug import _checks, native
from normplug._ops import cache, sharded
from normplug._ops.batch_norm import checks as batch_norm_checks
from normplug._ops.batch_norm import route as batch_norm_route
from normplug._ops.group_norm import checks as group_norm_checks
from normplug._ops.group_norm import route as group_norm_route
from normplug._ops.layer_norm import checks as layer_norm_checks
from normplug._ops.layer_norm import route as layer_norm_route
from normplug._ops.spec import (
    BatchNormSpec,
    GroupNormSpec,
    LayerNormSpec,
    Route,
    Tensors,
    others,
)

Spec: TypeAlias = BatchNormSpec | GroupNormSpec | LayerNormSpec

# What a call of a norm must satisfy, and what chooses its route.
_NORMS: dict[type, tuple[Callable[..., None], Callable[..., Route]]] = {
    BatchNormSpec: (batch_norm_checks.check, batch_norm_route.choose),
    GroupNormSpec: (group_norm_checks.check, group_norm_route.choose),
    LayerNormSpec: (layer_norm_checks.check, layer_norm_route.choose),
}


def carry_out(caller: str, t: Tensors, spec: Spec, backend: str, *, single: bool = False) -> Any:
    """Carry out a call. On a GPU, one that is like an earlier call skips the checks.

    Args:
        caller: for errors.
        t: the call's tensors.
        spec: the call's numbers; their type says which norm it is.
        backend: "auto", "triton" or "torch".
        single: whether a compiler gains nothing by fusing the norm with what stands around it.

    Returns:
        What the route returns: y, or (y, total) of a norm of rows with a residual.
    """
    eager = getattr(t.x, "is_cuda", False) and not torch.compiler.is_compiling()
    if eager:
        if (known := native.call(spec, backend, t)) is not None:
            return known
        key = cache.key_of(t, spec, backend)
        if (call := cache.find(key)) is not None:
            native.keep(spec, backend, t, call)
            return call(t)
    check, choose = _NORMS[type(spec)]
    check(caller, t, spec)
    if sharded.is_sharded(t.x):
        call_own = partial(carry_out, caller, spec=spec, backend=backend, single=single)
        return sharded.run(caller, t, spec.free_dims(t), call_own)
    route = choose(caller, _checks.backend(caller, backend), t, spec, single)
    _checks.devices(caller, t.x, **others(t))
    result = route(t, spec)
    if eager:
        cache.keep(key, route.bind(t, spec))
    return result
