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
    mode: ModeLike = "golden",
    activation: str | tuple[str, float] | None = None,
    autocast_output: str = "float32",
    backend: str = "auto",
) -> Tensor:
    """Normalise each group of channels of each sample to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    The C channels make `num_groups` groups of adjacent ones. mean and biased var are those of a
    sample's group, over its channels and space, in training and evaluation alike.

    Args:
        input: (N, C) or (N, C, *space); float16, bfloat16, float32 or float64. The kernels take
            contiguous and channels_last input as it is, and copy other strides once, in dy too.
        num_groups: a divisor of C.
        weight: (C,), or None for ones. May be float32 beside a half `input`.
        bias: (C,), or None for zeros.
        eps: 0 or above, added to the variance before the root.
        mode: the target variance tv: "golden" (1/phi), "standard" (1), a number or a `NormMode`.
        activation: None, "relu", "silu", "gelu" (exact), "relu6", "hardswish" or "leaky_relu"; a
            pair as ("leaky_relu", 0.2) sets its slope below 0, which is 0.01 otherwise.
        autocast_output: under autocast, "float32" returns what `torch.nn.functional.group_norm`
            does (float32 on CUDA); "low" returns the autocast dtype. Sums are float32 in both.
        backend: "auto", "triton" (normplug's kernels) or "torch" (PyTorch's); the environment's
            `NORMPLUG_BACKEND` sets "auto", which takes what was measured faster and can run.

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). The kernels lay
        it out as `input` is, where that is contiguous or channels_last.

    Raises:
        ValueError: shapes or devices that do not fit, a `num_groups` that does not divide C, a
            single group of a single value, an eps below 0, an unknown mode, activation,
            autocast_output or backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: backend "triton" where the kernels cannot run, saying why.

    Precision: sums are float32 (float64 where a tensor is). The torch backend promotes mixed dtypes
    and rounds the result back, which costs a copy of `input`, and rounds weight * sqrt(tv); the
    kernels do not.
    Differentiable twice, by `input`, `weight` and `bias`. By the kernels, equal calls give equal
    bits, and what is kept for the backward is `input` and two numbers a group.

    Example:
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
    mode: ModeLike = "golden",
    activation: str | tuple[str, float] | None = None,
    backend: str = "auto",
) -> Tensor:
    """Normalise each channel of each sample over space to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    With `use_input_stats`, mean and biased var are those of a sample's channel, and the running
    statistics, if given, move towards the samples' average of mean and of *unbiased* variance, as
    in `torch.nn.functional.instance_norm`. Without, they are the running statistics, as in
    `batch_norm` in evaluation. An empty batch leaves the running statistics untouched.

    Args:
        input: (N, C, *space); dtypes and layouts as in `group_norm`.
        running_mean: (C,), updated in place with `use_input_stats`, or None.
        running_var: (C,), updated in place with `use_input_stats`, or None.
        weight: (C,), or None for ones. May be float32 beside a half `input`.
        bias: (C,), or None for zeros, in the dtype of `weight`.
        use_input_stats: use the input's statistics rather than the running ones.
        momentum: weight of the new batch in the running statistics.
        eps: added to the variance before the root; 0 or above with `use_input_stats`, else above 0.
        mode: as in `group_norm`.
        activation: as in `group_norm`.
        backend: as in `group_norm`.

    Returns:
        Shaped like `input`, in its dtype, under autocast too. The kernels lay it out as `input` is,
        where that is contiguous or channels_last; PyTorch makes it contiguous.

    Raises:
        ValueError: as in `group_norm`; a single spatial position, whose variance is always 0; no
            running statistics without `use_input_stats`.
        TypeError: as in `group_norm`.
        NotImplementedError: as in `group_norm`.

    Precision and gradients are those of `group_norm` with a group for each channel; but without
    promotion: PyTorch takes float32 parameters beside a half `input`.

    Example:
        >>> instance_norm(torch.tensor([[[1.0, 3.0], [5.0, 5.1]]]), mode="standard").round()
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    caller = "functional.instance_norm"
    _checks.flags(caller, use_input_stats=use_input_stats)
    t = Tensors(input, None, weight, bias, None, running_mean, running_var)
    tv = target_variance(mode)
    if not use_input_stats:
        constant = BatchNormSpec(False, momentum, eps, tv, activation)
        return carry_out(caller, t, constant, backend)
    spec = GroupNormSpec(_channels(input), eps, tv, activation, momentum=momentum, instance=True)
    return carry_out(caller, t, spec, backend)


def _channels(x: Tensor) -> int:
    try:
        return x.shape[1]
    except (AttributeError, IndexError, RuntimeError, TypeError):  # no input for it: refused later
        return 1
