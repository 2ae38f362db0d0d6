"""Norms of rows that compute in float32 whatever their input's dtype, as in several libraries."""

from __future__ import annotations

from torch import Tensor

from normplug.modules.row_norm import RowNorm


class Float32(RowNorm):
    """Computes in float32 and returns the input's dtype, with or without autocast."""

    def _normalise(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, autocast_output: str
    ) -> Tensor:
        weight = None if weight is None else weight.float()
        bias = None if bias is None else bias.float()
        return super()._normalise(input.float(), weight, bias, "float32").to(input.dtype)
