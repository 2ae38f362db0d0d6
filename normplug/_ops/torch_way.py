"""What the norms share where PyTorch's own kernels run: any device, differentiable twice.

weight * sqrt(tv) * xhat + bias is the stock norm with weight * sqrt(tv) in place of weight, so that
the target variance costs no pass over the data.

Running statistics are updated as follows; the kernels do the same in their last step.

    step    = momentum, or 1 / number of batches if momentum is None
    running = running + step * (value - running)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from normplug._ops.spec import Tensors
from normplug._torch import in_backward, interposed
from normplug.reference import accumulator_dtype


def scaled(
    weight: Tensor | None,
    target_variance: float,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """The weight times sqrt(target_variance). A missing weight counts as ones of `shape`."""
    if target_variance == 1.0:
        return weight
    root = math.sqrt(target_variance)
    if weight is None:
        return torch.full(shape, root, dtype=dtype, device=device)
    return weight * root


def scaled_channels(
    t: Tensors, target_variance: float, like: Tensor | None
) -> Tensor | None:
    """The weight of each channel times sqrt(target_variance).

    like: gives the dtype if there is neither weight nor bias; None for the accumulator dtype.
    """
    if target_variance == 1.0:
        return t.weight
    like = like if t.bias is None else t.bias
    dtype = accumulator_dtype(t.x.dtype) if like is None else like.dtype
    return scaled(t.weight, target_variance, (t.x.shape[1],), dtype, t.x.device)


def prepared(
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target_variance: float,
    shape: Sequence[int],
    promotes: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The input, scaled weight and bias for a stock norm.

    promotes: whether to cast them to their common dtype: most kernels do not mix dtypes.
    """
    dtype = h.dtype
    if promotes:
        # Only if they differ: torch.export of torch 2.6 cannot save a graph with `promote_types`.
        for v in (weight, bias):
            if v is not None and v.dtype != dtype:
                dtype = torch.promote_types(dtype, v.dtype)
        h = h if h.dtype == dtype else h.to(dtype)
        weight, bias = (
            v if v is None or v.dtype == dtype else v.to(dtype) for v in (weight, bias)
        )
    dtype = h.dtype if bias is None else bias.dtype
    return h, scaled(weight, target_variance, shape, dtype, h.device), bias


def mixes_dtypes(h: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether PyTorch's LayerNorm and GroupNorm accept these dtypes without a cast.

    On the CPU they accept a float32 weight for a 16-bit input, with a float32 bias or none.
    """
    is_16_bit = h.dtype in (torch.float16, torch.bfloat16)
    if h.device.type != "cpu" or not is_16_bit or weight is None:
        return False
    return weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)


def cast(
    y: Tensor, dtype: torch.dtype, autocast: torch.dtype | None, output: str
) -> Tensor:
    """Cast the result of a stock norm. dtype: of its input; the others: see `LayerNormSpec`."""
    if autocast is None:
        return y if y.dtype == dtype else y.to(dtype)
    return y.to(autocast) if output == "low" else y


def realigned(y: Tensor) -> Tensor:
    """Return y, which takes its gradient in its own strides if it is on the CPU.

    Where a dimension has size 1, PyTorch's CPU kernels (2.6 to 2.15) mistake the strides of one
    memory format for another's, and return wrong gradients.
    """
    if torch.compiler.is_compiling() or interposed():  # before its sizes are read
        return y
    if 1 in y.shape and y.device.type == "cpu" and y.grad_fn is not None:
        strides = y.stride()

        def in_strides(gradients: Any) -> Any:
            dy, *rest = gradients
            if dy is None or dy.stride() == strides:
                return None
            return (dy.new_empty_strided(dy.shape, strides).copy_(dy), *rest)

        y.grad_fn.register_prehook(in_strides)
    return y


def empty_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """The norm over channels of an input without values.

    All inputs stay in the graph, so that each gets a gradient (of zeros). The running statistics
    are not updated; ATen's kernels would fill them with nan.
    """
    shape = (1, -1, *[1] * (x.dim() - 2))
    y = x.clone() if weight is None else x * weight.reshape(shape)
    return (y if bias is None else y + bias.reshape(shape)).to(x.dtype)


def variance_of(rstd: Tensor, eps: float) -> Tensor:
    """The variance, recovered from rstd = 1 / sqrt(var + eps)."""
    # In float32 it has an error of about 1e-7 * (var + eps), which could make it negative.
    return rstd.pow(-2).sub_(eps).clamp_min_(0)


def has_readable_count(t: Tensors) -> bool:
    """Whether the host can read the count of batches without waiting for a device."""
    on_host = t.tracked is not None and t.tracked.is_cpu
    return on_host and not (torch.compiler.is_compiling() or interposed())


def update_running(
    t: Tensors,
    momentum: float | None,
    mean: Tensor | None,
    var: Tensor,
    counts: Tensor | None = None,
) -> None:
    """Count a batch, and move a call's running statistics one step towards mean and var.

    One function does both, since activation checkpointing must not repeat one without the other: it
    recomputes a forward up to the last tensor that is saved for the backward.

    counts: whether the batch counts, as a boolean tensor. If not, nothing is updated.
    """
    running_mean, running_var, tracked = t.running_mean, t.running_var, t.tracked
    assert running_var is not None
    if tracked is not None:
        tracked.add_(1 if counts is None else counts)
    step: Any = momentum
    if step is None:
        # In torch.nn it is a float, for which the host would have to wait for the GPU.
        assert tracked is not None
        step = tracked.to(running_var).clamp(min=1).reciprocal()
    if running_mean is not None and mean is not None:
        _move(running_mean, mean, step, counts)
    _move(running_var, var, step, counts)


def guarded(t: Tensors, momentum: float | None, run: Callable[[Tensors], Any]) -> Any:
    """Run a call whose running statistics are safe: see `docs/safe.md`.

    `run` updates finite copies, so a new value is finite exactly if the batch's is. A channel
    stores its new mean and variance if both are. The batch counts if its first channel is finite,
    as in the kernels. With a momentum of None, which averages over the counted batches, it counts
    if any channel is. A forward within a backward is a repetition by activation checkpointing, and
    stores nothing.
    """
    mean, var, tracked = t.running_mean, t.running_var, t.tracked
    if mean is None or var is None:
        return run(t)
    new_mean = _finite_copy(mean)
    new_var = _finite_copy(var)
    new_tracked = None if tracked is None else tracked.clone()
    # Dynamo of torch 2.6 cannot call `_replace`.
    inputs = (t.x, t.residual, t.weight, t.bias, t.input_bias)
    result = run(Tensors(*inputs, new_mean, new_var, new_tracked))
    if is_repeated():
        return result
    finite = torch.isfinite(new_mean) & torch.isfinite(new_var)
    for running, new in ((mean, new_mean), (var, new_var)):
        # A value that was not finite before stays as it is, for `doctor` to find.
        running.copy_(torch.where(finite & torch.isfinite(running), new, running))
    if tracked is not None and new_tracked is not None:
        counts = finite.any() if momentum is None else finite[0]
        tracked.copy_(torch.where(counts, new_tracked, tracked))
    return result


def is_repeated() -> bool:
    """Whether activation checkpointing may be repeating this forward. A compiler cannot know."""
    return not torch.compiler.is_compiling() and in_backward()


def _finite_copy(running: Tensor) -> Tensor:
    return torch.nan_to_num(running, nan=0.0, posinf=0.0, neginf=0.0)


def _move(
    running: Tensor, value: Tensor, step: float | Tensor, counts: Tensor | None
) -> None:
    value = value.to(running.dtype)
    if counts is not None:
        # A step from a value to itself changes no bit.
        value = value.where(counts, running)
    if running.dim() == 0 and running.dtype == torch.float64:
        # On the CPU, torch.compile of torch 2.8 to 2.13 drops writes to such a tensor, but keeps
        # writes to a view of it.
        running = running.view(1)
    running.lerp_(value, step)
