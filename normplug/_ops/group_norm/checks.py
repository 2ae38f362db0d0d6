"""The checks of a GroupNorm or an InstanceNorm call, whatever its route."""

from __future__ import annotations

from normplug import _checks
from normplug._ops.spec import GroupNormSpec, Tensors, others


def check(caller: str, t: Tensors, spec: GroupNormSpec) -> None:
    """Refuse an invalid call.

    Raises:
        ValueError: a value, shape or device is invalid.
        TypeError: an argument has the wrong type.
    """
    _checks.tensors(caller, t.x, **others(t))
    _checks.eps(caller, spec.eps)
    _checks.variance(caller, spec.target_variance)
    _checks.channels(caller, t.x, weight=t.weight, bias=t.bias)
    running = {"running_mean": t.running_mean, "running_var": t.running_var}
    if spec.instance:
        _checks.channels(caller, t.x, **running)
        _checks.running_pair(caller, t.running_mean, t.running_var, training=True)
        if t.running_mean is not None:
            _checks.number(caller, "momentum", spec.momentum)
        _checks.momentum(caller, spec.momentum, None, updates=False)
        _checks.more_than_one_position(caller, t.x)
    else:
        _checks.scalars(caller, **running, num_batches_tracked=t.tracked)
        _checks.groups(caller, t.x, spec.groups)
    _checks.activation(caller, spec.activation)
    _checks.autocast_output(caller, spec.autocast_output)
