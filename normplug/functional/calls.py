"""The path of every call, whichever norm it is for."""

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

# The type of a spec -> the check of a call's arguments, and the choice of its route.
_NORMS: dict[type, tuple[Callable[..., None], Callable[..., Route]]] = {
    BatchNormSpec: (batch_norm_checks.check, batch_norm_route.choose),
    GroupNormSpec: (group_norm_checks.check, group_norm_route.choose),
    LayerNormSpec: (layer_norm_checks.check, layer_norm_route.choose),
}


def carry_out(caller: str, t: Tensors, spec: Spec, backend: str, *, isolated: bool = False) -> Any:
    """Run a call. On a GPU, a call with the cache key of an earlier one skips the checks.

    Args:
        caller: the function's name, for errors.
        t: the call's tensors.
        spec: the call's other arguments; the type of the spec says which norm it is.
        backend: "auto", "triton" or "torch".
        isolated: whether a compiler gains nothing by fusing the norm with its neighbours.

    Returns:
        The result of the route: y, or (y, total) for a norm of rows with a residual.
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
    if sharded.is_sharded(t.x):  # a DTensor: make the same call on this process's own shard
        call_own = partial(carry_out, caller, spec=spec, backend=backend, isolated=isolated)
        return sharded.run(caller, t, spec.free_dims(t), call_own)
    route = choose(caller, _checks.backend(caller, backend), t, spec, isolated)
    _checks.devices(caller, t.x, **others(t))
    result = route(t, spec)
    if eager:
        cache.keep(key, route.bind(t, spec))
    return result
