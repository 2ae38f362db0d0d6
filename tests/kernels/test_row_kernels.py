"""The Triton kernels of LayerNorm, run on the CPU by Triton's interpreter: see `test_kernels`.

Programs that share the columns of a row wait for each other, which the interpreter cannot do: they
run on a GPU only, in `test_row_kernels_gpu`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import interpreted
import normplug
import routes
from accuracy import assert_no_worse, assert_same_bits
from fuse_cases import Depthwise
from normplug import functional, fuse, reference, swap
from row_cases import (
    DTYPES,
    HALVES,
    LAYOUTS,
    OPERATOR_CASES,
    PERMUTED,
    Case,
    assert_accurate,
    call,
    check_around_attention,
    check_compiled,
    check_compiled_around_attention,
    check_operators,
    check_recomputed,
    make,
    run,
)

triton = pytest.importorskip("triton")

from normplug._kernels.device import power_of_2  # noqa: E402
from normplug._kernels.layer_norm import rows, schedule  # noqa: E402
from normplug._kernels.layer_norm.schedule import Rows, WideBackward, WideForward  # noqa: E402

pytestmark = interpreted.MARKS


class Setup(NamedTuple):
    """A tensor, and how it is cut into work forward and backward."""

    shape: tuple[int, ...]
    forward: Callable[[Any], Any]
    backward: Callable[[Any], Any]


def as_is(shape):
    return shape


def held(r, bc, programs, **rest):
    """Tiles of r rows, in columns of bc, taken in turn by so many programs."""

    def change(shape):
        u = -(-power_of_2(shape.width) // bc)
        cut = {"r": r, "u": u, "bc": bc, "programs": programs, "warps": 1, "stages": 1, "k": 1}
        rest_of_it = {"keep": False, "lanes": r, "finish": 8, **rest}
        return Rows(shape.rows, shape.width, **{**cut, **rest_of_it})

    return change


def tiled(block, lag):
    """Tiles of a row, written some after they were read."""
    return lambda shape: WideForward(shape.rows, shape.width, block, 1, lag)


def blocks(rb, cw, lag):
    """Tiles of a block of rows, written some after they were read."""
    return lambda shape: WideBackward(shape.rows, shape.width, rb, cw, 1, lag)


SETUPS = {
    "rows": Setup((7, 24), as_is, as_is),
    "rows, uneven": Setup((9, 12), held(2, 8, 2), held(2, 8, 2)),
    "rows, side by side": Setup((7, 24), held(4, 32, 1), held(4, 32, 1, keep=True)),
    "rows, even": Setup((8, 16), held(2, 8, 2, keep=True, stages=2), held(2, 8, 2, keep=True)),
    "rows, folded": Setup((9, 16), held(1, 4, 3, keep=True), held(2, 4, 3, lanes=1, stages=3)),
    "rows, even and folded": Setup((8, 16), held(4, 16, 2), held(4, 8, 2, lanes=1, finish=16)),
    "rows, folded in part": Setup((9, 12), held(2, 8, 2), held(4, 8, 2, lanes=2, keep=True)),
    "wide": Setup((5, 40), tiled(16, 4), blocks(2, 16, 5)),
    "wide, even": Setup((4, 32), tiled(8, 4), blocks(2, 8, 4)),
    "wide, one block": Setup((3, 40), tiled(32, 5), blocks(4, 16, 3)),
    "wide, all late": Setup((3, 20), tiled(8, 9), blocks(1, 8, 9)),
    "wide, one tile": Setup((3, 20), tiled(32, 1), blocks(2, 32, 1)),
}
EVERY_SETUP = pytest.mark.parametrize("setup", SETUPS)
SOME_SETUPS = pytest.mark.parametrize("setup", ["rows, uneven", "rows, folded", "wide"])
MIXED = {"params": torch.float32, "vectors": "weight+bias+input_bias"}
VARIANTS = [
    {"dtype": torch.float16, "vectors": "bias+input_bias", "mode": "standard"},
    {"dtype": torch.bfloat16, **MIXED, "offset": 1e3, "mode": 4, "layout": "apart"},
    {"vectors": "weight+input_bias", "offset": 1e3, "running": torch.float32, "dy": "odd"},
    {"dtype": torch.float64, "vectors": "", "running": torch.float64, "momentum": None, "eps": 0.1},
    {"residual": "apart", "offset": 1e3, "vectors": "weight"},
    {"dtype": torch.bfloat16, "residual": "contiguous", "residual_dtype": torch.float32},
]


def reschedule(monkeypatch, forward, backward):
    routes.reschedule(monkeypatch, layer_norm_forward=forward, layer_norm_backward=backward)


@pytest.fixture
def prepared(monkeypatch):
    """A function from the name of a setup to a `Case` in it."""

    def prepare(name, **options):
        setup = SETUPS[name]
        reschedule(monkeypatch, setup.forward, setup.backward)
        return Case(**{"shape": setup.shape, **options})

    return prepare


def test_the_setups_are_the_corners_that_they_are_named_for():
    forward, backward = {}, {}
    for name, (shape, cut_forward, cut_backward) in SETUPS.items():
        machine = (132, 227 << 10)
        forward[name] = cut_forward(schedule.layer_norm_forward(*shape, 1, 4, False, machine[0]))
        cut = schedule.layer_norm_backward(*shape, 1, 4, False, *machine, False)
        backward[name] = cut_backward(cut)
        for made in (forward[name], backward[name]):
            assert isinstance(made, Rows) == name.startswith("rows"), name
            assert made.even or "even" not in name.split(), name
    for made in (forward, backward):
        uneven = made["rows, uneven"]
        assert uneven.u > 1
        assert uneven.r > 1
        assert uneven.u * uneven.bc > uneven.width
        assert uneven.rows % uneven.r != 0
        assert 1 < uneven.programs < uneven.tiles
        assert uneven.tiles % uneven.programs != 0
        assert made["rows, even"].u > 1
        assert not made["rows, side by side"].even
        assert not made["wide"].even
        assert made["wide"].k > 2
        assert made["wide"].lag > made["wide"].k
        assert made["wide, one tile"].k == 1
    late = forward["wide, all late"]
    assert late.lag == late.rows * late.k
    late = backward["wide, all late"]
    assert late.lag == late.blocks * late.k
    assert backward["wide, one block"].blocks == 1
    assert backward["wide"].blocks > 2
    assert backward["wide"].rows % backward["wide"].rb != 0
    assert backward["rows, uneven"].finish < backward["rows, uneven"].width
    assert 1 < backward["rows, folded in part"].lanes < backward["rows, folded in part"].r


@EVERY_SETUP
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: str(Case((), **options)))
def test_every_setup_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **options))


RESIDUALS = [
    {"offset": 1e3, "vectors": "weight", "running": torch.float32, "residual": "apart"},
    {"dtype": torch.float16, "vectors": "bias"},
    {"dtype": torch.bfloat16, "residual_dtype": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "vectors": ""},
]


@EVERY_SETUP
@pytest.mark.parametrize("options", RESIDUALS, ids=lambda options: str(Case((), **options)))
def test_the_result_is_had_again_from_what_the_backward_needs(setup, options, prepared):
    check_recomputed(prepared(setup, **{"residual": "contiguous", **options}))


@EVERY_SETUP
@pytest.mark.parametrize("residual", [None, "contiguous"])
def test_offsets_of_64_bits(setup, residual, prepared, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(prepared(setup, residual=residual, running=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 24, 96, 100, 257])
def test_widths_and_dtypes(dtype, width):
    for offset in (3.0, 1e3):
        assert_accurate(Case((5, width), dtype, offset=offset))


@pytest.mark.parametrize(
    "shape", [(4, 1), (4, 3), (2, 4097), (1, 9000), (3, 2, 2500), (150, 5)], ids=str
)
def test_the_schedules_own_cuts(shape):
    assert_accurate(Case(shape, running=torch.float32, vectors="weight+bias+input_bias"))


def test_a_row_that_no_program_holds(monkeypatch):
    for name in ("_HELD_BYTES", "_SUMMED_BYTES"):
        monkeypatch.setattr(schedule, name, 1 << 10)
    routes.forget(monkeypatch)
    for dtype in (torch.bfloat16, torch.float64):
        assert_accurate(Case((2, 5000), dtype, running=torch.float32, offset=1e3))


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_lie_anyhow(layout, dims):
    shape = (3, 4, 2, 6)
    assert_accurate(Case(shape, dims=dims, layout=layout, dy="contiguous"))
    assert_accurate(Case(shape, dims=dims, dy=layout, running=torch.float32))
    assert_accurate(Case(shape, dims=dims, residual=layout, dtotal=layout))


SOME_PERMUTED = list(itertools.product(["contiguous", "permuted"], repeat=4))


@pytest.mark.parametrize("layouts", SOME_PERMUTED, ids=" ".join)
@pytest.mark.parametrize("shape", [(2, 3, 12), (2, 2, 2, 12)], ids=str)
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
def test_any_of_the_tensors_may_be_permuted(setup, shape, layouts, prepared):
    layout, residual, dy, dtotal = layouts
    assert_accurate(
        prepared(setup, shape=shape, layout=layout, residual=residual, dy=dy, dtotal=dtotal)
    )
    if residual == dtotal == "contiguous":
        assert_accurate(prepared(setup, shape=shape, layout=layout, dy=dy))


PERMUTED_VARIANTS = [
    {"vectors": "weight+bias+input_bias", "running": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "running": torch.float64},
    {"dtype": torch.bfloat16, "params": torch.float32, "residual": "permuted"},
    {"dtype": torch.float16, "residual": "permuted", "dy": "permuted apart"},
]


@pytest.mark.parametrize("options", PERMUTED_VARIANTS, ids=lambda options: str(Case((), **options)))
@pytest.mark.parametrize("setup", ["rows", "rows, even", "rows, folded", "wide", "wide, even"])
def test_permuted_rows_by_offsets_of_32_and_64_bits(setup, options, prepared, monkeypatch):
    shape = (2, 3, SETUPS[setup].shape[-1])
    case = prepared(setup, **{"shape": shape, "layout": "permuted", **options})
    ours = assert_accurate(case)
    routes.use_64_bit_offsets(monkeypatch)
    assert_same_bits(run(case, make(case), "triton"), ours)


@pytest.mark.parametrize("layout", ["apart", *PERMUTED])
@pytest.mark.parametrize("shape", [(3, 4, 12), (2, 3, 1, 2, 12)], ids=str)
def test_rows_found_by_two_strides_are_not_copied(layout, shape, monkeypatch):
    launches = routes.watch_launches(monkeypatch)
    case = Case(shape, layout=layout)
    tensors = make(case)
    run(case, tensors, "triton")
    forward, backward = launches
    assert forward["x"] == backward["x"] == tensors.x.data_ptr()
    assert backward["dy"] == tensors.dy.data_ptr()
    case = Case(shape, layout=layout, residual=layout)
    tensors = make(case)
    out = run(case, tensors, "triton")
    forward, backward = launches[2:]
    assert forward["x"] == tensors.x.data_ptr()
    assert forward["residual"] == tensors.residual.data_ptr()
    assert backward["dy"] == tensors.dy.data_ptr()
    assert backward["dtotal"] == tensors.dtotal.data_ptr()
    assert backward["x"] == out["total"].data_ptr()


def test_rows_of_another_order_than_those_before_are_copied(monkeypatch):
    launches = routes.watch_launches(monkeypatch)
    case = Case((3, 4, 2, 6), layout="permuted", residual="rotated", dtotal="rotated")
    tensors = make(case)
    run(case, tensors, "triton")
    forward, backward = launches
    assert forward["x"] == tensors.x.data_ptr()
    assert forward["residual"] != tensors.residual.data_ptr()
    assert backward["dy"] == tensors.dy.data_ptr()
    assert backward["dtotal"] != tensors.dtotal.data_ptr()
    assert_accurate(case)
    assert_accurate(Case((3, 4, 2, 6), layout="permuted", dy="rotated"))


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gradient_lies_as_its_input_where_that_is_dense(layout, dims):
    case = Case((3, 4, 2, 6), dims=dims, layout=layout, dy="contiguous")
    x = make(case).x
    out = run(case, make(case), "triton")
    assert out["y"].is_contiguous()
    if layout in ("permuted", "rotated"):
        assert out["dx"].stride() == x.stride() != out["y"].stride()
    else:
        assert out["dx"].is_contiguous()
    case = dataclasses.replace(case, residual=layout)
    out = run(case, make(case), "triton")
    assert all(out[name].is_contiguous() for name in ("y", "total", "dx", "dresidual"))


def test_norms_around_an_attention_take_what_it_gives(monkeypatch):
    check_around_attention(monkeypatch, "cpu")


@pytest.mark.parametrize("vectors", ["", "weight", "bias", "input_bias", "weight+bias+input_bias"])
@pytest.mark.parametrize("setup", ["rows", "wide"])
def test_a_single_row_without_dimensions_around_it(setup, vectors, prepared):
    for dims, shape in ((1, (24,)), (2, (4, 6))):
        assert_accurate(prepared(setup, shape=shape, dims=dims, vectors=vectors))
    assert_accurate(prepared(setup, shape=(24,), residual="contiguous"))


@pytest.mark.parametrize("mode", ["golden", "standard", 0.25])
@pytest.mark.parametrize(
    ("dtype", "params"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.float16, torch.float64),
    ],
    ids=str,
)
def test_vectors_of_another_dtype(dtype, params, mode):
    assert_accurate(Case((6, 24), dtype, params=params, mode=mode))


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@SOME_SETUPS
def test_a_residual_is_added_first(setup, dtype, residual_dtype, prepared):
    options = {"residual": "contiguous", "residual_dtype": residual_dtype}
    out = assert_accurate(prepared(setup, dtype=dtype, params=torch.float32, **options))
    assert out["total"].dtype == out["y"].dtype == torch.promote_types(dtype, residual_dtype)
    assert out["dx"].dtype == dtype
    assert out["dresidual"].dtype == residual_dtype


NAMES = ("x", "weight", "bias", "input_bias")
SUBSETS = [s for size in range(1, 5) for s in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("needs", SUBSETS, ids="+".join)
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
def test_some_of_the_gradients(setup, needs, prepared):
    case = prepared(setup, needs=needs, vectors="weight+bias+input_bias")
    out = assert_accurate(case)
    assert {name for name in out if name.startswith("d")} == {f"d{name}" for name in needs}


NEEDS_OF_ADD = [("x",), ("residual",), ("weight",), ("bias",), ("residual", "weight")]


@pytest.mark.parametrize("needs", NEEDS_OF_ADD, ids="+".join)
@SOME_SETUPS
def test_some_of_the_gradients_with_a_residual(setup, needs, prepared):
    assert_accurate(prepared(setup, needs=needs, residual="contiguous"))


def test_a_total_of_what_needs_no_gradient_needs_none():
    weight = torch.ones(6, requires_grad=True)
    for backend in ("torch", "triton"):
        y, total = functional.add_layer_norm(X, X, (6,), weight, backend=backend)
        assert y.requires_grad
        assert not total.requires_grad


@SOME_SETUPS
def test_one_output_of_two_is_used(setup, prepared):
    assert_accurate(prepared(setup, residual="contiguous", used=("y",)))
    case = prepared(setup, residual="apart", used=("total",), needs=("x", "residual"))
    out = assert_accurate(case)
    dtotal = make(case).dtotal
    assert torch.equal(out["dx"], dtotal)
    assert torch.equal(out["dresidual"], dtotal)


@SOME_SETUPS
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("running", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_running_statistics(setup, momentum, running, prepared):
    case = prepared(setup, needs=(), running=running, momentum=momentum, offset=1e3)
    assert assert_accurate(case)["num_batches_tracked"] == 4


def test_running_statistics_without_a_counter():
    case = Case((5, 24), torch.bfloat16, running=torch.float32, tracked=False)
    assert "num_batches_tracked" not in assert_accurate(case)


def test_running_statistics_move_once_a_call():
    x = torch.randn(6, 12) * 2 + 1
    mean, var, count = torch.tensor(0.0), torch.tensor(1.0), torch.tensor(0)
    expected = [mean.double(), var.double()]
    made = reference.layer_norm(x.double(), (12,))
    for step in range(1, 4):
        y = functional.layer_norm(
            x.clone().requires_grad_(), (12,), running_mean=mean, running_var=var,
            num_batches_tracked=count, momentum=None if step == 3 else 0.25, backend="triton",
        )  # fmt: skip
        y.sum().backward()
        assert count == step
        momentum = None if step == 3 else 0.25
        expected = [
            reference.running_average(old, value.mean(), momentum, step)
            for old, value in zip(expected, made[1:], strict=True)
        ]
        torch.testing.assert_close(mean.double(), expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(var.double(), expected[1], rtol=1e-6, atol=1e-6)


@SOME_SETUPS
def test_without_gradients_the_results_are_the_same(setup, prepared):
    for options in ({"running": torch.float32}, {"residual": "contiguous"}):
        case = prepared(setup, **options)
        with torch.no_grad():
            bare = run(dataclasses.replace(case, needs=()), make(case), "triton")
        full = run(case, make(case), "triton")
        assert_same_bits(bare, {name: full[name] for name in bare})


@EVERY_SETUP
def test_equal_calls_give_equal_bits_and_leave_the_counters_at_zero(setup, prepared, monkeypatch):
    made = routes.watch_workspaces(monkeypatch)
    for options in ({"running": torch.float32, "vectors": "bias+input_bias"}, {"residual": "odd"}):
        case = prepared(setup, **options)
        tensors = make(case)
        assert_same_bits(run(case, tensors, "triton"), run(case, tensors, "triton"))
    for needs in (("x",), ("bias",)):
        run(prepared(setup, needs=needs), make(prepared(setup)), "triton")
    assert made
    assert not any(work.counters.any() for work in made)


@SOME_SETUPS
def test_infinity_and_nan_stay_in_their_row(setup, prepared):
    case = prepared(setup)
    tensors = make(case)
    clean = run(case, tensors, "triton")
    tensors.x[0, 1] = torch.inf
    tensors.x[2, 3] = torch.nan
    broken = run(case, tensors, "triton")
    for name in ("y", "dx"):
        assert broken[name][[0, 2]].isnan().all()
        assert torch.equal(broken[name][1], clean[name][1])
        assert torch.equal(broken[name][3:], clean[name][3:]) or case.shape[0] == 3
    assert torch.equal(broken["dbias"], clean["dbias"])
    assert broken["dweight"].isnan().all()


@pytest.mark.parametrize("setup", ["rows", "rows, uneven", "wide"])
@pytest.mark.parametrize("width", [8, 20])
def test_equal_values_have_no_variance_and_give_the_bias(setup, width, prepared):
    case = prepared(setup, shape=(6, width), running=torch.float32)
    tensors = make(case)
    tensors.x = torch.arange(6.0).mul(1e4 / 3).reshape(6, 1).expand(6, width)
    out = run(case, tensors, "triton")
    assert torch.equal(out["y"], tensors.bias.expand(6, width))
    torch.testing.assert_close(out["running_var"], 0.9 * tensors.running_var)


@pytest.mark.parametrize("shape", [(5, 3), (2, 2, 4)], ids=str)
@pytest.mark.parametrize("dims", [1, 2])
def test_derivatives_once_and_twice(shape, dims):
    vectors = "weight+bias+input_bias"
    case = Case(shape, torch.float64, dims=dims, vectors=vectors, offset=0.5, eps=1e-2)
    tensors = make(case)
    names = ("x", "weight", "bias", "input_bias")
    leaves = [getattr(tensors, name).requires_grad_() for name in names]

    def norm(*inputs):
        given = dict(zip(names, inputs, strict=True))
        return call(case, {"residual": None, **given}, "triton")["y"]

    assert torch.autograd.gradcheck(norm, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(norm, leaves, fast_mode=True)


def test_derivatives_once_and_twice_with_a_residual():
    case = Case((4, 3), torch.float64, residual="contiguous", offset=0.5, eps=1e-2)
    tensors = make(case)
    names = ("x", "residual", "weight", "bias")
    leaves = [getattr(tensors, name).requires_grad_() for name in names]

    def norm(*inputs):
        given = dict(zip(names, inputs, strict=True))
        return tuple(call(case, {"input_bias": None, **given}, "triton").values())

    assert torch.autograd.gradcheck(norm, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(norm, leaves, fast_mode=True)


@pytest.mark.parametrize("vectors", ["", "bias", "weight+bias+input_bias"])
@pytest.mark.parametrize("residual", [None, "contiguous"])
def test_gradients_that_will_be_differentiated_are_those_that_will_not(vectors, residual):
    case = Case((2, 3, 6), torch.float64, vectors=vectors, residual=residual, dims=2)
    tensors = make(case)
    inputs = {name: getattr(tensors, name) for name in ("x", "residual", *NAMES[1:])}
    if residual is not None:
        inputs["input_bias"] = None
    leaves = [t.requires_grad_() for t in inputs.values() if t is not None]
    outputs = list(call(case, inputs, "triton").values())
    gradients = [tensors.dy, tensors.dtotal][: len(outputs)]
    for wanted in (leaves, leaves[:1], leaves[-1:]):
        once = torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)
        twice = torch.autograd.grad(outputs, wanted, gradients, create_graph=True)
        for a, b in zip(once, twice, strict=True):
            torch.testing.assert_close(a, b)


def test_changed_inputs_are_noticed_before_the_backward():
    x, weight = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    y = functional.layer_norm(x, (6,), weight, backend="triton")
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    residual = torch.randn(4, 6)
    y, total = functional.add_layer_norm(x, residual, (6,), weight, backend="triton")
    total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("residual", [None, "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_the_backward_keeps_what_is_normalised_and_two_numbers_a_row(dtype, residual):
    vectors = "weight+bias" if residual else "weight+bias+input_bias"
    case = Case((32, 24), dtype, residual=residual, vectors=vectors)
    tensors, kept = make(case), {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = {name: getattr(tensors, name) for name in ("x", "residual", *NAMES[1:])}
    inputs = {name: t if t is None else t.requires_grad_() for name, t in inputs.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(case, inputs, "triton")["y"]
    # Beside what is normalised the weight, and the bias or the input_bias.
    assert sum(kept.values()) == (32 + 2) * 24 * dtype.itemsize + 2 * 32 * 4
    y.sum().backward()


@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("asked", ["low", "float32"])
@pytest.mark.parametrize("residual", [False, True])
def test_autocast_decides_the_dtype_of_the_output_only(low, dtype, asked, residual):
    torch.manual_seed(0)
    x, beside = (torch.randn(5, 24, dtype=dtype, requires_grad=True) for _ in range(2))
    weight, bias = (torch.rand(24).add(0.5).requires_grad_() for _ in range(2))
    options = {"autocast_output": asked, "backend": "triton", "mode": "standard"}
    with torch.autocast("cpu", low):
        if residual:
            y, total = functional.add_layer_norm(x, beside, (24,), weight, bias, **options)
        else:
            y, total = functional.layer_norm(x, (24,), weight, bias, **options), x
    assert y.dtype == (low if asked == "low" else torch.float32)
    assert total.dtype == dtype
    h = total.detach().double()
    torch.testing.assert_close(
        y.double(), reference.layer_norm(h, (24,), weight, bias).y, **tolerance(y.dtype)
    )
    dy = torch.randn_like(y)
    leaves = (x, beside, weight, bias) if residual else (x, weight, bias)
    got = torch.autograd.grad(y, leaves, dy)
    exact = reference.layer_norm_backward(dy.double(), h, (24,), weight)
    expected = (exact.dx, *exact) if residual else exact
    for gradient, truth, leaf in zip(got, expected, leaves, strict=True):
        assert gradient.dtype == leaf.dtype
        torch.testing.assert_close(gradient.double(), truth, **tolerance(leaf.dtype))


def tolerance(dtype):
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(torch.float32).eps}


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.layer_norm(
            torch.randn(3, 8).double(), (8,), autocast_output="low", backend="triton"
        )
    assert y.dtype == torch.float64


X = torch.randn(4, 6)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"weight": torch.ones(6, device="meta")}, "not every tensor is on cpu"),
        ({"weight": torch.ones(12)[::2]}, "strided"),
        ({"input_bias": torch.ones(12)[::2]}, "strided"),
        (
            {
                "running_mean": torch.zeros(()),
                "running_var": torch.ones(()),
                "num_batches_tracked": torch.tensor(0, dtype=torch.int32),
            },
            "num_batches_tracked is torch.int32",
        ),
    ],
)
def test_what_the_kernels_cannot_take_is_refused_with_the_reason(options, why):
    with pytest.raises(NotImplementedError, match=f"backend='triton', but.*{why}"):
        functional.layer_norm(X, (6,), backend="triton", **options)
    if "meta" not in str(options):
        assert functional.layer_norm(X, (6,), **options).shape == X.shape


def test_transforms_and_no_rows_are_refused_by_name():
    def norm(x):
        return functional.layer_norm(x, (6,), backend="triton")

    def add(x):
        return functional.add_layer_norm(x, x, (6,), backend="triton")

    for route in (norm, add):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            torch.func.vmap(route)(torch.randn(2, 4, 6))
        with (
            pytest.raises(NotImplementedError, match="forward-mode"),
            torch.autograd.forward_ad.dual_level(),
        ):
            route(torch.autograd.forward_ad.make_dual(X, X))
        with pytest.raises(NotImplementedError, match="empty"):
            route(X[:0])
        with pytest.raises(NotImplementedError, match="meta"):
            route(X.to("meta"))
    assert functional.layer_norm(X[:0], (6,)).shape == (0, 6)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_would_miss_a_kernel_and_is_refused():
    with pytest.raises(NotImplementedError, match=r"backend='triton', but torch\.jit\.trace"):
        torch.jit.trace(lambda x: functional.layer_norm(x, (6,), backend="triton"), (X,))


def test_programs_that_would_wait_for_each_other_are_not_asked_for_here(monkeypatch):
    asked, choose = [], schedule.layer_norm_backward
    monkeypatch.setattr(
        schedule, "layer_norm_backward", lambda *sizes: asked.append(sizes) or choose(*sizes)
    )
    routes.forget(monkeypatch)
    run(Case((6, 24)), make(Case((6, 24))), "triton")
    assert len(asked) == 1
    *sizes, together = asked[0]
    assert together is False
    assert isinstance(choose(4096, 12288, 8, 2, *sizes[4:], together), WideBackward)


def test_more_parts_than_are_added_at_a_time(prepared, monkeypatch):
    seen, most = set(), {"KP", "KF", "GB", "FAN_IN"}

    def by_twos(constants):
        seen.update(most & constants.keys())
        fewer = {**constants, **{n: min(constants[n], 2) for n in most & constants.keys()}}
        if "FAN_IN" not in constants and "R" in constants:
            fewer["KP"] = constants["KP"]  # of programs that share a row, here one
        return fewer

    routes.watch_compiled(monkeypatch, by_twos)
    for setup in ("rows, uneven", "rows, folded", "wide", "wide, all late"):
        for dtype in (torch.float32, torch.float64):
            vectors = "weight+bias+input_bias"
            case = {"dtype": dtype, "offset": 1e3, "running": dtype, "vectors": vectors}
            assert_accurate(prepared(setup, **case))
    assert seen == most


def test_each_stretch_of_columns_is_finished_once(prepared, monkeypatch):
    finished, finish = [], rows.finish_columns

    def finish_columns(gradient_ptr, parts_ptr, which, stretch, *rest):
        finished.append(int(stretch))
        finish(gradient_ptr, parts_ptr, which, stretch, *rest)

    monkeypatch.setattr(rows, "finish_columns", finish_columns)
    assert_accurate(prepared("rows, uneven", needs=("bias",), shape=(3, 60)))
    assert sorted(finished) == list(range(8))


def test_a_module_trains_by_the_kernels():
    torch.manual_seed(0)
    ours, theirs = (normplug.LayerNorm(12, backend=b) for b in ("triton", "torch"))
    data = [torch.randn(6, 12) * 2 + 1 for _ in range(3)]
    for layer in (ours, theirs):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            (layer(x) - 1).square().mean().backward()
            optimizer.step()
        layer.eval()
    assert ours.num_batches_tracked == 3
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(ours(data[0]), theirs(data[0]))
    assert ours.num_batches_tracked == 3


# The operators that compilers see.


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_the_operators_keep_torchs_rules(case):
    check_operators(case, "cpu")


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_the_operators_compute_what_the_kernels_do(case, monkeypatch):
    case = dataclasses.replace(case, running=torch.float32)
    eager = run(case, make(case), "triton")
    routes.use_operators(monkeypatch)
    assert_same_bits(run(case, make(case), "triton"), eager)


@pytest.mark.parametrize("layout", ["contiguous", "permuted"])
@pytest.mark.parametrize("residual", [False, True])
def test_compiled_in_one_graph_with_other_numbers_of_rows(residual, layout):
    check_compiled(residual, layout, "cpu", "aot_eager")


def test_compiled_around_an_attention():
    check_compiled_around_attention("cpu", "aot_eager")


@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_fused_norm_adds_the_bias_of_the_convolution_before_it(memory_format, compiler):
    torch.manual_seed(0)
    stock = Depthwise()
    torch.nn.init.normal_(stock.conv.bias, 1, 2)
    x = torch.randn(2, 8, 5, 6).to(memory_format=memory_format)
    results = []
    for change, dtype in (
        (lambda model: fuse(swap(model, backend="triton")), torch.float32),
        (lambda model: swap(model, backend="torch"), torch.float32),
        (lambda model: swap(model, backend="torch"), torch.float64),
    ):
        model = change(copy.deepcopy(stock)).to(dtype)
        run = torch.compile(model, backend=compiler, fullgraph=True) if compiler else model
        y = run(x.to(dtype))
        gradients = torch.autograd.grad(y.sigmoid().square().sum(), [*model.parameters()])
        named = zip(dict(model.named_parameters()), gradients, strict=True)
        results.append({"y": y.detach(), **dict(named), "running_var": model.norm.running_var})
    ours, theirs, truth = results
    for name, value in ours.items():
        assert_no_worse(name, value, theirs[name], truth[name], spare=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_operators_say_how_a_gradient_lies(layout):
    case = Case((3, 4, 2, 6), layout=layout)
    tensors = make(case)
    stats = torch.zeros(2 * 24)
    inputs = (tensors.dy, None, tensors.x, None, tensors.weight, None, None, stats)
    needs = (True, False, True, False, False)
    numbers = (False, [6], 0.1, 1e-5, 1.0, None, "float32", needs)
    backward = torch.ops.normplug.layer_norm_backward
    real = backward(*inputs, *numbers)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = (t if t is None else mode.from_tensor(t) for t in inputs)
        told = backward(*fakes, *numbers)
    assert [t.stride() for t in told] == [t.stride() for t in real]


def test_what_records_operators_records_the_kernels_as_one():
    def norm(x):
        y, total = functional.add_layer_norm(x, x * 0.5, (6,), backend="triton")
        return functional.layer_norm(y, (6,), backend="triton") + total

    graph = make_fx(norm)(X)
    targets = [node.target for node in graph.graph.nodes]
    assert torch.ops.normplug.layer_norm_forward.default in targets
    assert torch.ops.normplug.add_layer_norm_forward.default in targets
    assert torch.equal(graph(X + X**2), norm(X + X**2))


@given(
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda s: torch.Size(s).numel() <= 2000),
    dims=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
    with_residual=st.booleans(),
    residual_dtype=st.sampled_from([None, torch.float32]),
    vectors=st.sets(st.sampled_from(["weight", "bias", "input_bias"])),
    mode=st.one_of(st.just("golden"), st.floats(0.01, 10)),
    running=st.sampled_from([None, torch.float32]),
    momentum=st.one_of(st.sampled_from([None, 0.0, 1.0]), st.floats(0.001, 1)),
    offset=st.sampled_from([0.0, 3.0, 1e3]),
    full_parameters=st.booleans(),
    cut=st.sampled_from(["", "rows", "wide"]),
    seed=st.integers(0, 2**31),
)
# Nothing is shrunk: at the interpreter's speed that takes minutes, and the calls are small.
@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_call(
    shape, dims, dtype, layouts, with_residual, residual_dtype, vectors, mode, running, momentum,
    offset, full_parameters, cut, seed,
):  # fmt: skip
    layout, dy, residual = layouts
    case = Case(
        shape,
        dtype,
        min(dims, len(shape)),
        layout,
        params=torch.promote_types(dtype, torch.float32) if full_parameters else None,
        vectors="+".join(vectors - {"input_bias"} if with_residual else vectors),
        residual=residual if with_residual else None,
        residual_dtype=residual_dtype,
        running=running,
        momentum=momentum,
        mode=mode,
        offset=offset,
        dy=dy,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        if cut == "rows":
            reschedule(monkeypatch, held(2, 4, 2), held(2, 4, 2, keep=True))
        elif cut == "wide":
            reschedule(monkeypatch, soon(16), soon_blocks(2, 8))
        assert_accurate(case)


def soon(block):
    """As `tiled`, with the least lag that there may be."""
    return lambda shape: tiled(block, -(-shape.width // block))(shape)


def soon_blocks(rb, cw):
    """As `blocks`, with the least lag that there may be."""
    return lambda shape: blocks(rb, cw, -(-shape.width // cw))(shape)
