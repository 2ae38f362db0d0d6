"""The plan of a GroupNorm or an InstanceNorm."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from normplug._kernels import processors
from normplug._kernels.group_norm import launches, schedule
from normplug._layouts import lies_like
from normplug._ops.plans import Needs, Plan, Program, gradients_of, named
from normplug._ops.spec import Tensors


class GroupNormPlan(Plan):
    """The launches of a GroupNorm, with an activation: one forward and one backward.

    State: stats, mean and rstd of the groups of all samples, (2 * N * groups,).
    """

    spec: Any  # a `group_norm.GroupNormSpec`, which imports this module
    state = ("stats",)

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, (n, c, *space) = t.x, t.x.shape
        self._output_dtype = spec.output_dtype(x.dtype)
        self._flags = launches.Flags(**t.has("weight", "bias"), activation=spec.activation)
        self._groups = n * spec.groups
        widest = max(x.dtype.itemsize, self._output_dtype.itemsize)
        itemsize = 8 if self.acc.itemsize == 8 else widest
        sizes = (n, spec.groups, c // spec.groups, math.prod(space))
        self._shape = (*sizes, not x.is_contiguous(), itemsize)
        self._machine = processors(x.device)
        if t.running_mean is not None:  # torch operations have to follow; C++ stores no such call
            self.run = self._run_and_update  # type: ignore[method-assign]

    def _run_and_update(self, t: Tensors) -> Tensor:
        y, (stats,) = self.run_with_state(t)
        self.spec.update_by(t, stats)
        return y

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x, spec = t.x, self.spec
        geometry = schedule.group_norm_forward(*self._shape, self._machine)
        numbers = (spec.eps, spec.target_variance)
        launch = launches.forward_launch(geometry, self.acc, self._flags, *numbers)
        return Program(
            named(t),
            (launch, {}),
            empties={
                "y": (x.shape, x.stride(), self._output_dtype),
                "stats": ((2 * self._groups,), (1,), self.acc),
            },
            saved=("x", "nothing", "weight", "bias", "nothing", "stats"),
            scratch=launches.forward_scratch(geometry),
        )

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        x, dy, tv = given["x"], given["dy"], self.spec.target_variance
        wanted = (needs[0], needs[2], needs[3])
        geometry = schedule.group_norm_backward(*self._shape, self._machine)
        launch = launches.backward_launch(geometry, self.acc, self._flags, wanted, tv)
        return Program(
            given,
            (launch, {}),
            copies={} if lies_like(dy, x) else {"dy": x.stride()},
            empties=gradients_of(given, wanted),
            results=("dx", "nothing", "dweight", "dbias", "nothing"),
            scratch=launches.backward_scratch(geometry, wanted),
        )
