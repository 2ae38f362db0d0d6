"""The norms of rows, LayerNorm and RMSNorm, with a target variance and watched statistics."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn

from normplug import reference
from normplug._ops import subclasses
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors, autocast_dtype
from normplug._torch import RMS_NORM_AUTOCASTS
from normplug.modules.base import FusionSites, name_arguments
from normplug.modules.watched import WatchedRows


class RowNorm(WatchedRows):
    """A norm of rows of shape `_affine_shape`, with statistics that are only watched.

    A subclass declares `_function`, and all that `TargetVarianceNorm` asks for.
    """

    normalized_shape: tuple[int, ...]
    # Where an RMSNorm rounds: see `LayerNormSpec.rounding`.
    _rounding: ClassVar[str | None] = None
    # Where an RMSNorm multiplies a gate, which takes the place of the residual: "first" or "last".
    _gate: ClassVar[str | None] = None
    # How many adjacent values of a row are normalised together; None for the whole row.
    _group_size: ClassVar[int | None] = None
    # Whether autocast has the stock layer compute and return float32.
    _autocasts: ClassVar[bool] = True

    _call_reads = (*WatchedRows._call_reads, "normalized_shape")

    def _affine_shape(self) -> tuple[int, ...]:
        return self.normalized_shape

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`; in training, update the watched statistics if there are any."""
        if isinstance(input, fx.Proxy):
            return self._as_leaf(input)
        return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:
        """The forward of a tensor; adapters change its input and its output."""
        y: Tensor = self._run(input, None, None)
        if self._probe is not None:
            shape = self._affine_shape()
            self._record(subclasses.rows(input, shape), subclasses.rows(y, shape))
        return y

    def _fused_add(
        self, input: Tensor, residual: Tensor, saves_normalised: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `forward(input + residual)` and the sum, in one call.

        saves_normalised: see `LayerNormSpec`.
        """
        if saves_normalised:
            y: tuple[Tensor, Tensor] = self._run(input, residual, None, True)
        else:
            y = self._run(input, residual, None)
        return y

    def _call(
        self,
        input: Tensor,
        residual: Tensor | None,
        input_bias: Tensor | None,
        saves_normalised: bool = False,
    ) -> tuple[Tensors, LayerNormSpec]:
        statistics = self._statistics_to_update(input)
        t = Tensors(input, residual, *self._affine(), input_bias, *statistics)
        settings = self._normplug
        spec = LayerNormSpec(
            self._affine_shape(),
            settings.momentum,
            settings.eps,
            settings.target_variance,
            self._autocast(input),
            settings.autocast_output,
            self._measure == "variance",
            self._weight_offset,
            self._rounding,
            gate=None if residual is None else self._gate,
            group_size=self._group_size,
            saves_normalised=saves_normalised,
        )
        return t, spec

    def _fused_modulation(
        self, input: Tensor, scale: Tensor, shift: Tensor
    ) -> Tensor | None:
        """Compute `forward(input) * scale + shift` in one call; None if no kernel can.

        scale, shift: of each sample or token, with as many dimensions as the input.
        """
        t, spec = self._call(input, None, None)
        weight, bias = t.weight, t.bias
        shape = spec.normalized_shape
        dtype = spec.output_dtype(input.dtype, None if weight is None else weight.dtype)
        spec = spec._replace(weight_offset=0.0, rounding=None, adaptive=True)
        is_of_input = scale.dim() == input.dim() and scale.shape[-len(shape) :] == shape
        if not is_of_input or scale.shape != shift.shape:
            return None
        if not scale.dtype == shift.dtype == dtype == spec.output_dtype(input.dtype):
            return None
        if weight is not None:
            acc = reference.accumulator_dtype(dtype)
            factor = scale
            scale = scale * (weight.to(acc) + self._weight_offset)
            shift = shift if bias is None else factor * bias.to(acc) + shift
        t = t._replace(weight=scale, bias=shift)
        if spec._refusal_of_modulated(t) is not None:
            return None
        y: Tensor = self._run_tensors(t, spec)
        return y

    def _autocast(self, x: Tensor) -> torch.dtype | None:
        """The dtype that autocast has set, if it changes what the layer computes or returns."""
        if self._autocasts or self._normplug.autocast_output == "low":
            return autocast_dtype(x)
        return None

    _fusion_sites = FusionSites(
        {"forward": forward, "_normalise": _normalise},
        after=("modulation",),
        before=("sum",),
    )

    def _row_dims(self) -> tuple[int, ...]:
        """The dimensions of an input that form a row."""
        return tuple(range(-len(self._affine_shape()), 0))


class _LayerNorm(RowNorm):
    """LayerNorm without a stock class: the base for the LayerNorm of any class."""

    _function = "functional.layer_norm"

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        weight, bias = self._affine()
        return reference.layer_norm(
            x, self._affine_shape(), weight, bias, **self._numbers()
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.var(self._row_dims(), correction=0)


class LayerNorm(_LayerNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm` that normalises to a target variance and monitors its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The watched statistics are scalars that no result depends on: `watched_mean` and `watched_var`,
    moving averages of the rows' mean and of their biased variance, and `watched_count`, the number
    of batches. They are not saved: a state_dict has the keys of the stock layer's. They start with
    mean 0 and variance 1. Inside `torch.func` transforms they are not updated.

    Args:
        *args: passed to `torch.nn.LayerNorm`.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        backend: "auto", "triton" or "torch".
        track_running_stats: whether to watch statistics of the input; None is True here, but only
            where normplug's kernels run, in eager steps.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.layer_norm`.
        **kwargs: passed to `torch.nn.LayerNorm`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.layer_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, an empty row, or input of another
            trailing shape.
        TypeError: an argument of another type.

    Examples:
        >>> LayerNorm(8, mode=0.5)
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, ..., mode=0.5)
    """

    def _fused_bias(self, input: Tensor, input_bias: Tensor) -> Tensor:
        """Compute `forward(input + input_bias)` in one call."""
        y: Tensor = self._run(input, None, input_bias)
        return y

    _fusion_sites = RowNorm._fusion_sites._replace(before=("sum", "convolution_bias"))


class _RMSNorm(RowNorm):
    """RMSNorm without a stock class: the base for the RMSNorm of any library.

    A class for a library's RMSNorm inherits from this class and then from the library's class. What
    differs from `torch.nn.RMSNorm` it declares by `_weight_offset`, `_rounding`, `_autocasts`,
    `_eps_name` and `_affine_shape`.
    """

    _function = "functional.rms_norm"
    _watched = ("watched_var", "watched_count")
    _watches = False
    _measure = "second moment"
    _autocasts = RMS_NORM_AUTOCASTS

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        if "weight" in self._parameters:
            return self._parameters["weight"], None
        return self.weight, None  # type: ignore[return-value]  # parametrized, or sharded

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        weight, _ = self._affine()
        offset = self._weight_offset
        return reference.rms_norm(
            x, self._affine_shape(), weight, **self._numbers(), weight_offset=offset
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.square().mean(self._row_dims())


class _GatedRMSNorm(_RMSNorm):
    """RMSNorm with a gate, or of groups of a row: the base for such a norm of any library.

        y = rms_norm(input) * silu(gate), or rms_norm(input * silu(gate)) if the gate is first

    The gate may be None. A `VarianceLogger` measures what is normalised, and the result without
    the gate: `_measure` is a group's.
    """

    _fusion_sites = None  # type: ignore[assignment]

    def forward(self, input: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise `input`, with a gate of its shape or without one."""
        if isinstance(input, fx.Proxy):
            tracer: Any = input.tracer
            path = tracer.path_of_module(self)
            node: Any = tracer.create_proxy("call_module", path, (input, gate), {})
            return node
        if gate is not None and gate.shape != input.shape:
            input, gate = torch.broadcast_tensors(input, gate)
        y: Tensor = self._run(input, gate, None)
        if self._probe is not None:
            self._record_without_gate(input.detach(), gate)
        return y

    @torch.no_grad()
    def _record_without_gate(self, x: Tensor, gate: Tensor | None) -> None:
        if gate is not None and self._gate == "first":
            x = x * nn.functional.silu(gate.to(reference.accumulator_dtype(x.dtype)))
        self._record(x, self._expected(x, self.training))

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        weight, _ = self._affine()
        return reference.rms_norm(
            x,
            self._affine_shape(),
            weight,
            **self._numbers(),
            weight_offset=self._weight_offset,
            group_size=self._group_size,
        ).y

    def _variance(self, x: Tensor) -> Tensor:
        if self._group_size is not None:
            x = x.unflatten(-1, (-1, self._group_size))
        return super()._variance(x)


class RMSNorm(_RMSNorm, nn.RMSNorm):
    """`torch.nn.RMSNorm` that normalises to a target second moment.

        y = weight * sqrt(tv) * x / sqrt(mean(x^2) + eps)

    Rows are not centred. So the target variance tv is the target of mean(y^2) where weight is 1;
    it is the variance of y where the mean of y is 0.

    It takes the arguments of `torch.nn.RMSNorm` and the additional arguments of `LayerNorm`, and
    raises the same errors. With `track_running_stats`, off by default, `watched_var` is a scalar: a
    moving average of mean(x^2), the second moment of the input. There is no `watched_mean`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.rms_norm`.

    Examples:
        >>> RMSNorm(8, mode=0.5)
        RMSNorm((8,), eps=None, elementwise_affine=True, ..., mode=0.5)
    """


name_arguments(RMSNorm, nn.RMSNorm)  # torch calls the input x
