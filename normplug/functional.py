"""The door: norms as functions, checked here and carried out by the route that `backend` names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops import choice, nested
from normplug._ops.aten import Pool
from normplug.modes import ModeLike, target_variance
from normplug.reference import accumulator_dtype

__all__ = ["add_layer_norm", "batch_norm", "channel_stats", "layer_norm"]


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
    activation: str | None = None,
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
        activation: None, "relu", "silu", "gelu" (exact), "relu6" or "hardswish".
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
    return _fused_batch_norm(
        input, running_mean, running_var, weight, bias, training, momentum, eps, mode=mode,
        residual=residual, activation=activation, num_batches_tracked=num_batches_tracked,
        backend=backend,
    )  # fmt: skip


def _fused_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    *,
    mode: ModeLike,
    residual: Tensor | None,
    activation: str | None,
    num_batches_tracked: Tensor | None,
    backend: str,
    lone: bool = False,
    keeps_residual: bool = False,
) -> Tensor:
    """`batch_norm`.

    lone: whether a compiler would have nothing to fuse it with. keeps_residual: so that the
    kernels' result can be recomputed.
    """
    who = "functional.batch_norm"
    tensors = (
        input, running_mean, running_var, weight, bias, residual, num_batches_tracked
    )  # fmt: skip
    settings = (training, momentum, eps, mode, activation, backend, keeps_residual)
    eager = getattr(input, "is_cuda", False) and not torch.compiler.is_compiling()
    if eager:
        signature = choice.signature(who, settings, tensors)
        if (known := choice.known(signature)) is not None:
            return known(*tensors)
    vectors = (running_mean, running_var, weight, bias)
    _check_batch_norm(who, input, *vectors, residual, num_batches_tracked, training, momentum, eps)
    _checks.activation(who, activation)
    _checks.same_shape(who, input, residual=residual)
    name, tv = _checks.backend(who, backend), target_variance(mode)
    fused = residual is not None or activation is not None
    route = choice.batch_norm(
        who, name, input, residual, num_batches_tracked, vectors, fused, lone,
        training and tv == 1.0, keeps_residual,
    )  # fmt: skip
    _checks.devices(
        who, input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias,
        residual=residual, num_batches_tracked=num_batches_tracked,
    )  # fmt: skip
    numbers = (training, momentum, eps, tv, activation)
    y = route(*tensors, *numbers)
    if eager:
        choice.remember(signature, route, tensors, *numbers)
    return y


def _check_batch_norm(
    who: str,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    num_batches_tracked: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
) -> None:
    _checks.tensors(
        who, input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias,
        residual=residual, num_batches_tracked=num_batches_tracked,
    )  # fmt: skip
    _checks.flags(who, training=training)
    _checks.eps(who, eps)
    _checks.channels(
        who, input, running_mean=running_mean, running_var=running_var, weight=weight, bias=bias
    )
    _checks.running_pair(who, running_mean, running_var, training)
    moves = training and running_mean is not None
    _checks.momentum(who, momentum, num_batches_tracked, moves)
    if training:
        _checks.more_than_one_value(who, input)


def _batch_norm_max_pool(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float | None,
    eps: float,
    *,
    mode: ModeLike,
    pool: Pool,
    num_batches_tracked: Tensor | None,
    backend: str,
) -> Tensor:
    """`pool` of `batch_norm` with relu: in one by the kernels, for channels_last input on CUDA.

    If values tie after rounding, the gradient goes to the one that was largest before rounding.
    The kernels keep `input` and, of each window, its largest value before the norm and a byte.
    """
    who = "functional.batch_norm"
    tensors = (input, running_mean, running_var, weight, bias, num_batches_tracked)
    eager = getattr(input, "is_cuda", False) and not torch.compiler.is_compiling()
    if eager:
        signature = choice.signature(who, (training, momentum, eps, mode, pool, backend), tensors)
        if (known := choice.known(signature)) is not None:
            return known(*tensors)
    vectors = (running_mean, running_var, weight, bias)
    _check_batch_norm(who, input, *vectors, None, num_batches_tracked, training, momentum, eps)
    name, tv = _checks.backend(who, backend), target_variance(mode)
    route = choice.batch_norm_max_pool(name, input, num_batches_tracked, vectors, pool)
    if route is None:
        y = batch_norm(
            input, *vectors, training, momentum, eps, mode=mode, activation="relu",
            num_batches_tracked=num_batches_tracked, backend=backend,
        )  # fmt: skip
        return pool(y)
    numbers = (training, momentum, eps, tv, pool)
    y = route(*tensors, *numbers)
    if eager:
        choice.remember(signature, route, tensors, *numbers)
    return y


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
    return _layer_norm(
        input, normalized_shape, weight, bias, eps, mode=mode, input_bias=input_bias,
        running_mean=running_mean, running_var=running_var,
        num_batches_tracked=num_batches_tracked, momentum=momentum,
        autocast_output=autocast_output, backend=backend,
    )  # fmt: skip


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    mode: ModeLike,
    input_bias: Tensor | None = None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    autocast_output: str,
    backend: str,
    channels_first: bool = False,
) -> Tensor:
    """`layer_norm`; channels_first: the input is a view of images that are."""
    who = "functional.layer_norm"
    try:
        shape = tuple(normalized_shape)
    except TypeError:
        raise _checks.no_shape(who, normalized_shape) from None
    tensors = (input, weight, bias, input_bias, running_mean, running_var, num_batches_tracked)
    eager = getattr(input, "is_cuda", False) and not torch.compiler.is_compiling()
    if eager:
        settings = (shape, momentum, eps, mode, autocast_output, backend, *_autocast())
        signature = choice.signature(who, settings, tensors)
        if (known := choice.known(signature)) is not None:
            return known(*tensors)
    _check_layer_norm(
        who, input, shape, eps, running_mean, running_var, num_batches_tracked, momentum,
        autocast_output, weight=weight, bias=bias, input_bias=input_bias,
    )  # fmt: skip
    if nested.is_strided(input):
        components = input.unbind()
        _checks.components(who, components, shape)
        y = _layer_norm(
            nested.rows(input, shape), shape, weight, bias, eps, mode=mode, input_bias=input_bias,
            running_mean=running_mean, running_var=running_var,
            num_batches_tracked=num_batches_tracked, momentum=momentum,
            autocast_output=autocast_output, backend=backend,
        )  # fmt: skip
        return nested.of_rows(y, input)
    _checks.trailing(who, input, shape, weight=weight, bias=bias, input_bias=input_bias)
    name, tv = _checks.backend(who, backend), target_variance(mode)
    vectors = (weight, bias, input_bias, running_mean, running_var)
    fused = input_bias is not None
    stock = tv == 1.0 and not fused and running_mean is None
    route = choice.layer_norm(
        who, name, input, len(shape), num_batches_tracked, vectors, fused,
        channels_first, stock,
    )  # fmt: skip
    _checks.devices(
        who, input, weight=weight, bias=bias, input_bias=input_bias, running_mean=running_mean,
        running_var=running_var, num_batches_tracked=num_batches_tracked,
    )  # fmt: skip
    numbers = (shape, momentum, eps, tv, autocast_output == "low")
    y = route(*tensors, *numbers)
    if eager:
        choice.remember(signature, route, tensors, *numbers)
    return y


def _check_layer_norm(
    who: str,
    input: Tensor,
    shape: tuple[int, ...],
    eps: float,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    autocast_output: str,
    **others: Tensor | None,
) -> None:
    running = {"running_mean": running_mean, "running_var": running_var}
    running["num_batches_tracked"] = num_batches_tracked
    _checks.tensors(who, input, **others, **running)
    _checks.shape(who, shape)
    _checks.eps(who, eps, zero=True)
    _checks.running_pair(who, running_mean, running_var, training=True)
    _checks.scalars(who, **running)
    _checks.momentum(who, momentum, num_batches_tracked, running_mean is not None)
    _checks.autocast_output(who, autocast_output)


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
    who = "functional.add_layer_norm"
    try:
        shape = tuple(normalized_shape)
    except TypeError:
        raise _checks.no_shape(who, normalized_shape) from None
    tensors = (x, residual, weight, bias, running_mean, running_var, num_batches_tracked)
    eager = getattr(x, "is_cuda", False) and not torch.compiler.is_compiling()
    if eager:
        settings = (shape, momentum, eps, mode, autocast_output, backend, *_autocast())
        signature = choice.signature(who, settings, tensors)
        if (known := choice.known(signature)) is not None:
            return known(*tensors)
    _check_layer_norm(
        who, x, shape, eps, running_mean, running_var, num_batches_tracked, momentum,
        autocast_output, weight=weight, bias=bias, residual=residual,
    )  # fmt: skip
    _checks.same_shape(who, x, residual=residual)
    if nested.is_strided(x):
        total = x + residual
        y = _layer_norm(
            total, shape, weight, bias, eps, mode=mode, running_mean=running_mean,
            running_var=running_var, num_batches_tracked=num_batches_tracked, momentum=momentum,
            autocast_output=autocast_output, backend=backend,
        )  # fmt: skip
        return y, total
    _checks.trailing(who, x, shape, weight=weight, bias=bias)
    name, tv = _checks.backend(who, backend), target_variance(mode)
    vectors = (weight, bias, running_mean, running_var)
    route = choice.add_layer_norm(who, name, x, len(shape), residual, num_batches_tracked, vectors)
    _checks.devices(
        who, x, residual=residual, weight=weight, bias=bias, running_mean=running_mean,
        running_var=running_var, num_batches_tracked=num_batches_tracked,
    )  # fmt: skip
    numbers = (shape, momentum, eps, tv, autocast_output == "low")
    result = route(*tensors, *numbers)
    if eager:
        choice.remember(signature, route, tensors, *numbers)
    return result


def _autocast() -> tuple[bool, torch.dtype]:
    """What of the surroundings decides the dtype of a LayerNorm's result on CUDA."""
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def channel_stats(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over batch and space.

        mean = mean(x)        var = mean((x - mean)^2)

    Args:
        x: (N, C) or (N, C, *space), floating point.

    Returns:
        (mean, var), each (C,), float32 (float64 for float64 input); nan for an empty batch.

    Raises:
        ValueError: where `x` has no channel dimension.
        TypeError: where `x` is no tensor, or not floating point.

    Example:
        >>> channel_stats(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        (tensor([2., 5.]), tensor([1., 0.]))
    """
    who = "functional.channel_stats"
    _checks.floating(who, x)
    _checks.channels(who, x)
    if (by_kernel := choice.channel_stats(x)) is not None:
        return by_kernel
    dims = (0, *range(2, x.dim()))
    x = x.to(accumulator_dtype(x.dtype))
    if x.numel() == 0:
        nan = x.new_full((x.shape[1],), torch.nan)
        return nan, nan.clone()
    var, mean = torch.var_mean(x, dim=dims, correction=0)
    return mean, var
