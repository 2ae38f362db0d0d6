"""Choose the route of a norm of rows: by backend, by eligibility, and by measured speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from normplug._ops import eligible, nested
from normplug._ops.layer_norm.aten import ATEN
from normplug._ops.layer_norm.compiled import COMPILED
from normplug._ops.spec import LayerNormSpec, Route, Tensors

# Bytes of input from which torch.compile calls the operator, without and with a residual.
_OPERATOR_BYTES = 16 << 20
_ADD_OPERATOR_BYTES = 32 << 20


def choose(caller: str, backend: str, t: Tensors, spec: LayerNormSpec, isolated: bool) -> Route:
    """Choose the route of a call.

    Args:
        caller: for the error.
        backend: "auto", "triton" or "torch".
        t: the call's tensors.
        spec: the call's non-tensor arguments.
        isolated: whether a compiler gains nothing by fusing the norm with the operations around it:
            x is a view of images whose channels come first.

    Raises:
        NotImplementedError: backend "triton" where the kernels cannot run.
    """
    if nested.is_strided(t.x):
        return _AllRows(partial(choose, caller, backend, isolated=isolated))
    if not eligible.takes(caller, backend, t, spec, _kernels):
        return ATEN
    if eligible.is_compiling():
        pays = spec.centred and _operator_pays(t, isolated)
        return COMPILED if backend == "triton" or pays else ATEN
    return _kernels()


class _AllRows(Route):
    """For a nested tensor of the older layout: the route of the dense tensor of all its rows."""

    def __init__(self, choose: Callable[[Tensors, LayerNormSpec], Route]) -> None:
        self._choose = choose

    def __call__(self, t: Tensors, spec: LayerNormSpec) -> Any:
        total = t.x if t.residual is None else t.x + t.residual
        rows = t._replace(x=nested.rows(total, spec.normalized_shape), residual=None)
        y = nested.of_rows(self._choose(rows, spec)(rows, spec), total)
        return y if t.residual is None else (y, total)


def _kernels() -> Route:
    from normplug._ops.layer_norm.eager import KERNELS

    return KERNELS


def _operator_pays(t: Tensors, isolated: bool) -> bool:
    """Whether an operator was measured faster than what Inductor makes of a LayerNorm."""
    size = eligible.size_of(t.x)
    if t.residual is not None:  # Inductor fuses this too, forward as fast, backward slower
        return size >= _ADD_OPERATOR_BYTES
    # Inductor fuses a LayerNorm with the residual add before it. Over the channels of channels_last
    # images it is still slower than the kernels (docs/speed.md).
    slow = isolated and t.x.is_contiguous()
    return (t.input_bias is not None or slow) and size >= _OPERATOR_BYTES
