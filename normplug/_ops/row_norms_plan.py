"""The plan of a LayerNorm or an RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normplug._kernels import processors, shared_memory
from normplug._kernels.launch import COOPERATIVE, Launch
from normplug._kernels.layer_norm import launches, schedule
from normplug._layouts import Spacing, lies_dense, row_spacing, spacing_after
from normplug._ops.plans import (
    RUNNING,
    Gradients,
    Layout,
    Needs,
    Plan,
    Program,
    gradients_of,
    named,
    strides_of,
)
from normplug._ops.spec import Tensors
from normplug.reference import rms_eps


class LayerNormPlan(Plan):
    """The launches of a LayerNorm or RMSNorm, with a residual or an input bias: one per direction.

    State: stats, mean and rstd of the rows, (2 * rows,), or for RMSNorm rstd alone, (rows,). With a
    residual, the total x + residual is normalised.
    """

    spec: Any  # a `row_norms.LayerNormSpec`, which imports this module
    state = ("stats",)

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, residual, weight = t.x, t.residual, t.weight
        self._dtypes = (x.dtype, x.dtype if residual is None else residual.dtype)
        self._total_dtype = torch.promote_types(*self._dtypes)
        weight_dtype = None if weight is None else weight.dtype
        self._output_dtype = spec.output_dtype(self._total_dtype, weight_dtype)
        self._shape, self._strides = x.shape, strides_of(x.shape)
        self._row_dims, self._width = len(spec.normalized_shape), math.prod(spec.normalized_shape)
        self._rows = x.numel() // self._width
        self.has_total = self.is_recomputable = residual is not None
        running = t.running_var is not None and (t.running_mean is not None or not spec.centred)
        self._flags = launches.Flags(
            centred=spec.centred,
            offset=float(spec.weight_offset),
            rounded=spec.rounds_to(self._total_dtype, weight_dtype),
            **t.has("weight", "bias", "input_bias", "residual"),
            running=running,
            tracked=running and t.tracked is not None,
            cumulative=running and spec.momentum is None,
        )
        self._numbers = (rms_eps(self._total_dtype, spec.eps), spec.target_variance)
        # The widest value that a thread holds decides how a row is tiled.
        widest = max(self._total_dtype.itemsize, self._output_dtype.itemsize)
        self._itemsize = 8 if self.acc == torch.float64 else widest
        cooperative = COOPERATIVE and x.is_cuda
        self._machine = (processors(x.device), shared_memory(x.device), cooperative)
        # Row spacing of what is normalised: x, or the total, which is allocated contiguous.
        self._normalised = self._width if self.has_total else self._spacing(x)

    def _spacing(self, t: Tensor | None) -> Any:
        return None if t is None else row_spacing(t.shape, t.stride(), self._row_dims)

    def _forward(self, flags: launches.Flags, *spacings: Any) -> tuple[Launch, tuple[int, int]]:
        """The launch of a forward, and its scratch memory. spacings: of x and the residual."""
        strides = launches.Strides(*spacings)
        sizes = (self._rows, self._width, strides.unit(self._width), self._itemsize)
        shape = schedule.layer_norm_forward(*sizes, flags.running, self._machine[0])
        numbers = (0.0 if flags.given else self.spec.momentum or 0.0, *self._numbers)
        launch = launches.forward_launch(shape, self.acc, flags, strides, *numbers)
        return launch, launches.forward_scratch(shape, flags)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        spacings = self._spacing(t.x), self._spacing(t.residual)
        launch, scratch = self._forward(replace(self._flags, stats=keep), *spacings)
        dense = (self._shape, self._strides)
        empties: dict[str, Layout] = {"y": (*dense, self._output_dtype)}
        if keep:
            empties["stats"] = (((1 + self.spec.centred) * self._rows,), (1,), self.acc)
        if self.has_total:
            empties["total"] = (*dense, self._total_dtype)
        normalised = "total" if self.has_total else "x"
        return Program(
            named(t),
            (launch, {}),
            empties=empties,
            results=("y", "total") if self.has_total else ("y",),
            saved=(normalised, "nothing", "weight", "bias", "input_bias", "stats"),
            updates=RUNNING,
            scratch=scratch,
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        flags = replace(
            self._flags, given=True, stats=False, residual=False, running=False, tracked=False,
            cumulative=False,
        )  # fmt: skip
        launch, _ = self._forward(flags, self._width)  # of the total
        y = (self._shape, self._strides, self._output_dtype)
        return Program(saved, (launch, {}), empties={"y": y})

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        if "dy" not in given:  # y was not used
            return Program(given, empties={}, results=self._results("dtotal", needs))
        copies: dict[str, tuple[int, ...]] = {}
        spacings: dict[str, Spacing] = {}
        for name in ("dy", "dtotal"):
            if name not in given:
                continue
            before = (self._normalised, *spacings.values())
            spacing = spacing_after(given[name], self._row_dims, self._width, *before)
            if spacing is None:
                copies[name], spacing = self._strides, self._width
            spacings[name] = spacing
        wanted = (needs[0] or needs[1], needs[2], needs[3], needs[4])
        flags, strides = self._flags, launches.Strides(self._normalised, **spacings)
        sizes = (self._rows, self._width, strides.unit(self._width), self._itemsize)
        shape = schedule.layer_norm_backward(*sizes, flags.input_bias, *self._machine)
        tv = self.spec.target_variance
        launch = launches.backward_launch(shape, self.acc, flags, strides, wanted, tv)
        empties = gradients_of(given, wanted)
        # If the rows of x are dense, in any order, dx has the strides of x.
        if wanted[0] and not lies_dense(self._normalised, self._rows, self._width):
            empties["dx"] = (self._shape, self._strides, self._total_dtype)
        return Program(
            given,
            (launch, {}),
            empties=empties,
            results=self._results("dx", needs),
            copies=copies,
            scratch=launches.backward_scratch(shape, wanted),
        )

    def _results(self, through: str, needs: Needs) -> list[Any]:
        """The gradients; x and the residual share the slot `through`."""
        both = [
            (through if need else "nothing", dtype)
            for need, dtype in zip(needs, self._dtypes, strict=False)
        ]
        return [*both, "dweight", "dbias", "dinput_bias"]

    def composed_backward(
        self, saved: Sequence[Any], dy: Tensor, dtotal: Tensor | None, needs: Sequence[bool]
    ) -> Gradients:
        if not self.has_total:
            return super().composed_backward(saved, dy, None, needs)
        # x and the residual have the same gradient, `through`.
        through, vectors = dtotal, list[Tensor | None]([None] * 3)
        if dy is not None:
            asked = (needs[0] or needs[1], False, *needs[2:])
            by_y, _, *vectors = super().composed_backward(saved, dy, None, asked)
            if by_y is not None:
                through = by_y if dtotal is None else by_y + dtotal
        both = (
            through.to(dtype) if need and through is not None else None
            for need, dtype in zip(needs, self._dtypes, strict=False)
        )
        return (*both, *vectors)

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, Any, Tensor]:
        t, spec, dy = super().composed(saved, dy)
        return t, spec._replace(eps=self._numbers[0], rounding="output"), dy
