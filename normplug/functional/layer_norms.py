"""LayerNorm as a function, alone and with a preceding addition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from normplug._ops.layer_norm import checks
from normplug._ops.spec import LayerNormSpec, Tensors
from normplug.functional.autocast import autocast_dtype
from normplug.functional.calls import carry_out
from normplug.modes import ModeLike, target_variance


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    input_bias: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> Tensor:
    """Normalise each row over its trailing `normalized_shape` to the target variance of `mode`.

        y = weight * sqrt(tv) * (h - mean) / sqrt(var + eps) + bias        h = input + input_bias

    mean and biased var are those of the row. The running statistics, if given, are for monitoring
    only: they are updated with the averages over rows of mean and var, and no result depends on
    them. An empty batch leaves them unchanged.

    Args:
        input: (*rows, *normalized_shape); float16, bfloat16, float32 or float64. The kernels read
            rows of contiguous values without a copy if the rows have one stride, or two (as after
            a transpose of batch and sequence); they copy other tensors once. The same holds for dy.
            A nested tensor whose components have such shapes works too; its running statistics
            average over the rows of all components.
        normalized_shape: the trailing dimensions that form a row.
        weight: `normalized_shape`, or None for ones. May be float32 if `input` is half precision.
        bias: `normalized_shape`, or None for zeros.
        eps: added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        input_bias: `normalized_shape`, added to the input before it is normalised, or None.
        running_mean: scalar tensor, updated in place, or None.
        running_var: scalar tensor, updated in place, or None.
        num_batches_tracked: integer scalar tensor, incremented when they are updated, or None.
        momentum: weight of the new batch in the running statistics; None averages over all
            batches equally.
        autocast_output: the dtype of the result under autocast. "float32" follows
            `torch.nn.functional.layer_norm` (float32 on CUDA); "low" is the autocast dtype, which
            the next linear layer would cast to anyway. Sums are float32 in both.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's). "auto" takes
            whichever was measured to be faster, if it can run; the environment variable
            `NORMPLUG_BACKEND` overrides "auto".

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it is contiguous, and the gradient of a dense `input` has the layout of `input`. A nested
        tensor gives a nested tensor of the same layout.

    Raises:
        ValueError: mismatched shapes or devices, one running statistic without the other, a
            momentum of None without a counter, an unknown mode, autocast_output or
            backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: `backend` is "triton" and the kernels cannot run; the message says why.

    Precision: sums are float32, or float64 if a tensor is. The torch backend promotes mixed dtypes
    and rounds the result back, which costs a copy of `input`; it also rounds weight * sqrt(tv) and
    input + input_bias. The kernels do neither.
    Twice differentiable in `input`, `weight`, `bias` and `input_bias`. The kernels are bitwise
    deterministic. For the backward they save `input` and two numbers per row.

    Examples:
        >>> import torch
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,), mode="standard").round()
        tensor([[-1.,  1.]])
    """
    caller = "functional.layer_norm"
    t = Tensors(
        input, None, weight, bias, input_bias, running_mean, running_var, num_batches_tracked
    )
    tv, shape = target_variance(mode), checks.row_shape(caller, normalized_shape)
    spec = LayerNormSpec(shape, momentum, eps, tv, autocast_dtype(input), autocast_output)
    return carry_out(caller, t, spec, backend)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: the step between two blocks of a pre-norm transformer.

        total = x + residual        y = layer_norm(total)

    Args:
        x: (*rows, *normalized_shape), a block's output.
        residual: shaped like `x`: the stream that `x` is added to. If the rows of both have two
            strides, the kernels copy `residual` unless its layout is that of `x`.
        normalized_shape: as in `layer_norm`.
        weight: as in `layer_norm`.
        bias: as in `layer_norm`.
        eps: as in `layer_norm`.
        mode: as in `layer_norm`.
        running_mean: as in `layer_norm`, of total.
        running_var: as in `layer_norm`, of total.
        num_batches_tracked: as in `layer_norm`.
        momentum: as in `layer_norm`.
        autocast_output: as in `layer_norm`.
        backend: as in `layer_norm`.

    Returns:
        (y, total), both shaped like `x`, in the promoted dtype of `x` and `residual` (y under
        autocast: see `autocast_output`). y is the norm of the rounded total.

    Raises:
        ValueError: as in `layer_norm`, and if `residual` is not shaped like `x`.
        TypeError: as in `layer_norm`.
        NotImplementedError: as in `layer_norm`.

    Twice differentiable in `x`, `residual`, `weight` and `bias`. The kernels do both steps in one
    launch, and save `total` for the backward.

    Examples:
        >>> import torch
        >>> y, total = add_layer_norm(torch.ones(1, 2), torch.tensor([[0.0, 2.0]]), (2,))
        >>> total
        tensor([[1., 3.]])
    """
    caller = "functional.add_layer_norm"
    t = Tensors(x, residual, weight, bias, None, running_mean, running_var, num_batches_tracked)
    tv, shape = target_variance(mode), checks.row_shape(caller, normalized_shape)
    spec = LayerNormSpec(shape, momentum, eps, tv, autocast_dtype(x), autocast_output)
    return carry_out(caller, t, spec, backend)
