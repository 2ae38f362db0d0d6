"""BatchNorm as a function, and the statistics of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops.batch_norm import route as batch_norm_route
from normplug._ops.spec import BatchNormSpec, Tensors
from normplug.functional.calls import carry_out
from normplug.modes import ModeLike, target_variance
from normplug.reference import accumulator_dtype


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
    mode: ModeLike = "golden",
    residual: Tensor | None = None,
    activation: str | tuple[str, float] | None = None,
    num_batches_tracked: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise each channel over batch and space to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias + residual)

    In training, mean and biased var are the batch's, and the running statistics move towards the
    batch's mean and *unbiased* variance of the input, as in `torch.nn.functional.batch_norm`. In
    eval they are the running statistics. An empty batch leaves the running statistics untouched.

    Args:
        input: (N, C) or (N, C, *space); float16, bfloat16, float32 or float64. Contiguous and
            channels_last (channels innermost, for any number of dims) are taken as they are; the
            kernels copy other strides once, and dy or `residual` where laid out otherwise.
        running_mean: (C,), updated in place in training, or None.
        running_var: (C,), updated in place in training, or None.
        weight: (C,), or None for ones. May be float32 beside a half `input`.
        bias: (C,), or None for zeros, in the dtype of `weight`.
        training: use the batch's statistics rather than the running ones.
        momentum: weight of the new batch in the running statistics; None averages over all
            batches equally, counted by `num_batches_tracked`.
        eps: above 0, added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        residual: added before the activation; shaped like `input`, or None.
        activation: None, "relu", "silu", "gelu" (exact), "relu6", "hardswish" or "leaky_relu"; a
            pair as ("leaky_relu", 0.2) sets its slope below 0, which is 0.01 otherwise.
        num_batches_tracked: integer scalar, raised by one where running statistics move, or None.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's); the environment's
            `NORMPLUG_BACKEND` sets "auto", which takes what was measured faster and can run.

    Returns:
        Shaped like `input`, in its dtype (promoted with that of `residual`).

    Raises:
        ValueError: shapes or devices that do not fit, one value a channel in training, evaluation
            without running statistics, an eps of 0 or below, an unknown mode, activation or
            backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: backend "triton" where the kernels cannot run, saying why.

    Precision: sums are float32 (float64 for float64 input). With tv other than 1, the torch backend
    rounds weight * sqrt(tv) to the dtype of `weight`; the kernels do not.
    Differentiable twice, by `input`, `weight`, `bias` and `residual`. By the kernels, equal calls
    give equal bits, and what is kept for the backward is `input` and two numbers a channel, with
    `residual` and relu one bit an element more, with `residual` and another activation `residual`.

    Example:
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

    A diagnostic: in a forward hook it shows the output of any layer. On CUDA a kernel reads `x`
    once, unless it needs a gradient: pass `output.detach()`.

    Args:
        x: (N, C) or (N, C, *space), floating point. For features that come last, as in a
            transformer, `x.flatten(0, -2)`.

    Returns:
        (mean, var), each (C,), float32 (float64 for float64 input); nan for an empty batch.

    Raises:
        ValueError: where `x` has no channel dimension.
        TypeError: where `x` is no tensor, or not floating point.

    Example:
        >>> channel_stats(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.]), tensor([1., 0.]))
    """
    caller = "functional.channel_stats"
    _checks.floating(caller, x)
    _checks.channels(caller, x)
    if (by_kernel := batch_norm_route.channel_stats(x)) is not None:
        return by_kernel
    dims = (0, *range(2, x.dim()))
    x = x.to(accumulator_dtype(x.dtype))
    if x.numel() == 0:
        nan = x.new_full((x.shape[1],), torch.nan)
        return nan, nan.clone()
    var, mean = torch.var_mean(x, dim=dims, correction=0)
    return mean, var
