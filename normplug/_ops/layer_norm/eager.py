"""LayerNorm over normplug's own kernels.

A call's shape, strides and flags name a `_Plan`, made once: what is cut into tiles how, and which
kernels are launched. A call is then one launch forward and one backward. Second derivatives go
through torch's own operations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug._kernels.device import MOST_PLACES, processors, shared_memory
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._kernels.layer_norm import launches as kernels
from normplug._kernels.layer_norm import schedule
from normplug._kernels.layer_norm.launches import Spacing, TwoLevels
from normplug._ops import aten
from normplug._ops import eligible as gpu
from normplug._ops.recompute import Recomputable
from normplug.reference import accumulator_dtype

_Needs = tuple[bool, bool, bool, bool]  # dx, dweight, dbias, dinput_bias
_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Key(NamedTuple):
    shape: torch.Size
    row_dims: int
    spacing: Spacing
    dtype: torch.dtype
    device: torch.device
    residual: tuple[Spacing, torch.dtype] | None
    weight: torch.dtype | None
    bias: torch.dtype | None
    input_bias: torch.dtype | None
    running: tuple[torch.dtype, torch.dtype] | None
    tracked: bool
    momentum: float | None
    eps: float
    target_variance: float
    out: torch.dtype

    @property
    def total(self) -> torch.dtype:
        """Of what is normalised."""
        return torch.promote_types(self.dtype, self.residual[1]) if self.residual else self.dtype


class _Plan:
    """All that calls of one shape, strides and flags have in common."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.total = key.total
        self.acc = accumulator_dtype(self.total, key.weight, key.bias, key.input_bias)
        self.width = math.prod(key.shape[len(key.shape) - key.row_dims :])
        self.rows = math.prod(key.shape[: len(key.shape) - key.row_dims])
        self._vector = key.shape[len(key.shape) - key.row_dims :]
        # What a thread holds decides how a row is cut.
        widest = max(self.total.itemsize, key.out.itemsize)
        self.itemsize = 8 if self.acc == torch.float64 else widest
        device = key.device
        self._machine = (processors(device), shared_memory(device))
        self._forward: dict[bool, tuple[Launch, tuple[int, int]]] = {}
        self._again: Launch | None = None
        self._backward: dict[tuple[Any, ...], tuple[Launch, tuple[int, int]]] = {}
        self._workspaces = gpu.Workspaces(key.device, self.acc)
        # Where there was a residual, the backward's x is the total, which is dense.
        self._normalised: Spacing = self.width if key.residual else key.spacing
        # `empty_like` takes the host half the time of `empty`.
        self._like_x = key.spacing == self.width
        self._dx_like_x = lies_dense(self._normalised, self.rows, self.width)
        self._like_weight = key.bias == key.weight

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        input_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        tracked: Tensor | None,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """y, the total where there is a residual, and if `keep` the rows' mean and rstd."""
        key = self.key
        y = self._empty(x, key.dtype, key.out)
        total = None if residual is None else self._empty(x, key.dtype, self.total)
        stats = x.new_empty(2 * self.rows if keep else 1, dtype=self.acc)
        prepared = self._forward.get(keep)
        if prepared is None:
            prepared = self._set_up_forward(keep)
        launch, scratch = prepared
        stream, work = self._workspaces.get(scratch)
        # What a call does not have, the kernel does not touch: any tensor stands in.
        launch(
            stream,
            x,
            x if residual is None else residual,
            stats if weight is None else weight,
            stats if bias is None else bias,
            stats if input_bias is None else input_bias,
            stats if running_mean is None else running_mean,
            stats if running_var is None else running_var,
            work.counters if tracked is None else tracked,
            y,
            y if total is None else total,
            stats,
            work.partial,
            work.counters,
        )
        return y, total, stats

    def again(
        self, total: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor
    ) -> Tensor:
        """The y of a call with residual, to the bit, from what it kept and its bias."""
        y = self._empty(total, self.total, self.key.out)
        if self._again is None:
            self._again = self._set_up_again()
        stream, work = self._workspaces.get((0, 0))
        vectors = (stats if weight is None else weight, stats if bias is None else bias)
        # What a call does not have, the kernel does not touch: any tensor stands in.
        self._again(
            stream, total, total, *vectors, stats, stats, stats, work.counters, y, y, stats,
            work.partial, work.counters,
        )  # fmt: skip
        return y

    def backward(
        self,
        dy: Tensor,
        dtotal: Tensor | None,
        x: Tensor,
        weight: Tensor | None,
        input_bias: Tensor | None,
        stats: Tensor,
        needs: _Needs,
    ) -> _Gradients:
        """The gradients of x (and the residual), weight, bias and input_bias that `needs` names."""
        key = self.key
        before = self._normalised
        dy, dy_spacing = _with_dense_rows(dy, key.row_dims, self.width, before)
        dtotal_spacing = None
        if dtotal is not None:
            dtotal, dtotal_spacing = _with_dense_rows(
                dtotal, key.row_dims, self.width, before, dy_spacing
            )
        if not any(needs):
            return None, None, None, None
        signature = (needs, dy_spacing, dtotal_spacing)
        prepared = self._backward.get(signature)
        if prepared is None:
            prepared = self._set_up_backward(*signature)
        launch, scratch = prepared
        dx = dweight = dbias = dinput_bias = None
        if needs[0]:
            dx = torch.empty_like(x) if self._dx_like_x else x.new_empty(key.shape)
        if needs[1] and weight is not None:
            dweight = torch.empty_like(weight)
        if needs[2]:
            if weight is not None and self._like_weight:
                dbias = torch.empty_like(weight)
            else:
                dbias = x.new_empty(self._vector, dtype=key.bias)
        if needs[3] and input_bias is not None:
            dinput_bias = torch.empty_like(input_bias)
        stream, work = self._workspaces.get(scratch)
        launch(
            stream,
            dy,
            dy if dtotal is None else dtotal,
            x,
            stats if weight is None else weight,
            stats if input_bias is None else input_bias,
            stats,
            dy if dx is None else dx,
            stats if dweight is None else dweight,
            stats if dbias is None else dbias,
            stats if dinput_bias is None else dinput_bias,
            work.partial,
            work.counters,
        )
        return dx, dweight, dbias, dinput_bias

    def _empty(self, x: Tensor, dtype: torch.dtype, wanted: torch.dtype) -> Tensor:
        """Contiguous, shaped like x, whose dtype is `dtype`."""
        if self._like_x and dtype == wanted:
            return torch.empty_like(x)
        return x.new_empty(self.key.shape, dtype=wanted)

    def run(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        input_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        tracked: Tensor | None,
    ) -> Tensor:
        """y, with what its gradients need."""
        if gpu.elsewhere(x):
            with torch.cuda.device_of(x):
                return self.run(x, weight, bias, input_bias, running_mean, running_var, tracked)
        if torch.is_grad_enabled():
            rest = (self, running_mean, running_var, tracked)
            return _apply(gpu.alive(x), weight, bias, input_bias, rest)
        return self.forward(
            x, None, weight, bias, input_bias, running_mean, running_var, tracked, keep=False
        )[0]

    def run_add(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        tracked: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(y, total), with what their gradients need."""
        running = (running_mean, running_var, tracked)
        if gpu.elsewhere(x):
            with torch.cuda.device_of(x):
                return self.run_add(x, residual, weight, bias, *running)
        if torch.is_grad_enabled():
            return _apply_add(gpu.alive(x), gpu.alive(residual), weight, bias, (self, *running))
        y, total, _ = self.forward(x, residual, weight, bias, None, *running, keep=False)
        assert total is not None
        return y, total

    def _set_up_again(self) -> Launch:
        key = self.key
        flags = kernels.Flags(
            weight=key.weight is not None, bias=key.bias is not None, given=True, stats=False
        )
        strides = kernels.Strides(self.width)  # of the total
        shape = self._forward_shape(strides, False)
        return kernels.forward_launch(
            shape, self.acc, flags, strides, 0.0, key.eps, key.target_variance
        )

    def _forward_shape(
        self, strides: kernels.Strides, running: bool
    ) -> schedule.Rows | schedule.WideForward:
        return schedule.layer_norm_forward(
            self.rows,
            self.width,
            strides.unit(self.width),
            self.itemsize,
            running,
            self._machine[0],
        )

    def _set_up_forward(self, keep: bool) -> tuple[Launch, tuple[int, int]]:
        key = self.key
        running = key.running is not None
        flags = kernels.Flags(
            weight=key.weight is not None,
            bias=key.bias is not None,
            input_bias=key.input_bias is not None,
            residual=key.residual is not None,
            stats=keep,
            running=running,
            tracked=running and key.tracked,
            cumulative=running and key.momentum is None,
        )
        strides = kernels.Strides(key.spacing, residual=key.residual and key.residual[0])
        shape = self._forward_shape(strides, running)
        launch = kernels.forward_launch(
            shape, self.acc, flags, strides, key.momentum or 0.0, key.eps, key.target_variance
        )
        prepared = self._forward[keep] = launch, kernels.forward_scratch(shape, flags)
        return prepared

    def _set_up_backward(
        self, needs: _Needs, dy: Spacing, dtotal: Spacing | None
    ) -> tuple[Launch, tuple[int, int]]:
        key = self.key
        flags = kernels.Flags(weight=key.weight is not None, input_bias=key.input_bias is not None)
        strides = kernels.Strides(self._normalised, dy=dy, dtotal=dtotal)
        shape = schedule.layer_norm_backward(
            self.rows,
            self.width,
            strides.unit(self.width),
            self.itemsize,
            flags.input_bias,
            *self._machine,
            COOPERATIVE and key.device.type == "cuda",
        )
        launch = kernels.backward_launch(
            shape, self.acc, flags, strides, needs, key.target_variance
        )
        prepared = launch, kernels.backward_scratch(shape, needs)
        self._backward[needs, dy, dtotal] = prepared
        return prepared


_plans = gpu.Plans[_Key, _Plan](_Plan)


def plan_of(
    x: Tensor,
    row_dims: int,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    target_variance: float,
    out: torch.dtype,
) -> tuple[_Plan, Tensor, Tensor | None]:
    """The plan of a call, with x and the residual laid out so that it can run."""
    width = math.prod(x.shape[x.dim() - row_dims :])
    x, spacing = _with_dense_rows(x, row_dims, width)
    beside = None
    if residual is not None:
        residual, residual_spacing = _with_dense_rows(residual, row_dims, width, spacing)
        beside = (residual_spacing, residual.dtype)
    running = None
    if running_mean is not None and running_var is not None:
        running = (running_mean.dtype, running_var.dtype)
    key = _Key(
        x.shape,
        row_dims,
        spacing,
        x.dtype,
        x.device,
        beside,
        None if weight is None else weight.dtype,
        None if bias is None else bias.dtype,
        None if input_bias is None else input_bias.dtype,
        running,
        running is not None and num_batches_tracked is not None,
        momentum,
        eps,
        target_variance,
        out,
    )
    return _plans[key], x, residual


class _LayerNorm(torch.autograd.Function):
    # A tensor argument costs the host time: those that get no gradient come in `rest`.
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        input_bias: Tensor | None,
        rest: tuple[_Plan, Tensor | None, Tensor | None, Tensor | None],
    ) -> Tensor:
        plan, running_mean, running_var, tracked = rest
        y, _, stats = plan.forward(
            x, None, weight, bias, input_bias, running_mean, running_var, tracked, keep=True
        )
        ctx.save_for_backward(x, weight, input_bias, stats)
        ctx.plan = plan
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, input_bias, stats = ctx.saved_tensors
        needs = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            return (*_composed_backward(dy, x, weight, input_bias, ctx.plan, needs), None)
        gradients = gpu.on_device_of(
            x, ctx.plan.backward, dy, None, x, weight, input_bias, stats, needs
        )
        return (*gradients, None)


class _AddLayerNorm(Recomputable):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        rest: tuple[_Plan, Tensor | None, Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        plan, running_mean, running_var, tracked = rest
        y, total, stats = plan.forward(
            x, residual, weight, bias, None, running_mean, running_var, tracked, keep=True
        )
        assert total is not None
        ctx.save_for_backward(total, weight, bias, stats)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if not any(ctx.needs_input_grad[:2]):
            ctx.mark_non_differentiable(total)
        return y, total

    @staticmethod
    def recompute(node: Any) -> Tensor:
        total, weight, bias, stats = node.saved_tensors
        return gpu.on_device_of(total, node.plan.again, total, weight, bias, stats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight, _, stats = ctx.saved_tensors
        plan, key = ctx.plan, ctx.plan.key
        dx, dresidual, dweight, dbias, _ = ctx.needs_input_grad
        needs = (dx or dresidual, dweight, dbias, False)
        through: Tensor | None
        if dy is None:  # nobody used y
            through, dweight, dbias = dtotal, None, None
        elif torch.is_grad_enabled():
            through, dweight, dbias, _ = _composed_backward(dy, total, weight, None, plan, needs)
            if through is not None and dtotal is not None:
                through = through + dtotal
        else:
            through, dweight, dbias, _ = gpu.on_device_of(
                total, plan.backward, dy, dtotal, total, weight, None, stats, needs
            )
        if through is None:
            return None, None, dweight, dbias, None
        return (
            through.to(key.dtype) if dx else None,
            through.to(key.residual[1]) if dresidual else None,
            dweight,
            dbias,
            None,
        )


_apply, _apply_add = gpu.applier(_LayerNorm), gpu.applier(_AddLayerNorm)


def _plan_of(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    normalized_shape: tuple[int, ...],
    momentum: float | None,
    eps: float,
    target_variance: float,
    low_autocast: bool,
) -> tuple[_Plan, Tensor]:
    plan, x, _ = plan_of(
        x, len(normalized_shape), None, weight, bias, input_bias, running_mean, running_var,
        num_batches_tracked, momentum, eps, target_variance,
        aten.output_dtype(x, x.dtype, low_autocast),
    )  # fmt: skip
    return plan, x


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    input_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    *settings: Any,
) -> Tensor:
    """`functional.layer_norm` after its checks, for what `refusal` has nothing against."""
    tensors = (weight, bias, input_bias, running_mean, running_var, num_batches_tracked)
    plan, x = _plan_of(x, *tensors, *settings)
    return plan.run(x, *tensors)


def _plan_of_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    normalized_shape: tuple[int, ...],
    momentum: float | None,
    eps: float,
    target_variance: float,
    low_autocast: bool,
) -> tuple[_Plan, Tensor, Tensor]:
    total = torch.promote_types(x.dtype, residual.dtype)
    plan, x, beside = plan_of(
        x, len(normalized_shape), residual, weight, bias, None, running_mean, running_var,
        num_batches_tracked, momentum, eps, target_variance,
        aten.output_dtype(x, total, low_autocast),
    )  # fmt: skip
    assert beside is not None
    return plan, x, beside


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, Tensor]:
    """`functional.add_layer_norm` after its checks, for what `refusal` has nothing against."""
    tensors = (weight, bias, running_mean, running_var, num_batches_tracked)
    plan, x, residual = _plan_of_add(x, residual, *tensors, *settings)
    return plan.run_add(x, residual, *tensors)


def refusal(
    x: Tensor,
    row_dims: int,
    residual: Tensor | None,
    tracked: Tensor | None,
    vectors: tuple[Tensor | None, ...],
) -> str | None:
    """Why the kernels cannot take these tensors; None where they can."""
    why = gpu.refusal(x, (residual,), tracked, vectors)
    if why is None:
        width = math.prod(x.shape[x.dim() - row_dims :])
        if max(width, x.numel() // width) > MOST_PLACES:
            why = "a row has nearly 2^31 values or more, or there are so many rows"
    return why


def straight(route: Any, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    """The plan's own method, where calls like this one need nothing else; else None."""
    if route is add_layer_norm:
        plan, *laid_out = _plan_of_add(*tensors, *settings)
        return plan.run_add if all(map(operator.is_, laid_out, tensors)) else None
    plan, x = _plan_of(*tensors, *settings)
    return plan.run if x is tensors[0] else None


def row_spacing(shape: Sequence[int], stride: Sequence[int], row_dims: int) -> Spacing | None:
    """How rows lie; None where they are not dense, or take more than two strides to find."""
    outer = len(shape) - row_dims
    if not gpu.is_contiguous(shape[outer:], stride[outer:]):
        return None
    levels: list[tuple[int, int]] = []  # how many, how far apart; the innermost first
    for size, step in zip(reversed(shape[:outer]), reversed(stride[:outer]), strict=True):
        if size == 1:
            continue
        if levels and step == math.prod(levels[-1]):
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, step))
    if len(levels) > 2:
        return None
    if len(levels) == 2:
        (inner, step), (_, apart) = levels
        return TwoLevels(inner, apart, step)
    return levels[0][1] if levels else math.prod(shape[outer:])


_row_spacing = lru_cache(maxsize=4096)(row_spacing)  # not for a compiler's symbolic sizes


def lies_dense(spacing: Spacing | None, rows: int, width: int) -> bool:
    """Whether rows, in whatever order, have nothing between them: so does their gradient then."""
    if isinstance(spacing, TwoLevels):
        return spacing.dense(rows, width)
    return spacing == width


def _with_dense_rows(
    t: Tensor, row_dims: int, width: int, *before: Spacing
) -> tuple[Tensor, Spacing]:
    """A tensor and how its rows lie, copied if no launch could take them with those `before`."""
    if t.is_contiguous():
        return t, width
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    if isinstance(spacing, TwoLevels):
        inners = (other.inner for other in before if isinstance(other, TwoLevels))
        if any(inner != spacing.inner for inner in inners):
            spacing = None
    return (t.contiguous(), width) if spacing is None else (t, spacing)


def _composed_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    input_bias: Tensor | None,
    plan: _Plan,
    needs: Sequence[bool],
) -> _Gradients:
    """The gradients as torch operations, which autograd can differentiate again."""
    key, acc = plan.key, plan.acc
    dims = tuple(range(x.dim() - key.row_dims))
    shape = tuple(x.shape[x.dim() - key.row_dims :])
    with torch.autocast(x.device.type, enabled=False):
        h = x.to(acc)
        if input_bias is not None:
            h = h + input_bias.to(acc)
        scale = None if weight is None else weight.to(acc) * math.sqrt(key.target_variance)
        y = F.layer_norm(h, shape, scale, None, key.eps)
        if scale is None:
            y = y * math.sqrt(key.target_variance)
        inputs = (x, weight, None, input_bias)
        asked = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
        got = torch.autograd.grad(y, asked, dy.to(acc), create_graph=True) if asked else ()
        found = iter(got)
        gradients = [
            next(found) if need and t is not None else None
            for t, need in zip(inputs, needs, strict=True)
        ]
        if needs[2]:
            gradients[2] = (dy.to(acc).sum(dims) if dims else dy).to(key.bias)
    dx, dweight, dbias, dinput_bias = gradients
    return dx, dweight, dbias, dinput_bias
