"""Choose the route of a norm of rows: by backend, by what can run, and by measured speed."""

from __future__ import annotations

from normplug._ops import eligible
from normplug._ops.layer_norm.aten import ATEN
from normplug._ops.layer_norm.compiled import COMPILED
from normplug._ops.spec import LayerNormSpec, Route, Tensors

# Bytes of input from which it is an operator under torch.compile, without and with a residual.
_OPERATOR_BYTES = 16 << 20
_ADD_OPERATOR_BYTES = 32 << 20


def choose(
    caller: str, backend: str, t: Tensors, spec: LayerNormSpec, *, channels_first: bool
) -> Route:
    """The route of a call.

    Args:
        caller: for the error.
        backend: "auto", "triton" or "torch".
        t: the call's tensors.
        spec: the call's numbers.
        channels_first: whether x is a view of images whose channels come first.

    Raises:
        NotImplementedError: backend "triton" where the kernels cannot run.
    """
    if not eligible.takes(caller, backend, t, spec, _kernels):
        return ATEN
    if eligible.is_compiling():
        pays = spec.centred and _operator_pays(t, channels_first)
        return COMPILED if backend == "triton" or pays else ATEN
    return _kernels()


def _kernels() -> Route:
    from normplug._ops.layer_norm.eager import KERNELS

    return KERNELS


def _operator_pays(t: Tensors, channels_first: bool) -> bool:
    """Whether an operator was measured faster than what Inductor makes of a LayerNorm."""
    size = eligible.size_of(t.x)
    if t.residual is not None:  # Inductor fuses this too, forward as fast, backward slower
        return size >= _ADD_OPERATOR_BYTES
    # Inductor fuses a single LayerNorm with the residual add before it. Over the channels of
    # channels_last images it is still slower than the kernels (docs/speed.md).
    slow = channels_first and t.x.is_contiguous()
    return (t.input_bias is not None or slow) and size >= _OPERATOR_BYTES
