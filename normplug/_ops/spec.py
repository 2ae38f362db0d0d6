"""What every norm has: the tensors of its calls, and the methods of its spec.

A spec is a named tuple of a call's non-tensor arguments, and the norm itself. It is hashable, since
it is part of the key by which calls are stored. Its methods, for a call with the `Tensors` t:

    check(caller, t)            refuse an invalid call, by a ValueError or a TypeError
    free_dims(t)                the dimensions along which x can be split over processes without
                                changing results
    by_torch(t)                 run it by PyTorch's kernels: any device, differentiable twice
    refusal(t)                  why the kernels cannot run it; None if they can
    laid_out(t)                 t, with copies of tensors whose layout the kernels cannot read
    plan(t)                     the `plans.Plan` of a call that is laid out
    operator(t)                 run it by the kernels, as an operator: see `operators.NormOperators`
    compiled(t)                 what a compiler should call where kernels can run: a method, such as
                                `operator`, or None for PyTorch's operations, which it fuses
    fake(t), fake_dx(x)         the operator's outputs and the gradient of x, without values; sizes
                                may be symbolic

    without_kernels(t, why, choose)
                                how to run a call that no kernel can run, because of `why`, if not
                                by PyTorch's kernels; None otherwise. `choose` chooses for a spec
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Computed at import: torch.compile of torch 2.6 cannot trace `is_autocast_available`.
_AUTOCAST_DEVICES = frozenset(
    device
    for device in ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")
    if torch.amp.is_autocast_available(device)
)


class Tensors(NamedTuple):
    """The tensors of a call, in the order used everywhere below `functional`.

    residual: shaped like x, and added to it or to its norm; or the gate of a gated norm.
    weight, bias: those of the norm; or the scale and the shift of an adaptive norm.
    tracked: num_batches_tracked. A tensor that a call does not have is None.
    """

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    input_bias: Tensor | None = None
    running_mean: Tensor | None = None
    running_var: Tensor | None = None
    tracked: Tensor | None = None

    def has(self, *names: str) -> dict[str, bool]:
        """Whether the call has each of these tensors, by name."""
        return {name: getattr(self, name) is not None for name in names}

    def reading(
        self, x: Tensor, residual: Tensor | None, *affine: Tensor | None
    ) -> Tensors:
        """The call with this x and this residual; itself if they are its own.

        affine: another weight and another bias, if any.
        """
        weight, bias = affine or (self.weight, self.bias)
        is_own = weight is self.weight and bias is self.bias
        if is_own and x is self.x and residual is self.residual:
            return self
        return self._replace(x=x, residual=residual, weight=weight, bias=bias)


class Pool(NamedTuple):
    """Max pooling over two dimensions, height first, with the arguments of `F.max_pool2d`."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool

    def of(self, x: Tensor) -> Tensor:
        """The pooled x."""
        # Not `__call__`, which torch.compile of torch 2.8 cannot trace in a named tuple.
        return F.max_pool2d(
            x, self.kernel, self.stride, self.padding, ceil_mode=self.ceil_mode
        )

    def size(self, x: Tensor) -> tuple[int, int]:
        """Height and width of the pooled x; a RuntimeError if torch refuses the window."""
        height, width = self.of(x.new_empty(1, 1, *x.shape[2:], device="meta")).shape[2:]
        return height, width


def to_text(spec: Any) -> str:
    """The fields of a spec as JSON, for operators. A compiler may store it on disk."""
    return json.dumps(spec, default=lambda dtype: {"dtype": str(dtype)})


@cache
def from_text(cls: type, text: str) -> Any:
    """The spec of this class, from the text of its fields."""
    fields = json.loads(text, object_hook=_dtype_of)
    spec: Any = cls(*(_as_tuple(value) for value in fields))
    if getattr(spec, "pool", None) is not None:
        spec = spec._replace(pool=Pool(*spec.pool))
    return spec


def _dtype_of(value: dict[str, str]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    return dtype


def _as_tuple(value: Any) -> Any:
    """The value, with tuples in place of lists."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast has set for the device of x; None where autocast is off."""
    try:
        device = "cuda" if x.is_cuda else x.device.type
    except AttributeError:  # not a tensor: the checks reject it later
        return None
    if device in _AUTOCAST_DEVICES and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return None


def autocast_result(
    dtype: torch.dtype, autocast: torch.dtype | None, autocast_output: str
) -> torch.dtype | None:
    """The dtype of a result under autocast; None if autocast is off or does not change `dtype`."""
    if autocast is None or dtype == torch.float64:
        return None
    return autocast if autocast_output == "low" else torch.float32
