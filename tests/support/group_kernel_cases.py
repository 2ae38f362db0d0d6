"""Calls of GroupNorm for the tests of its kernels: inputs, exact results and error bounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import calls
import routes
from batch_norm_cases import laid_out
from calls import Tensors, assert_all_no_worse, describe
from normplug import _activations
from normplug._activations import ActivationLike
from normplug._ops.group_norm import GroupNormSpec
from normplug.reference import accumulator_dtype

HALF = {"dtype": torch.bfloat16, "params": torch.float32}


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
    variance: float = 0.618
    offset: float = 3.0
    dy: str | None = None
    output: torch.dtype | None = None
    needs: tuple[str, ...] = ("x", "weight", "bias")
    seed: int = 0

    __str__ = describe

    @property
    def spec(self) -> GroupNormSpec:
        numbers = (self.groups, self.eps, self.variance, self.activation)
        output = "float32" if self.output == torch.float32 else "low"
        return GroupNormSpec(*numbers, self.output and torch.bfloat16, output)


def make(case: Case, device: str = "cpu") -> Tensors:
    """Random tensors, the same on every device of one type."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(shape: tuple[int, ...], scale: float, shift: float) -> Tensor:
        options = {"generator": generator, "device": device, "dtype": torch.double}
        return torch.randn(shape, **options) * scale + shift

    c, params = case.shape[1:2], case.params or case.dtype
    # Give each channel of a group its own mean.
    x = normal(case.shape, 2.0, case.offset)
    x = x + normal((1, *c, *[1] * (len(case.shape) - 2)), 1.0, 0.0)
    tensors = Tensors(
        x=laid_out(x.to(case.dtype), case.layout),
        weight=(normal(c, 0.3, 0.0).exp() * 1.1).to(params) if "weight" in case.affine else None,
        bias=normal(c, 0.5, 0.0).to(params) if "bias" in case.affine else None,
        residual=None,
        running_mean=None,
        running_var=None,
        dy=normal(case.shape, 1.0, 0.1).to(case.output or case.dtype),
    )
    name, _ = _activations.parts(case.activation)
    if name in ("relu", "leaky_relu") and case.dy != "expanded":
        # Where a rounding may decide the sign of a value, dy is 0.
        z, terms = _before_activation(case, tensors)
        clear = z.abs() > 64 * torch.finfo(accumulator_dtype(case.dtype)).eps * terms
        tensors.dy = torch.where(clear, tensors.dy, 0)
    tensors.dy = laid_out(tensors.dy, case.dy or case.layout)
    return tensors


def call(case: Case, inputs: dict[str, Any], backend: str) -> dict[str, Tensor]:
    """The output, by name: from the kernels, or from torch in the accumulator dtype."""
    x, weight, bias = (inputs[name] for name in ("x", "weight", "bias"))
    if backend == "triton":
        t = routes.Tensors(x, None, weight, bias)
        return {"y": routes.by_kernels(t, case.spec)}
    acc = accumulator_dtype(*(t.dtype for t in (x, weight, bias) if t is not None))
    vectors = (None if t is None else t.to(acc).view(_vector(x)) for t in (weight, bias))
    weight, bias = vectors
    # On the CPU, torch is inaccurate for channels_last input whose mean is far from 0.
    y = F.group_norm(x.to(acc).contiguous(), case.groups, eps=case.eps) * case.variance**0.5
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    y = _activations.apply(case.activation, y)
    return {"y": y.to(x.dtype if x.dtype == torch.double else case.output or x.dtype)}


run = partial(calls.run, call)


def assert_accurate(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Assert that the kernels are as close to float64 as torch; return their results."""
    tensors = make(case, device)
    ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    truth = run(case, tensors.to(torch.double), "torch")
    assert_all_no_worse(ours, theirs, truth, _terms(case, tensors))
    return ours


OPERATOR_CASES = [
    Case((2, 4, 3, 5), 2, layout="channels_last", activation="silu"),
    Case((2, 4, 3, 5), 4),
    Case((2, 4, 3, 5), 4, layout="channels_last", affine="weight", needs=("x",)),
]


def check_operators(case: Case, device: str) -> None:
    """Run `torch.library.opcheck` on the differentiable operator and its forward and backward."""
    from normplug._ops.group_norm import OPERATORS

    tensors = make(case, device)
    x, _, weight, bias, _ = tensors.inputs(case.needs).values()
    activation = _activations.parts(case.activation)
    numbers = (case.groups, case.eps, case.variance, *activation, None, "float32")
    routes.check_operators(OPERATORS, routes.Tensors(x, None, weight, bias), numbers, tensors.dy)


def _vector(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (x.dim() - 2))


def _statistics(case: Case, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as (N, groups, channels, space), and mean and rstd of its groups."""
    x = x.double().reshape(*case.shape[:1], case.groups, case.shape[1] // case.groups, -1)
    var, mean = torch.var_mean(x, (2, 3), correction=0, keepdim=True)
    return x, mean, torch.rsqrt(var + case.eps)


def _before_activation(case: Case, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The input of the activation, and the sum of the absolute values of its terms."""
    x, mean, rstd = _statistics(case, tensors.x)
    z, terms = (x - mean) * rstd, (x.abs() + mean.abs()) * rstd
    z, terms = (t.reshape(case.shape) * case.variance**0.5 for t in (z, terms))
    if tensors.weight is not None:
        weight = tensors.weight.double().view(_vector(z))
        z, terms = z * weight, terms * weight.abs()
    if tensors.bias is not None:
        bias = tensors.bias.double().view(_vector(z))
        z, terms = z + bias, terms + bias.abs()
    return z, terms


def _terms(case: Case, tensors: Tensors) -> dict[str, Tensor]:
    """For each result, the sum of the absolute values of its terms, before any cancel."""
    x, mean, rstd = _statistics(case, tensors.x)
    centre, xhat = (x.abs() + mean.abs()) * rstd, (x - mean).abs() * rstd
    _, y = _before_activation(case, tensors)
    # No activation's first or second derivative is much above 1.
    dy = tensors.dy.double().abs()
    dz = dy * (1.0 if case.activation is None else 1.2 + y)
    root = case.variance**0.5
    weight = 1.0 if tensors.weight is None else tensors.weight.double().abs().view(_vector(dz))
    g, dz = ((t * root).reshape(x.shape) for t in (dz * weight, dz))
    return {
        "y": y,
        "dx": calls.dx_terms(g, xhat, centre, rstd, (2, 3)).reshape(case.shape),
        "dweight": (dz * (xhat + centre)).sum((0, 3)).flatten(),
        "dbias": (dz / root).sum((0, 3)).flatten(),
    }
