"""What a call of a norm is: its tensors, its numbers, and what can carry it out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug._activations import ActivationLike
from normplug.reference import rms_eps


class Tensors(NamedTuple):
    """The tensors of a call, in the order that everything below `functional` has them in.

    `tracked` is num_batches_tracked. What a norm does not take is None.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    input_bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    tracked: Tensor | None = None


def others(t: Tensors) -> dict[str, Tensor | None]:
    """All tensors but x, by the names of the arguments."""
    _, residual, weight, bias, input_bias, running_mean, running_var, tracked = t
    return {
        "residual": residual,
        "weight": weight,
        "bias": bias,
        "input_bias": input_bias,
        "running_mean": running_mean,
        "running_var": running_var,
        "num_batches_tracked": tracked,
    }


class Pool(NamedTuple):
    """Max pooling over two dimensions, height first, with the arguments of `F.max_pool2d`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool

    def __call__(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, self.kernel, self.stride, self.padding, ceil_mode=self.ceil_mode)

    def is_proper(self) -> bool:
        """Whether torch accepts it. Then every window has a value."""
        pads = zip(self.padding, self.kernel, strict=True)
        return min(self.kernel + self.stride) > 0 and all(0 <= 2 * p <= k for p, k in pads)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output; sizes may be symbols."""
        return self._length(height, 0), self._length(width, 1)

    def _length(self, size: int, axis: int) -> int:
        # No slice of self: torch.compile of torch 2.6 cannot follow one.
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        past = size + 2 * padding - kernel
        if not self.ceil_mode:
            return past // stride + 1
        length = -(-past // stride) + 1
        # The last window starts in the image or the padding before it.
        return length - 1 if (length - 1) * stride >= size + padding else length


class BatchNormSpec(NamedTuple):
    """All of a BatchNorm that is not a tensor.

    keeps_residual: save the residual for the backward, so that the result can be recomputed.
    """

    training: bool
    momentum: float | None
    eps: float
    target_variance: float
    activation: ActivationLike = None
    pool: Pool | None = None
    keeps_residual: bool = False

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """The dimensions of x over which a call can be split without a change of its results."""
        if self.training:
            return ()
        return (0,) if self.pool is not None else (0, *range(2, t.x.dim()))

    def without_pool(self) -> BatchNormSpec:
        """The norm alone."""
        # torch.compile of torch 2.6 cannot follow `_replace`.
        return BatchNormSpec(
            self.training, self.momentum, self.eps, self.target_variance, self.activation
        )


class LayerNormSpec(NamedTuple):
    """All of a norm of rows that is not a tensor: of a LayerNorm, or of an RMSNorm.

    eps: None is for an RMSNorm: see `reference.rms_eps`.
    autocast: the dtype that autocast has set on the device, or None where it is off or ignored.
    autocast_output: "float32", or "low" to return that dtype.
    centred: whether the rows' mean is subtracted: True for LayerNorm, False for RMSNorm.
    weight_offset: added to the weight, in the dtype of sums. Without a weight it has no effect.
    rounding: where an RMSNorm rounds. None: where `torch.rms_norm` does. "output": once, at the
        end, to the dtype of the input; in torch 2.6 `torch.rms_norm` rounds half values between
        its steps too. "input" and "weight": first x / rms * sqrt(tv), to the dtype of the input,
        or to that of the weight if it is half; then the product with the weight, to the dtype
        that the two promote to.
    """

    normalized_shape: tuple[int, ...]
    momentum: float | None
    eps: float | None
    target_variance: float
    autocast: torch.dtype | None
    autocast_output: str
    centred: bool = True
    weight_offset: float = 0.0
    rounding: str | None = None

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """As `BatchNormSpec.free_dims`: the rows. What is only watched may change."""
        return tuple(range(t.x.dim() - len(self.normalized_shape)))

    def eps_of(self, total: torch.dtype) -> float:
        """The eps, where `total` is the dtype of what is normalised."""
        return rms_eps(total, self.eps)

    def rounds_to(self, total: torch.dtype, weight: torch.dtype | None) -> torch.dtype | None:
        """The dtype to round to before the product with the weight; None to keep all digits.

        weight: the dtype of the weight, if there is one.
        """
        if self.rounding == "input":
            return total
        is_half = weight in (torch.float16, torch.bfloat16)
        return weight if self.rounding == "weight" and is_half else None

    def output_dtype(self, total: torch.dtype, weight: torch.dtype | None = None) -> torch.dtype:
        """The dtype of the result; arguments as in `rounds_to`."""
        under_autocast = _autocast_result(total, self.autocast, self.autocast_output)
        if under_autocast is not None:
            return under_autocast
        if self.rounding in (None, "output") or weight is None:
            return total
        return torch.promote_types(self.rounds_to(total, weight) or total, weight)


class GroupNormSpec(NamedTuple):
    """All of a GroupNorm that is not a tensor; an InstanceNorm is one whose groups are channels.

    autocast, autocast_output: as in `LayerNormSpec`.
    momentum: of running statistics, if the call moves any. No kernel depends on it.
    instance: whether it is an InstanceNorm, whose running statistics are those of its channels.
    """

    groups: int
    eps: float
    target_variance: float
    activation: ActivationLike = None
    autocast: torch.dtype | None = None
    autocast_output: str = "float32"
    momentum: float | None = 0.1
    instance: bool = False

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """As `BatchNormSpec.free_dims`: the samples, unless statistics that are used move."""
        return () if self.instance and t.running_mean is not None else (0,)

    def output_dtype(self, x: torch.dtype) -> torch.dtype:
        """The dtype of the result, where `x` is that of the input."""
        return _autocast_result(x, self.autocast, self.autocast_output) or x


def _autocast_result(
    dtype: torch.dtype, autocast: torch.dtype | None, autocast_output: str
) -> torch.dtype | None:
    """The dtype of a result under autocast; None where that is off, or leaves `dtype` alone."""
    if autocast is None or dtype == torch.float64:
        return None
    return autocast if autocast_output == "low" else torch.float32


class Route:
    """One way to carry out the calls of a norm."""

    def refusal(self, t: Tensors, spec: Any) -> str | None:
        """Why it cannot carry out this call; None where it can."""
        return None

    def __call__(self, t: Tensors, spec: Any) -> Any:
        """Carry out a call that has been checked, and has no refusal."""
        raise NotImplementedError

    def bind(self, t: Tensors, spec: Any) -> Callable[[Tensors], Any]:
        """The shortest way to carry out calls like this one."""
        return partial(self.__call__, spec=spec)
