"""The checks of a LayerNorm or an RMSNorm call, whatever its route."""

from __future__ import annotations

from collections.abc import Sequence

from normplug import _checks
from normplug._ops import nested
from normplug._ops.spec import LayerNormSpec, Tensors, others


def check(caller: str, t: Tensors, spec: LayerNormSpec) -> None:
    """Refuse an invalid call.

    Raises:
        ValueError: a value, shape or device is invalid.
        TypeError: an argument has the wrong type.
    """
    _checks.tensors(caller, t.x, **others(t))
    _checks.shape(caller, spec.normalized_shape)
    _checks.eps(caller, spec.eps, none=not spec.centred)
    _checks.variance(caller, spec.target_variance)
    if spec.centred:
        _checks.running_pair(caller, t.running_mean, t.running_var, training=True)
    else:
        _checks.number(caller, "weight_offset", spec.weight_offset)
    running = {"running_mean": t.running_mean, "running_var": t.running_var}
    _checks.scalars(caller, **running, num_batches_tracked=t.tracked)
    _checks.momentum(caller, spec.momentum, t.tracked, t.running_var is not None)
    _checks.autocast_output(caller, spec.autocast_output)
    _checks.same_shape(caller, t.x, residual=t.residual)
    vectors = {"weight": t.weight, "bias": t.bias, "input_bias": t.input_bias}
    if nested.is_strided(t.x):
        for part in nested.components(caller, t.x):
            _checks.trailing(caller, part, spec.normalized_shape, **vectors)
    else:
        _checks.trailing(caller, t.x, spec.normalized_shape, **vectors)


def row_shape(caller: str, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    """`normalized_shape` as a tuple.

    Raises:
        TypeError: it is not a sequence.
    """
    try:
        return tuple(normalized_shape)
    except TypeError:
        raise _checks.no_shape(caller, normalized_shape) from None
