"""LayerNorm as a function, alone and with the addition before it."""

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
    mode: ModeLike = "golden",
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

    mean and biased var are those of the row. The running statistics, where given, are watched and
    never used: they move towards the rows' mean of mean and of var, and an empty batch leaves
    them untouched.

    Args:
        input: (*rows, *normalized_shape); float16, bfloat16, float32 or float64. The kernels take
            rows of adjacent values, evenly spaced or at two strides (a batch and a sequence that
            have changed places), as they are, in dy too, and copy others once. Or a nested tensor
            whose components are of such shapes; its statistics are those of all their rows.
        normalized_shape: the trailing dimensions that make a row.
        weight: `normalized_shape`, or None for ones. May be float32 beside a half `input`.
        bias: `normalized_shape`, or None for zeros.
        eps: 0 or above, added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        input_bias: `normalized_shape`, added to the input before it is normalised, or None.
        running_mean: scalar tensor, updated in place, or None.
        running_var: scalar tensor, updated in place, or None.
        num_batches_tracked: integer scalar tensor, raised by one where they move, or None.
        momentum: weight of the new batch in the running statistics; None averages over all
            batches equally.
        autocast_output: under autocast, "float32" returns what `torch.nn.functional.layer_norm`
            does (float32 on CUDA); "low" returns the autocast dtype, which the next linear layer
            would cast to anyway. Sums are float32 in both.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's); the environment's
            `NORMPLUG_BACKEND` sets "auto", which takes what was measured faster and can run.

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). The kernels make
        it contiguous, and lay the gradient of a dense `input` out as that. A nested tensor gives a
        nested tensor of the same layout.

    Raises:
        ValueError: shapes or devices that do not fit, running statistics without a counter, an eps
            below 0, an unknown mode, autocast_output or backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: backend "triton" where the kernels cannot run, saying why.

    Precision: sums are float32 (float64 where a tensor is). The torch backend promotes mixed dtypes
    and rounds the result back, which costs a copy of `input`, and rounds weight * sqrt(tv) and
    input + input_bias; the kernels do not.
    Differentiable twice, by `input`, `weight`, `bias` and `input_bias`. By the kernels, equal calls
    give equal bits, and what is kept for the backward is `input` and two numbers a row.

    Example:
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
    mode: ModeLike = "golden",
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
        residual: shaped like `x`, the stream it is added to. Where both take two strides, the
            kernels copy it unless it lies as `x` does.
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
        autocast: see `autocast_output`). It is the rounded total that is normalised.

    Raises:
        ValueError: as in `layer_norm`, and where `residual` is not shaped like `x`.
        TypeError: as in `layer_norm`.
        NotImplementedError: as in `layer_norm`.

    Differentiable twice, by `x`, `residual`, `weight` and `bias`. By the kernels, both steps are
    one launch, and `total` is kept for the backward.

    Example:
        >>> y, total = add_layer_norm(torch.ones(1, 2), torch.tensor([[0.0, 2.0]]), (2,))
        >>> total
        tensor([[1., 3.]])
    """
    caller = "functional.add_layer_norm"
    t = Tensors(x, residual, weight, bias, None, running_mean, running_var, num_batches_tracked)
    tv, shape = target_variance(mode), checks.row_shape(caller, normalized_shape)
    spec = LayerNormSpec(shape, momentum, eps, tv, autocast_dtype(x), autocast_output)
    return carry_out(caller, t, spec, backend)
