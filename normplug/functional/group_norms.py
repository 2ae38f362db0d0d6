"""GroupNorm and InstanceNorm as functions."""

from __future__ import annotations

from torch import Tensor

from normplug import _checks
from normplug._ops.spec import BatchNormSpec, GroupNormSpec, Tensors
from normplug.functional.autocast import autocast_dtype
from normplug.functional.calls import carry_out
from normplug.modes import ModeLike, target_variance


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    activation: str | tuple[str, float] | None = None,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> Tensor:
    """Normalise each group of channels of each sample to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    The C channels form `num_groups` groups of adjacent channels. mean and biased var are those of
    a group of one sample, over its channels and space, both in training and in evaluation.

    Args:
        input: (N, C) or (N, C, *space); float16, bfloat16, float32 or float64. The kernels read
            contiguous and channels_last tensors without a copy, and copy tensors with other strides
            once; the same holds for dy.
        num_groups: a divisor of C.
        weight: (C,), or None for ones. May be float32 if `input` is half precision.
        bias: (C,), or None for zeros.
        eps: added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        activation: None, "relu", "silu", "gelu" (exact), "relu6", "hardswish" or "leaky_relu". A
            pair such as ("leaky_relu", 0.2) sets the slope below 0; the default is 0.01.
        autocast_output: the dtype of the result under autocast. "float32" follows
            `torch.nn.functional.group_norm` (float32 on CUDA); "low" is the autocast dtype. Sums
            are float32 in both.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's). "auto" takes
            whichever was measured to be faster, if it can run; the environment variable
            `NORMPLUG_BACKEND` overrides "auto".

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it has the layout of `input` if that is contiguous or channels_last.

    Raises:
        ValueError: mismatched shapes or devices, a `num_groups` that does not divide C, a single
            sample with one value per group, an unknown mode, activation,
            autocast_output or backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: `backend` is "triton" and the kernels cannot run; the message says why.

    Precision: sums are float32, or float64 if a tensor is. The torch backend promotes mixed dtypes
    and rounds the result back, which costs a copy of `input`; it also rounds weight * sqrt(tv). The
    kernels do neither.
    Twice differentiable in `input`, `weight` and `bias`. The kernels are bitwise deterministic. For
    the backward they save `input` and two numbers per group of each sample.

    Examples:
        >>> import torch
        >>> group_norm(torch.tensor([[1.0, 3.0, 5.0, 5.1]]), 2, mode="standard").round()
        tensor([[-1.,  1., -1.,  1.]])
    """
    t = Tensors(input, None, weight, bias)
    tv, autocast = target_variance(mode), autocast_dtype(input)
    spec = GroupNormSpec(num_groups, eps, tv, activation, autocast, autocast_output)
    return carry_out("functional.group_norm", t, spec, backend)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    activation: str | tuple[str, float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise each channel of each sample over space to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    With `use_input_stats`, mean and biased var are those of a channel of one sample. The running
    statistics, if given, are updated with the averages over samples of mean and *unbiased*
    variance, as in `torch.nn.functional.instance_norm`. Otherwise mean and var are the running
    statistics, as in `batch_norm` in evaluation. An empty batch leaves the running statistics
    unchanged.

    Args:
        input: (N, C, *space); dtypes and layouts as in `group_norm`.
        running_mean: (C,), updated in place with `use_input_stats`, or None.
        running_var: (C,), updated in place with `use_input_stats`, or None.
        weight: (C,), or None for ones. May be float32 if `input` is half precision.
        bias: (C,), or None for zeros, in the dtype of `weight`.
        use_input_stats: use the input's statistics instead of the running ones.
        momentum: weight of the new batch in the running statistics; unlike in `batch_norm`, it must
            be a number.
        eps: added to the variance before the root.
        mode: as in `group_norm`.
        activation: as in `group_norm`.
        backend: as in `group_norm`.

    Returns:
        Shaped like `input`, in its dtype, under autocast too. From the kernels it has the layout of
        `input` if that is contiguous or channels_last; from PyTorch it is contiguous.

    Raises:
        ValueError: as in `group_norm`; a single spatial position, whose variance is always 0; no
            running statistics without `use_input_stats`.
        TypeError: as in `group_norm`.
        NotImplementedError: as in `group_norm`.

    Precision and gradients are those of `group_norm` with one group per channel, except that the
    torch backend does not promote: PyTorch accepts float32 parameters with a half `input`.

    Examples:
        >>> import torch
        >>> instance_norm(torch.tensor([[[1.0, 3.0], [5.0, 5.1]]]), mode="standard").round()
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    caller = "functional.instance_norm"
    _checks.flags(caller, use_input_stats=use_input_stats)
    t = Tensors(input, None, weight, bias, None, running_mean, running_var)
    tv = target_variance(mode)
    if not use_input_stats:
        constant = BatchNormSpec(False, momentum, eps, tv, activation, instance=True)
        return carry_out(caller, t, constant, backend)
    spec = GroupNormSpec(_channels(input), eps, tv, activation, momentum=momentum, instance=True)
    return carry_out(caller, t, spec, backend)


def _channels(x: Tensor) -> int:
    try:
        return x.shape[1]
    except (AttributeError, IndexError, RuntimeError, TypeError):  # invalid: rejected later
        return 1
