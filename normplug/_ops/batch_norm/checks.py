"""The checks of a BatchNorm call, whatever its route."""

from __future__ import annotations

from normplug import _checks
from normplug._ops.spec import BatchNormSpec, Tensors, others


def check(caller: str, t: Tensors, spec: BatchNormSpec, *, joined: bool = False) -> None:
    """Refuse an invalid call.

    joined: whether x is only a process's part of the batch, which may have one value per channel.

    Raises:
        ValueError: a value, shape or device is invalid.
        TypeError: an argument has the wrong type.
    """
    _checks.tensors(caller, t.x, **others(t))
    _checks.flags(caller, training=spec.training)
    _checks.eps(caller, spec.eps)
    _checks.variance(caller, spec.target_variance)
    running = {"running_mean": t.running_mean, "running_var": t.running_var}
    _checks.channels(caller, t.x, **running, weight=t.weight, bias=t.bias)
    _checks.running_pair(caller, t.running_mean, t.running_var, spec.training)
    _checks.scalars(caller, num_batches_tracked=t.tracked)
    updates = spec.training and t.running_mean is not None
    _checks.momentum(caller, spec.momentum, t.tracked, updates)
    if spec.training and not joined and spec.peers is None:
        _checks.more_than_one_value(caller, t.x)
    _checks.activation(caller, spec.activation)
    _checks.same_shape(caller, t.x, residual=t.residual)
