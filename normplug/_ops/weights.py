"""Weight and bias as PyTorch's kernels take them: in one dtype, with the target variance folded in.

weight * sqrt(tv) * xhat + bias is the stock norm with weight * sqrt(tv) in place of weight, so that
the target variance costs no pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def scaled(
    weight: Tensor | None,
    target_variance: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """The weight times sqrt(target_variance). If it is None, `shape` to `device` describe ones."""
    if target_variance == 1.0:
        return weight
    root = math.sqrt(target_variance)
    return torch.full(shape, root, dtype=dtype, device=device) if weight is None else weight * root


def promoted(
    h: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Cast all three to their common dtype, since not every device's kernel mixes dtypes."""
    dtype = h.dtype
    for affine in (weight, bias):
        # Only if they differ: torch.export of torch 2.6 cannot save a graph with `promote_types`.
        if affine is not None and affine.dtype != dtype:
            dtype = torch.promote_types(dtype, affine.dtype)
    if dtype == h.dtype and (weight is None or weight.dtype == dtype):
        return h, weight, None if bias is None else bias.to(dtype)
    return (
        h.to(dtype),
        None if weight is None else weight.to(dtype),
        None if bias is None else bias.to(dtype),
    )
