"""RMSNorm with a target second moment."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from normplug import functional, reference
from normplug._checks import as_number
from normplug._ops.row_norms import LayerNormSpec, composed_rms_norm
from normplug._torch import RMS_NORM_AUTOCASTS
from normplug.modules.row_norm import RowNorm


class _RMSNorm(RowNorm):
    """RMSNorm without a stock class: the base for the RMSNorm of any library.

    A class for a library's RMSNorm inherits from this one and then from the library's. It declares
    how that differs from `torch.nn.RMSNorm` by `_weight_offset`, `_rounding`, `_autocasts`,
    `_eps_name` and `_affine_shape`.
    """

    _function = "rms_norm"
    _watched = ("watched_var", "watched_count")
    _watches = False
    _measure = "second moment"
    # Whether autocast has the stock layer compute and return float32.
    _autocasts: ClassVar[bool] = RMS_NORM_AUTOCASTS

    def _affine(self) -> tuple[Tensor | None, None]:
        if "weight" in self._parameters:
            return self._parameters["weight"], None
        return self.weight, None  # type: ignore[return-value]  # parametrized, or sharded

    def _spec(self, x: Tensor, autocast_output: str) -> LayerNormSpec:
        own = self._normplug
        return LayerNormSpec(
            self._affine_shape(),
            own.momentum,
            as_number(own.eps),
            own.target_variance,
            functional.autocast_of_rms_norm(x, autocast_output, self._autocasts),
            autocast_output,
            False,
            self._weight_offset,
            self._rounding,
        )

    def _by_torch(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        move = self._mover()
        if self._rounding is not None or self._weight_offset:
            y = composed_rms_norm(x, weight, self._spec(x, "float32"))
        else:
            shape, eps = self._affine_shape(), self._normplug.eps
            y = torch.rms_norm(x, shape, self._scaled(weight), eps)
        if move is not None:
            move(None, x.detach().square().sum().item() / x.numel())
        return y

    def _expected(self, x: Tensor, training: bool) -> Tensor:
        shape, (weight, _), offset = self._affine_shape(), self._affine(), self._weight_offset
        return reference.rms_norm(x, shape, weight, **self._numbers(), weight_offset=offset).y

    def _variance(self, x: Tensor) -> Tensor:
        x = x.to(reference.accumulator_dtype(x.dtype))
        return x.square().mean(self._row_dims())


class RMSNorm(_RMSNorm, nn.RMSNorm):
    """`torch.nn.RMSNorm` that normalises to a target second moment.

        y = weight * sqrt(tv) * x / sqrt(mean(x^2) + eps)

    Rows are not centred. So the target variance tv is the target of mean(y^2) where weight is 1;
    it is the variance of y where the mean of y is 0.

    With `track_running_stats`, `watched_var` is a scalar: a moving average of mean(x^2), the second
    moment of the input. There is no `watched_mean`. See `LayerNorm`.

    Args:
        *args: those of `torch.nn.RMSNorm`.
        mode: as in `BatchNorm1d`.
        backend: as in `BatchNorm1d`.
        track_running_stats: keep the watched statistics; None is False here.
        momentum: weight of the new batch in them; None averages over all batches equally.
        autocast_output: "float32" (torch's rule) or "low"; see `normplug.functional.rms_norm`.
        **kwargs: those of `torch.nn.RMSNorm`.

    Shape: (*rows, *normalized_shape), in and out. Details: `normplug.functional.rms_norm`.

    Raises:
        ValueError: an unknown mode, backend or autocast_output, an empty row, or
            input of another trailing shape.
        TypeError: an argument of another type.

    Examples:
        >>> RMSNorm(8, mode=0.5)
        RMSNorm((8,), eps=None, elementwise_affine=True, ..., mode=0.5)
    """

    def _affine_shape(self) -> tuple[int, ...]:
        return self.normalized_shape
