"""RMSNorm as a function, alone and with a preceding addition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops.layer_norm import checks
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug._torch import RMS_NORM_AUTOCASTS
from normplug.functional.autocast import autocast_dtype
from normplug.functional.calls import carry_out
from normplug.modes import ModeLike, target_variance


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mode: ModeLike = "standard",
    weight_offset: float = 0.0,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> Tensor:
    """Divide each row over its trailing `normalized_shape` by its root mean square.

        y = (weight + weight_offset) * sqrt(tv) * input / sqrt(mean(input^2) + eps)

    The rows are not centred, so the target variance tv of `mode` is a target *second moment*: the
    mean of y^2 over a row if weight + weight_offset is 1. For rows of mean 0 it is their variance.

    Args:
        input: (*rows, *normalized_shape); float16, bfloat16, float32 or float64, laid out as in
            `layer_norm`, or nested.
        normalized_shape: the trailing dimensions that form a row.
        weight: `normalized_shape`, or None for a factor of one. May be float32 if `input` is half
            precision.
        eps: added to the second moment before the root; None for the machine epsilon
            of float32 (of float64 for float64 `input`), as in torch since 2.7.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        weight_offset: added to `weight` in the dtype of the sums; 1 for Gemma, whose weights start
            at 0.
        running_var: scalar tensor, updated in place, or None. It is updated with the mean of
            input^2 over all rows: the *second moment*. No result depends on it, and an empty batch
            leaves it unchanged.
        num_batches_tracked: integer scalar tensor, incremented when `running_var` is updated, or
            None.
        momentum: weight of the new batch in `running_var`; None averages over all batches equally.
        autocast_output: the dtype of the result under autocast. "float32" follows
            `torch.nn.functional.rms_norm` (on CUDA: float32 in torch 2.15, the dtype of `input` in
            2.11); "low" is the autocast dtype, which the next linear layer would cast to anyway.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's). "auto" takes the
            kernels if they can run; the environment variable `NORMPLUG_BACKEND` overrides "auto".

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it is contiguous.

    Raises:
        ValueError: mismatched shapes or devices, a momentum of None without a counter, an unknown
            mode, backend or autocast_output.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: `backend` is "triton" and the kernels cannot run; the message says why.

    Precision: sums are float32 (float64 for float64 input), and the result is rounded once. With tv
    other than 1, the torch backend rounds weight * sqrt(tv) to the dtype of `weight`; the kernels
    do not. The kernels are bitwise deterministic. The bits of a row of y do not depend on the other
    rows, nor, for the same layout, on their number.
    Twice differentiable in `input` and `weight`. For the backward the kernels save `input` and one
    number per row.

    Examples:
        >>> import torch
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), (2,), mode="standard")
        tensor([[0.8485, 1.1314]])
    """
    caller = "functional.rms_norm"
    t = Tensors(input, None, weight, None, None, None, running_var, num_batches_tracked)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, weight_offset)
    return carry_out(caller, t, _spec(caller, input, *numbers), backend)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mode: ModeLike = "standard",
    weight_offset: float = 0.0,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: the step between two blocks of a pre-norm transformer.

        total = x + residual        y = rms_norm(total)

    Args:
        x: (*rows, *normalized_shape), a block's output.
        residual: shaped like `x`: the stream that `x` is added to; strides as in `add_layer_norm`.
        normalized_shape: as in `rms_norm`.
        weight: as in `rms_norm`.
        eps: as in `rms_norm`.
        mode: as in `rms_norm`.
        weight_offset: as in `rms_norm`.
        running_var: as in `rms_norm`, of total.
        num_batches_tracked: as in `rms_norm`.
        momentum: as in `rms_norm`.
        autocast_output: as in `rms_norm`.
        backend: as in `rms_norm`.

    Returns:
        (y, total), both shaped like `x`, in the promoted dtype of `x` and `residual` (y under
        autocast: see `autocast_output`). y is the norm of the rounded total.

    Raises:
        ValueError: as in `rms_norm`, and if `residual` is not shaped like `x`.
        TypeError: as in `rms_norm`.
        NotImplementedError: as in `rms_norm`.

    Twice differentiable in `x`, `residual` and `weight`. The kernels do both steps in one launch,
    and save `total` for the backward.

    Examples:
        >>> import torch
        >>> y, total = add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), (2,))
        >>> total
        tensor([[3., 4.]])
    """
    caller = "functional.add_rms_norm"
    t = Tensors(x, residual, weight, None, None, None, running_var, num_batches_tracked)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, weight_offset)
    return carry_out(caller, t, _spec(caller, x, *numbers), backend)


def _spec(
    caller: str,
    x: Tensor,
    normalized_shape: Sequence[int],
    momentum: float | None,
    eps: float | None,
    mode: ModeLike,
    autocast_output: str,
    weight_offset: float,
) -> LayerNormSpec:
    tv, shape = target_variance(mode), checks.row_shape(caller, normalized_shape)
    _checks.autocast_output(caller, autocast_output)  # before the next line reads it
    autocast = autocast_of_rms_norm(x, autocast_output)
    return LayerNormSpec(shape, momentum, eps, tv, autocast, autocast_output, False, weight_offset)


def autocast_of_rms_norm(
    x: Tensor, autocast_output: str, is_cast: bool = RMS_NORM_AUTOCASTS
) -> torch.dtype | None:
    """The dtype of autocast on the device of x; None if autocast is off or does not apply.

    is_cast: whether autocast has the stock norm compute and return float32.
    """
    return autocast_dtype(x) if is_cast or autocast_output == "low" else None
