"""LayerNorm and RMSNorm by normplug's own kernels: one launch forward and one backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug._kernels.device import LONGEST_AXIS, processors, shared_memory
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._kernels.layer_norm import launches, schedule
from normplug._kernels.layer_norm.launches import Flags, Levels, Spacing
from normplug._ops import likely
from normplug._ops.layer_norm.spacing import lies_dense, spacing_after, spacing_of
from normplug._ops.plans import Gradients, KernelRoute, Needs, Plan
from normplug._ops.program import (
    NOTHING,
    RUNNING,
    SLOT,
    Layout,
    Program,
    Result,
    contiguous,
    named,
)
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.reference import accumulator_dtype


class LayerNormPlan(Plan):
    """The launches of a LayerNorm or RMSNorm, with a residual or an input bias. State: stats.

    stats: mean and rstd of the rows, (2 * rows,), or for RMSNorm rstd alone, (rows,). The total,
    x + residual, is what is normalised; without a residual it is x.
    """

    spec: LayerNormSpec
    state = ("stats",)

    def __init__(self, t: Tensors, spec: LayerNormSpec) -> None:
        super().__init__(t, spec)
        x, residual, weight, bias, input_bias, running_mean, running_var, tracked = t
        self._dtype = x.dtype
        self._residual_dtype = None if residual is None else residual.dtype
        self._total_dtype = (
            x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        )
        self._weight_dtype = None if weight is None else weight.dtype
        self._output_dtype = spec.output_dtype(self._total_dtype, self._weight_dtype)
        vectors = (t if t is None else t.dtype for t in (weight, bias, input_bias))
        self.acc = accumulator_dtype(self._total_dtype, *vectors)
        self._shape, self._row = x.shape, spec.normalized_shape
        self._row_dims = row_dims = len(self._row)
        self._width = math.prod(self._row)
        self._rows = x.numel() // self._width
        self.has_total = self.is_recomputable = residual is not None
        self._flags = partial(
            Flags,
            centred=spec.centred,
            offset=float(spec.weight_offset),
            rounded=spec.rounds_to(self._total_dtype, self._weight_dtype),
            weight=weight is not None,
        )
        self._has_bias, self._has_input_bias = bias is not None, input_bias is not None
        self._numbers = (spec.eps_of(self._total_dtype), spec.target_variance)
        self._stats_size = 2 * self._rows if spec.centred else self._rows
        self._running = running_var is not None and (running_mean is not None or not spec.centred)
        self._tracked = self._running and tracked is not None
        self._bias_dtype = None if bias is None else bias.dtype
        # The widest value that a thread holds decides how a row is tiled.
        widest = max(self._total_dtype.itemsize, self._output_dtype.itemsize)
        self._itemsize = 8 if self.acc == torch.float64 else widest
        cooperative = COOPERATIVE and x.is_cuda
        self._machine = (processors(x.device), shared_memory(x.device), cooperative)
        self._x_spacing = spacing_of(x, row_dims)
        self._residual_spacing = None if residual is None else spacing_of(residual, row_dims)
        # Of the total, which is allocated contiguous.
        self._normalised = self._x_spacing if residual is None else self._width

    @classmethod
    def refusal(cls, t: Tensors, spec: LayerNormSpec) -> str | None:
        """Why the kernels cannot run a call; None if they can."""
        if t.x.is_nested:
            return "the input is a nested tensor"
        why = super().refusal(t, spec)
        if why is None:
            width = math.prod(spec.normalized_shape)
            if max(width, t.x.numel() // width) > LONGEST_AXIS:
                why = "a row has nearly 2^31 values or more, or there are as many rows"
        return why

    @classmethod
    def laid_out(cls, t: Tensors, spec: LayerNormSpec) -> tuple[Tensors, LayerNormSpec]:
        """The call with dense rows, where one launch can read those of x and of the residual."""
        row_dims, width = len(spec.normalized_shape), math.prod(spec.normalized_shape)
        x, residual = t.x, t.residual
        spacing = spacing_after(x, row_dims, width)
        if spacing is None:
            x, spacing = x.contiguous(), width
        if residual is not None and spacing_after(residual, row_dims, width, spacing) is None:
            residual = residual.contiguous()
        same = x is t.x and residual is t.residual
        return (t if same else t._replace(x=x, residual=residual)), spec

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        """The program of y, and of the total if there is a residual: one launch."""
        spec = self.spec
        flags = self._flags(
            bias=self._has_bias,
            input_bias=self._has_input_bias,
            residual=self.has_total,
            stats=keep,
            running=self._running,
            tracked=self._tracked,
            cumulative=self._running and spec.momentum is None,
        )
        strides = launches.Strides(self._x_spacing, residual=self._residual_spacing)
        shape = self._forward_shape(strides, self._running)
        numbers = (spec.momentum or 0.0, *self._numbers)
        launch = launches.forward_launch(shape, self.acc, flags, strides, *numbers)
        dense = (self._shape, contiguous(self._shape))
        empties: dict[str, Layout] = {"y": (*dense, self._output_dtype)}
        if keep:
            empties["stats"] = ((self._stats_size,), (1,), self.acc)
        saved = ("x", "nothing", "weight", "nothing", "input_bias", "stats")
        results = [Result(SLOT["y"])]
        if self.has_total:
            empties["total"] = (*dense, self._total_dtype)
            # The bias is saved so that y can be recomputed from the total.
            saved = ("total", "nothing", "weight", "bias", "nothing", "stats")
            results.append(Result(SLOT["total"]))
        return Program(
            named(t),
            empties=empties,
            launches=[(launch, {})],
            results=results,
            saved=saved,
            updates=RUNNING,
            scratch=launches.forward_scratch(shape, flags),
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        """The program that recomputes y from the total and the rows' statistics."""
        flags = self._flags(bias=self._has_bias, given=True, stats=False)
        strides = launches.Strides(self._width)  # of the total
        shape = self._forward_shape(strides, False)
        launch = launches.forward_launch(shape, self.acc, flags, strides, 0.0, *self._numbers)
        return Program(
            saved,
            empties={"y": (self._shape, contiguous(self._shape), self._output_dtype)},
            launches=[(launch, {})],
            results=[Result(SLOT["y"])],
        )

    def backward_program(
        self, saved: dict[str, Tensor], dy: Tensor | None, dtotal: Tensor | None, needs: Needs
    ) -> Program:
        """The program of the gradients: one launch."""
        given = {"dy": dy, "dtotal": dtotal}
        if dy is None:  # y was not used
            results = self._results("dtotal", needs)
            return Program(saved, empties={}, launches=[], results=results)
        x = saved["x"]
        before: list[Spacing] = [self._normalised]
        copies = {}
        for name, t in given.items():
            if t is not None:
                spacing = spacing_after(t, self._row_dims, self._width, *before)
                if spacing is None:
                    copies[name], spacing = contiguous(self._shape), self._width
                before.append(spacing)
        wanted = (needs[0] or needs[1], needs[2], needs[3], needs[4])
        results = self._results("dx", needs)
        if not any(wanted):
            return Program(saved, empties={}, launches=[], results=results)
        _, dy_spacing, *others = before
        launch, scratch = self._backward_launch(wanted, dy_spacing, *others)
        # If the rows of x are dense, in any order, dx has the strides of x.
        is_dense = lies_dense(self._normalised, self._rows, self._width)
        rows = {
            "dx": (x.shape, x.stride() if is_dense else contiguous(x.shape), x.dtype),
            "dweight": self._vector("weight", saved),
            "dbias": (self._row, contiguous(self._row), self._bias_dtype),
            "dinput_bias": self._vector("input_bias", saved),
        }
        pairs = zip(rows.items(), wanted, strict=True)
        return Program(
            {**saved, "dy": dy, **({} if dtotal is None else {"dtotal": dtotal})},
            empties={name: layout for (name, layout), want in pairs if want},
            launches=[(launch, {})],
            results=results,
            copies=copies,
            scratch=scratch,
        )

    def usual_gradients(
        self, t: Tensors, dy: Tensor, dtotal: Tensor | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """The gradients that a backward usually gets, the likeliest first.

        If nothing else reads the total, it has no gradient. If the rows of x or of the residual lie
        in another order, as those of an attention do, so may those of dy: its gradient's.
        """
        usual = [dy]
        for each in [t.x] if t.residual is None else [t.x, t.residual]:
            spacing = spacing_of(each, self._row_dims)
            if isinstance(spacing, Levels) and spacing.dense(self._rows, self._width):
                usual.append(dy.new_empty_strided(dy.shape, each.stride()))
        totals = [dtotal] if dtotal is None else [dtotal, None]
        return [(each, total) for each in usual for total in totals]

    def likely_plans(self, t: Tensors, call: likely.Call) -> Iterator[tuple[Plan, Tensors]]:
        """Plans for a layer that is called as `call`, each with its tensors, if t came first.

        Under autocast the branches of a model have its dtype. The stream that they are added to has
        the dtype of x, or that of the branches from the first norm on. The latter holds for all
        sums if the first norm is that of a sum.
        """
        row, operations = call.shape, call.operations
        spec = self.spec._replace(normalized_shape=row, **dict(call.fields))
        weight, bias = (likely.vector(v, row) for v in (t.weight, t.bias))
        input_bias = likely.vector(t.weight, row) if operations.input_bias else None
        branch = self.spec.autocast or t.x.dtype
        only_branch = operations.input_bias or t.residual is not None
        dtypes = [branch] if only_branch else list(dict.fromkeys((t.x.dtype, branch)))
        pairs: list[tuple[Any, Any]] = [(dtype, None) for dtype in dtypes]
        if operations.residual:
            pairs = [(a, b) for a in dtypes for b in dtypes if branch in (a, b)]
        layouts: list[tuple[Any, Any]] = [(None, None)]
        if any(isinstance(s, Levels) for s in (self._x_spacing, self._residual_spacing)):
            layouts.append((t.x, t.residual))
        for shape in likely.row_shapes(t.x, self._row_dims, row):
            for (x_dtype, dtype), (like_x, like_residual) in itertools.product(pairs, layouts):
                x = likely.rows(shape, x_dtype, like_x)
                residual = None if dtype is None else likely.rows(shape, dtype, like_residual)
                other = Tensors(x, residual, weight, bias, input_bias, *t[5:])
                yield LayerNormPlan(other, spec), other

    def _vector(self, name: str, saved: dict[str, Tensor]) -> Any:
        return (self._row, contiguous(self._row), saved[name].dtype) if name in saved else None

    def _results(self, through: str, needs: Needs) -> list[Result]:
        """The gradients; those of x and the residual are in the slot `through`."""
        slot = SLOT[through]
        dtypes = (self._dtype, self._residual_dtype)
        both = [
            Result(slot, None if dtype == self._total_dtype else dtype) if need else NOTHING
            for need, dtype in zip(needs, dtypes, strict=False)
        ]
        names = ("dweight", "dbias", "dinput_bias")
        used = through == "dx"
        rest = [
            Result(SLOT[n]) if need and used else NOTHING
            for n, need in zip(names, needs[2:], strict=True)
        ]
        return [*both, *rest]

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
            # The gradients do not depend on its values.
            bias = x.new_zeros(self._row, dtype=self._bias_dtype).requires_grad_()
        h = x.to(acc)
        if input_bias is not None:
            h = h + input_bias.to(acc)
        eps, _ = self._numbers
        if self.spec.centred:
            y = F.layer_norm(h, self._row, None, None, eps) * root
        else:
            dims = tuple(range(-self._row_dims, 0))
            y = h * torch.rsqrt(h.square().mean(dims, keepdim=True) + eps) * root
        if weight is not None:
            y = y * (weight.to(acc) + self.spec.weight_offset)
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
        """The gradients: those of x and the residual are that of their sum, `through`."""
        if through is None:
            return None, None, dweight, dbias, None
        dx = dresidual = through
        if through.dtype != self._dtype:
            dx = through.to(self._dtype)
        if through.dtype != self._residual_dtype:
            dresidual = through.to(self._residual_dtype)
        return dx if needs[0] else None, dresidual if needs[1] else None, dweight, dbias, None

    def _forward_shape(
        self, strides: launches.Strides, running: bool
    ) -> schedule.Rows | schedule.WideForward:
        unit = strides.unit(self._width)
        return schedule.layer_norm_forward(
            self._rows, self._width, unit, self._itemsize, running, self._machine[0]
        )

    def _backward_launch(
        self,
        wanted: tuple[bool, bool, bool, bool],
        dy: Spacing,
        dtotal: Spacing | None = None,
    ) -> tuple[Launch, tuple[int, int]]:
        """The backward's launch, and the scratch memory that it needs."""
        flags = self._flags(input_bias=self._has_input_bias)
        strides = launches.Strides(self._normalised, dy=dy, dtotal=dtotal)
        shape = schedule.layer_norm_backward(
            self._rows,
            self._width,
            strides.unit(self._width),
            self._itemsize,
            flags.input_bias,
            *self._machine,
        )
        tv = self.spec.target_variance
        launch = launches.backward_launch(shape, self.acc, flags, strides, wanted, tv)
        return launch, launches.backward_scratch(shape, wanted)


KERNELS = KernelRoute(LayerNormPlan)
