"""Two BatchNorms whose results are added, in one call: inputs, exact results and error bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import kernel_cases
import normplug
from accuracy import leaf
from calls import assert_all_no_worse
from kernel_cases import Case, Exact
from normplug import _activations, reference

VECTORS = ("weight", "bias")
STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Pair:
    """y = activation(norm(x) + other(residual)).

    one: the norm, the activation, and the layout of dy. other: the norm of the residual, which has
    the shape, dtype and layout of x. needs: of each case, what requires a gradient.
    """

    one: Case
    other: Case

    def __str__(self) -> str:
        return f"{self.one} + {self.other}"


def pair(
    shape: tuple[int, ...], other: dict[str, Any] | None = None, **options: Any
) -> Pair:
    """A pair of cases; other: how the residual's differs."""
    one = Case(shape, **options)
    changes = {"seed": one.seed + 1, "offset": -one.offset, "mode": 2.0, **(other or {})}
    return Pair(one, replace(one, **changes))


def make(case: Pair, device: str = "cpu") -> tuple[Any, Any]:
    """The tensors of both norms. dy is 0 where a rounding may decide what relu does."""
    one, other = (
        kernel_cases.make(replace(each, activation=None, residual=None), device)
        for each in (case.one, case.other)
    )
    exact = exact_norms(case, one, other)
    rounding = torch.finfo(reference.accumulator_dtype(case.one.dtype)).eps
    size = sum(each.terms_of_z() for each in exact)
    clear = exact[0].z.abs() > 64 * rounding * size
    one.dy = kernel_cases.laid_out(
        torch.where(clear, one.dy, 0), case.one.dy or case.one.layout
    )
    return one, other


def exact_norms(case: Pair, one: Any, other: Any) -> tuple[Exact, Exact]:
    """Each norm in float64, with the other's result as its residual."""
    alone = [
        Exact(replace(each, activation=None), replace(tensors, residual=None)).z
        for each, tensors in ((case.one, one), (case.other, other))
    ]
    other_case = replace(case.other, activation=case.one.activation)
    first = Exact(case.one, replace(one, residual=alone[1]))
    second = Exact(other_case, replace(other, residual=alone[0], dy=one.dy))
    return first, second


def layer(case: Case, tensors: Any, backend: str) -> Any:
    """A layer with the parameters and statistics of a case."""
    cls = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    made = cls[len(case.shape)](
        case.shape[1], case.eps, case.momentum, track_running_stats=case.running
    )
    for name in VECTORS:
        value = leaf(getattr(tensors, name))
        if value is not None:
            value = nn.Parameter(value, requires_grad=name in case.needs)
        setattr(made, name, value)
    if case.running:
        for name in STATISTICS:
            setattr(made, name, getattr(tensors, name).clone())
        made.num_batches_tracked.fill_(3)
    normplug.swap(made.to(tensors.x.device), case.mode, backend=backend)
    return made


def layers_of(case: Pair, tensors: tuple[Any, Any], backend: str = "triton") -> list[Any]:
    """The layers of both norms."""
    pairs = zip((case.one, case.other), tensors, strict=True)
    return [layer(each, values, backend) for each, values in pairs]


def run(case: Pair, tensors: tuple[Any, Any], backend: str) -> dict[str, Tensor]:
    """A step: in one call of the kernels, or, by "torch", the norms one after the other."""
    layers = layers_of(case, tensors, backend)
    x, residual = (
        values.x.detach().requires_grad_("x" in each.needs)
        for each, values in zip((case.one, case.other), tensors, strict=True)
    )
    activation = case.one.activation
    if backend == "triton":
        y = layers[0]._fused_norms(x, residual, layers[1], activation)
    else:
        y = _activations.apply(activation, layers[0](x) + layers[1](residual))
    results = {"y": y.detach()}
    leaves = {"x": x, "residual": residual}
    for prefix, made in zip(("", "other_"), layers, strict=True):
        leaves |= {prefix + name: getattr(made, name) for name in VECTORS}
        if case.one.running:
            results |= {prefix + name: getattr(made, name) for name in STATISTICS}
            results[prefix + "num_batches_tracked"] = made.num_batches_tracked
    asked = {f"d{n}": t for n, t in leaves.items() if t is not None and t.requires_grad}
    if asked:
        gradients = torch.autograd.grad(y, list(asked.values()), tensors[0].dy)
        results |= zip(asked, gradients, strict=True)
    return results


def assert_accurate(case: Pair, device: str = "cpu") -> dict[str, Tensor]:
    """Assert that one call is as close to float64 as torch's calls; return its results."""
    tensors = make(case, device)
    ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    first, second = exact_norms(case, *tensors)
    exact, terms = first.results(), first.terms()
    for name, value in second.results().items():
        prefix = "d" if name.startswith("d") else ""
        renamed = f"{prefix}other_{name.removeprefix('d')}"
        renamed = {"dother_x": "dresidual"}.get(renamed, renamed)
        exact[renamed] = value
        terms[renamed] = second.terms()[name]
    terms["y"] = first.terms_of_z() + second.terms_of_z()
    assert_all_no_worse(ours, theirs, exact, terms)
    return ours
