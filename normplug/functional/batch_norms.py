"""BatchNorm as a function, and the statistics of each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops.batch_norm import route as batch_norm_route
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug.functional.calls import carry_out
from normplug.modes import ModeLike, target_variance
from normplug.reference import accumulator_dtype, channel_dims


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    residual: Tensor | None = None,
    activation: str | tuple[str, float] | None = None,
    num_batches_tracked: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise each channel over batch and space to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias + residual)

    In training, mean and biased var are the batch's. The running statistics are updated with the
    mean and the *unbiased* variance of the batch, as in `torch.nn.functional.batch_norm`. In
    evaluation, mean and var are the running statistics. An empty batch leaves the running
    statistics unchanged.

    Args:
        input: (N, C) or (N, C, *space); float16, bfloat16, float32 or float64. The kernels read
            contiguous and channels_last tensors (of any number of dimensions) without a copy, and
            copy tensors with other strides once. They also copy dy and `residual` once if their
            layout differs from that of `input`.
        running_mean: (C,), updated in place in training, or None.
        running_var: (C,), updated in place in training, or None.
        weight: (C,), or None for ones. May be float32 if `input` is half precision.
        bias: (C,), or None for zeros, in the dtype of `weight`.
        training: use the batch's statistics instead of the running ones.
        momentum: weight of the new batch in the running statistics; None averages over all
            batches equally, as counted by `num_batches_tracked`.
        eps: added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        residual: added before the activation; shaped like `input`, or None.
        activation: None, "relu", "silu", "gelu" (exact), "relu6", "hardswish" or "leaky_relu". A
            pair such as ("leaky_relu", 0.2) sets the slope below 0; the default is 0.01.
        num_batches_tracked: integer scalar, incremented when the running statistics are updated, or
            None.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's). "auto" takes
            whichever was measured to be faster, if it can run; the environment variable
            `NORMPLUG_BACKEND` overrides "auto".

    Returns:
        Shaped like `input`, in its dtype (promoted with that of `residual`).

    Raises:
        ValueError: mismatched shapes or devices, one value per channel in training, evaluation
            without running statistics, an unknown mode, activation or
            backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: `backend` is "triton" and the kernels cannot run; the message says why.

    Precision: sums are float32 (float64 for float64 input). With tv other than 1, the torch backend
    rounds weight * sqrt(tv) to the dtype of `weight`; the kernels do not.
    Twice differentiable in `input`, `weight`, `bias` and `residual`. The kernels are bitwise
    deterministic. For the backward they save `input` and two numbers per channel; with `residual`
    and relu also one bit per element, and with `residual` and another activation also `residual`.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> batch_norm(x, None, None, training=True, eps=1e-12, mode=0.25).flatten()
        tensor([-0.5000,  0.5000])
    """
    t = Tensors(input, residual, weight, bias, None, running_mean, running_var, num_batches_tracked)
    spec = BatchNormSpec(training, momentum, eps, target_variance(mode), activation)
    return carry_out("functional.batch_norm", t, spec, backend)


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over batch and space.

        mean = mean(x)        var = mean((x - mean)^2)

    A diagnostic: call it in a forward hook to see the statistics of a layer's output. On CUDA, one
    kernel reads `x` once if no gradient is needed: pass `output.detach()`.

    Args:
        x: (N, C) or (N, C, *space), floating point. If the features come last, as in a
            transformer, pass `x.flatten(0, -2)`.

    Returns:
        (mean, var), each (C,), float32 (float64 for float64 input); nan for an empty batch.

    Raises:
        ValueError: `x` has no channel dimension.
        TypeError: `x` is not a tensor, or not floating point.

    Examples:
        >>> import torch
        >>> channel_stats(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.]), tensor([1., 0.]))
    """
    caller = "functional.channel_stats"
    _checks.floating(caller, x)
    _checks.channels(caller, x)
    if (by_kernel := batch_norm_route.channel_stats(x)) is not None:
        return by_kernel
    x = x.to(accumulator_dtype(x.dtype))
    if x.numel() == 0:
        nan = x.new_full((x.shape[1],), torch.nan)
        return nan, nan.clone()
    var, mean = torch.var_mean(x, dim=channel_dims(x), correction=0)
    return mean, var
