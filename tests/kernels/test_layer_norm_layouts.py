"""How LayerNorm's kernels address rows, in Triton's interpreter: see `test_interpreter`."""

import dataclasses
import itertools

import pytest
import torch

import interpreted
import routes
from accuracy import assert_same_bits
from row_cases import LAYOUTS, PERMUTED, Case, assert_accurate, check_around_attention, make, run
from row_setups import SETUPS

pytestmark = interpreted.MARKS


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_have_any_layout(layout, dims):
    shape = (3, 4, 2, 6)
    assert_accurate(Case(shape, dims=dims, layout=layout, dy="contiguous"))
    assert_accurate(Case(shape, dims=dims, dy=layout, running=torch.float32))
    assert_accurate(Case(shape, dims=dims, residual=layout, dtotal=layout))


# Whether x, residual, dy and dtotal are permuted, and the indices of the shape and the setup, which
# follow from them. Any three of the six take all combinations; without a residual, any two of four.
FOUR = list(itertools.product([0, 1], repeat=4))
PERMUTED_CASES = [(x, r, dy, dt, x ^ r ^ dy, r ^ dy ^ dt) for x, r, dy, dt in FOUR]
PERMUTED_CASES += [
    (x, None, dy, None, s, x ^ dy ^ s) for x, dy, s in itertools.product([0, 1], repeat=3)
]


@pytest.mark.parametrize(("x", "residual", "dy", "dtotal", "shape", "setup"), PERMUTED_CASES)
def test_any_of_the_tensors_may_be_permuted(x, residual, dy, dtotal, shape, setup, prepared):
    layouts = {"layout": x, "residual": residual, "dy": dy, "dtotal": dtotal}
    names = {0: "contiguous", 1: "permuted", None: None}
    options = {name: names[is_permuted] for name, is_permuted in layouts.items()}
    shape = [(2, 3, 12), (2, 2, 2, 12)][shape]
    assert_accurate(prepared(["rows, uneven", "wide"][setup], shape=shape, **options))


PERMUTED_VARIANTS = [
    {"vectors": "weight+bias+input_bias", "running": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "running": torch.float64},
    {"dtype": torch.bfloat16, "params": torch.float32, "residual": "permuted"},
    {"dtype": torch.float16, "residual": "permuted", "dy": "permuted apart"},
]


@pytest.mark.parametrize("options", PERMUTED_VARIANTS, ids=lambda options: str(Case((), **options)))
@pytest.mark.parametrize("setup", ["rows", "rows, even", "rows, folded", "wide", "wide, even"])
def test_permuted_rows_have_the_same_bits_with_32_and_64_bit_offsets(
    setup, options, prepared, monkeypatch
):
    shape = (2, 3, SETUPS[setup].shape[-1])
    case = prepared(setup, **{"shape": shape, "layout": "permuted", **options})
    ours = assert_accurate(case)
    routes.use_64_bit_offsets(monkeypatch)
    assert_same_bits(run(case, make(case), "triton"), ours)


@pytest.mark.parametrize("layout", ["apart", *PERMUTED])
@pytest.mark.parametrize("shape", [(3, 4, 12), (2, 3, 1, 2, 12)], ids=str)
def test_rows_addressed_by_two_strides_are_not_copied(layout, shape, monkeypatch):
    launches = routes.watch_launches(monkeypatch)
    for residual in (None, layout):
        case = Case(shape, layout=layout, residual=residual)
        tensors = make(case)
        out = run(case, tensors, "triton")
        forward, backward = launches[-2:]
        assert forward["x"] == tensors.x.data_ptr()
        assert backward["dy"] == tensors.dy.data_ptr()
        assert backward["x"] == out.get("total", tensors.x).data_ptr()
        if residual is not None:
            assert forward["residual"] == tensors.residual.data_ptr()
            assert backward["dtotal"] == tensors.dtotal.data_ptr()
    assert len(launches) == 4


def test_tensors_with_another_order_of_rows_than_x_are_copied(monkeypatch):
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
def test_a_gradient_has_the_layout_of_a_dense_input(layout, dims):
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


def test_norms_around_an_attention_accept_its_layouts(monkeypatch):
    check_around_attention(monkeypatch, "cpu")
