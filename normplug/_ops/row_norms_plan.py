"""The plan of a LayerNorm or an RMSNorm, and where its rows lie in memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from normplug._kernels import needs_int64, processors, shared_memory, unit_of
from normplug._kernels.constants import Constants
from normplug._kernels.launch import COOPERATIVE, TYPES, Launch, accumulator
from normplug._kernels.layer_norm import rows, schedule, wide_rows
from normplug._kernels.layer_norm.schedule import RowLayout, RowTiles, Wide
from normplug._layouts import Levels, Spacing, lies_dense, row_spacing, spacing_after
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
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug.reference import rms_eps

# A normalised value is at most the square root of a row's length, so float16 can hold it. Its
# rounding error is an eighth of bfloat16's.
_NORMALISED = torch.float16


class Strides(NamedTuple):
    """The spacing of each tensor's rows; None for a tensor that a call does not have.

    All `inner` are the same, and so are all `heads` of rows with three levels.
    """

    x: Spacing
    residual: Spacing | None = None
    dy: Spacing | None = None
    dtotal: Spacing | None = None

    def unit(self, width: int) -> int:
        """A divisor of the width and all strides: the alignment the compiler may assume."""
        sizes = (
            (s.outer, s.step, s.middle) if isinstance(s, Levels) else (s or 0,)
            for s in self
        )
        return unit_of(width, *itertools.chain(*sizes))

    @property
    def levels(self) -> Levels | None:
        """The `Levels` of the tensor with the most levels; None if there are none."""
        every = (s for s in self if isinstance(s, Levels))
        return max(every, key=lambda levels: levels.heads, default=None)

    def layout(
        self, rows: int, width: int, *names: str
    ) -> tuple[dict[str, int], RowLayout]:
        """Where the rows of the tensors of these names lie: a kernel's sizes, and its constants."""
        unit, levels = self.unit(width), self.levels
        inner = rows if levels is None else levels.inner
        sizes = {"INNER": inner, "WIDTH_UNITS": width // unit}
        middles: dict[str, Any] = {}
        furthest = rows * width
        for name in names:
            spacing = getattr(self, name)
            if isinstance(spacing, Levels):
                _, outer, step, heads, middle = spacing
            else:
                step = width if spacing is None else spacing
                outer, heads, middle = inner * step, 1, 0
            sizes[f"{name.upper()}_UNITS"] = step // unit
            sizes[f"{name.upper()}_OUTER_UNITS"] = outer // unit
            middles[f"{name}_middle"] = middle
            furthest = max(
                furthest, rows // inner // heads * outer + heads * middle + inner * step
            )
        return sizes, RowLayout(
            unit=unit,
            heads=0 if levels is None else levels.heads,
            wide=needs_int64(1, furthest),
            **middles,
        )


def _kernel_dtype(dtype: torch.dtype | None, otherwise: Any) -> Any:
    """Triton's dtype of this name; `otherwise` for None."""
    return otherwise if dtype is None else tl.dtype(TYPES[dtype])


class LayerNormPlan(Plan):
    """The launches of a LayerNorm or RMSNorm, with a residual or an input bias: one per direction.

    State: stats, mean and rstd of the rows, (2 * rows,), or for RMSNorm rstd alone, (rows,). With a
    residual, the total x + residual is normalised. It is saved, or its normalised values are. A
    gate takes the place of the residual.
    """

    spec: LayerNormSpec
    state = ("stats",)

    def __init__(self, t: Tensors, spec: Any) -> None:
        super().__init__(t, spec)
        x, residual, weight = t.x, t.residual, t.weight
        self._dtypes = (x.dtype, x.dtype if residual is None else residual.dtype)
        is_gated = spec.gate is not None
        self._total_dtype = x.dtype if is_gated else torch.promote_types(*self._dtypes)
        weight_dtype = None if weight is None else weight.dtype
        self._output_dtype = spec.output_dtype(self._total_dtype, weight_dtype)
        self._shape, self._strides = x.shape, strides_of(x.shape)
        self._row_dims, self._width = len(spec.normalized_shape), spec.width
        self._rows = x.numel() // self._width
        self._vectors = spec.vectors(t)
        self.has_total = self.is_recomputable = residual is not None and not is_gated
        running = t.running_var is not None and (
            t.running_mean is not None or not spec.centred
        )
        acc = accumulator(self.acc)
        rounded = spec.rounds_to(self._total_dtype, weight_dtype)
        product = rounded
        if rounded is not None and weight_dtype is not None:
            product = torch.promote_types(rounded, weight_dtype)
        # What both directions share.
        self._constants = Constants(
            acc=acc,
            centred=spec.centred,
            offset=float(spec.weight_offset),
            rounded=_kernel_dtype(rounded, acc),
            gate=spec.gate or "",
            gated=_kernel_dtype(product, acc) if spec.gate == "last" else None,
            weight=weight is not None,
            input_bias=t.input_bias is not None,
        )
        # What a forward has besides, unless it normalises by given statistics.
        self._updates: dict[str, Any] = {
            "running": running,
            "tracked": running and t.tracked is not None,
            "cumulative": running and spec.momentum is None,
        }
        self._has_bias = t.bias is not None
        self._root = math.sqrt(spec.target_variance)
        self._eps = rms_eps(self._total_dtype, spec.eps)
        # The widest value that a thread holds decides how a row is tiled.
        widest = max(self._total_dtype.itemsize, self._output_dtype.itemsize)
        if is_gated:
            widest = max(widest, self._dtypes[1].itemsize)
        self._itemsize = 8 if self.acc == torch.float64 else widest
        cooperative = COOPERATIVE and x.is_cuda
        self._machine = (processors(x.device), shared_memory(x.device), cooperative)
        # Row spacing of what is normalised: x, or the total, which is allocated contiguous.
        self._normalised = self._width if self.has_total else self._spacing(x)
        self._saves_normalised = spec.saves_normalised and self._can_save_normalised()

    def _can_save_normalised(self) -> bool:
        """Whether float16 is narrower than the total but not than y, and a program holds a row."""
        has_wide_total = self.has_total and self._total_dtype == torch.float32
        if not has_wide_total or self._output_dtype.itemsize > _NORMALISED.itemsize:
            return False
        sizes = (self._rows, self._width, 1, self._itemsize)
        forward = schedule.layer_norm_forward(*sizes, False, self._machine[0])
        backward = schedule.layer_norm_backward(*sizes, False, *self._machine)
        return not (isinstance(forward, Wide) or isinstance(backward, Wide))

    def _spacing(self, t: Tensor | None) -> Any:
        if t is None:
            return None
        rows = self.spec.in_groups(t)
        return row_spacing(rows.shape, rows.stride(), self._row_dims)

    def _layout(self, strides: Strides, *names: str) -> tuple[dict[str, int], RowLayout]:
        """`Strides.layout`, and where the weights of the rows lie."""
        places, layout = strides.layout(self._rows, self._width, *names)
        kind, inner, step = self._vectors
        if inner:
            places["INNER"] = inner
        wide = layout.wide or needs_int64(self._rows // max(inner, 1), step)
        return places, replace(layout, vectors=kind, step=step, wide=wide)

    def _forward(
        self, constants: Constants, strides: Strides
    ) -> tuple[Launch, tuple[int, int]]:
        """The launch of a forward, and its scratch memory."""
        # The wide kernel would wait forever: with given statistics, no program stores the total.
        assert not (constants.given and constants.residual)
        running = constants.running
        unit = strides.unit(self._width)
        sizes = (self._rows, self._width, unit, self._itemsize)
        shape = schedule.layer_norm_forward(*sizes, running, self._machine[0])
        if self._vectors.kind != "all":
            assert isinstance(shape, RowTiles)
            shape = replace(shape, keep=False)  # each row loads its own weight
        places, layout = self._layout(strides, "x", "residual")
        if isinstance(shape, Wide):
            kernel = wide_rows.layer_norm_wide_forward
        else:
            kernel = rows.layer_norm_rows_forward
        launch = Launch(
            kernel,
            shape.forward(places, layout, running, constants.given),
            constants,
            momentum=0.0 if constants.given else self.spec.momentum or 0.0,
            eps=self._eps,
            root=self._root,
        )
        return launch, shape.forward_scratch(running)

    def forward_program(self, t: Tensors, keep: bool) -> Program:
        constants = replace(
            self._constants,
            bias=self._has_bias,
            residual=self.has_total,
            stats=keep,
            normalised=keep and self._saves_normalised,
            **self._updates,
        )
        strides = Strides(self._spacing(t.x), self._spacing(t.residual))
        launch, scratch = self._forward(constants, strides)
        dense = (self._shape, self._strides)
        empties: dict[str, Layout] = {"y": (*dense, self._output_dtype)}
        if keep:
            empties["stats"] = (((1 + self.spec.centred) * self._rows,), (1,), self.acc)
        if self.has_total:
            empties["total"] = (*dense, self._total_dtype)
        normalised = "total" if self.has_total else "x"
        if constants.normalised:
            normalised = "normalised"
            empties["normalised"] = (*dense, _NORMALISED)
        gate = "nothing" if self.spec.gate is None else "residual"
        return Program(
            named(t),
            (launch, {}),
            empties=empties,
            results=("y", "total") if self.has_total else ("y",),
            saved=(normalised, gate, "weight", "bias", "input_bias", "stats"),
            updates=RUNNING,
            scratch=scratch,
        )

    def recompute_program(self, saved: dict[str, Tensor]) -> Program:
        constants = replace(self._constants, bias=self._has_bias, given=True)
        if self._saves_normalised:
            constants = replace(constants, normalised=True, centred=False)
        launch, _ = self._forward(constants, Strides(self._width))  # of the total
        y = (self._shape, self._strides, self._output_dtype)
        return Program(saved, (launch, {}), empties={"y": y})

    def backward_program(self, given: dict[str, Tensor], needs: Needs) -> Program:
        if "dy" not in given:  # y was not used
            return Program(given, empties={}, results=self._results("dtotal", needs))
        is_gated = self.spec.gate is not None
        second = "residual" if is_gated else "dtotal"
        spacings, copies = self._backward_spacings(given, second)
        dx = needs[0] or (needs[1] and not is_gated)
        wanted = (dx, needs[2], needs[3], needs[4])
        sums = 0 if self._vectors.kind == "token" else sum(wanted[1:])
        strides = Strides(
            self._normalised, dy=spacings["dy"], dtotal=spacings.get(second)
        )
        sizes = (self._rows, self._width, strides.unit(self._width), self._itemsize)
        has_input_bias = self._constants.input_bias
        sets = self._vectors.sets(self._rows)
        shape = schedule.layer_norm_backward(*sizes, has_input_bias, *self._machine, sets)
        if self._vectors.kind == "token":
            assert isinstance(shape, RowTiles)
            shape = replace(shape, keep=False)
        places, layout = self._layout(strides, "x", "dy", "dtotal")
        constants = replace(
            self._constants,
            dtotal="dtotal" in spacings,
            dx=dx,
            dweight=needs[2],
            dbias=needs[3],
            dinput_bias=needs[4],
            normalised=self._saves_normalised,
            dgate=is_gated and needs[1],
            dx_as_x=isinstance(strides.x, Levels)
            and strides.x.dense(self._rows, self._width),
        )
        if isinstance(shape, Wide):
            kernel = wide_rows.layer_norm_wide_backward
        else:
            kernel = rows.layer_norm_rows_backward
        late = dx or needs[4]
        work = shape.backward(places, layout, late, sums)
        launch = Launch(kernel, work, constants, root=self._root)
        gate = {"dtotal": "residual", "dinput_bias": "dresidual"} if is_gated else {}
        return Program(
            given,
            (launch, gate),
            empties=self._gradients(given, wanted, is_gated and needs[1]),
            results=self._results("dx", needs),
            copies=copies,
            scratch=shape.backward_scratch(sums),
        )

    def _backward_spacings(
        self, given: dict[str, Tensor], second: str
    ) -> tuple[dict[str, Spacing], dict[str, tuple[int, ...]]]:
        """The spacings of dy and of a second tensor, and the strides of needed copies."""
        copies: dict[str, tuple[int, ...]] = {}
        spacings: dict[str, Spacing] = {}
        for name in ("dy", second):
            if name not in given:
                continue
            before = (self._normalised, *self._vectors.spacings, *spacings.values())
            t = self.spec.in_groups(given[name])
            spacing = spacing_after(t, self._row_dims, self._width, *before)
            if spacing is None:
                copies[name], spacing = self._strides, self._width
            spacings[name] = spacing
        return spacings, copies

    def _gradients(
        self, given: dict[str, Tensor], wanted: Sequence[bool], dgate: bool
    ) -> dict[str, Layout]:
        """The layouts of the gradients: see `gradients_of`. dgate: whether the gate's is wanted."""
        empties = gradients_of(given, wanted)
        # If the rows of x are dense, in any order, dx has the strides of x.
        strides = self._strides
        if lies_dense(self._normalised, self._rows, self._width):
            strides = given["x"].stride()
        if wanted[0]:
            empties["dx"] = (self._shape, strides, self._total_dtype)
        if dgate:
            empties["dresidual"] = (self._shape, strides, self._dtypes[1])
        if self.spec.adaptive:  # weight and bias may be slices of a larger tensor
            for name in empties.keys() & {"dweight", "dbias"}:
                shape, _, dtype = empties[name]
                empties[name] = (shape, strides_of(shape), dtype)
        return empties

    def _results(self, through: str, needs: Needs) -> list[Any]:
        """The gradients; x and the residual share the slot `through`."""
        slots = (through, through if self.spec.gate is None else "dresidual")
        both = [
            (slot if need else "nothing", dtype)
            for slot, need, dtype in zip(slots, needs, self._dtypes, strict=False)
        ]
        return [*both, "dweight", "dbias", "dinput_bias"]

    def composed_backward(
        self,
        saved: Sequence[Any],
        dy: Tensor,
        dtotal: Tensor | None,
        needs: Sequence[bool],
    ) -> Gradients:
        if self._saves_normalised:
            raise RuntimeError(
                "normplug: second derivatives need the sum before a norm, but a model that was "
                "fused with recompute=True saves normalised values instead. Use "
                "normplug.fuse(model), or call the backward without create_graph=True."
            )
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
        return t, spec._replace(eps=self._eps, rounding="output"), dy
