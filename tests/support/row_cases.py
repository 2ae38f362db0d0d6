"""Calls of LayerNorm and RMSNorm for the tests of their kernels: inputs and error bounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import calls
import normplug
import oracle
from calls import (
    INPUTS,
    Tensors,
    assert_all_no_worse,
    assert_recomputable,
    check_one_graph,
    describe,
)
from normplug import functional, reference, target_variance

# Rows with two strides.
PERMUTED = (
    "permuted",
    "rotated",
    "permuted apart",
    "repeated inside",
)
LAYOUTS = (
    "contiguous", "apart", "odd", "every second", "transposed", "repeated", "expanded", "heads",
    *PERMUTED,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One call; the defaults are those of a layer without running statistics.

    dims: how many dimensions of `shape` make a row. params: dtype of the vectors; None is that of
    x. layout, residual, dy, dtotal: one of LAYOUTS; None means no residual, and a gradient with the
    layout of x. running: dtype of the running statistics, if any. used: the outputs that have a
    gradient. needs: the inputs that require one. centred: whether it is a LayerNorm; otherwise it
    is an RMSNorm, which has no bias. weight_offset: RMSNorm's.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    dims: int = 1
    layout: str = "contiguous"
    params: torch.dtype | None = None
    vectors: str = "weight+bias"
    residual: str | None = None
    residual_dtype: torch.dtype | None = None
    running: torch.dtype | None = None
    tracked: bool = True
    momentum: float | None = 0.1
    eps: float | None = 1e-5
    mode: str | float = "golden"
    offset: float = 3.0
    dy: str | None = None
    dtotal: str | None = None
    used: tuple[str, ...] = ("y", "total")
    needs: tuple[str, ...] = INPUTS
    seed: int = 0
    centred: bool = True
    weight_offset: float = 0.0

    __str__ = describe

    @property
    def row(self) -> tuple[int, ...]:
        return self.shape[len(self.shape) - self.dims :]

    @property
    def total(self) -> torch.dtype:
        """The dtype of the normalised tensor."""
        if self.residual is None:
            return self.dtype
        return torch.promote_types(self.dtype, self.residual_dtype or self.dtype)


def laid_out(x: Tensor, dims: int, layout: str) -> Tensor:
    """x in a layout; layouts that repeat or expand broadcast a part of x."""
    outer = x.dim() - dims
    row = tuple(x.shape[outer:])
    if layout in ("apart", "odd"):  # rows are dense, with something between them
        rows = x.flatten(outer)
        between = rows if layout == "apart" else rows[..., :1]
        return torch.cat([rows, between], -1)[..., : rows.shape[-1]].unflatten(-1, row)
    if layout == "every second":
        return torch.stack([x, x + 1], dim=-1)[..., 0]
    if layout == "transposed":
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "heads":  # as queries and keys lie: heads within tokens, three strides
        if outer < 2:
            return laid_out(x, dims, "apart")
        apart = laid_out(x.transpose(outer - 2, outer - 1), dims, "apart")
        return apart.transpose(outer - 2, outer - 1)
    if layout in PERMUTED and outer > 0:
        # Permuted: the first axis is the innermost outer one, as `batch_first` leaves the batch.
        # Rotated: the last outer axis is the outermost one.
        there, back = (outer - 1, 0) if layout == "rotated" else (0, outer - 1)
        if layout == "repeated inside":
            return x.narrow(outer - 1, 0, 1).expand(x.shape)
        between = "apart" if layout == "permuted apart" else "contiguous"
        return laid_out(x.movedim(there, back), dims, between).movedim(back, there)
    if layout == "repeated":
        return x[(0,) * outer].expand(x.shape)
    if layout == "expanded":
        return x.flatten()[0].expand(x.shape)
    return x.contiguous()


def make(case: Case, device: str = "cpu") -> Tensors:
    """Random tensors, the same on every device of one type."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(
        shape: tuple[int, ...], dtype: torch.dtype, scale: float, shift: float
    ) -> Tensor:
        options = {"generator": generator, "device": device, "dtype": torch.double}
        return (torch.randn(shape, **options) * scale + shift).to(dtype)

    params, vectors = case.params or case.dtype, case.vectors.split("+")
    spread = normal(case.row, torch.double, 0.3, 0.0).exp()
    x = normal(case.shape, case.dtype, 2.0, case.offset)
    beside = normal(case.shape, case.residual_dtype or case.dtype, 1.0, 0.0)
    dy = normal(case.shape, case.total, 1.0, 0.1)
    dtotal = normal(case.shape, case.total, 1.0, 0.1)
    running = case.running
    return Tensors(
        x=laid_out(x, case.dims, case.layout),
        residual=laid_out(beside, case.dims, case.residual) if case.residual else None,
        weight=(spread * 1.1).to(params) if "weight" in vectors else None,
        bias=normal(case.row, params, 0.5, 0.0)
        if case.centred and "bias" in vectors
        else None,
        input_bias=normal(case.row, params, 1.0, 0.5)
        if "input_bias" in vectors
        else None,
        running_mean=normal((), running, 1.0, case.offset)
        if running and case.centred
        else None,
        running_var=normal((), running, 0.1, 3.0) if running else None,
        dy=laid_out(dy, case.dims, case.dy or case.layout),
        dtotal=laid_out(dtotal, case.dims, case.dtotal or case.layout)
        if case.residual
        else None,
    )


def call(
    case: Case, inputs: dict[str, Any], backend: str, **running: Any
) -> dict[str, Tensor]:
    """The outputs, by name."""
    x, residual, weight = inputs["x"], inputs["residual"], inputs["weight"]
    name = "layer_norm" if case.centred else "rms_norm"
    options = {"eps": case.eps, "mode": case.mode, "backend": backend, **running}
    options |= (
        {"bias": inputs["bias"]}
        if case.centred
        else {"weight_offset": case.weight_offset}
    )
    if running:
        options["momentum"] = case.momentum
    if residual is not None:
        add = getattr(functional, f"add_{name}")
        y, total = add(x, residual, case.row, weight, **options)
        return {"y": y, "total": total}
    if case.centred:
        options["input_bias"] = inputs["input_bias"]
    return {"y": getattr(functional, name)(x, case.row, weight, **options)}


def run(case: Case, tensors: Tensors, backend: str) -> dict[str, Tensor]:
    """Run forward and backward; return outputs, gradients and running statistics by name."""
    return calls.run(call, case, tensors, backend, case.used, case.tracked)


def assert_accurate(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Assert that the kernels are as close to float64 as torch's; return their results."""
    tensors = make(case, device)
    ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    if "total" in ours:
        theirs = _of_the_same_total(case, tensors, ours, theirs)
    exact = _Exact(case, tensors, ours.get("total"))
    truth, terms = exact.results(), exact.terms()

    def spare(name: str, value: Tensor) -> float:
        assert value.isfinite().all(), name
        if name.startswith("running") and case.running == torch.float64 != case.dtype:
            # They are updated in float32.
            return float(1e-6 * terms[name] / truth[name].abs())
        return calls.truncation(value)

    assert_all_no_worse(ours, theirs, truth, terms, spare)
    return ours


def _of_the_same_total(
    case: Case, tensors: Tensors, ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Torch's results for a total with the same bits as ours."""
    total = ours["total"]
    if calls.truncation(total):
        off = (total.double() - theirs["total"].double()).abs()
        assert (off <= torch.finfo(total.dtype).eps * theirs["total"].abs()).all()
        same = replace(tensors, x=total, residual=torch.zeros_like(total))
        theirs = run(case, same, "torch")
    assert torch.equal(total, theirs["total"])
    return theirs


def check_recomputed(case: Case, device: str = "cpu") -> None:
    """Assert that the backward can recompute the result."""
    tensors = make(case, device)
    running = tensors.running()
    y = call(case, tensors.inputs(("x",)), "triton", **running)["y"]
    assert_recomputable(y, running.values())


OPERATOR_CASES = [
    Case((6, 5)),
    Case((3, 4, 6), torch.bfloat16, dims=2, params=torch.float32, vectors="weight+input_bias"),
    Case((6, 10), layout="apart", vectors="bias", mode="standard", needs=("x", "bias")),
    Case((6, 10), layout="transposed", vectors="", dy="expanded"),
    Case((6, 10), torch.float64, vectors="weight+bias+input_bias", needs=("weight", "input_bias")),
    Case((6, 5), residual="contiguous"),
    Case((3, 4, 6), torch.bfloat16, residual="apart", residual_dtype=torch.float32),
    Case((6, 5), residual="transposed", vectors="weight", needs=("residual",)),
    Case((2, 3, 8), layout="permuted"),
    Case((2, 3, 8), layout="permuted apart", dy="rotated"),
    Case((2, 3, 2, 8), layout="rotated", residual="permuted", dy="permuted"),
    Case((2, 3, 2, 8), vectors="weight+bias+input_bias", dy="permuted"),
    Case((2, 3, 2, 2, 4), residual="contiguous", dims=2),
    Case((6, 5), running=torch.float32),
    Case((2, 3, 8), residual="contiguous", running=torch.float64, momentum=None),
    Case(
        (3, 4, 6), torch.bfloat16, params=torch.float32, vectors="weight", centred=False,
        weight_offset=1.0,
    ),
    Case((6, 5), residual="contiguous", vectors="weight", centred=False, eps=None),
]  # fmt: skip


def operators(case: Case) -> tuple[Any, tuple[Any, ...]]:
    from normplug._ops.row_norms import ADD, PLAIN

    kind = (
        target_variance(case.mode),
        None,
        "float32",
        case.centred,
        case.weight_offset,
        None,
    )
    numbers = (list(case.row), case.momentum, case.eps, *kind, None, None, False, False)
    return PLAIN if case.residual is None else ADD, numbers


def check_compiled(residual: bool, layout: str, *options: Any) -> None:
    """Assert that one graph serves every number of rows.

    options: the layer's class, if it is not LayerNorm; the device and the compiler.
    """
    *norm, device, backend = options
    layers = [_Block(residual, *norm).to(device) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn((rows, 3, 2, 24), generator=generator) for rows in (2, 5, 6)]
    inputs = [laid_out(x.to(device), 1, layout) for x in values]
    check_one_graph(*layers, inputs, backend)
    assert layers[0].norm.watched_count == 3


class _Block(torch.nn.Module):
    """A norm computed by the kernels, alone or between two blocks of a transformer."""

    def __init__(self, residual: bool, norm: type = normplug.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(24, backend="triton", track_running_stats=True)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        if not self.residual:
            return self.norm(x)
        y, total = self.norm._fused_add(x, x * 0.5)
        return y + total


class _Exact:
    """A call in float64, by the formulas of `normplug.reference`; total: x + residual, if known."""

    def __init__(self, case: Case, tensors: Tensors, total: Tensor | None) -> None:
        self.case, self.tensors = case, tensors.to(torch.double)
        t = self.tensors
        self.tv = target_variance(case.mode)
        self.h = t.x if total is None else total.double()
        if t.input_bias is not None:
            self.h = self.h + t.input_bias
        self.dims = tuple(range(-case.dims, 0))
        self.rows = tuple(range(len(case.shape) - case.dims))
        self.var, self.mean = torch.var_mean(
            self.h, self.dims, correction=0, keepdim=True
        )
        if not case.centred:
            self.mean = torch.zeros_like(self.mean)
            self.var = self.h.square().mean(self.dims, keepdim=True)
        self.eps = reference.rms_eps(case.total, case.eps)
        self.rstd = torch.rsqrt(self.var + self.eps)

    def results(self) -> dict[str, Tensor]:
        t, case = self.tensors, self.case
        dy = t.dy if "y" in case.used else torch.zeros_like(t.dy)
        options = {
            "eps": self.eps,
            "target_variance": self.tv,
            "normalized_shape": case.row,
        }
        norm, bias = reference.layer_norm, {"bias": t.bias}
        if not case.centred:
            norm, bias = reference.rms_norm, {}
            options["weight_offset"] = case.weight_offset
        made = norm(self.h, weight=t.weight, **bias, **options)
        gradients = oracle.gradients(norm, dy, self.h, t.weight, **options)
        through = gradients.dx
        if t.dtotal is not None and "total" in case.used:
            through = through + t.dtotal
        out = {
            "y": made.y,
            "total": self.h,
            "dx": through,
            "dresidual": through,
            "dinput_bias": self._over_rows(through),
            "dweight": gradients.dweight,
            "dbias": gradients.dbias,
        }
        for name, value in self._batch().items():
            out[name] = oracle.running_average(getattr(t, name), value, case.momentum, 4)
        return out

    def terms(self) -> dict[str, Tensor]:
        """For each result, the sum of the absolute values of its terms, before any cancel."""
        t, rstd = self.tensors, self.rstd
        centre = (self.h.abs() + self.mean.abs()) * rstd
        if t.input_bias is not None:
            centre = centre + (t.x.abs() + t.input_bias.abs()) * rstd
        xhat = (self.h - self.mean).abs() * rstd
        root = self.tv**0.5
        weight = 1.0 if t.weight is None else (t.weight + self.case.weight_offset).abs()
        dy = t.dy.abs()
        g = dy * weight * root
        sums = (g, g * xhat, g * (xhat + centre))
        mean, slope, other = (each.mean(self.dims, keepdim=True) for each in sums)
        through = rstd * (g + mean + slope * centre + xhat * other)
        if t.dtotal is not None:
            through = through + t.dtotal.abs()
        y = centre * weight * root
        out = {
            "y": y if t.bias is None else y + t.bias.abs(),
            "total": self.h.abs(),
            "dx": through,
            "dresidual": through,
            "dinput_bias": self._over_rows(through),
            "dweight": self._over_rows(dy * (xhat + centre)) * root,
            "dbias": self._over_rows(dy),
        }
        for name, value in self._batch().items():
            out[name] = getattr(t, name).abs() + value.abs()
        if "running_var" in out:
            # The kernels merge the means of parts of a row, and each of these is rounded.
            width = self.h[(0,) * len(self.rows)].numel()
            spread = (xhat * centre / rstd.square()).mean()
            out["running_var"] = out["running_var"] + spread / width**0.5
        if "running_mean" in out:
            out["running_mean"] = out["running_mean"] + self.h.abs().mean()
        return out

    def _over_rows(self, values: Tensor) -> Tensor:
        return values.sum(self.rows) if self.rows else values

    def _batch(self) -> dict[str, Tensor]:
        """The batch statistics that the running statistics are updated with."""
        batch = {"running_mean": self.mean.mean(), "running_var": self.var.mean()}
        return {
            n: value for n, value in batch.items() if getattr(self.tensors, n) is not None
        }
