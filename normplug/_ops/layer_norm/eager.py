"""LayerNorm over normplug's own kernels: one launch forward and one backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug._kernels.device import MOST_PLACES, processors, shared_memory
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._kernels.layer_norm import launches, schedule
from normplug._kernels.layer_norm.launches import Spacing, TwoLevels
from normplug._layouts import is_contiguous
from normplug._ops.plans import Gradients, KernelRoute, Plan
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.reference import accumulator_dtype

_Prepared = tuple[Launch, tuple[int, int]]  # with the scratch memory that it needs


class LayerNormPlan(Plan):
    """The launches of a LayerNorm, with a residual or an input bias. State: stats.

    stats: mean and rstd of the rows, (2 * rows,). The total, x + residual, is what is normalised;
    it is x where there is no residual.
    """

    spec: LayerNormSpec

    def __init__(self, t: Tensors, spec: LayerNormSpec) -> None:
        super().__init__(t, spec)
        x, residual, weight, bias, input_bias, running_mean, running_var, tracked = t
        self._dtype = x.dtype
        self._residual_dtype = None if residual is None else residual.dtype
        self._total = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        self._output = spec.output_dtype(self._total)
        vectors = (t if t is None else t.dtype for t in (weight, bias, input_bias))
        self.acc = accumulator_dtype(self._total, *vectors)
        self._shape, self._row = x.shape, spec.normalized_shape
        self._row_dims = row_dims = len(self._row)
        self._width = math.prod(self._row)
        self._rows = x.numel() // self._width
        self.has_total = self.is_recomputable = residual is not None
        self._affine = launches.Flags(
            weight=weight is not None, bias=bias is not None, input_bias=input_bias is not None
        )
        self._running = running_mean is not None and running_var is not None
        self._tracked = self._running and tracked is not None
        self._bias_dtype = None if bias is None else bias.dtype
        # What a thread holds decides how a row is cut.
        widest = max(self._total.itemsize, self._output.itemsize)
        self._itemsize = 8 if self.acc == torch.float64 else widest
        self._machine = (processors(x.device), shared_memory(x.device))
        self._cooperative = COOPERATIVE and x.is_cuda
        self._x_spacing = _spacing(x, row_dims)
        self._residual_spacing = None if residual is None else _spacing(residual, row_dims)
        # The total is dense.
        self._normalised = self._x_spacing if residual is None else self._width
        self._forward: dict[bool, _Prepared] = {}
        self._backward: dict[tuple[Any, ...], _Prepared] = {}
        self._recompute: Launch | None = None
        # `empty_like` takes the host half the time of `empty`.
        self._like_x = self._x_spacing == self._width
        self._dx_like_x = lies_dense(self._normalised, self._rows, self._width)
        self._dbias_like_weight = weight is not None and self._bias_dtype == weight.dtype

    @classmethod
    def refusal(cls, t: Tensors, spec: LayerNormSpec) -> str | None:
        """Why the kernels cannot carry out a call; None where they can."""
        why = super().refusal(t, spec)
        if why is None:
            width = math.prod(spec.normalized_shape)
            if max(width, t.x.numel() // width) > MOST_PLACES:
                why = "a row has nearly 2^31 values or more, or there are so many rows"
        return why

    @classmethod
    def laid_out(cls, t: Tensors, spec: LayerNormSpec) -> tuple[Tensors, LayerNormSpec]:
        """The call with dense rows, and those of the residual at strides that go with x's."""
        place = (len(spec.normalized_shape), math.prod(spec.normalized_shape))
        x, spacing = _with_dense_rows(t.x, *place)
        residual = t.residual
        if residual is not None:
            residual, _ = _with_dense_rows(residual, *place, spacing)
        same = x is t.x and residual is t.residual
        return (t if same else t._replace(x=x, residual=residual)), spec

    def forward(self, t: Tensors, needs: Sequence[bool]) -> tuple[Any, tuple[Any, ...]]:
        """y, or (y, total) where there is a residual; and what to save."""
        x, residual, weight, bias, input_bias, running_mean, running_var, tracked = t
        keep = bool(needs)
        y = self._empty(x, self._dtype, self._output)
        total = None if residual is None else self._empty(x, self._dtype, self._total)
        stats = x.new_empty(2 * self._rows if keep else 1, dtype=self.acc)
        launch, scratch = self._forward.get(keep) or self._set_up_forward(keep)
        stream, work = self._workspace(scratch)
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
        if total is None:
            return y, (x, None, weight, None, input_bias, stats)
        # With the bias, y can be recomputed from the total.
        return (y, total), (total, None, weight, bias, None, stats)

    def recomputed(self, saved: Sequence[Any]) -> Tensor:
        """The output y again, from the total and the rows' statistics."""
        total, _, weight, bias, _, stats = saved
        y = self._empty(total, self._total, self._output)
        if self._recompute is None:
            flags = launches.Flags(
                weight=self._affine.weight, bias=self._affine.bias, given=True, stats=False
            )
            strides = launches.Strides(self._width)  # of the total
            shape = self._forward_shape(strides, False)
            numbers = (0.0, self.spec.eps, self.spec.target_variance)
            self._recompute = launches.forward_launch(shape, self.acc, flags, strides, *numbers)
        stream, work = self._workspace((0, 0))
        vectors = (stats if weight is None else weight, stats if bias is None else bias)
        self._recompute(
            stream, total, total, *vectors, stats, stats, stats, work.counters, y, y, stats,
            work.partial, work.counters,
        )  # fmt: skip
        return y

    def backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """The gradients that `needs` names."""
        if dy is None:  # nobody used y
            return self._of_total(dtotal, needs, None, None)
        x, _, weight, _, input_bias, stats = saved
        before, row_dims, width = self._normalised, self._row_dims, self._width
        dy, dy_spacing = _with_dense_rows(dy, row_dims, width, before)
        dtotal_spacing = None
        if dtotal is not None:
            dtotal, dtotal_spacing = _with_dense_rows(dtotal, row_dims, width, before, dy_spacing)
        wanted = (needs[0] or needs[1], needs[2], needs[3], needs[4])
        if not any(wanted):
            return None, None, None, None, None
        signature = (wanted, dy_spacing, dtotal_spacing)
        launch, scratch = self._backward.get(signature) or self._set_up_backward(*signature)
        dx = dweight = dbias = dinput_bias = None
        if wanted[0]:
            dx = torch.empty_like(x) if self._dx_like_x else x.new_empty(self._shape)
        if needs[2] and weight is not None:
            dweight = torch.empty_like(weight)
        if needs[3]:
            if weight is not None and self._dbias_like_weight:
                dbias = torch.empty_like(weight)
            else:
                dbias = x.new_empty(self._row, dtype=self._bias_dtype)
        if needs[4] and input_bias is not None:
            dinput_bias = torch.empty_like(input_bias)
        stream, work = self._workspace(scratch)
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
        if self.has_total:
            return self._of_total(dx, needs, dweight, dbias)
        return dx, None, dweight, dbias, dinput_bias

    def composed_backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        """As `backward`, by torch operations, which autograd can differentiate again."""
        if not self.has_total:
            return super().composed_backward(saved, dy, None, needs)
        if dy is None:
            return self._of_total(dtotal, needs, None, None)
        both = (needs[0] or needs[1], False, *needs[2:])
        through, _, dweight, dbias, _ = super().composed_backward(saved, dy, None, both)
        if through is not None and dtotal is not None:
            through = through + dtotal
        return self._of_total(through, needs, dweight, dbias)

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Sequence[Any], Tensor, Tensor]:
        """The inputs that have gradients, y computed from them by torch operations, and its dy."""
        x, _, weight, _, input_bias, _ = saved
        acc, root = self.acc, math.sqrt(self.spec.target_variance)
        bias = None
        if self._bias_dtype is not None:
            # No value of the gradients depends on it.
            bias = x.new_zeros(self._row, dtype=self._bias_dtype).requires_grad_()
        h = x.to(acc)
        if input_bias is not None:
            h = h + input_bias.to(acc)
        y = F.layer_norm(h, self._row, None, None, self.spec.eps) * root
        if weight is not None:
            y = y * weight.to(acc)
        if bias is not None:
            y = y + bias.to(acc)
        return (x, None, weight, bias, input_bias), y, dy.to(acc)

    def _of_total(
        self,
        through: Tensor | None,
        needs: Sequence[bool],
        dweight: Tensor | None,
        dbias: Tensor | None,
    ) -> Gradients:
        """The gradients of x and the residual from that of their sum, and the others."""
        if through is None:
            return None, None, dweight, dbias, None
        dx = dresidual = through
        if through.dtype != self._dtype:
            dx = through.to(self._dtype)
        if through.dtype != self._residual_dtype:
            dresidual = through.to(self._residual_dtype)
        return dx if needs[0] else None, dresidual if needs[1] else None, dweight, dbias, None

    def _empty(self, x: Tensor, dtype: torch.dtype, wanted: torch.dtype) -> Tensor:
        """Contiguous, shaped like x, whose dtype is `dtype`."""
        if self._like_x and dtype == wanted:
            return torch.empty_like(x)
        return x.new_empty(self._shape, dtype=wanted)

    def _forward_shape(
        self, strides: launches.Strides, running: bool
    ) -> schedule.Rows | schedule.WideForward:
        unit = strides.unit(self._width)
        return schedule.layer_norm_forward(
            self._rows, self._width, unit, self._itemsize, running, self._machine[0]
        )

    def _set_up_forward(self, keep: bool) -> _Prepared:
        spec = self.spec
        flags = launches.Flags(
            weight=self._affine.weight,
            bias=self._affine.bias,
            input_bias=self._affine.input_bias,
            residual=self.has_total,
            stats=keep,
            running=self._running,
            tracked=self._tracked,
            cumulative=self._running and spec.momentum is None,
        )
        strides = launches.Strides(self._x_spacing, residual=self._residual_spacing)
        shape = self._forward_shape(strides, self._running)
        numbers = (spec.momentum or 0.0, spec.eps, spec.target_variance)
        launch = launches.forward_launch(shape, self.acc, flags, strides, *numbers)
        prepared = self._forward[keep] = launch, launches.forward_scratch(shape, flags)
        return prepared

    def _set_up_backward(
        self, wanted: tuple[bool, bool, bool, bool], dy: Spacing, dtotal: Spacing | None
    ) -> _Prepared:
        flags = launches.Flags(weight=self._affine.weight, input_bias=self._affine.input_bias)
        strides = launches.Strides(self._normalised, dy=dy, dtotal=dtotal)
        shape = schedule.layer_norm_backward(
            self._rows,
            self._width,
            strides.unit(self._width),
            self._itemsize,
            flags.input_bias,
            *self._machine,
            self._cooperative,
        )
        tv = self.spec.target_variance
        launch = launches.backward_launch(shape, self.acc, flags, strides, wanted, tv)
        prepared = launch, launches.backward_scratch(shape, wanted)
        self._backward[wanted, dy, dtotal] = prepared
        return prepared


KERNELS = KernelRoute(LayerNormPlan)


def row_spacing(shape: Sequence[int], stride: Sequence[int], row_dims: int) -> Spacing | None:
    """How rows lie; None where they are not dense, or take more than two strides to find."""
    outer = len(shape) - row_dims
    if not is_contiguous(shape[outer:], stride[outer:]):
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


def _spacing(t: Tensor, row_dims: int) -> Spacing:
    """How the rows of a tensor lie that has been laid out."""
    if t.is_contiguous():
        return math.prod(t.shape[t.dim() - row_dims :])
    spacing = _row_spacing(t.shape, t.stride(), row_dims)
    assert spacing is not None
    return spacing


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
