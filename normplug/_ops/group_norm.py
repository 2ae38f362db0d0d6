"""GroupNorm, and InstanceNorm, which is GroupNorm with one group per channel."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normplug import _activations, _checks
from normplug._activations import ActivationLike
from normplug._layouts import dense
from normplug._ops import can_run, torch_way
from normplug._ops.operators import NormOperators
from normplug._ops.plans import Plan, accumulator_of
from normplug._ops.spec import Tensors, autocast_result
from normplug.reference import accumulator_dtype

_OPERATOR_BYTES = 1 << 20  # of input, from which torch.compile calls the operator


class GroupNormSpec(NamedTuple):
    """The spec of a GroupNorm or InstanceNorm call.

    autocast, autocast_output: see `LayerNormSpec`.
    momentum: of the running statistics, if the call updates any. No kernel depends on it.
    instance: whether it is an InstanceNorm, whose running statistics have a value per channel.
    """

    groups: int
    eps: float
    target_variance: float
    activation: ActivationLike = None
    autocast: torch.dtype | None = None
    autocast_output: str = "float32"
    momentum: float | None = 0.1
    instance: bool = False

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """The samples, unless the call updates statistics that evaluation uses."""
        return () if self.instance and t.running_mean is not None else (0,)

    def output_dtype(self, x: torch.dtype) -> torch.dtype:
        """The dtype of the result, where `x` is the dtype of the input."""
        return autocast_result(x, self.autocast, self.autocast_output) or x

    def check(self, caller: str, t: Tensors) -> None:
        _checks.tensors(caller, *t)
        _checks.number(caller, "eps", self.eps)
        _checks.channels(caller, t.x, weight=t.weight, bias=t.bias)
        statistics = {"running_mean": t.running_mean, "running_var": t.running_var}
        if self.instance:
            _checks.channels(caller, t.x, **statistics)
            _checks.running_pair(caller, t.running_mean, t.running_var, training=True)
            if t.running_mean is not None:
                _checks.number(caller, "momentum", self.momentum)
            _checks.momentum(caller, self.momentum, None, updates=False)
            _checks.more_than_one_position(caller, t.x)
        else:
            _checks.scalars(caller, **statistics, num_batches_tracked=t.tracked)
            _checks.groups(caller, t.x, self.groups)
        _checks.activation(caller, self.activation)
        _checks.option(caller, "autocast_output", self.autocast_output)

    # PyTorch's kernels.

    def by_torch(self, t: Tensors) -> Tensor:
        y = self._instance_norm(t) if self.instance else self._group_norm(t)
        return y if self.activation is None else _activations.apply(self.activation, y)

    def _instance_norm(self, t: Tensors) -> Tensor:
        x = t.x
        weight = torch_way.scaled_channels(t, self.target_variance, None)
        if x.numel() == 0:
            return torch_way.empty_norm(x, weight, t.bias)
        given = (x, weight, t.bias, t.running_mean, t.running_var)
        momentum = self.momentum or 0.0
        cudnn = torch.backends.cudnn.enabled
        return torch_way.realigned(
            torch.instance_norm(*given, True, momentum, self.eps, cudnn)
        )

    def _group_norm(self, t: Tensors) -> Tensor:
        autocast = None if t.x.dtype == torch.float64 else self.autocast
        vectors = (t.weight, t.bias)
        shape = (t.x.shape[1],)
        promotes = autocast is None and not torch_way.mixes_dtypes(t.x, *vectors)
        x, weight, bias = torch_way.prepared(
            t.x, *vectors, self.target_variance, shape, promotes
        )
        y = torch.group_norm(
            x, self.groups, weight, bias, self.eps, torch.backends.cudnn.enabled
        )
        if t.running_mean is not None and x.numel() > 0:
            values = t.x.detach().to(accumulator_dtype(t.x.dtype))
            groups = values.reshape(x.shape[0], self.groups, -1)
            var, mean = torch.var_mean(groups, dim=-1, correction=0)
            self._update(t, mean, var)
        return torch_way.cast(y, t.x.dtype, autocast, self.autocast_output)

    # Normplug's kernels.

    def refusal(self, t: Tensors) -> str | None:
        why = can_run.refusal_of(t)
        n, c, *space = t.x.shape
        each = c // self.groups * math.prod(space)
        if why is None and can_run.is_too_long(each, n * self.groups):
            why = "a group has nearly 2^31 values or more, or there are as many groups"
        return why

    def laid_out(self, t: Tensors) -> Tensors:
        """The call with x dense."""
        return t.reading(dense(t.x), None)

    def without_kernels(self, t: Tensors, why: str, choose: Any) -> None:
        """PyTorch's kernels run it."""

    def plan(self, t: Tensors) -> Plan:
        page = import_module("normplug._ops.group_norm_plan")  # which imports Triton
        plan: Plan = page.GroupNormPlan(t, self)
        return plan

    # The operator for compilers. Torch operations outside it update the running statistics.

    def compiled(self, t: Tensors) -> Callable[[Tensors], Any] | None:
        """An operator: Inductor's reductions over channels and space are several times as slow."""
        return self.operator if can_run.size_of(t.x) >= _OPERATOR_BYTES else None

    def operator(self, t: Tensors) -> Tensor:
        y, stats = OPERATORS.differentiable(
            t.x, None, t.weight, t.bias, None, None, None, None,
            self.groups, self.eps, self.target_variance, *_activations.parts(self.activation),
            self.autocast, self.autocast_output, False,
        )  # fmt: skip
        if t.running_mean is not None:
            self.update_by(t, stats)
        return y

    def fake(self, t: Tensors) -> tuple[Tensor, ...]:
        stats = t.x.new_empty(2 * t.x.shape[0] * self.groups, dtype=accumulator_of(t))
        return torch.empty_like(dense(t.x), dtype=self.output_dtype(t.x.dtype)), stats

    def fake_dx(self, x: Tensor) -> Tensor:
        return dense(x)

    # The running statistics.

    def update_by(self, t: Tensors, stats: Tensor) -> None:
        """Update a call's running statistics by the kernels' stats: mean and rstd of the groups."""
        mean, rstd = stats.detach().view(2, t.x.shape[0], self.groups)
        self._update(t, mean, torch_way.variance_of(rstd, self.eps))

    def _update(self, t: Tensors, mean: Tensor, var: Tensor) -> None:
        """Update a call's running statistics by mean and biased var of its groups, (N, groups)."""
        if self.instance:  # with the *unbiased* variance of each channel, like torch's
            values = t.x.numel() // mean.numel()
            mean, var = mean.mean(0), var.mean(0) * (values / (values - 1))
        else:  # scalars, which are only watched
            mean, var = mean.mean(), var.mean()
        torch_way.update_running(t, self.momentum, mean, var)


def _spec_of(
    groups: int,
    eps: float,
    target_variance: float,
    name: str | None,
    slope: float,
    *autocast: Any,
) -> GroupNormSpec:
    activation = _activations.joined(name, slope)
    return GroupNormSpec(groups, eps, target_variance, activation, *autocast)


OPERATORS = NormOperators(
    "group_norm",
    GroupNormSpec,
    _spec_of,
    "int groups, float eps, float target_variance, str? activation, float slope, "
    "ScalarType? autocast, str autocast_output",
    ("stats",),
)
