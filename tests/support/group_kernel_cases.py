"""Calls of GroupNorm for the tests of its kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import calls
import kernel_cases
import routes
from calls import describe
from normplug import _activations
from normplug._activations import ActivationLike
from normplug._ops.group_norm import GroupNormSpec
from normplug.reference import accumulator_dtype, per_channel


@dataclass(frozen=True)
class Case:
    """One call. layout, dy: as in `batch_norm_cases`; a dy of None has the layout of x.

    params: dtype of weight and bias; None is that of x. output: the dtype that autocast asks for.
    """

    shape: tuple[int, ...]
    groups: int
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    params: torch.dtype | None = None
    affine: str = "weight+bias"
    activation: ActivationLike = None
    eps: float = 1e-5
    mode: float = 0.618
    offset: float = 3.0
    dy: str | None = None
    output: torch.dtype | None = None
    needs: tuple[str, ...] = ("x", "weight", "bias")
    seed: int = 0
    residual: ClassVar[None] = None
    running: ClassVar[bool] = False
    training: ClassVar[bool] = True

    __str__ = describe

    @property
    def spec(self) -> GroupNormSpec:
        numbers = (self.groups, self.eps, self.mode, self.activation)
        output = "float32" if self.output == torch.float32 else "low"
        return GroupNormSpec(*numbers, self.output and torch.bfloat16, output)


def call(case: Case, inputs: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """The output, by name: from the kernels, or from torch in the accumulator dtype."""
    x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
    if backend == "triton":
        t = routes.Tensors(x, None, weight, bias)
        return {"y": routes.by_kernels(t, case.spec)}
    acc = accumulator_dtype(*(t.dtype for t in (x, weight, bias) if t is not None))
    weight, bias = (
        None if t is None else per_channel(t.to(acc), x) for t in (weight, bias)
    )
    # On the CPU, torch is inaccurate for channels_last input whose mean is far from 0.
    y = F.group_norm(x.to(acc).contiguous(), case.groups, eps=case.eps) * case.mode**0.5
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    y = _activations.apply(case.activation, y)
    return {"y": y.to(x.dtype if x.dtype == torch.double else case.output or x.dtype)}


make, run = kernel_cases.make, partial(calls.run, call)
assert_accurate = partial(kernel_cases.assert_accurate, run=run)
OPERATOR_CASES = [
    Case((2, 4, 3, 5), 2, layout="channels_last", activation="silu"),
    Case((2, 4, 3, 5), 4),
    Case((2, 4, 3, 5), 4, layout="channels_last", affine="weight", needs=("x",)),
]


def operators(case: Case) -> tuple[Any, tuple[Any, ...]]:
    from normplug._ops.group_norm import OPERATORS

    activation = _activations.parts(case.activation)
    return OPERATORS, (case.groups, case.eps, case.mode, *activation, None, "float32")
