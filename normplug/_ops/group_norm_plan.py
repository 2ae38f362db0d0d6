"""The plan of a GroupNorm or an InstanceNorm."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from normplug._activations import kernel_code
from normplug._kernels import processors
from normplug._kernels.constants import Constants
from normplug._kernels.group_norm import columns, planes, schedule
from normplug._kernels.group_norm.schedule import GroupColumns
from normplug._kernels.launch import Launch, accumulator
from normplug._layouts import lies_like
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.plans import Needs, Plan, Program, gradients_of, named
from normplug._ops.spec import Tensors


class GroupNormPlan(Plan):
    """The launches of a GroupNorm, with an activation: one forward and one backward.

    State: stats, mean and rstd of the groups of all samples, (2 * N * groups,).
    """

    spec: GroupNormSpec
    state = ("stats",)

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x = t.x
        n, c, *space = x.shape
        self._output_dtype = spec.output_dtype(x.dtype)
        self._constants = Constants(
            acc=accumulator(self.acc),
            weight=t.weight is not None,
            bias=t.bias is not None,
            activation=kernel_code(spec.activation),
        )
        self._root = math.sqrt(spec.target_variance)
        self._groups = n * spec.groups
        widest = max(x.dtype.itemsize, self._output_dtype.itemsize)
        itemsize = 8 if self.acc.itemsize == 8 else widest
        sizes = (n, spec.groups, c // spec.groups, math.prod(space))
        self._shape = (*sizes, not x.is_contiguous(), itemsize)
        self._machine = processors(x.device)
        if t.running_mean is not None:
            # Torch operations have to follow; C++ stores no such call.
            self.run = self._run_and_update  # type: ignore[method-assign]

    def _run_and_update(self, t: Tensors) -> Tensor:
        y, (stats,) = self.run_with_state(t)
        self.spec.update_by(t, stats)
        return y

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        x = t.x
        shape = schedule.group_norm_forward(*self._shape, self._machine)
        if isinstance(shape, GroupColumns):
            kernel = columns.group_norm_columns_forward
        elif shape.solo:
            kernel = planes.group_norm_planes_solo_forward
        else:
            kernel = planes.group_norm_planes_forward
        numbers = {"eps": self.spec.eps, "root": self._root}
        launch = Launch(kernel, shape.forward(), self._constants, **numbers)
        return Program(
            named(t),
            (launch, {}),
            empties={
                "y": (x.shape, x.stride(), self._output_dtype),
                "stats": ((2 * self._groups,), (1,), self.acc),
            },
            saved=("x", "nothing", "weight", "bias", "nothing", "stats"),
            scratch=shape.scratch,
        )

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        x, dy = given["x"], given["dy"]
        dx, _, dweight, dbias, _ = needs
        is_activated = self.spec.activation is not None
        constants = Constants(
            acc=self._constants.acc,
            weight=self._constants.weight and (dx or is_activated),
            bias=self._constants.bias and is_activated,
            activation=self._constants.activation,
            dx=dx,
            dweight=dweight,
            dbias=dbias,
        )
        shape = schedule.group_norm_backward(*self._shape, self._machine)
        if isinstance(shape, GroupColumns):
            kernel = columns.group_norm_columns_backward
        else:
            kernel = planes.group_norm_planes_backward
        sums = dweight + dbias
        launch = Launch(kernel, shape.backward(dx, sums), constants, root=self._root)
        return Program(
            given,
            (launch, {}),
            copies={} if lies_like(dy, x) else {"dy": x.stride()},
            empties=gradients_of(given, (dx, dweight, dbias)),
            results=("dx", "nothing", "dweight", "dbias", "nothing"),
            scratch=shape.backward_scratch(sums),
        )
