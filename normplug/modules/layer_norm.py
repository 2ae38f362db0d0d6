"""LayerNorm with a target variance and watched statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normplug import functional, reference
from normplug._checks import as_number
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from normplug.modules.fusion_sites import FusionSites
from normplug.modules.row_norm import RowNorm
from normplug.modules.watched import averages


class LayerNorm(RowNorm, nn.LayerNorm):
    """`torch.nn.LayerNorm` that normalises to a target variance and monitors its input.

        y = weight * sqrt(tv) * (x - mean) / sqrt(var + eps) + bias

    The watched statistics are scalars that no result depends on: `watched_mean` and `watched_var`,
    moving averages of the rows' mean and of their biased variance, and `watched_count`, the number
    of batches. They are not saved: a state_dict has the keys of the stock layer's. They start with
    mean 0 and variance 1. Inside `torch.func` transforms they are not updated.

    Args:
        *args: those of `torch.nn.LayerNorm`.
        mode: as in `BatchNorm1d`.
        backend: as in `BatchNorm1d`.
        track_running_stats: keep the watched statistics; None is True here.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.layer_norm`.
        **kwargs: those of `torch.nn.LayerNorm`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.layer_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, an empty row, or
            input of another trailing shape.
        TypeError: an argument of another type.

    Examples:
        >>> LayerNorm(8, mode=0.5)
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, ..., mode=0.5)
    """

    _function = "layer_norm"

    def _fused_bias(self, input: Tensor, input_bias: Tensor) -> Tensor:
        """Compute `forward(input + input_bias)` in one call."""
        known = self._run_native(input, None, input_bias)
        if known is not None:
            return known
        statistics = self._statistics_to_update(input)
        t = Tensors(input, None, *self._affine(), input_bias, *statistics)
        return self._run(t, self._normplug.autocast_output)

    _fusion_sites = FusionSites(
        {"forward": RowNorm.forward, "_normalise": RowNorm._normalise},
        before=("sum", "convolution_bias"),
    )

    def _spec(self, x: Tensor, autocast_output: str) -> LayerNormSpec:
        own = self._normplug
        return LayerNormSpec(
            self.normalized_shape,
            own.momentum,
            as_number(own.eps),
            own.target_variance,
            functional.autocast_dtype(x),
            autocast_output,
        )

    def _by_torch(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        eps, move = self._normplug.eps, self._mover()
        arguments = x, self.normalized_shape, self._scaled(weight), bias, eps
        if move is None:
            return torch.layer_norm(*arguments)
        y, mean, rstd = torch.native_layer_norm(*arguments)
        move(*averages(mean, rstd, eps))
        return y

    def _affine_shape(self) -> tuple[int, ...]:
        return self.normalized_shape

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        affine = self.weight, self.bias
        return reference.layer_norm(x, self.normalized_shape, *affine, **self._numbers()).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.var(self._row_dims(), correction=0)
