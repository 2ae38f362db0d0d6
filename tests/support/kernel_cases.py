"""Calls of BatchNorm for the tests of its kernels: inputs, exact results and error bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

import calls
import normplug
import oracle
import routes
from batch_norm_cases import laid_out
from calls import (
    Tensors,
    assert_all_no_worse,
    assert_recomputable,
    check_one_graph,
    describe,
)
from normplug import _activations, functional, reference, target_variance
from normplug._activations import ActivationLike

INPUTS = ("x", "weight", "bias", "residual")
HALF = {"dtype": torch.bfloat16, "params": torch.float32}
# Inputs where an activation's slope jumps.
BENDS = {"relu": (0,), "relu6": (0, 6), "hardswish": (-3, 3), "leaky_relu": (0,)}


@dataclass(frozen=True)
class Case:
    """One call; the defaults are those of a layer in training.

    layout, residual, dy: "contiguous", "channels_last", "strided" or "expanded"; None means
    no residual, and a dy with the layout of x. params: dtype of weight, bias and statistics; None
    is that of x. needs: the inputs that require a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    params: torch.dtype | None = None
    affine: str = "weight+bias"
    residual: str | None = None
    activation: ActivationLike = None
    training: bool = True
    running: bool = True
    momentum: float | None = 0.1
    eps: float = 1e-5
    mode: str | float = "golden"
    offset: float = 3.0
    dy: str | None = None
    needs: tuple[str, ...] = INPUTS
    seed: int = 0
    # What only cases of GroupNorm have.
    groups: ClassVar[int | None] = None
    output: ClassVar[torch.dtype | None] = None

    __str__ = describe


def make(case: Case, device: str = "cpu") -> Tensors:
    """Random tensors, the same on every device."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(
        shape: tuple[int, ...], dtype: torch.dtype, scale: float, shift: float
    ) -> Tensor:
        values = (
            torch.randn(shape, generator=generator, dtype=torch.double) * scale + shift
        )
        return values.to(device, dtype)

    c, params = (case.shape[1],), case.params or case.dtype
    spread = normal(c, torch.double, 0.3, 0).exp()
    x = normal(case.shape, torch.double, 2.0, case.offset)
    if case.groups is not None:  # each channel of a group has its own mean
        x = x + reference.per_channel(normal(c, torch.double, 1.0, 0.0), x)
    tensors = Tensors(
        x=laid_out(x.to(case.dtype), case.layout),
        weight=(spread * 1.1).to(params) if "weight" in case.affine else None,
        bias=normal(c, params, 0.5, 0.0) if "bias" in case.affine else None,
        residual=None,
        # A running mean far from the input's would overflow torch's own float16 backward.
        running_mean=normal(c, params, 1.0, case.offset) if case.running else None,
        running_var=(spread * 3).to(params) if case.running else None,
        dy=normal(case.shape, case.output or case.dtype, 1.0, 0.1),
    )
    if case.residual is not None:
        tensors.residual = laid_out(
            normal(case.shape, case.dtype, 1.0, 0.0), case.residual
        )
    name, _ = _activations.parts(case.activation)
    if name in BENDS and case.dy != "expanded":
        # Where a rounding may decide on which side of a bend a value is, dy is 0.
        exact = Exact(case, tensors)
        rounding = torch.finfo(reference.accumulator_dtype(case.dtype)).eps
        for bend in BENDS[name]:
            clear = (exact.z - bend).abs() > 64 * rounding * exact.terms_of_z()
            tensors.dy = torch.where(clear, tensors.dy, 0)
    tensors.dy = laid_out(tensors.dy, case.dy or case.layout)
    return tensors


def call(
    case: Case,
    inputs: dict[str, Any],
    backend: str,
    norm: Callable[..., Tensor] = functional.batch_norm,
    **options: Any,
) -> dict[str, Tensor]:
    """The output, by name; `options` are running statistics and other arguments of the norm."""
    running = (options.pop("running_mean", None), options.pop("running_var", None))
    y = norm(
        inputs["x"], *running, inputs["weight"], inputs["bias"], case.training, case.momentum,
        case.eps, mode=case.mode, residual=inputs["residual"], activation=case.activation,
        backend=backend, **options,
    )  # fmt: skip
    return {"y": y}


run = partial(calls.run, call)


def assert_accurate(
    case: Case, device: str = "cpu", run: Callable[..., dict[str, Tensor]] = run
) -> dict[str, Tensor]:
    """Assert that the kernels are as close to float64 as torch's; return their results."""
    tensors = make(case, device)
    ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    exact = Exact(case, tensors)
    assert_all_no_worse(ours, theirs, exact.results(), exact.terms())
    return ours


def check_recomputed(case: Case, device: str = "cpu") -> None:
    """Assert that the backward can recompute the result."""
    tensors = make(case, device)
    running = tensors.running()
    options = {"norm": routes.batch_norm, "keeps_residual": True}
    y = call(case, tensors.inputs(("x",)), "triton", **running, **options)["y"]
    assert_recomputable(y, running.values())


OPERATOR_CASES = [
    Case((6, 5), activation="relu", residual="contiguous"),
    Case((4, 5, 6, 3), **HALF, layout="channels_last", residual="contiguous", activation="gelu"),
    Case((4, 5, 6, 3), layout="strided", affine="weight", residual="contiguous"),
    Case((3, 4, 2, 5), residual="expanded", activation="silu"),
    Case((2, 3, 11, 13), affine="", activation="relu", residual="channels_last", mode="standard"),
    Case(
        (2, 3, 11, 13), torch.float64, training=False, activation="silu",
        residual="channels_last", needs=("weight", "residual"),
    ),
]  # fmt: skip


def operators(case: Case) -> tuple[Any, tuple[Any, ...]]:
    """The operators of a call, and their arguments that are no tensors."""
    from normplug._ops.batch_norm import PLAIN

    activation = _activations.parts(case.activation)
    return PLAIN, (
        case.training,
        case.eps,
        target_variance(case.mode),
        *activation,
        [],
        0,
    )


def check_compiled(
    shape: tuple[int, ...], layout: str, activation: str | None, device: str, backend: str
) -> None:
    """Assert that one graph serves every batch size."""
    layers = [_FusedNorm(shape, activation).to(device) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    batches = [(n, *shape[1:]) for n in (shape[0], 2 * shape[0] + 1, 3 * shape[0])]
    values = [torch.randn(batch, generator=generator).to(device) for batch in batches]
    # The bias's gradients add up to nearly 0, so their rounding errors are large against the sum.
    inputs = [laid_out(x, layout) for x in values]
    check_one_graph(*layers, inputs, backend, rtol=1e-5, atol=5e-5)
    assert layers[0].norm.num_batches_tracked == 3


class _FusedNorm(torch.nn.Module):
    """The end of a residual block, computed by the kernels."""

    def __init__(self, shape: tuple[int, ...], activation: str | None) -> None:
        super().__init__()
        cls = normplug.BatchNorm1d if len(shape) == 2 else normplug.BatchNorm2d
        self.norm = cls(shape[1], backend="triton")
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        if self.activation is None:
            return self.norm(x)
        return self.norm._fused(x, residual=x * 0.5, activation=self.activation)


class Exact:
    """A call in float64, by the formulas of `normplug.reference`."""

    def __init__(self, case: Case, tensors: Tensors) -> None:
        self.case, self.tensors = case, tensors.to(torch.double)
        t = self.tensors
        self.tv = target_variance(case.mode)
        norm: Callable[..., reference.Normalized] = reference.batch_norm
        options: dict[str, Any] = {"eps": case.eps, "target_variance": self.tv}
        if case.groups is not None:
            norm, options["groups"] = reference.group_norm, case.groups
        elif not case.training:
            options |= {"mean": t.running_mean, "var": t.running_var}
        plain, self.mean, self.var = norm(t.x, weight=t.weight, bias=t.bias, **options)
        self.z = plain if t.residual is None else plain + t.residual
        self.dz = oracle.activation_backward(t.dy, self.z, case.activation)
        self.gradients = oracle.gradients(norm, self.dz, t.x, t.weight, **options)
        self.dims = reference.channel_dims(t.x)
        self.n = t.x.numel() // t.x.shape[1]

    def results(self) -> dict[str, Tensor]:
        out = {
            "y": reference.activation(self.z, self.case.activation),
            "dresidual": self.dz,
            **self.gradients._asdict(),
        }
        for name, value in self._batch().items():
            old = getattr(self.tensors, name)
            momentum = self.case.momentum if self.case.training else 0.0
            out[name] = oracle.running_average(old, value, momentum, 4)
        return out

    def terms(self) -> dict[str, Tensor]:
        """For each result, the sum of the absolute values of its terms, before any cancel."""
        t, rstd = self.tensors, self._rstd()
        centre = (t.x.abs() + self._wide(self.mean.abs())) * rstd
        xhat = (t.x - self._wide(self.mean)).abs() * rstd
        dz, exact_dz = t.dy.abs(), self.dz.abs()
        if self.case.groups is not None:  # no activation's derivatives are much above 1
            dz = dz * (1.0 if self.case.activation is None else 1.2 + self.terms_of_z())
            exact_dz = dz
        elif self.case.activation in ("silu", "gelu", "hardswish"):
            dz = dz * (1 + self.terms_of_z())  # their second derivatives are at most 1
        g, exact_g = dz * self._factor(), exact_dz * self._factor()
        dx = g
        if self.case.training:
            slope = self._mean(g * xhat + exact_g * centre)
            dx = g + self._mean(g) + centre * self._mean(exact_g * xhat) + xhat * slope
        out = {
            "y": self.terms_of_z(),
            "dx": rstd * dx,
            "dweight": (dz * xhat + exact_dz * centre).sum(self.dims) * self.tv**0.5,
            "dbias": dz.sum(self.dims),
            "dresidual": dz,
        }
        for name, value in self._batch().items():
            out[name] = getattr(self.tensors, name).abs() + value.abs()
        if "running_var" in out:
            # The kernels merge the means of parts of a channel, and each of these is rounded.
            spread = (xhat * centre / rstd.square()).mean(self.dims)
            out["running_var"] += spread / self.n**0.5
        return out

    def terms_of_z(self) -> Tensor:
        t = self.tensors
        size = (t.x.abs() + self._wide(self.mean.abs())) * self._rstd() * self._factor()
        if t.bias is not None:
            size = size + self._wide(t.bias.abs())
        return size if t.residual is None else size + t.residual.abs()

    def _rstd(self) -> Tensor:
        return self._wide(torch.rsqrt(self.var + self.case.eps))

    def _factor(self) -> Tensor:
        weight = self.tensors.weight
        one = self.tensors.x.new_ones(self.tensors.x.shape[1])
        return self._wide((one if weight is None else weight.abs()) * self.tv**0.5)

    def _wide(self, values: Tensor) -> Tensor:
        """Reshape (C,) or (N, groups) values to broadcast over x."""
        if values.dim() == 1:
            return reference.per_channel(values, self.tensors.x)
        by_channel = values.repeat_interleave(
            self.tensors.x.shape[1] // values.shape[1], 1
        )
        return by_channel.reshape(*by_channel.shape, *[1] * (self.tensors.x.dim() - 2))

    def _mean(self, values: Tensor) -> Tensor:
        """The mean over all values that share their statistics."""
        if self.case.groups is None:
            return values.mean(self.dims, keepdim=True)
        return self._wide(values.reshape(values.shape[0], self.case.groups, -1).mean(2))

    def _batch(self) -> dict[str, Tensor]:
        """The batch statistics that the running statistics are updated with."""
        if self.tensors.running_mean is None:
            return {}
        unbiased = self.var * (self.n / max(self.n - 1, 1))
        return {"running_mean": self.mean, "running_var": unbiased}
