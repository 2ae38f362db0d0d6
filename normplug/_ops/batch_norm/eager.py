"""BatchNorm over normplug's own kernels.

A call's shape, layout and flags name a `_Plan`, made once: what is cut into tiles how, and which
kernels are launched. A call is then one launch forward and one backward. Second derivatives go
through torch's own operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normplug._kernels.batch_norm import launches as kernels
from normplug._kernels.batch_norm import schedule
from normplug._kernels.device import processors
from normplug._kernels.launch import COOPERATIVE, Launch, Workspace
from normplug._ops import aten
from normplug._ops import eligible as gpu
from normplug._ops.recompute import Recomputable
from normplug.reference import accumulator_dtype


class _Key(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight: torch.dtype | None
    bias: torch.dtype | None
    residual: bool
    running: torch.dtype | None
    tracked: bool
    training: bool
    momentum: float | None
    eps: float
    target_variance: float
    activation: str | None
    keeps_residual: bool


class _Plan:
    """All that calls of one shape, layout and flags have in common."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        shape, device = key.shape, key.device
        self.flags = kernels.Flags(
            training=key.training,
            weight=key.weight is not None,
            bias=key.bias is not None,
            residual=key.residual,
            activation=key.activation,
            running=key.running is not None,
            cumulative=key.momentum is None and key.training and key.running is not None,
            tracked=key.tracked and key.training and key.momentum is not None,
        )
        self.acc = accumulator_dtype(key.dtype)
        self._sizes = (shape[0], shape[1], math.prod(shape[2:]))
        self._innermost = not gpu.is_contiguous(shape, key.stride)
        self._machine = (processors(device), COOPERATIVE and device.type == "cuda")
        geometry = self._geometry(1)
        self._forward = kernels.forward_launch(
            geometry, key.dtype, self.flags, key.momentum or 0.0, key.eps, key.target_variance
        )
        self._forward_scratch = kernels.scratch(geometry)
        self._again: Launch | None = None
        self._mask_bytes = 0
        if self.flags.bits:
            size = key.dtype.itemsize
            self._mask_bytes = schedule.mask_bytes(*self._sizes, self._innermost, size)
        # The backward of all but relu needs all of the input to the activation.
        self.reads_residual = key.residual and key.activation not in (None, "relu")
        self.keeps_residual = self.reads_residual or key.keeps_residual
        self.is_recomputable = self.keeps_residual or not key.residual
        self._backward: dict[tuple[bool, ...], Launch] = {}
        self._backward_scratch = (0, 0)
        self._workspaces = gpu.Workspaces(device, self.acc)

    def _geometry(self, tensors: int) -> schedule.Geometry:
        size = self.key.dtype.itemsize
        return schedule.geometry(*self._sizes, self._innermost, size, tensors, *self._machine)

    def run(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        tracked: Tensor | None,
    ) -> Tensor:
        """y, with what its gradients need."""
        if gpu.elsewhere(x):
            with torch.cuda.device_of(x):
                return self.run(x, running_mean, running_var, weight, bias, residual, tracked)
        if torch.is_grad_enabled():
            rest = (self, running_mean, running_var, tracked)
            return _apply(gpu.alive(x), weight, bias, gpu.alive(residual), rest)
        return self.forward(x, weight, bias, residual, running_mean, running_var, tracked)[0]

    def forward(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        tracked: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """y, the channels' mean and rstd in one tensor, and relu's signs in bits."""
        if self.flags.cumulative and tracked is not None:
            tracked.add_(1)
        y = torch.empty_like(x)
        stats = x.new_empty(2 * self._sizes[1], dtype=self.acc)
        bits = None
        if self._mask_bytes:
            bits = x.new_empty(self._mask_bytes, dtype=torch.uint8)
        stream, work = self._workspaces.get(self._forward_scratch)
        # What a call does not have, the kernel does not touch: any tensor stands in.
        self._forward(
            stream,
            x,
            x if residual is None else residual,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats if running_mean is None else running_mean,
            stats if running_var is None else running_var,
            work.counters if tracked is None else tracked,
            y,
            x if bits is None else bits,
            stats,
            work.partial,
            work.counters,
        )
        return y, stats, bits

    def again(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        stats: Tensor,
    ) -> Tensor:
        """The y of a call that `is_recomputable`, to the bit, from what its backward has."""
        y = torch.empty_like(x)
        if self._again is None:
            given = kernels.Flags(
                training=False,
                given=True,
                weight=self.flags.weight,
                bias=self.flags.bias,
                residual=self.flags.residual,
                activation=self.flags.activation,
            )
            key = self.key
            self._again = kernels.forward_launch(
                self._geometry(1), key.dtype, given, 0.0, key.eps, key.target_variance
            )
        stream, work = self._workspaces.get((0, 0))
        beside = x if residual is None else residual
        vectors = (stats if weight is None else weight, stats if bias is None else bias)
        # What a call does not have, the kernel does not touch: any tensor stands in.
        self._again(
            stream, x, beside, *vectors, stats, stats, work.counters, y, x, stats, work.partial,
            work.counters,
        )  # fmt: skip
        return y

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        stats: Tensor,
        bits: Tensor | None,
        needs: tuple[bool, bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of x, weight, bias and residual that `needs` names."""
        if dy.stride() != x.stride():
            dy = laid_out_like(dy, x)
        dresidual = None
        if needs[3]:
            if self.key.activation is None:
                dresidual, needs = dy, (needs[0], needs[1], needs[2], False)
            else:
                dresidual = torch.empty_like(x)
        if not any(needs):
            return None, None, None, dresidual
        dx = torch.empty_like(x) if needs[0] else None
        dweight = torch.empty_like(weight) if needs[1] and weight is not None else None
        dbias = torch.empty_like(bias) if needs[2] and bias is not None else None
        launch = self._backward.get(needs)
        if launch is None:
            launch = self._set_up_backward(needs)
        stream, work = self._workspaces.get(self._backward_scratch)
        launch(
            stream,
            dy,
            x,
            x if residual is None else residual,
            x if bits is None else bits,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats,
            x if dx is None else dx,
            x if dresidual is None else dresidual,
            stats if dweight is None else dweight,
            stats if dbias is None else dbias,
            work.partial,
            work.counters,
        )
        return dx, dweight, dbias, dresidual

    def _set_up_backward(self, needs: tuple[bool, bool, bool, bool]) -> Launch:
        geometry = self._geometry(2)
        self._backward_scratch = kernels.scratch(geometry)
        launch = kernels.backward_launch(
            geometry, self.key.dtype, self.flags, needs, self.key.target_variance
        )
        self._backward[needs] = launch
        return launch


_plans = gpu.Plans[_Key, _Plan](_Plan)


def plan_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    running_mean: Tensor | None,
    tracked: bool,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    activation: str | None,
    keeps_residual: bool = False,
) -> tuple[_Plan, Tensor, Tensor | None]:
    """The plan of a call, with x and the residual laid out so that it can run."""
    x = dense(x)
    stride = x.stride()
    if residual is not None and residual.stride() != stride:
        residual = laid_out_like(residual, x)
        keeps_residual = False  # nobody else keeps the copy
    key = _Key(
        x.shape,
        stride,
        x.dtype,
        x.device,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        residual is not None,
        None if running_mean is None else running_mean.dtype,
        tracked,
        training,
        momentum,
        eps,
        target_variance,
        activation,
        keeps_residual and residual is not None,
    )
    return _plans[key], x, residual


class _BatchNorm(Recomputable):
    # A tensor argument costs the host time: those that get no gradient come in `rest`.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        rest: tuple[_Plan, Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        plan, running_mean, running_var, tracked = rest
        y, stats, bits = plan.forward(x, weight, bias, residual, running_mean, running_var, tracked)
        kept = residual if plan.keeps_residual else None
        ctx.save_for_backward(x, weight, bias, kept, stats, bits)
        ctx.plan = plan
        return y

    @staticmethod
    def is_recomputable(node: Any) -> bool:
        return node.plan.is_recomputable

    @staticmethod
    def recompute(node: Any) -> Tensor:
        x, weight, bias, residual, stats, _ = node.saved_tensors
        return gpu.on_device_of(x, node.plan.again, x, weight, bias, residual, stats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, residual, stats, bits = ctx.saved_tensors
        dx, dweight, dbias, dresidual, _ = ctx.needs_input_grad
        needs = (dx, dweight, dbias, dresidual)
        if torch.is_grad_enabled():
            composed = _composed_backward(
                dy, x, weight, bias, residual, stats, bits, ctx.plan, needs
            )
            return (*composed, None)
        gradients = gpu.on_device_of(
            x, ctx.plan.backward, dy, x, weight, bias, residual, stats, bits, needs
        )
        return (*gradients, None)


_apply = gpu.applier(_BatchNorm)


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    target_variance: float,
    activation: str | None,
    keeps_residual: bool = False,
) -> Tensor:
    """`functional.batch_norm` after its checks, for what `refusal` has nothing against.

    keeps_residual: for the backward too, so that the result can be recomputed.
    """
    tracked = num_batches_tracked is not None and running_mean is not None
    plan, x, residual = plan_of(
        x, weight, bias, residual, running_mean, tracked, training, momentum, eps, target_variance,
        activation, keeps_residual,
    )  # fmt: skip
    return plan.run(x, running_mean, running_var, weight, bias, residual, num_batches_tracked)


def recomputable(*arguments: Any) -> Tensor:
    """`batch_norm` with a residual that is kept for the backward, as something else does anyway."""
    return batch_norm(*arguments, keeps_residual=True)  # type: ignore[misc]


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """`functional.channel_stats`, in one read."""
    x = dense(x.detach())
    n, c, hw = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    innermost, size = not x.is_contiguous(), x.element_size()
    machine = (processors(x.device), COOPERATIVE and x.is_cuda)
    geometry = schedule.geometry(n, c, hw, innermost, size, 1, *machine)
    flags = kernels.Flags(weight=False, bias=False, normalize=False, variance=True)
    launch = kernels.forward_launch(geometry, x.dtype, flags, 0.0, 0.0, 1.0)
    stats = x.new_empty(2 * c, dtype=accumulator_dtype(x.dtype))
    with torch.cuda.device_of(x):
        stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
        work = Workspace(x.device, stats.dtype, *kernels.scratch(geometry))
        # What a call does not have, the kernel does not touch.
        blank = (stats, stats, stats, stats, work.counters)
        launch(stream, x, x, *blank, x, x, stats, work.partial, work.counters)
    return stats[:c], stats[c:]


def refusal(
    x: Tensor, residual: Tensor | None, tracked: Tensor | None, vectors: tuple[Tensor | None, ...]
) -> str | None:
    """Why the kernels cannot take these tensors; `vectors` starts with the running statistics."""
    if residual is not None and residual.dtype != x.dtype:
        return f"the input is {x.dtype} and the residual {residual.dtype}"
    if len({t.dtype for t in vectors[:2] if t is not None}) > 1:
        return "running_mean and running_var differ in dtype"
    why = gpu.refusal(x, (residual,), tracked, vectors)
    if why is None and x.shape[0] * math.prod(x.shape[2:]) >= 2**31:
        why = "a channel has 2^31 values or more"
    return why


def straight(route: Any, tensors: Sequence[Tensor | None], settings: tuple[Any, ...]) -> Any:
    """The plan's own `run`, where calls like this one need nothing else; else None."""
    x, running_mean, _, weight, bias, residual, count = tensors
    assert x is not None
    tracked = count is not None and running_mean is not None
    numbers = (*settings, route is recomputable)
    plan, x_as_it_runs, residual_as_it_runs = plan_of(
        x, weight, bias, residual, running_mean, tracked, *numbers
    )
    return plan.run if x_as_it_runs is x and residual_as_it_runs is residual else None


def _composed_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    stats: Tensor,
    bits: Tensor | None,
    plan: _Plan,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients as torch operations, which autograd can differentiate again."""
    key = plan.key
    dresidual = None
    activation = key.activation
    if bits is not None:
        # relu's signs as a tensor of ones and zeros: the gradient that a dy of ones gives.
        mask = (False, False, False, True)
        ones = torch.ones_like(x)
        signs = plan.backward(ones, x.detach(), weight, bias, residual, stats, bits, mask)[3]
        assert signs is not None
        dy, activation = dy * signs, None
    if key.residual and not plan.reads_residual:
        residual, dresidual = None, dy if needs[3] else None
    running_mean = running_var = None
    if not key.training:
        running_mean, running_var = running_of(stats, key.eps, key.running)
    y = aten.batch_norm(
        x, running_mean, running_var, weight, bias, residual, None, key.training, 0.0, key.eps,
        key.target_variance, activation,
    )  # fmt: skip
    inputs = [x, weight, bias, residual]
    asked = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    got = iter(torch.autograd.grad(y, asked, dy, create_graph=True) if asked else ())
    dx, dweight, dbias, through = (
        next(got) if need and t is not None else None for t, need in zip(inputs, needs, strict=True)
    )
    return dx, dweight, dbias, through if through is not None else dresidual


def running_of(stats: Tensor, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The running statistics that a forward in evaluation had, from their mean and rstd."""
    mean, rstd = stats.chunk(2)
    var = rstd.pow(-2) - eps
    return (mean, var) if dtype is None else (mean.to(dtype), var.to(dtype))


def dense(x: Tensor) -> Tensor:
    """x, copied if it is neither contiguous nor channels_last."""
    if x.is_contiguous() or is_innermost(x.shape, x.stride()):
        return x
    return x.contiguous()


def laid_out_like(tensor: Tensor, x: Tensor) -> Tensor:
    """`tensor`, copied if its values lie otherwise in memory than those of `x`."""
    if x.is_contiguous():
        return tensor.contiguous()
    if tensor.shape == x.shape and is_innermost(tensor.shape, tensor.stride()):
        return tensor
    return torch.empty_like(x).copy_(tensor)


def is_innermost(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """channels_last, for any number of dimensions."""
    last = (shape[0], *shape[2:], shape[1])
    return gpu.is_contiguous(last, (stride[0], *stride[2:], stride[1]))
