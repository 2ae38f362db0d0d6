"""Calls of norms of rows with a gate, groups, or a scale and a shift: inputs and error bounds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from accuracy import assert_no_worse
from calls import DTYPES, describe, truncation
from normplug import functional, reference, target_variance
from normplug._layouts import spread
from row_cases import LAYOUTS, laid_out

GIVEN = ("weight", "bias", "gate", "scale", "shift")


@dataclass(frozen=True)
class Case:
    """One call of `functional.rms_norm`, or of `layer_norm` if it is `centred`.

    shape: of x; a row has one dimension. gate: "first", "last" or "". outer: the leading dimensions
    of the scale and of the shift, if there are any; they are slices of a larger tensor if `sliced`.
    vectors: which of GIVEN there are, besides the gate. layout, gate_layout, dy: see `row_cases`.
    needs: the tensors whose gradients are wanted.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    gate: str = ""
    group_size: int | None = None
    outer: tuple[int, ...] = ()
    sliced: bool = True
    vectors: str = "weight"
    params: torch.dtype | None = None
    gate_dtype: torch.dtype | None = None
    layout: str = "contiguous"
    gate_layout: str = "contiguous"
    dy: str = "contiguous"
    mode: str | float = "golden"
    weight_offset: float = 0.0
    offset: float = 1.0
    needs: tuple[str, ...] = ("x", *GIVEN)
    centred: bool = False
    seed: int = 0

    __str__ = describe


def make(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Random tensors, and dy, by name."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        options = {"generator": generator, "device": device, "dtype": torch.double}
        return torch.randn(shape, **options).to(dtype or case.dtype)

    row = case.shape[-1:]
    x = normal(case.shape, torch.double) * 2 + case.offset
    made = {"x": laid_out(x.to(case.dtype), 1, case.layout)}
    made["dy"] = laid_out(normal(case.shape, case.dtype), 1, case.dy)
    for name in case.vectors.split("+") if case.vectors else ():
        if name in ("scale", "shift"):
            width = 3 * row[0] if case.sliced else row[0]
            start = row[0] if case.sliced and name == "shift" else 0
            wide = normal((*case.outer, width), case.params) * 0.5
            made[name] = wide[..., start : start + row[0]]
        else:
            made[name] = normal(row, case.params) * 0.3 + 1
    if case.gate:
        gate = normal(case.shape, case.gate_dtype)
        made["gate"] = laid_out(gate, 1, case.gate_layout)
    return made


def options_of(case: Case) -> dict[str, Any]:
    """The arguments of the function and of the reference that are not tensors."""
    options: dict[str, Any] = {"normalized_shape": case.shape[-1:], "eps": 1e-5}
    if case.centred:
        return options
    first = {"gate_first": case.gate == "first"}
    of_rms = {"group_size": case.group_size, "weight_offset": case.weight_offset}
    return {**options, **first, **of_rms}


def call_of(case: Case, tensors: dict[str, Tensor], backend: str) -> Tensor:
    """The output of the function."""
    norm = functional.layer_norm if case.centred else functional.rms_norm
    given = {name: t for name, t in tensors.items() if name != "x"}
    options = {**options_of(case), "mode": case.mode, "backend": backend}
    y: Tensor = norm(tensors["x"], **given, **options)
    return y


def run(case: Case, tensors: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Run forward and backward; return y and the gradients by name."""
    leaves = {
        name: t.detach().requires_grad_(name in case.needs)
        for name, t in tensors.items()
        if name != "dy"
    }
    y = call_of(case, leaves, backend)
    return _with_gradients(y, leaves, tensors["dy"].to(y.dtype))


def _with_gradients(
    y: Tensor, leaves: dict[str, Tensor], dy: Tensor
) -> dict[str, Tensor]:
    wanted = {name: t for name, t in leaves.items() if t.requires_grad}
    if not wanted:
        return {"y": y}
    gradients = torch.autograd.grad(y, [*wanted.values()], dy)
    named = zip((f"d{name}" for name in wanted), gradients, strict=True)
    return {"y": y.detach(), **dict(named)}


def exact(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The results in float64, by the reference."""
    leaves = {
        name: t.detach().double().requires_grad_(name in case.needs)
        for name, t in tensors.items()
        if name != "dy"
    }
    given = {
        name: _over_x(t, leaves["x"]) if name in ("scale", "shift") else t
        for name, t in leaves.items()
        if name != "x"
    }
    norm = reference.layer_norm if case.centred else reference.rms_norm
    options = {**options_of(case), "target_variance": target_variance(case.mode)}
    y = norm(leaves["x"], **given, **options)[0]
    return _with_gradients(y, leaves, tensors["dy"].double())


def _over_x(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(spread(vector.shape, x.dim(), 1))


def terms(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each result, the sum of the absolute values of its terms, before any cancel."""
    t = {name: each.double() for name, each in tensors.items()}
    x, dy = t["x"], t["dy"].abs()
    one = torch.ones((), dtype=torch.double, device=x.device)
    silu, slope = one, one
    if case.gate:
        gate = t["gate"].requires_grad_()
        silu = F.silu(gate)
        (slope,) = torch.autograd.grad(silu.sum(), gate)
        silu, slope = silu.detach().abs(), slope.abs()
    before, after = (silu, one) if case.gate == "first" else (one, silu)

    def in_groups(value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, case.group_size or case.shape[-1]))

    def mean(value: Tensor) -> Tensor:
        """The mean of each group, for all of its values."""
        each = in_groups(value)
        return each.mean(-1, keepdim=True).expand(each.shape).flatten(-2)

    h = x * before
    middle = mean(h) if case.centred else torch.zeros_like(h)
    rstd = torch.rsqrt(mean((h - middle).square()) + 1e-5)
    xhat = (h - middle).abs() * rstd
    centre = (h.abs() + middle.abs()) * rstd
    root = target_variance(case.mode) ** 0.5
    weight = (t["weight"] + case.weight_offset).abs() if "weight" in t else one
    scale = (1 + _over_x(t["scale"], x)).abs() if "scale" in t else one
    factor = weight * scale * root
    g = dy * factor * after
    dh = rstd * (g + mean(g) + centre * mean(g * xhat) + xhat * mean(g * (xhat + centre)))
    bias = t["bias"].abs() if "bias" in t else one * 0
    unshifted = (centre * weight * root + bias) * scale
    shift = _over_x(t["shift"], x).abs() if "shift" in t else one * 0
    y = unshifted + shift
    through = dy * after
    wide = {
        "y": y * after,
        "dx": dh * before,
        "dgate": dh * x.abs() * slope if case.gate == "first" else dy * y * slope,
        "dweight": through * (xhat + centre) * scale * root,
        "dbias": through * scale,
        "dscale": dy * ((xhat + centre) * weight * root + bias),
        "dshift": dy,
    }
    shapes = {f"d{name}": each.shape for name, each in tensors.items()}
    return {
        name: value
        if name == "y"
        else value.sum_to_size(spread(shapes[name], x.dim(), 1)).reshape(shapes[name])
        for name, value in wide.items()
        if name == "y" or name in shapes
    }


def assert_accurate(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Assert that the kernels are as close to float64 as torch's; return their results."""
    tensors = make(case, device)
    ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
    truth, sums = exact(case, tensors), terms(case, tensors)
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, value in ours.items():
        assert value.isfinite().all(), name
        found = (value, theirs[name], truth[name], sums[name], truncation(value))
        assert_no_worse(name, *found)
    return ours


_LAYOUT = st.sampled_from(LAYOUTS)
_CASE = st.builds(
    Case,
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    gate=st.sampled_from(["", "first", "last"]),
    layout=_LAYOUT,
    gate_layout=_LAYOUT,
    dy=_LAYOUT,
    gate_dtype=st.sampled_from([None, torch.float32]),
    params=st.sampled_from([None, torch.float32]),
    sliced=st.booleans(),
    mode=st.just("golden") | st.floats(0.01, 10),
    offset=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 2**31),
)


@st.composite
def any_case(draw: Any) -> Case:
    """A strategy for small cases of every kind."""
    case, width = draw(_CASE), draw(st.integers(3, 40))
    shape = (*case.shape, width)
    kind = draw(st.sampled_from(["gate", "groups", "scale", "shift", "scale+shift"]))
    if kind == "gate":
        return replace(case, shape=shape)
    if kind == "groups":
        whole = (*case.shape, width * draw(st.integers(1, 3)))
        return replace(case, shape=whole, group_size=width)
    outer = case.shape[: draw(st.integers(0, 3))]
    centred = draw(st.booleans())
    return replace(case, shape=shape, gate="", vectors=kind, outer=outer, centred=centred)


HALF = torch.bfloat16
GATED = [
    {"gate": "last"},
    {"gate": "first", "weight_offset": 1.0, "dtype": HALF, "params": torch.float32},
    {"gate": "first", "group_size": 8, "layout": "apart", "gate_layout": "apart"},
    {"gate": "last", "group_size": 4, "vectors": "", "dtype": torch.float16},
    {"gate": "last", "dtype": HALF, "gate_dtype": torch.float32, "gate_layout": "odd"},
    {"gate": "first", "dtype": torch.float64, "layout": "permuted"},
    {"group_size": 12, "weight_offset": 1.0},
]
BOTH = "scale+shift"
ADAPTIVE = [
    {"centred": True, "vectors": BOTH, "outer": (2,)},
    {"centred": True, "vectors": BOTH, "outer": (2, 1), "dtype": HALF, "sliced": False},
    {"centred": True, "vectors": "shift", "outer": (2,), "params": torch.float64},
    {"centred": True, "vectors": BOTH, "outer": (2, 5), "dtype": torch.float16},
    {"vectors": BOTH, "outer": (2,), "dtype": HALF, "params": torch.float32, "offset": 0.0},
    {"vectors": "scale+weight", "outer": (2, 5), "weight_offset": 1.0},
    {"centred": True, "vectors": "scale+shift+weight+bias", "outer": (2,)},
    {"centred": True, "vectors": BOTH, "outer": (1, 1), "dtype": torch.float64},
    {"centred": True, "vectors": BOTH, "outer": (2,), "layout": "permuted", "dy": "apart"},
]  # fmt: skip
EVERY = [Case((2, 5, 24), **options) for options in (*GATED, *ADAPTIVE)]
NEEDS = [
    Case((2, 5, 24), vectors="weight", gate=gate, needs=needs)
    for gate in ("first", "last")
    for size in (1, 2)
    for needs in itertools.combinations(("x", "weight", "gate"), size)
] + [
    Case((2, 5, 24), vectors=BOTH, outer=outer, centred=True, needs=needs)
    for outer in ((2,), (2, 5))
    for size in (1, 2)
    for needs in itertools.combinations(("x", "scale", "shift"), size)
]
