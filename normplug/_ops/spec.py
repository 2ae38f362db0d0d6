"""A norm call: its tensors, its non-tensor arguments, and the routes that can run it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from normplug._activations import ActivationLike
from normplug.reference import channel_dims, rms_eps


class Tensors(NamedTuple):
    """The tensors of a call, in the order used everywhere below `functional`.

    `tracked` is num_batches_tracked. A tensor that a call does not have is None.
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
    """All tensors but x, by argument name."""
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
        """Whether torch accepts the window. If so, every window covers a value."""
        pads = zip(self.padding, self.kernel, strict=True)
        return min(self.kernel + self.stride) > 0 and all(0 <= 2 * p <= k for p, k in pads)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the output; sizes may be symbolic."""
        return self._length(height, 0), self._length(width, 1)

    def _length(self, size: int, axis: int) -> int:
        # No slices of self: torch.compile of torch 2.6 cannot trace them.
        kernel, stride, padding = self.kernel[axis], self.stride[axis], self.padding[axis]
        past = size + 2 * padding - kernel
        if not self.ceil_mode:
            return past // stride + 1
        length = -(-past // stride) + 1
        # The last window starts in the image or the padding before it.
        return length - 1 if (length - 1) * stride >= size + padding else length


class BatchNormSpec(NamedTuple):
    """The non-tensor arguments of a BatchNorm call.

    keeps_residual: save the residual for the backward, so that the result can be recomputed.
    peers: the `peers.Peers` of the processes over whose joined batch the norm is; None if alone.
    instance: whether it is an InstanceNorm in evaluation with running statistics.
    """

    training: bool
    momentum: float | None
    eps: float
    target_variance: float
    activation: ActivationLike = None
    pool: Pool | None = None
    keeps_residual: bool = False
    peers: Any = None
    instance: bool = False

    def free_dims(self, t: Tensors) -> tuple[int, ...]:
        """The dimensions of x along which a call can be split without changing its results."""
        if self.training:
            return ()
        return (0,) if self.pool is not None else channel_dims(t.x)

    def without_pool(self) -> BatchNormSpec:
        """The spec of the norm alone."""
        # torch.compile of torch 2.6 cannot trace `_replace`.
        return BatchNormSpec(
            self.training, self.momentum, self.eps, self.target_variance, self.activation,
            peers=self.peers,
        )  # fmt: skip


class LayerNormSpec(NamedTuple):
    """The non-tensor arguments of a norm of rows: of a LayerNorm or an RMSNorm call.

    eps: None only for an RMSNorm: see `reference.rms_eps`.
    autocast: the dtype that autocast has set on the device, or None where it is off or ignored.
    autocast_output: "float32", or "low" to return that dtype.
    centred: whether the rows' mean is subtracted: True for LayerNorm, False for RMSNorm.
    weight_offset: added to the weight, in the accumulator dtype. Without a weight it has no effect.
    rounding: where an RMSNorm rounds. None: where `torch.rms_norm` does. "output": once, at the
        end, to the dtype of the input; in torch 2.6 `torch.rms_norm` also rounds half-precision
        intermediates. "input" and "weight": first x / rms * sqrt(tv), to the dtype of the input,
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
        """As `BatchNormSpec.free_dims`: those of the rows. Only watched statistics may differ."""
        return tuple(range(t.x.dim() - len(self.normalized_shape)))

    def eps_of(self, total: torch.dtype) -> float:
        """The eps, where `total` is the dtype of the tensor that is normalised."""
        return rms_eps(total, self.eps)

    def rounds_to(self, total: torch.dtype, weight: torch.dtype | None) -> torch.dtype | None:
        """The dtype to round to before the product with the weight; None not to round.

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
    """The non-tensor arguments of a GroupNorm call, or an InstanceNorm's: a group per channel.

    autocast, autocast_output: as in `LayerNormSpec`.
    momentum: of the running statistics, if the call updates any. No kernel depends on it.
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
        """As `BatchNormSpec.free_dims`: the samples, unless statistics used in eval are updated."""
        return () if self.instance and t.running_mean is not None else (0,)

    def output_dtype(self, x: torch.dtype) -> torch.dtype:
        """The dtype of the result, where `x` is the dtype of the input."""
        return _autocast_result(x, self.autocast, self.autocast_output) or x


def _autocast_result(
    dtype: torch.dtype, autocast: torch.dtype | None, autocast_output: str
) -> torch.dtype | None:
    """The dtype of a result under autocast; None if autocast is off or does not change `dtype`."""
    if autocast is None or dtype == torch.float64:
        return None
    return autocast if autocast_output == "low" else torch.float32


class Route:
    """One way to run the calls of a norm."""

    def refusal(self, t: Tensors, spec: Any) -> str | None:
        """Why this route cannot run a call; None if it can."""
        return None

    def __call__(self, t: Tensors, spec: Any) -> Any:
        """Run a call that has passed the checks and that `refusal` accepts."""
        raise NotImplementedError

    def bind(self, t: Tensors, spec: Any) -> Callable[[Tensors], Any]:
        """Return the fastest function that runs calls like this one."""
        return partial(self.__call__, spec=spec)
