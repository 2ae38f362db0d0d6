"""Choose the route of a GroupNorm or an InstanceNorm: by backend and eligibility."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from normplug._ops import eligible
from normplug._ops.group_norm.aten import ATEN
from normplug._ops.group_norm.compiled import COMPILED
from normplug._ops.group_norm.updates import moments, update_running
from normplug._ops.spec import GroupNormSpec, Route, Tensors


def choose(caller: str, backend: str, t: Tensors, spec: GroupNormSpec, isolated: bool) -> Route:
    """Choose the route of a call.

    Args:
        caller: for the error.
        backend: "auto", "triton" or "torch".
        t: the call's tensors.
        spec: the call's non-tensor arguments.
        isolated: as for other norms; not used here.

    Raises:
        NotImplementedError: backend "triton" where the kernels cannot run.
    """
    if not eligible.takes(caller, backend, t, spec, _kernels):
        return ATEN
    if eligible.is_compiling():
        # Inductor fuses a norm with the operations around it, and an operator prevents that.
        return COMPILED if backend == "triton" else ATEN
    return _kernels() if t.running_mean is None else _UPDATING_RUNNING


def _kernels() -> Any:
    from normplug._ops.group_norm.eager import KERNELS

    return KERNELS


class _UpdatingRunning(Route):
    """The kernels, then torch operations that update the running statistics by their stats."""

    def __call__(self, t: Tensors, spec: GroupNormSpec) -> Tensor:
        bare = t._replace(running_mean=None, running_var=None, tracked=None)
        plan, ready = _kernels().plan_of(bare, spec)
        y, (stats,) = plan.run_with_state(ready)
        update_running(t, spec, *moments(t, spec, stats))
        return y


_UPDATING_RUNNING = _UpdatingRunning()
