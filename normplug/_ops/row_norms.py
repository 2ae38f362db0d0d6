"""The norms of rows, LayerNorm and RMSNorm: a spec, its plan, and its operators."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug import _checks
from normplug._layouts import (
    Levels,
    is_contiguous,
    lies_dense,
    row_spacing,
    spacing_after,
    spread,
)
from normplug._ops import can_run, subclasses, torch_way
from normplug._ops.operators import NormOperators
from normplug._ops.plans import Plan, accumulator_of
from normplug._ops.spec import Tensors, autocast_result
from normplug.reference import accumulator_dtype, rms_eps

_OPERATOR_BYTES = 16 << 20  # of input, from which torch.compile calls the operator


class Vectors(NamedTuple):
    """The rows that share a weight and a bias: see `_kernels.layer_norm.schedule.RowLayout`.

    kind: "all", "sample", "group" or "token". inner: the rows of a sample, or the groups of a row;
    else 0. step: how far the weights are apart, in values.
    """

    kind: str
    inner: int
    step: int

    def sets(self, rows: int) -> int:
        """How many sets of rows there are whose gradients of weight and bias are sums."""
        if self.kind == "sample":
            return rows // self.inner
        return self.inner if self.kind == "group" else 1

    @property
    def spacings(self) -> tuple[Levels, ...]:
        """The spacings that the spacing of any tensor's rows must be compatible with."""
        return (Levels(self.inner, 0, 0),) if self.inner else ()


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
    gate: of an RMSNorm; None without one. "last": y is multiplied by silu(gate). "first": x is,
        before it is normalised. The gate takes the place of the residual.
    group_size: of an RMSNorm, how many adjacent values of a row are normalised together; None for
        the whole row.
    adaptive: weight and bias belong to a sample or to a token, whose values they broadcast to. The
        leading dimensions that they lack are the last ones of x before the row.
    saves_normalised: whether to save x + residual for the backward as normalised values in float16,
        if y is of 16 bits and the sum is wider. Then there are no second derivatives.
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
    gate: str | None = None
    group_size: int | None = None
    adaptive: bool = False
    saves_normalised: bool = False

    @property
    def activation(self) -> str | None:
        """The activation through which a backward reads the gate."""
        return None if self.gate is None else "silu"

    # A method, since Dynamo of torch 2.6 to 2.8 cannot read a property of a spec whose eps varies.
    def is_modulated(self) -> bool:
        """Whether there are a gate, groups, or a scale and a shift."""
        return self.adaptive or self.gate is not None or self.group_size is not None

    @property
    def width(self) -> int:
        """How many values are normalised together."""
        return self.group_size or math.prod(self.normalized_shape)

    @property
    def groups(self) -> int:
        """The number of groups that a row is cut into."""
        return math.prod(self.normalized_shape) // self.width

    def in_groups(self, t: Tensor) -> Tensor:
        """A tensor with its rows cut into groups, which are rows of their own."""
        if self.group_size is None:
            return t
        return t.unflatten(-1, (self.groups, self.group_size))

    def vectors(self, t: Tensors) -> Vectors:
        """The rows that share a weight and a bias, of a call that the kernels can run."""
        if self.groups > 1:
            return Vectors("group", self.groups, self.width)
        if not self.adaptive:
            return Vectors("all", 0, 0)
        inner = self._rows_of_a_scale(t)
        assert inner is not None
        vector = _modulator(t)
        step = row_spacing(vector.shape, vector.stride(), len(self.normalized_shape))
        step = step if isinstance(step, int) else self.width  # of a copy: see `laid_out`
        return Vectors("token", 0, step) if inner == 1 else Vectors("sample", inner, step)

    def _rows_of_a_scale(self, t: Tensors) -> int | None:
        """How many rows share a scale or a shift; None if these are not adjacent."""
        x = t.x
        row_dims = len(self.normalized_shape)
        sizes = spread(_modulator(t).shape, x.dim(), row_dims)
        outer = x.dim() - row_dims
        inner = 1
        while outer > 0 and sizes[outer - 1] == 1:
            outer -= 1
            inner *= x.shape[outer]
        return inner if sizes[:outer] == x.shape[:outer] else None

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """Dimensions along which rows are independent; watched statistics describe one shard."""
        rows = range(t.x.dim() - len(self.normalized_shape))
        if not self.adaptive:
            return tuple(rows)
        # Each process has all scales and shifts, so those of its shard must be all of them.
        sizes = spread(_modulator(t).shape, t.x.dim(), len(self.normalized_shape))
        return tuple(dim for dim in rows if sizes[dim] == 1)

    def rounds_to(
        self, total: torch.dtype, weight: torch.dtype | None
    ) -> torch.dtype | None:
        """The dtype to round to before the product with the weight; None not to round.

        total, weight: the dtypes of what is normalised and of the weight, if there is one.
        """
        if self.rounding == "input":
            return total
        is_half = weight in (torch.float16, torch.bfloat16)
        return weight if self.rounding == "weight" and is_half else None

    def output_dtype(
        self, total: torch.dtype, weight: torch.dtype | None = None
    ) -> torch.dtype:
        """The dtype of the result. `rounds_to` explains the arguments."""
        under_autocast = autocast_result(total, self.autocast, self.autocast_output)
        if under_autocast is not None:
            return under_autocast
        if self.rounding in (None, "output") or weight is None or self.gate == "last":
            return total
        return torch.promote_types(self.rounds_to(total, weight) or total, weight)

    def check(self, caller: str, t: Tensors) -> None:
        _checks.floating(caller, t.x)
        if self.gate is not None:
            _checks.beside(caller, t.x, gate=t.residual)
        if self.adaptive:
            _checks.modulation(caller, t.x, self.normalized_shape, t.weight, t.bias)
        _checks.tensors(caller, *t)
        _checks.shape(caller, self.normalized_shape)
        if self.group_size is not None:
            _checks.group_size(caller, self.group_size, self.normalized_shape)
        if self.adaptive and (self.gate is not None or self.group_size is not None):
            raise ValueError(
                f"normplug.{caller}: a scale or a shift cannot be combined with a gate or a "
                "group_size; got both. Apply one of the two after the norm."
            )
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
        other = "residual" if self.gate is None else "gate"
        _checks.same_shape(caller, t.x, **{other: t.residual})
        vectors = {"input_bias": t.input_bias}
        if not self.adaptive:
            vectors["weight"] = t.weight
            vectors["bias"] = t.bias
        rows = t.x.unbind() if subclasses.is_nested(t.x) else (t.x,)
        if not rows:
            raise ValueError(
                f"normplug.{caller}: a nested input needs at least one component; got none. Skip "
                "empty batches."
            )
        for part in rows:
            _checks.trailing(caller, part, self.normalized_shape, **vectors)

    # PyTorch's kernels.

    def by_torch(self, t: Tensors) -> Any:
        if self.is_modulated():
            y, mean, var, _ = self.by_formula(t.x, t)
            self._update_running(t, mean, var)
            return y
        total = t.x if t.residual is None else t.x + t.residual
        y = self._layer_norm(total, t) if self.centred else self._rms_norm(total, t)
        return y if t.residual is None else (y, total)

    def _layer_norm(self, total: Tensor, t: Tensors) -> Tensor:
        h = total if t.input_bias is None else total + t.input_bias
        shape = self.normalized_shape
        autocast = self._autocast_of(total)
        promotes = autocast is None and not torch_way.mixes_dtypes(h, t.weight, t.bias)
        h, weight, bias = torch_way.prepared(
            h, t.weight, t.bias, self.target_variance, shape, promotes
        )
        assert self.eps is not None
        y, mean, rstd = torch.native_layer_norm(h, shape, weight, bias, self.eps)
        if t.running_mean is not None and t.running_var is not None and total.numel() > 0:
            # Detached, not under no_grad: torch.export would make that a subgraph without outputs,
            # and an ExportedProgram with one cannot be saved.
            statistics = h.detach(), len(shape), mean.detach(), rstd.detach(), self.eps
            torch_way.update_running(t, self.momentum, *_row_statistics(*statistics))
        return torch_way.cast(y, total.dtype, autocast, self.autocast_output)

    def _rms_norm(self, total: Tensor, t: Tensors) -> Tensor:
        shape = self.normalized_shape
        autocast = self._autocast_of(total)
        if t.running_var is not None and total.numel() > 0:
            rows = subclasses.rows(total.detach(), shape)
            moment = rows.to(accumulator_dtype(total.dtype)).square().mean()
            torch_way.update_running(t, self.momentum, None, moment)
        if self.weight_offset or self.rounding is not None:
            return self.by_formula(total, t)[0]
        promotes = autocast is None or self.autocast_output == "low"
        h, weight, _ = torch_way.prepared(
            total, t.weight, None, self.target_variance, shape, promotes
        )
        eps = self.eps if h.dtype == total.dtype else rms_eps(total.dtype, self.eps)
        y = torch.rms_norm(h, shape, weight, eps)
        return torch_way.cast(y, total.dtype, autocast, self.autocast_output)

    def _autocast_of(self, total: Tensor) -> torch.dtype | None:
        return None if total.dtype == torch.float64 else self.autocast

    # Normplug's kernels.

    def refusal(self, t: Tensors) -> str | None:
        if t.x.is_nested:
            return "the input is a nested tensor"
        why = can_run.refusal_of(t, strided=self.adaptive)
        if why is None and can_run.is_too_long(self.width, t.x.numel() // self.width):
            why = "a row has nearly 2^31 values or more, or there are as many rows"
        if why is None and self.is_modulated():
            why = self._refusal_of_modulated(t)
        return why

    def _refusal_of_modulated(self, t: Tensors) -> str | None:
        from normplug._kernels.layer_norm.schedule import holds_sums

        if not holds_sums(self.width, accumulator_of(t).itemsize):
            return (
                f"a row of {self.width} values is too wide for a gate, a scale or groups"
            )
        if self.adaptive and self._rows_of_a_scale(t) is None:
            return (
                "the scale or the shift has a row per token, but the same for all samples"
            )
        if self.adaptive and t.input_bias is not None:
            return "there is an input_bias as well as a scale or a shift"
        return None

    def laid_out(self, t: Tensors) -> Tensors:
        """The call with dense rows, where one launch can read the rows of x and of the residual."""
        vectors = self.vectors(t)
        rows = len(self.normalized_shape), self.width
        x, residual, weight, bias = t.x, t.residual, t.weight, t.bias
        spacing = spacing_after(self.in_groups(x), *rows, *vectors.spacings)
        if spacing is None:
            x, spacing = x.contiguous(), self.width
        before = (spacing, *vectors.spacings)
        if (
            residual is not None
            and spacing_after(self.in_groups(residual), *rows, *before) is None
        ):
            residual = residual.contiguous()
        if self.adaptive and not self._have_one_step(weight, bias):
            weight = None if weight is None else weight.contiguous()
            bias = None if bias is None else bias.contiguous()
        return t.reading(x, residual, weight, bias)

    def _have_one_step(self, *vectors: Tensor | None) -> bool:
        """Whether the scales of samples are apart by one stride, and the shifts by the same."""
        row_dims = len(self.normalized_shape)
        steps = {
            row_spacing(v.shape, v.stride(), row_dims) for v in vectors if v is not None
        }
        return len(steps) == 1 and isinstance(steps.pop(), int)

    def without_kernels(self, t: Tensors, why: str, choose: Any) -> None:
        """PyTorch's kernels run it."""

    def plan(self, t: Tensors) -> Plan:
        page = import_module("normplug._ops.row_norms_plan")  # which imports Triton
        plan: Plan = page.LayerNormPlan(t, self)
        return plan

    # The operators for compilers. They update the running statistics. Outside them, a compiler
    # would need further kernels to average the rows' statistics.

    def traced(self, t: Tensors) -> tuple[Tensor, ...]:
        """What the forward operator returns, by PyTorch's operations. It adds no residual."""
        y, mean, var, rstd = self.by_formula(t.x, t)
        self._update_running(t, mean, var)
        stats = (rstd,) if mean is None else (mean, rstd)
        return y, torch.cat([each.flatten() for each in stats])

    def _update_running(self, t: Tensors, mean: Tensor | None, var: Tensor) -> None:
        """Update the running statistics, if there are any, by those of the rows."""
        if t.running_var is not None and t.x.numel() > 0:
            mean = None if mean is None else mean.detach().mean()
            torch_way.update_running(t, self.momentum, mean, var.detach().mean())

    def by_formula(
        self, total: Tensor, t: Tensors
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """The norm of `total`, in its library's order of operations; mean, var and rstd of rows.

        An RMSNorm has no mean. t: the call, for its gate, weight, bias and input bias.
        """
        dims = tuple(range(-len(self.normalized_shape), 0))
        h = total.to(accumulator_of(t))
        mean = None
        if t.input_bias is not None:
            h = h + t.input_bias
        if self.gate == "first":
            h = h * _factor(t.residual, h.dtype)
        if self.group_size is not None:
            h = h.unflatten(-1, (self.groups, self.group_size))
        if self.centred:
            var, mean = torch.var_mean(h, dims, correction=0, keepdim=True)
            h = h - mean
        else:
            var = h.square().mean(dims, keepdim=True)
        rstd = torch.rsqrt(var + rms_eps(total.dtype, self.eps))
        y = h * rstd
        if self.group_size is not None:
            y = y.flatten(-2)
        return self._scaled(y, total.dtype, t), mean, var, rstd

    def _scaled(self, y: Tensor, total: torch.dtype, t: Tensors) -> Tensor:
        """The result of a call, of its normalised values y, in the accumulator dtype.

        total: the dtype of what was normalised.
        """
        acc = y.dtype
        weight, bias = self._spread(t.weight, y), self._spread(t.bias, y)
        dtype = None if weight is None else weight.dtype
        rounded = self.rounds_to(total, dtype)
        root = math.sqrt(self.target_variance)
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
        if bias is not None:
            y = y + bias
        if self.gate == "last":
            if rounded is not None and dtype is not None:
                y = y.to(torch.promote_types(rounded, dtype))
            y = y * _factor(t.residual, acc)
        return y.to(self.output_dtype(total, dtype))

    def _spread(self, vector: Tensor | None, x: Tensor) -> Tensor | None:
        """A weight or a bias, in a shape that broadcasts to x."""
        if vector is None or not self.adaptive:
            return vector
        return vector.reshape(spread(vector.shape, x.dim(), len(self.normalized_shape)))

    def compiled(self, t: Tensors) -> Callable[[Tensors], Any] | None:
        """The operators of a large LayerNorm if a matmul or a convolution computes x or residual.

        Inductor fuses the norm with any other operator that computes x, and so do the backwards.
        Where it cannot, its gradients of weight and bias are slow, and a kernel that adds the
        residual is faster in both directions. RMSNorms have no bias, so there is nothing to gain.
        Over the channels of contiguous images, only a norm that also adds a convolution's bias
        gains. An adaptive LayerNorm is left to Inductor.
        """
        outer = t.x.dim() - len(self.normalized_shape)
        has_rows = is_contiguous(t.x.shape[outer:], t.x.stride()[outer:])
        large = can_run.size_of(t.x) >= _OPERATOR_BYTES
        pays = self.centred and large and (has_rows or t.input_bias is not None)
        return self._automatic if pays and not self.adaptive else None

    def _automatic(self, t: Tensors) -> Any:
        return self.operator(t, automatic=True)

    def operator(self, t: Tensors, automatic: bool = False) -> Any:
        x, residual, *rest = t
        shape, row_dims = x.shape, len(self.normalized_shape)
        are_grids = _is_grid_of_rows(x, row_dims) and (
            residual is None or _is_grid_of_rows(residual, row_dims)
        )
        if are_grids and not self.adaptive:
            x = x.flatten(0, -1 - row_dims)
            residual = None if residual is None else residual.flatten(0, -1 - row_dims)
        if residual is None or self.gate is not None:
            y, _ = _plain(x, residual, *rest, *self, automatic)
            return y.view(shape)
        y, total, _ = _add(x, residual, *rest, *self, automatic)
        return y.view(shape), total.view(shape)

    def fake(self, t: Tensors) -> tuple[Tensor, ...]:
        x, residual, weight, *_ = t
        acc = accumulator_of(t)
        added = residual if self.gate is None else None
        dtype = x.dtype if added is None else torch.promote_types(x.dtype, added.dtype)
        rows = math.prod(x.shape[: x.dim() - len(self.normalized_shape)]) * self.groups
        stats = x.new_empty(2 * rows if self.centred else rows, dtype=acc)
        output = self.output_dtype(dtype, None if weight is None else weight.dtype)
        y = x.new_empty(x.shape, dtype=output)
        if added is None:
            return y, stats
        return y, x.new_empty(x.shape, dtype=dtype), stats

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
    # This needs no second read of h. It does not apply to half-precision input on the CPU, whose
    # rstd is too coarse, nor to a nested tensor, which may have rows that belong to no component.
    if rstd.dtype in (torch.float32, torch.float64) and not h.is_nested:
        return mean.mean(), torch_way.variance_of(rstd, eps).mean()
    h = subclasses.rows(h, h.shape[-row_dims:])
    dims = tuple(range(-row_dims, 0))
    var, mean = torch.var_mean(h.to(accumulator_dtype(h.dtype)), dim=dims, correction=0)
    return mean.mean(), var.mean()


def _modulator(t: Tensors) -> Tensor:
    """The scale of an adaptive call, or the shift, which has the same shape."""
    vector = t.bias if t.weight is None else t.weight
    assert vector is not None
    return vector


def _factor(gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a gate multiplies by: silu(gate)."""
    assert gate is not None
    return F.silu(gate.to(dtype))


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
    "ScalarType? autocast, str autocast_output, bool centred, float weight_offset, str? rounding, "
    "str? gate, int? group_size, bool adaptive, bool saves_normalised"
)
PLAIN, ADD = (
    NormOperators(
        name,
        LayerNormSpec,
        _spec_of,
        _NUMBERS,
        ("stats",),
        has_total=has_total,
        updates_running=True,
    )
    for name, has_total in (("layer_norm", False), ("add_layer_norm", True))
)
# For torch.compile, which guards on each attribute that it reads.
_plain, _add = PLAIN.differentiable, ADD.differentiable
