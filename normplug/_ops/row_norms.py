"""The norms of rows, LayerNorm and RMSNorm: a spec, its plan, and its operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from normplug import _checks
from normplug._layouts import Levels, Spacing, is_contiguous
from normplug._ops import eligible, parts, stock
from normplug._ops.operators import NormOperators
from normplug._ops.plans import (
    RUNNING,
    Gradients,
    Layout,
    Needs,
    Plan,
    Program,
    accumulator_of,
    gradients_of,
    named,
    strides_of,
)
from normplug._ops.spec import Tensors, autocast_result
from normplug.reference import accumulator_dtype, rms_eps

if TYPE_CHECKING:
    from normplug._kernels.launch import Launch
    from normplug._kernels.layer_norm import launches

_OPERATOR_BYTES = 16 << 20  # of input, from which torch.compile calls the operator


class LayerNormSpec(NamedTuple):
    """The spec of a norm of rows, LayerNorm or RMSNorm.

    eps: None only for an RMSNorm: see `reference.rms_eps`.
    autocast: the dtype that autocast has set on the device, or None where it is off or ignored.
    autocast_output: "float32", or "low" to return the autocast dtype.
    centred: whether the rows' mean is subtracted: True for LayerNorm, False for RMSNorm.
    weight_offset: added to the weight, in the accumulator dtype. Without a weight it has no effect.
    rounding: where an RMSNorm rounds. None: where `torch.rms_norm` does. "output": once, at the
        end, to the dtype of the input; in torch 2.6 `torch.rms_norm` also rounds half-precision
        intermediates. "input" and "weight": first x / rms * sqrt(tv), to the dtype of the input,
        or to the weight's dtype if it is half; then the product with the weight, to the dtype
        that the two promote to.
    """

    normalized_shape: tuple[int, ...]
    momentum: float | None
    eps: float | None
    target_variance: float
    autocast: torch.dtype | None
    autocast_output: str
    centred: bool = True
    weight_offset: float = 0.0
    rounding: str | None = None

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """Dimensions along which rows are independent; watched statistics describe one shard."""
        return tuple(range(t.x.dim() - len(self.normalized_shape)))

    def rounds_to(self, total: torch.dtype, weight: torch.dtype | None) -> torch.dtype | None:
        """The dtype to round to before the product with the weight; None not to round.

        total, weight: the dtypes of what is normalised and of the weight, if there is one.
        """
        if self.rounding == "input":
            return total
        is_half = weight in (torch.float16, torch.bfloat16)
        return weight if self.rounding == "weight" and is_half else None

    def output_dtype(self, total: torch.dtype, weight: torch.dtype | None = None) -> torch.dtype:
        """The dtype of the result. `rounds_to` explains the arguments."""
        under_autocast = autocast_result(total, self.autocast, self.autocast_output)
        if under_autocast is not None:
            return under_autocast
        if self.rounding in (None, "output") or weight is None:
            return total
        return torch.promote_types(self.rounds_to(total, weight) or total, weight)

    def check(self, caller: str, t: Tensors) -> None:
        _checks.tensors(caller, *t)
        _checks.shape(caller, self.normalized_shape)
        if self.centred or self.eps is not None:
            _checks.number(caller, "eps", self.eps)
        if self.centred:
            _checks.running_pair(caller, t.running_mean, t.running_var, training=True)
        else:
            _checks.number(caller, "weight_offset", self.weight_offset)
        statistics = {"running_mean": t.running_mean, "running_var": t.running_var}
        _checks.scalars(caller, **statistics, num_batches_tracked=t.tracked)
        _checks.momentum(caller, self.momentum, t.tracked, t.running_var is not None)
        _checks.option(caller, "autocast_output", self.autocast_output)
        _checks.same_shape(caller, t.x, residual=t.residual)
        vectors = {"weight": t.weight, "bias": t.bias, "input_bias": t.input_bias}
        rows = t.x.unbind() if parts.is_nested(t.x) else (t.x,)
        if not rows:
            raise ValueError(
                f"normplug.{caller}: a nested input needs at least one component; got none. Do not "
                "normalise an empty batch."
            )
        for part in rows:
            _checks.trailing(caller, part, self.normalized_shape, **vectors)

    # PyTorch's kernels.

    def by_torch(self, t: Tensors) -> Any:
        total = t.x if t.residual is None else t.x + t.residual
        y = self._layer_norm(total, t) if self.centred else self._rms_norm(total, t)
        return y if t.residual is None else (y, total)

    def _layer_norm(self, total: Tensor, t: Tensors) -> Tensor:
        h = total if t.input_bias is None else total + t.input_bias
        shape, autocast = self.normalized_shape, self._autocast_of(total)
        promotes = autocast is None and not stock.mixes_dtypes(h, t.weight, t.bias)
        h, weight, bias = stock.prepared(h, t.weight, t.bias, self.target_variance, shape, promotes)
        assert self.eps is not None
        y, mean, rstd = torch.native_layer_norm(h, shape, weight, bias, self.eps)
        if t.running_mean is not None and t.running_var is not None and total.numel() > 0:
            # Detached, not under no_grad: torch.export would make that a subgraph without outputs,
            # and an ExportedProgram with one cannot be saved.
            statistics = h.detach(), len(shape), mean.detach(), rstd.detach(), self.eps
            stock.update_running(t, self.momentum, *_row_statistics(*statistics))
        return stock.cast(y, total.dtype, autocast, self.autocast_output)

    def _rms_norm(self, total: Tensor, t: Tensors) -> Tensor:
        shape, autocast = self.normalized_shape, self._autocast_of(total)
        if t.running_var is not None and total.numel() > 0:
            rows = parts.rows(total.detach(), shape)
            moment = rows.to(accumulator_dtype(total.dtype)).square().mean()
            stock.update_running(t, self.momentum, None, moment)
        if self.weight_offset or self.rounding is not None:
            return self.by_formula(total, t)[0]
        promotes = autocast is None or self.autocast_output == "low"
        h, weight, _ = stock.prepared(total, t.weight, None, self.target_variance, shape, promotes)
        eps = self.eps if h.dtype == total.dtype else rms_eps(total.dtype, self.eps)
        y = torch.rms_norm(h, shape, weight, eps)
        return stock.cast(y, total.dtype, autocast, self.autocast_output)

    def _autocast_of(self, total: Tensor) -> torch.dtype | None:
        return None if total.dtype == torch.float64 else self.autocast

    # Normplug's kernels.

    def refusal(self, t: Tensors) -> str | None:
        if t.x.is_nested:
            return "the input is a nested tensor"
        why = eligible.refusal_of(t)
        if why is None:
            width = math.prod(self.normalized_shape)
            if eligible.is_too_long(width, t.x.numel() // width):
                why = "a row has nearly 2^31 values or more, or there are as many rows"
        return why

    def laid_out(self, t: Tensors) -> Tensors:
        """The call with dense rows, where one launch can read the rows of x and of the residual."""
        row_dims, width = len(self.normalized_shape), math.prod(self.normalized_shape)
        x, residual = t.x, t.residual
        spacing = spacing_after(x, row_dims, width)
        if spacing is None:
            x, spacing = x.contiguous(), width
        if residual is not None and spacing_after(residual, row_dims, width, spacing) is None:
            residual = residual.contiguous()
        return t.reading(x, residual)

    def plan(self, t: Tensors) -> LayerNormPlan:
        return LayerNormPlan(t, self)

    # The operators for compilers. They update the running statistics. Outside them, a compiler
    # would need further kernels to average the rows' statistics.

    def traced(self, t: Tensors) -> tuple[Tensor, ...]:
        """What a LayerNorm's forward operator returns, by PyTorch's operations. No residual."""
        y, mean, var, rstd = self.by_formula(t.x, t)
        assert mean is not None
        if t.running_var is not None:
            stock.update_running(t, self.momentum, mean.mean(), var.mean())
        return y, torch.cat((mean.flatten(), rstd.flatten()))

    def by_formula(self, total: Tensor, t: Tensors) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The norm of `total`, in its library's order of operations; mean, var and rstd of rows.

        An RMSNorm has no mean. t: the call, for its weight, bias and input bias.
        """
        acc, weight = accumulator_of(t), t.weight
        dims = tuple(range(-len(self.normalized_shape), 0))
        h, mean = total.to(acc), None
        if t.input_bias is not None:
            h = h + t.input_bias
        if self.centred:
            var, mean = torch.var_mean(h, dims, correction=0, keepdim=True)
            h = h - mean
        else:
            var = h.square().mean(dims, keepdim=True)
        rstd = torch.rsqrt(var + rms_eps(total.dtype, self.eps))
        y, dtype = h * rstd, None if weight is None else weight.dtype
        rounded, root = self.rounds_to(total.dtype, dtype), math.sqrt(self.target_variance)
        if weight is not None:
            weight = weight.to(acc)
            weight = weight + self.weight_offset if self.weight_offset else weight
        if root != 1.0:
            # With no rounding in between, the bits equal a stock layer's with this weight.
            if weight is None or rounded not in (None, acc):
                y = y * root
            else:
                weight = weight * root
        if rounded is not None:
            y = y.to(rounded).to(acc)
        if weight is not None:
            y = y * weight
        if t.bias is not None:
            y = y + t.bias
        return y.to(self.output_dtype(total.dtype, dtype)), mean, var, rstd

    def compiled(self, t: Tensors) -> Callable[[Tensors], Any] | None:
        """For a large LayerNorm, its operators, if a matmul or a convolution makes x or residual.

        Inductor fuses the norm with any other operator that makes x, and the two backwards with
        each other. If it cannot, its backward of the norm is slow, in the gradients of weight and
        bias, and a kernel that adds the residual pays in both directions. RMSNorms have no bias,
        so there is nothing to gain. Over the channels of contiguous images, only a norm that also
        adds a convolution's bias gains.
        """
        outer = t.x.dim() - len(self.normalized_shape)
        has_rows = is_contiguous(t.x.shape[outer:], t.x.stride()[outer:])
        large = eligible.size_of(t.x) >= _OPERATOR_BYTES
        pays = self.centred and large and (has_rows or t.input_bias is not None)
        return self._automatic if pays else None

    def _automatic(self, t: Tensors) -> Any:
        return self.operator(t, automatic=True)

    def operator(self, t: Tensors, automatic: bool = False) -> Any:
        x, residual, *rest = t
        shape, row_dims = x.shape, len(self.normalized_shape)
        if _is_grid_of_rows(x, row_dims) and (
            residual is None or _is_grid_of_rows(residual, row_dims)
        ):
            x = x.flatten(0, -1 - row_dims)
            residual = None if residual is None else residual.flatten(0, -1 - row_dims)
        if residual is None:
            y, _ = _plain(x, None, *rest, *self, automatic)
            return y.view(shape)
        y, total, _ = _add(x, residual, *rest, *self, automatic)
        return y.view(shape), total.view(shape)

    def fake(self, t: Tensors) -> tuple[Tensor, ...]:
        x, residual, weight, *_ = t
        acc = accumulator_of(t)
        dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        rows = math.prod(x.shape[: x.dim() - len(self.normalized_shape)])
        stats = x.new_empty(2 * rows if self.centred else rows, dtype=acc)
        output = self.output_dtype(dtype, None if weight is None else weight.dtype)
        y = x.new_empty(x.shape, dtype=output)
        return (y, stats) if residual is None else (y, x.new_empty(x.shape, dtype=dtype), stats)

    def fake_dx(self, x: Tensor) -> Tensor:
        row_dims = len(self.normalized_shape)
        rows = math.prod(x.shape[: x.dim() - row_dims])
        spacing = row_spacing(x.shape, x.stride(), row_dims)
        is_dense = lies_dense(spacing, rows, math.prod(self.normalized_shape))
        return x if is_dense else x.new_empty(x.shape)


def _row_statistics(
    h: Tensor, row_dims: int, mean: Tensor, rstd: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of a row, averaged over all rows."""
    # Without another read of h, unless rstd is too coarse, as the CPU kernel returns it for
    # half-precision input, or a nested tensor has rows that belong to no component.
    if rstd.dtype in (torch.float32, torch.float64) and not h.is_nested:
        return mean.mean(), stock.variance_of(rstd, eps).mean()
    h = parts.rows(h, h.shape[-row_dims:])
    dims = tuple(range(-row_dims, 0))
    var, mean = torch.var_mean(h.to(accumulator_dtype(h.dtype)), dim=dims, correction=0)
    return mean.mean(), var.mean()


def _is_grid_of_rows(t: Tensor, row_dims: int) -> bool:
    """Whether t is contiguous, with rows in a grid of three or more dimensions: (N, H, W, C).

    Such a tensor is passed to the operator as a matrix. Inductor would take a 4-dimensional one for
    images with channels at dimension 1, save it for the backward in that layout, and copy it.
    """
    return t.dim() > row_dims + 2 and t.is_contiguous()


def _spec_of(normalized_shape: list[int], *numbers: Any) -> LayerNormSpec:
    return LayerNormSpec(tuple(normalized_shape), *numbers)


_NUMBERS = (
    "int[] normalized_shape, float? momentum, float? eps, float target_variance, "
    "ScalarType? autocast, str autocast_output, bool centred, float weight_offset, str? rounding"
)
PLAIN, ADD = (
    NormOperators(name, _NUMBERS, ("stats",), _spec_of, has_total=has_total, updates_running=True)
    for name, has_total in (("layer_norm", False), ("add_layer_norm", True))
)
# For torch.compile, which guards on each attribute that it reads.
_plain, _add = PLAIN.differentiable, ADD.differentiable


class LayerNormPlan(Plan):
    """The launches of a LayerNorm or RMSNorm, with a residual or an input bias: one per direction.

    State: stats, mean and rstd of the rows, (2 * rows,), or for RMSNorm rstd alone, (rows,). With a
    residual, the total x + residual is normalised.
    """

    spec: LayerNormSpec
    state = ("stats",)

    def __init__(self, t: Tensors, spec: LayerNormSpec) -> None:
        from normplug._kernels import processors, shared_memory
        from normplug._kernels.launch import COOPERATIVE
        from normplug._kernels.layer_norm.launches import Flags

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
        self._flags = Flags(
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
        from normplug._kernels.layer_norm import launches, schedule

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
        from normplug._kernels.layer_norm import launches, schedule

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

    def composed(self, saved: Sequence[Any], dy: Tensor) -> tuple[Tensors, LayerNormSpec, Tensor]:
        t, spec, dy = super().composed(saved, dy)
        return t, spec._replace(eps=self._numbers[0], rounding="output"), dy


# How the rows of a tensor lie in memory, if the kernels can address them.


def row_spacing(shape: Sequence[int], stride: Sequence[int], row_dims: int) -> Spacing | None:
    """The spacing of rows; None if a row is not dense, or the kernels cannot express it."""
    outer = len(shape) - row_dims
    if not is_contiguous(shape[outer:], stride[outer:]):
        return None
    levels: list[tuple[int, int]] = []  # (count, stride), the innermost first
    for size, step in zip(reversed(shape[:outer]), reversed(stride[:outer]), strict=True):
        if size == 1:
            continue
        if levels and step == math.prod(levels[-1]):
            levels[-1] = (levels[-1][0] * size, levels[-1][1])
        else:
            levels.append((size, step))
    match levels:
        case []:
            return math.prod(shape[outer:])
        case [(_, step)]:
            return step
        case [(inner, step), (_, apart)]:
            return Levels(inner, apart, step)
        # Only heads within a token: the two are compiled into the kernel, and other layouts may
        # change them from call to call.
        case [(inner, step), (heads, middle), (_, apart)] if 0 < middle < step:
            return Levels(inner, apart, step, heads, middle)
    return None


def lies_dense(spacing: Spacing | None, rows: int, width: int) -> bool:
    """Whether rows, in any order, have no gaps between them. Their gradient then has none."""
    if isinstance(spacing, Levels):
        return spacing.dense(rows, width)
    return spacing == width


def spacing_after(t: Tensor, row_dims: int, width: int, *before: Spacing) -> Spacing | None:
    """The row spacing of t; None if no launch can take it together with the spacings `before`."""
    if t.is_contiguous():
        return width
    spacing = row_spacing(t.shape, t.stride(), row_dims)
    others = [each for each in before if isinstance(each, Levels)]
    if isinstance(spacing, Levels) and not all(map(spacing.goes_with, others)):
        return None
    return spacing
