"""LayerNorm's and RMSNorm's kernels.

Programs that share the columns of a row wait for each other, which the interpreter cannot do: they
run on a GPU only, in `test_layer_norm_kernels_gpu`.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import oracle
import routes
from accuracy import assert_same_bits, leaf
from calls import DTYPES, HALVES, paired
from normplug import functional, reference
from normplug._kernels import power_of_2
from normplug._kernels.layer_norm.schedule import RowTiles, Wide
from normplug._ops.call import call as call_spec
from normplug._ops.row_norms import LayerNormSpec
from row_cases import (
    INPUTS,
    LAYOUTS,
    Case,
    assert_accurate,
    call,
    check_recomputed,
    make,
    run,
)


def held(r, bc, programs, **rest):
    """Tiles of r rows, in blocks of bc columns, that so many programs take in turn."""

    def change(shape):
        u = -(-power_of_2(shape.width) // bc)
        cut = {
            "r": r,
            "u": u,
            "bc": bc,
            "programs": programs,
            "warps": 1,
            "stages": 1,
            "k": 1,
        }
        rest_of_it = {"keep": False, "lanes": r, "finish": 8, **rest}
        return RowTiles(shape.rows, shape.width, **{**cut, **rest_of_it})

    return change


def tiled(block, lag):
    """Tiles of a row, written `lag` programs after they were read."""
    return lambda shape: Wide(shape.rows, shape.width, 1, block, 1, lag)


def blocks(rb, cw, lag):
    """Tiles of a block of rows, written `lag` programs after they were read."""
    return lambda shape: Wide(shape.rows, shape.width, rb, cw, 1, lag)


def setup_of(shape, forward=lambda shape: shape, backward=lambda shape: shape):
    """A case, and changes to the schedules chosen for it."""
    return Case(shape), {"layer_norm_forward": forward, "layer_norm_backward": backward}


SETUPS = {
    "rows": setup_of((7, 24)),
    "rows, uneven": setup_of((9, 12), held(2, 8, 2), held(2, 8, 2)),
    "rows, side by side": setup_of((7, 24), held(4, 32, 1), held(4, 32, 1, keep=True)),
    "rows, even": setup_of(
        (8, 16), held(2, 8, 2, keep=True, stages=2), held(2, 8, 2, keep=True)
    ),
    "rows, folded": setup_of(
        (9, 16), held(1, 4, 3, keep=True), held(2, 4, 3, lanes=1, stages=3)
    ),
    "rows, even and folded": setup_of(
        (8, 16), held(4, 16, 2), held(4, 8, 2, lanes=1, finish=16)
    ),
    "rows, folded in part": setup_of(
        (9, 12), held(2, 8, 2), held(4, 8, 2, lanes=2, keep=True)
    ),
    "wide": setup_of((5, 40), tiled(16, 4), blocks(2, 16, 5)),
    "wide, even": setup_of((4, 32), tiled(8, 4), blocks(2, 8, 4)),
    "wide, one block": setup_of((3, 40), tiled(32, 5), blocks(4, 16, 3)),
    "wide, all late": setup_of((3, 20), tiled(8, 9), blocks(1, 8, 9)),
    "wide, one tile": setup_of((3, 20), tiled(32, 1), blocks(2, 32, 1)),
}
SOME_SETUPS = pytest.mark.parametrize("setup", ["rows, uneven", "rows, folded", "wide"])
MIXED = {"params": torch.float32, "vectors": "weight+bias+input_bias"}
VARIANTS = [
    {"dtype": torch.float16, "vectors": "bias+input_bias", "mode": "standard"},
    {"dtype": torch.bfloat16, **MIXED, "offset": 1e3, "mode": 4, "layout": "apart"},
    {
        "vectors": "weight+input_bias",
        "offset": 1e3,
        "running": torch.float32,
        "dy": "odd",
    },
    {
        "dtype": torch.float64,
        "vectors": "",
        "running": torch.float64,
        "momentum": None,
        "eps": 0.1,
    },
    {"residual": "apart", "offset": 1e3, "vectors": "weight"},
    {"dtype": torch.bfloat16, "residual": "contiguous", "residual_dtype": torch.float32},
]


@paired(SETUPS, VARIANTS, 0, 2, 3)
def test_every_setup_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **options))


RECOMPUTED = [
    {"offset": 1e3, "vectors": "weight", "running": torch.float32, "residual": "apart"},
    {"dtype": torch.float16, "vectors": "bias"},
    {"dtype": torch.bfloat16, "residual_dtype": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "vectors": ""},
    {
        "dtype": torch.bfloat16,
        "params": torch.float32,
        "vectors": "weight",
        "centred": False,
    },
]


@paired(SETUPS, RECOMPUTED, 0, 2)
def test_the_backward_can_recompute_the_output(setup, options, prepared):
    check_recomputed(prepared(setup, **{"residual": "contiguous", **options}))


@pytest.mark.parametrize("residual", [None, "contiguous"])
@SOME_SETUPS
def test_64_bit_offsets_are_accurate(setup, residual, prepared, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    vectors = "weight+bias" if residual else "weight+bias+input_bias"
    assert_accurate(
        prepared(setup, residual=residual, vectors=vectors, running=torch.float32)
    )


SIZES = [(4, 1), (4, 3), (2, 4097), (1, 9000), (3, 2, 2500), (150, 5)]
CASES = [
    *(
        Case((5, width), dtype, offset=1e3)
        for width, dtype in itertools.product((1, 24, 257), DTYPES)
    ),
    *(Case(size, vectors=MIXED["vectors"], running=torch.float32) for size in SIZES),
    *(
        Case(size, vectors="weight", running=torch.float32, centred=False)
        for size in SIZES
    ),
    # Parameters of another dtype.
    Case((6, 24), torch.float16, params=torch.float32),
    Case((6, 24), torch.bfloat16, params=torch.float32, mode="standard"),
    Case((6, 24), torch.float32, params=torch.float16, mode=0.25),
    Case((6, 24), torch.float32, params=torch.float64),
    Case((6, 24), torch.float16, params=torch.float64, mode="standard"),
    # Rows in another order than those of x.
    Case((3, 4, 2, 6), layout="permuted", residual="rotated", dtotal="rotated"),
    Case((3, 4, 2, 6), layout="permuted", dy="rotated"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_schedules_own_choices_are_accurate(case):
    assert_accurate(case)


@pytest.mark.parametrize("vectors", ["", MIXED["vectors"]])
@pytest.mark.parametrize("setup", ["rows", "wide"])
def test_an_input_may_be_a_single_row(setup, vectors, prepared):
    for dims, shape in ((1, (24,)), (2, (4, 6))):
        assert_accurate(prepared(setup, shape=shape, dims=dims, vectors=vectors))
    assert_accurate(prepared(setup, shape=(24,), residual="contiguous"))


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
def test_a_residual_is_added_first(setup, dtype, residual_dtype, prepared):
    options = {"residual": "contiguous", "residual_dtype": residual_dtype}
    out = assert_accurate(prepared(setup, dtype=dtype, params=torch.float32, **options))
    assert (
        out["total"].dtype == out["y"].dtype == torch.promote_types(dtype, residual_dtype)
    )
    assert out["dx"].dtype == dtype
    assert out["dresidual"].dtype == residual_dtype


NEEDS = [(None, (name,)) for name in ("x", "weight", "bias", "input_bias")]
NEEDS += [(None, ("weight", "bias")), (None, ("x", "input_bias"))]
ADDED = [("x",), ("residual",), ("weight",), ("bias",), ("residual", "weight")]
NEEDS += [("contiguous", needs) for needs in ADDED]


@pytest.mark.parametrize(("residual", "needs"), NEEDS, ids=str)
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
def test_a_subset_of_the_gradients_can_be_requested(setup, residual, needs, prepared):
    vectors = "weight+bias" if residual else "weight+bias+input_bias"
    out = assert_accurate(
        prepared(setup, needs=needs, residual=residual, vectors=vectors)
    )
    assert {name for name in out if name.startswith("d")} == {
        f"d{name}" for name in needs
    }


@SOME_SETUPS
def test_only_one_of_the_two_outputs_may_be_used(setup, prepared):
    assert_accurate(prepared(setup, residual="contiguous", used=("y",)))
    case = prepared(setup, residual="apart", used=("total",), needs=("x", "residual"))
    out = assert_accurate(case)
    dtotal = make(case).dtotal
    assert torch.equal(out["dx"], dtotal)
    assert torch.equal(out["dresidual"], dtotal)


@SOME_SETUPS
@pytest.mark.parametrize(
    ("running", "momentum"),
    [(torch.bfloat16, 0.1), (torch.float32, None), (torch.float64, 1.0)],
)
def test_running_statistics_are_accurate(setup, momentum, running, prepared):
    case = prepared(setup, needs=(), running=running, momentum=momentum, offset=1e3)
    assert assert_accurate(case)["num_batches_tracked"] == 4


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
        assert torch.equal(broken[name][3:], clean[name][3:])
    assert torch.equal(broken["dbias"], clean["dbias"])
    assert broken["dweight"].isnan().all()


@pytest.mark.parametrize("setup", ["rows", "rows, uneven", "wide"])
@pytest.mark.parametrize("width", [8, 20])
def test_a_constant_row_has_no_variance_and_gives_the_bias(setup, width, prepared):
    case = prepared(setup, shape=(6, width), running=torch.float32)
    tensors = make(case)
    tensors.x = torch.arange(6.0).mul(1e4 / 3).reshape(6, 1).expand(6, width)
    out = run(case, tensors, "triton")
    assert torch.equal(out["y"], tensors.bias.expand(6, width))
    torch.testing.assert_close(out["running_var"], 0.9 * tensors.running_var)


# From 2^23 on, float32 has no fractions. The kernels subtract the mean as it is saved.
@pytest.mark.parametrize("setup", ["rows", "rows, uneven", "rows, folded"])
def test_the_mean_of_a_row_is_rounded_once(setup, prepared):
    width = prepared(setup).shape[-1]
    x = (
        torch.randint(4, (32, width), generator=torch.Generator().manual_seed(1))
        + 2.0**23
    )
    y = functional.layer_norm(x, (width,), backend="triton")
    distances = x.double() - x.double().mean(1, keepdim=True).round()
    rstd = (distances.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    torch.testing.assert_close(y.double(), distances * rstd, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "dtype"),
    [*itertools.product(HALVES, [torch.float32]), HALVES, HALVES[::-1]],
    ids=str,
)
@pytest.mark.parametrize("asked", ["low", "float32"])
@pytest.mark.parametrize("residual", [None, "contiguous"])
def test_autocast_changes_only_the_dtype_of_the_output(residual, low, dtype, asked):
    case = Case(
        (5, 24), dtype, params=torch.float32, residual=residual, mode="standard", offset=0
    )
    inputs = make(case).inputs(INPUTS)
    with torch.autocast("cpu", low):
        outputs = call(case, inputs, "triton", autocast_output=asked)
    y, total = outputs["y"], outputs.get("total", inputs["x"])
    assert y.dtype == (low if asked == "low" else torch.float32)
    assert total.dtype == dtype
    h, weight, bias = (
        t.detach().double() for t in (total, inputs["weight"], inputs["bias"])
    )
    dy = make(case).dy.to(y.dtype)
    leaves = [t for t in inputs.values() if t is not None]
    got = (y, *torch.autograd.grad(y, leaves, dy))
    exact = oracle.gradients(
        reference.layer_norm, dy.double(), h, weight, normalized_shape=(24,)
    )
    through = (exact.dx,) if residual is None else (exact.dx, exact.dx)
    expected = (reference.layer_norm(h, (24,), weight, bias).y, *through, *exact[1:])
    for ours, truth, like in zip(got, expected, (y, *leaves), strict=True):
        assert ours.dtype == like.dtype
        rtol, atol = 2 * torch.finfo(ours.dtype).eps, 8 * torch.finfo(torch.float32).eps
        torch.testing.assert_close(ours.double(), truth, rtol=rtol, atol=atol)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.layer_norm(
            torch.randn(3, 8).double(), (8,), autocast_output="low", backend="triton"
        )
    assert y.dtype == torch.float64


def test_more_parts_than_one_addition_takes_are_added_right(prepared, monkeypatch):
    seen = routes.merge_two_at_a_time(monkeypatch, "kp", "fan_in")
    for setup in ("rows, uneven", "rows, folded", "wide", "wide, all late"):
        for dtype in (torch.float32, torch.float64):
            vectors = "weight+bias+input_bias"
            case = {"dtype": dtype, "offset": 1e3, "running": dtype, "vectors": vectors}
            assert_accurate(prepared(setup, **case))
    assert seen == {"kp", "fan_in"}


# How rows are addressed.


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_have_any_layout(layout, dims):
    of_x, of_others = (
        {"layout": layout, "dy": "contiguous"},
        {"residual": layout, "dy": layout},
    )
    case = Case((3, 2, 2, 6), dims=dims)
    out = assert_accurate(dataclasses.replace(case, **of_x))
    # The gradient has the layout of an input that is dense.
    assert out["y"].is_contiguous()
    if layout in ("permuted", "rotated"):
        x = make(dataclasses.replace(case, **of_x)).x
        assert out["dx"].stride() == x.stride() != out["y"].stride()
    else:
        assert out["dx"].is_contiguous()
    assert_accurate(dataclasses.replace(case, **of_others, running=torch.float32))
    out = assert_accurate(
        dataclasses.replace(case, **of_x, residual=layout, dtotal=layout)
    )
    assert all(out[name].is_contiguous() for name in ("y", "total", "dx", "dresidual"))


PERMUTED_VARIANTS = [
    {"vectors": "weight+bias+input_bias", "running": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "running": torch.float64},
    {"dtype": torch.bfloat16, "params": torch.float32, "residual": "permuted"},
    {"dtype": torch.float16, "residual": "permuted", "dy": "permuted apart"},
    {"layout": "heads", "vectors": "weight", "centred": False},
]


PERMUTED_SETUPS = ("rows", "rows, even", "rows, folded", "wide", "wide, even")


@paired(PERMUTED_SETUPS, PERMUTED_VARIANTS, 0, 1, 3)
def test_permuted_rows_have_the_same_bits_with_32_and_64_bit_offsets(
    setup, options, prepared, monkeypatch
):
    shape = (2, 3, SETUPS[setup][0].shape[-1])
    case = prepared(setup, **{"shape": shape, "layout": "permuted", **options})
    ours = assert_accurate(case)
    routes.use_64_bit_offsets(monkeypatch)
    assert_same_bits(run(case, make(case), "triton"), ours)


# What is compiled differently for RMSNorm.


RMS = {"centred": False, "vectors": "weight"}
RMS_VARIANTS = [
    {"dtype": torch.bfloat16, "params": torch.float32, "offset": 1e3, "mode": "standard"},
    {"dtype": torch.float16, "weight_offset": 1.0, "residual": "apart"},
    {"running": torch.float32, "offset": 1e3, "dy": "odd", "eps": None},
    {"dtype": torch.float64, "vectors": "", "running": torch.float64, "momentum": None},
    {"residual": "contiguous", "weight_offset": 1.0, "needs": ("x", "weight")},
]


RMS_SETUPS = ("rows, uneven", "rows, even", "rows, folded", "wide", "wide, one block")


@paired(RMS_SETUPS, RMS_VARIANTS, 0, 2)
def test_rms_norm_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **{**RMS, **options}))


@pytest.mark.parametrize("params", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("setup", "rounding"),
    [("rows, uneven", "input"), ("wide", "input"), ("wide", "weight")],
)
def test_a_norm_that_rounds_before_the_weight_matches_torch(
    setup, rounding, params, prepared
):
    """Gradients included. Values close to a tie between two of float16 may round either way."""
    case = prepared(setup, dtype=torch.float16, params=params, **RMS)
    t = make(case)
    spec = LayerNormSpec(case.row, None, 1e-5, 0.5, None, "float32", False, 0.0, rounding)
    results = []
    for backend in ("triton", "torch"):
        x, weight = leaf(t.x), leaf(t.weight)
        y = call_spec("test", routes.Tensors(x, weight=weight), spec, backend)
        results.append((y, *torch.autograd.grad(y, (x, weight), t.dy.to(y.dtype))))
    (y, dx, dweight), theirs = results
    assert y.dtype == params
    assert [a.dtype for a in results[0]] == [a.dtype for a in theirs]
    assert torch.isclose(y, theirs[0], rtol=1e-6, atol=0).float().mean() > 0.95
    torch.testing.assert_close(y, theirs[0], rtol=2**-9, atol=0)
    torch.testing.assert_close(dx, theirs[1], rtol=2**-8, atol=2**-9)
    torch.testing.assert_close(dweight, theirs[2], rtol=2**-8, atol=2**-8)


def test_a_float64_result_is_rounded_to_float32_before_float16():
    # As torch rounds it: directly, this value would become the next float16 above 1.
    value = 1 + 2**-11 + 2**-40
    assert torch.tensor(value, dtype=torch.float64).half() == 1
    weight = torch.zeros(6, dtype=torch.float64)
    bias = torch.full((6,), value, dtype=torch.float64)
    x = torch.randn(2, 6).half()
    y = functional.layer_norm(x, (6,), weight, bias, backend="triton")
    assert y.dtype == torch.float16
    assert torch.equal(y, torch.ones_like(x))


def test_the_default_eps_of_an_rms_norm_is_that_of_its_input_beside_a_wider_weight():
    x = torch.full((2, 6), 1e-4)  # its square is less than the eps
    weight = torch.ones(6, dtype=torch.float64)
    y = functional.rms_norm(x, (6,), weight, backend="triton")
    torch.testing.assert_close(y, functional.rms_norm(x, (6,), weight, backend="torch"))


LAYOUT = st.sampled_from(LAYOUTS)
ANY_CALL = st.builds(
    Case,
    shape=st.lists(st.integers(1, 13), min_size=1, max_size=4)
    .map(tuple)
    .filter(lambda s: torch.Size(s).numel() <= 2000),
    dims=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    layout=LAYOUT,
    dy=LAYOUT,
    residual=st.none() | LAYOUT,
    residual_dtype=st.sampled_from([None, torch.float32]),
    vectors=st.sets(st.sampled_from(["weight", "bias", "input_bias"])).map("+".join),
    mode=st.just("golden") | st.floats(0.01, 10),
    running=st.sampled_from([None, torch.float32]),
    momentum=st.sampled_from([None, 0.0, 1.0]) | st.floats(0.001, 1),
    offset=st.sampled_from([0.0, 3.0, 1e3]),
    seed=st.integers(0, 2**31),
)


# Nothing is shrunk: at the interpreter's speed that takes minutes, and the calls are small.
@given(case=ANY_CALL, full_parameters=st.booleans())
@settings(
    max_examples=settings.default.max_examples // 8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_any_call_is_as_close_to_float64_as_torch(case, full_parameters):
    vectors = case.vectors.split("+")
    if case.residual is not None and "input_bias" in vectors:
        vectors.remove("input_bias")
    params = torch.promote_types(case.dtype, torch.float32) if full_parameters else None
    case = dataclasses.replace(
        case,
        dims=min(case.dims, len(case.shape)),
        vectors="+".join(vectors),
        params=params,
    )
    assert_accurate(case)
