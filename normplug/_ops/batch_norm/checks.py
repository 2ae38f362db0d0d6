"""What a call of a BatchNorm must satisfy, whatever carries it out."""

from __future__ import annotations

from normplug import _checks
from normplug._ops.spec import BatchNormSpec, Tensors, others


def check(caller: str, t: Tensors, spec: BatchNormSpec, *, joined: bool = False) -> None:
    """Refuse a call that has no meaning.

    joined: whether x is only a process's part of the batch, which may have one value per channel.

    Raises:
        ValueError: values, shapes or devices that do not fit.
        TypeError: an argument of another type.
    """
    _checks.tensors(caller, t.x, **others(t))
    _checks.flags(caller, training=spec.training)
    _checks.eps(caller, spec.eps)
    running = {"running_mean": t.running_mean, "running_var": t.running_var}
    _checks.channels(caller, t.x, **running, weight=t.weight, bias=t.bias)
    _checks.running_pair(caller, t.running_mean, t.running_var, spec.training)
    _checks.scalars(caller, num_batches_tracked=t.tracked)
    moves = spec.training and t.running_mean is not None
    _checks.momentum(caller, spec.momentum, t.tracked, moves)
    if spec.training and not joined:
        _checks.more_than_one_value(caller, t.x)
    _checks.activation(caller, spec.activation)
    _checks.same_shape(caller, t.x, residual=t.residual)
