"""Norms as functions. Each builds the tensors and the spec of a call, and `_ops.call` runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normplug import _checks
from normplug._checks import as_number
from normplug._choices import AutocastOutput, Backend
from normplug._ops.batch_norm import BatchNormSpec
from normplug._ops.batch_norm import channel_stats as _channel_stats
from normplug._ops.call import call
from normplug._ops.group_norm import GroupNormSpec
from normplug._ops.plans import accumulator_of
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors, autocast_dtype
from normplug._torch import RMS_NORM_AUTOCASTS
from normplug.modes import ModeLike, target_variance

__all__ = [
    "add_layer_norm", "add_rms_norm", "batch_norm", "channel_stats", "group_norm",
    "instance_norm", "layer_norm", "rms_norm",
]  # fmt: skip


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
    backend: Backend = "auto",
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
            layout differs from `input`'s.
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
        Shaped like `input`, in its dtype (promoted with the dtype of `residual`).

    Raises:
        ValueError: mismatched shapes or devices, one value per channel in training, evaluation
            without running statistics, an unknown mode, activation or backend.
        TypeError: an argument of another type, or tensors that are not floating point.
        NotImplementedError: `backend` is "triton" and the kernels cannot run; the message says why.

    Precision: sums are float32 (float64 for float64 input). With tv other than 1, the torch backend
    rounds weight * sqrt(tv) to the dtype of `weight`; the kernels do not.
    Twice differentiable in `input`, `weight`, `bias` and `residual`. The kernels are bitwise
    deterministic. For the backward they save `input` and two numbers per channel; with `residual`
    and relu also one bit per element, and with `residual` and another activation also `residual`.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> batch_norm(x, None, None, training=True, eps=1e-12, mode=0.25).flatten()
        tensor([-0.5000,  0.5000])
    """
    statistics = (running_mean, running_var, num_batches_tracked)
    t = Tensors(input, residual, weight, bias, None, *statistics)
    if type(eps) is not float or type(momentum) is not float:
        momentum, eps = as_number(momentum), as_number(eps)
    spec = BatchNormSpec(training, momentum, eps, target_variance(mode), activation)
    return call("functional.batch_norm", t, spec, backend)


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
        >>> channel_stats(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.]), tensor([1., 0.]))
    """
    caller = "functional.channel_stats"
    _checks.floating(caller, x)
    _checks.channels(caller, x)
    return _channel_stats(x)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    input_bias: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: AutocastOutput = "float32",
    backend: Backend = "auto",
) -> Tensor:
    """Normalise each row over its trailing `normalized_shape` to the target variance of `mode`.

        y = weight * sqrt(tv) * (h - mean) / sqrt(var + eps) + bias        h = input + input_bias
        y * (1 + scale) + shift, if there is a scale or a shift: adaptive LayerNorm

    mean and biased var belong to the row. The running statistics, if given, are for monitoring
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
        scale: of each sample, (B, *normalized_shape) or (B, 1, *normalized_shape) for input
            (B, L, *normalized_shape); or of each token, shaped like `input`; or None. The kernels
            read slices of a larger tensor, as `chunk` makes them, without a copy.
        shift: of the shape of `scale`, or None.
        running_mean: scalar tensor, updated in place, or None.
        running_var: scalar tensor, updated in place, or None.
        num_batches_tracked: integer scalar tensor, incremented when they are updated, or None.
        momentum: weight of the new batch in the running statistics; None averages over all
            batches equally.
        autocast_output: the dtype of the result under autocast. "float32" follows
            `torch.nn.functional.layer_norm` (float32 on CUDA); "low" is the autocast dtype, which
            the next linear layer would cast to anyway. Sums are float32 in both.
        backend: "auto" (whichever was measured to be faster), "triton" or "torch".

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it is contiguous, and the gradient of a dense `input` has the layout of `input`. A nested
        tensor gives a nested tensor of the same layout.

    Raises:
        ValueError: mismatched shapes or devices, one running statistic without the other, a
            momentum of None without a counter, an unknown mode, autocast_output or backend.
        TypeError, NotImplementedError: as `batch_norm`.

    Precision: sums are float32, or float64 if a tensor is. The torch backend promotes mixed dtypes
    and rounds the result back, which costs a copy of `input`, except on the CPU if a 16-bit `input`
    has float32 parameters. It also rounds weight * sqrt(tv) and input + input_bias. The kernels do
    neither.
    Twice differentiable in `input`, `weight`, `bias`, `input_bias`, `scale` and `shift`. The
    kernels are bitwise deterministic. For the backward they save `input` and two numbers per row.
    With a scale or a shift they hold rows of up to 8,192 values; if there is an `input_bias`, too,
    PyTorch's operations run the call. Adaptive LayerNorm: Peebles and Xie 2022 (arXiv:2212.09748).

    Examples:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,), mode="standard").round()
        tensor([[-1.,  1.]])
    """
    caller = "functional.layer_norm"
    statistics = (running_mean, running_var, num_batches_tracked)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, backend)
    if scale is None and shift is None:
        t = Tensors(input, None, weight, bias, input_bias, *statistics)
        return _norm_of_rows(caller, t, *numbers)
    offset = 1.0
    if weight is None and bias is None:
        t = Tensors(input, None, scale, shift, input_bias, *statistics)
    else:
        t = Tensors(input, None, weight, bias, input_bias, *statistics)
        t, offset = _adaptive(caller, t, normalized_shape, scale, shift, 0.0)
    return _norm_of_rows(caller, t, *numbers, True, offset, None, None, None, True)


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
    autocast_output: AutocastOutput = "float32",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: the step between two blocks of a pre-norm transformer.

        total = x + residual        y = layer_norm(total)

    `x`, (*rows, *normalized_shape), is a block's output; `residual`, shaped like `x`, the stream
    that it is added to. If the rows of both have two strides, the kernels copy `residual` unless it
    has the layout of `x`. `layer_norm` explains the other arguments and the errors; the running
    statistics describe total.

    Returns:
        (y, total), both shaped like `x`, in the promoted dtype of `x` and `residual` (y under
        autocast: see `autocast_output`). y is the norm of the rounded total.

    Raises:
        ValueError: what `layer_norm` refuses, or a `residual` that is not shaped like `x`.

    Twice differentiable in `x`, `residual`, `weight` and `bias`. The kernels do both steps in one
    launch, and save `total` for the backward.

    Examples:
        >>> y, total = add_layer_norm(torch.ones(1, 2), torch.tensor([[0.0, 2.0]]), (2,))
        >>> total
        tensor([[1., 3.]])
    """
    statistics = (running_mean, running_var, num_batches_tracked)
    t = Tensors(x, residual, weight, bias, None, *statistics)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, backend)
    return _norm_of_rows("functional.add_layer_norm", t, *numbers)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    mode: ModeLike = "standard",
    weight_offset: float = 0.0,
    gate: Tensor | None = None,
    gate_first: bool = False,
    group_size: int | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    running_var: Tensor | None = None,
    num_batches_tracked: Tensor | None = None,
    momentum: float | None = 0.1,
    autocast_output: AutocastOutput = "float32",
    backend: Backend = "auto",
) -> Tensor:
    """Divide each row over its trailing `normalized_shape` by its root mean square.

        y = (weight + weight_offset) * sqrt(tv) * input / sqrt(mean(input^2) + eps)
        y * silu(gate), if there is a gate; if it is first, y of input * silu(gate)
        y * (1 + scale) + shift, if there is a scale or a shift: see `layer_norm`

    The rows are not centred, so the target variance tv of `mode` is a target *second moment*: the
    mean of y^2 over a row if weight + weight_offset is 1. For rows of mean 0 it is their variance.

    `weight`, `normalized_shape` or None for a factor of one, gets `weight_offset` added in the
    dtype of the sums: 1 for Gemma, whose weights start at 0. An `eps` of None is the machine
    epsilon of float32 (of float64 for float64 `input`), as in torch since 2.7. `running_var` is
    updated with the mean of input^2 over all rows: the *second moment*. With `autocast_output`
    "float32" the result follows `torch.nn.functional.rms_norm` (on CUDA float32 in torch 2.15, the
    dtype of `input` in 2.11). "auto" takes the kernels if they can run. `layer_norm` explains the
    other arguments and the errors.

    `gate` is shaped like `input`, or None; `gate_first` has no effect without it. silu(gate) is
    computed in the dtype of the sums. `group_size`, a divisor of the one size in
    `normalized_shape`, is the number of adjacent values of a row that are normalised together; None
    for the whole row. The gated norm of Mamba2 (Dao and Gu 2024, arXiv:2405.21060) has `gate_first`
    and groups. The kernels hold groups and gated rows of up to 8,192 values. A gate or a
    `group_size` together with a `scale` or a `shift` raises a ValueError.

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it is contiguous.

    Precision: sums are float32 (float64 for float64 input), and the result is rounded once. With tv
    other than 1, the torch backend rounds weight * sqrt(tv) to the dtype of `weight`; the kernels
    do not. The kernels are bitwise deterministic. The bits of a row of y do not depend on the other
    rows, nor, for the same layout, on their number.
    Twice differentiable in `input`, `weight`, `gate`, `scale` and `shift`. For the backward the
    kernels save `input`, `gate` and one number per row.

    Examples:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), (2,), mode="standard")
        tensor([[0.8485, 1.1314]])
    """
    caller = "functional.rms_norm"
    if gate_first is not False:
        _checks.flags(caller, gate_first=gate_first)
    t = Tensors(input, gate, weight, None, None, None, running_var, num_batches_tracked)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, backend)
    place = None
    if gate is not None:
        place = "first" if gate_first else "last"
    is_adaptive = scale is not None or shift is not None
    if is_adaptive:
        _checks.number(caller, "weight_offset", weight_offset)
        vectors = (normalized_shape, scale, shift, weight_offset)
        t, weight_offset = _adaptive(caller, t, *vectors)
    formula = (False, weight_offset, None, place, group_size, is_adaptive)
    return _norm_of_rows(caller, t, *numbers, *formula)


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
    autocast_output: AutocastOutput = "float32",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Add, then normalise: the step between two blocks of a pre-norm transformer.

        total = x + residual        y = rms_norm(total)

    `rms_norm` explains `eps`, `weight_offset` and `running_var`, and `add_layer_norm` the rest.
    Twice differentiable in `x`, `residual` and `weight`.

    Examples:
        >>> y, total = add_rms_norm(torch.ones(1, 2), torch.tensor([[2.0, 3.0]]), (2,))
        >>> total
        tensor([[3., 4.]])
    """
    t = Tensors(x, residual, weight, None, None, None, running_var, num_batches_tracked)
    numbers = (normalized_shape, momentum, eps, mode, autocast_output, backend)
    return _norm_of_rows("functional.add_rms_norm", t, *numbers, False, weight_offset)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    mode: ModeLike = "standard",
    activation: str | tuple[str, float] | None = None,
    autocast_output: AutocastOutput = "float32",
    backend: Backend = "auto",
) -> Tensor:
    """Normalise each group of channels of each sample to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    The C channels form `num_groups` groups of adjacent channels. mean and biased var belong to
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
        activation: None, "relu", "silu", "gelu" (exact), "relu6", "hardswish" or "leaky_relu", or a
            pair such as ("leaky_relu", 0.2).
        autocast_output: the dtype of the result under autocast: "float32", the rule of
            `torch.nn.functional.group_norm`, or "low", the autocast dtype.
        backend: "auto" (whichever was measured to be faster), "triton" or "torch".

    Returns:
        Shaped like `input`, in its dtype (under autocast: see `autocast_output`). From the kernels
        it has the layout of `input` if that is contiguous or channels_last.

    Raises:
        ValueError: a `num_groups` that does not divide C, a single sample with one value per group,
            an unknown autocast_output, or what `batch_norm` refuses.
        TypeError, NotImplementedError: as `batch_norm`.

    Precision: as for `layer_norm`. Twice differentiable in `input`, `weight` and `bias`. The
    kernels are bitwise deterministic. For the backward they save `input` and two numbers per group
    of each sample.

    Examples:
        >>> group_norm(torch.tensor([[1.0, 3.0, 5.0, 5.1]]), 2, mode="standard").round()
        tensor([[-1.,  1., -1.,  1.]])
    """
    t = Tensors(input, None, weight, bias)
    spec = GroupNormSpec(
        num_groups,
        as_number(eps),
        target_variance(mode),
        activation,
        autocast_dtype(input),
        autocast_output,
    )
    return call("functional.group_norm", t, spec, backend)


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
    backend: Backend = "auto",
) -> Tensor:
    """Normalise each channel of each sample over space to the target variance of `mode`.

        y = activation(weight * sqrt(tv) * (input - mean) / sqrt(var + eps) + bias)

    With `use_input_stats`, mean and biased var belong to a channel of one sample. The running
    statistics, if given, are updated with the averages over samples of mean and *unbiased*
    variance, as in `torch.nn.functional.instance_norm`. Otherwise mean and var are the running
    statistics. An empty batch leaves the running statistics unchanged.

    `input` is (N, C, *space); the running statistics are (C,), or None; unlike in `batch_norm`,
    `momentum` must be a number. `group_norm` explains the other arguments.

    Returns:
        Shaped like `input`, in its dtype, under autocast too. From the kernels it has the layout of
        `input` if that is contiguous or channels_last; from PyTorch it is contiguous.

    Raises:
        ValueError: what `group_norm` refuses; one running statistic without the other, or none
            without `use_input_stats`; a single spatial position, whose variance is always 0.

    Precision and gradients are `group_norm`'s, with one group per channel. But the torch backend
    does not promote, since PyTorch accepts float32 parameters with a half `input`.

    Examples:
        >>> instance_norm(torch.tensor([[[1.0, 3.0], [5.0, 5.1]]]), mode="standard").round()
        tensor([[[-1.,  1.],
                 [-1.,  1.]]])
    """
    caller = "functional.instance_norm"
    _checks.flags(caller, use_input_stats=use_input_stats)
    t = Tensors(input, None, weight, bias, None, running_mean, running_var)
    momentum = as_number(momentum)
    eps = as_number(eps)
    variance = target_variance(mode)
    if not use_input_stats:
        constant = BatchNormSpec(
            False, momentum, eps, variance, activation, instance=True
        )
        return call(caller, t, constant, backend)
    # The checks refuse an input without channels.
    has_channels = isinstance(input, Tensor) and not input.is_nested and input.dim() > 1
    groups = input.shape[1] if has_channels else 1
    spec = GroupNormSpec(
        groups, eps, variance, activation, momentum=momentum, instance=True
    )
    return call(caller, t, spec, backend)


def _norm_of_rows(
    caller: str,
    t: Tensors,
    shape: Sequence[int],
    momentum: float | None,
    eps: float | None,
    mode: ModeLike,
    autocast_output: str,
    backend: str,
    centred: bool = True,
    *formula: Any,
) -> Any:
    """Run a norm of rows. formula: the fields of its spec after `centred`."""
    variance = target_variance(mode)
    if type(shape) is not tuple:
        shape = _as_tuple(caller, shape)
    if type(momentum) is not float or not (eps is None or type(eps) is float):
        momentum = as_number(momentum)
        eps = as_number(eps)
    # Autocast leaves torch's RMSNorm alone in some versions.
    is_cast = centred or RMS_NORM_AUTOCASTS or str(autocast_output) == "low"
    autocast = autocast_dtype(t.x) if is_cast else None
    options = (autocast, autocast_output, centred, *formula)
    spec = LayerNormSpec(shape, momentum, eps, variance, *options)
    return call(caller, t, spec, backend)


def _as_tuple(caller: str, shape: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(shape)
    except TypeError:
        rule = "a sequence of integers, e.g. input.shape[-1:]"
        got = _checks.described(shape)
        raise TypeError(_checks.must(caller, "normalized_shape", rule, got)) from None


def _adaptive(
    caller: str,
    t: Tensors,
    shape: Sequence[int],
    scale: Tensor | None,
    shift: Tensor | None,
    weight_offset: float,
) -> tuple[Tensors, float]:
    """The call with a scale and a shift in place of weight and bias, and the scale's offset.

    (weight * xhat + bias) * (1 + scale) + shift is one scale and one shift of xhat, too.
    """
    weight, bias, offset = scale, shift, 1.0
    if t.weight is not None or t.bias is not None:
        shape = _as_tuple(caller, shape)
        _checks.tensors(caller, *t)
        _checks.trailing(caller, t.x, shape, weight=t.weight, bias=t.bias)
        _checks.modulation(caller, t.x, shape, scale, shift)
        acc = accumulator_of(Tensors(t.x, scale, t.weight, t.bias, shift))
        like: Any = shift
        one = torch.ones_like(like, dtype=acc) if scale is None else scale.to(acc) + 1
        weight = one if t.weight is None else one * (t.weight.to(acc) + weight_offset)
        if t.bias is not None:
            bias = one * t.bias if shift is None else one * t.bias + shift
        offset = 0.0
    inputs = (t.x, t.residual, weight, bias, t.input_bias)
    return Tensors(*inputs, t.running_mean, t.running_var, t.tracked), offset
