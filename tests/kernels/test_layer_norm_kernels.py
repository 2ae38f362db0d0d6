"""LayerNorm's kernels, run on the CPU by Triton's interpreter: see `test_interpreter`.

Programs that share the columns of a row wait for each other, which the interpreter cannot do: they
run on a GPU only, in `test_layer_norm_kernels_gpu`.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import interpreted
import routes
from accuracy import assert_same_bits
from calls import DTYPES, HALVES
from normplug import functional, reference
from normplug._kernels.layer_norm import schedule
from normplug._kernels.layer_norm.schedule import WideBackward
from row_cases import INPUTS, LAYOUTS, Case, assert_accurate, call, check_recomputed, make, run
from row_setups import EVERY_SETUP, SETUPS, SOME_SETUPS, VARIANTS, blocks, held, reschedule, tiled

pytest.importorskip("triton")


pytestmark = interpreted.MARKS


@EVERY_SETUP
@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: str(Case((), **options)))
def test_every_setup_is_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **options))


RECOMPUTED = [
    {"offset": 1e3, "vectors": "weight", "running": torch.float32, "residual": "apart"},
    {"dtype": torch.float16, "vectors": "bias"},
    {"dtype": torch.bfloat16, "residual_dtype": torch.float32, "offset": 1e3},
    {"dtype": torch.float64, "vectors": ""},
    {"dtype": torch.bfloat16, "params": torch.float32, "vectors": "weight", "centred": False},
]
# Every setup with two of them.
HALF_OF_THEM = [(s, RECOMPUTED[(i + k) % 5]) for i, s in enumerate(SETUPS) for k in (0, 2)]


@pytest.mark.parametrize(("setup", "options"), HALF_OF_THEM, ids=str)
def test_the_backward_can_recompute_the_output(setup, options, prepared):
    check_recomputed(prepared(setup, **{"residual": "contiguous", **options}))


@pytest.mark.parametrize(
    ("setup", "residual"), [*((s, "contiguous") for s in SETUPS), ("rows", None), ("wide", None)]
)
def test_64_bit_offsets_are_accurate(setup, residual, prepared, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    vectors = "weight+bias" if residual else "weight+bias+input_bias"
    assert_accurate(prepared(setup, residual=residual, vectors=vectors, running=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 24, 96, 100, 257])
def test_every_width_and_dtype_is_accurate(dtype, width):
    for offset in (3.0, 1e3):
        assert_accurate(Case((5, width), dtype, offset=offset))


@pytest.mark.parametrize(
    "shape", [(4, 1), (4, 3), (2, 4097), (1, 9000), (3, 2, 2500), (150, 5)], ids=str
)
def test_the_schedules_own_choices_are_accurate(shape):
    assert_accurate(Case(shape, running=torch.float32, vectors="weight+bias+input_bias"))


def test_a_row_that_is_too_wide_for_one_program_is_accurate(monkeypatch):
    for name in ("_HELD_BYTES", "_SUMMED_BYTES"):
        monkeypatch.setattr(schedule, name, 1 << 10)
    routes.forget(monkeypatch)
    for dtype in (torch.bfloat16, torch.float64):
        assert_accurate(Case((2, 5000), dtype, running=torch.float32, offset=1e3))


@pytest.mark.parametrize("vectors", ["", "weight", "bias", "input_bias", "weight+bias+input_bias"])
@pytest.mark.parametrize("setup", ["rows", "wide"])
def test_an_input_may_be_a_single_row(setup, vectors, prepared):
    for dims, shape in ((1, (24,)), (2, (4, 6))):
        assert_accurate(prepared(setup, shape=shape, dims=dims, vectors=vectors))
    assert_accurate(prepared(setup, shape=(24,), residual="contiguous"))


@pytest.mark.parametrize(
    ("dtype", "params", "mode"),
    [
        (torch.float16, torch.float32, "golden"),
        (torch.bfloat16, torch.float32, "standard"),
        (torch.float32, torch.float16, 0.25),
        (torch.float32, torch.float64, "golden"),
        (torch.float16, torch.float64, "standard"),
    ],
    ids=str,
)
def test_parameters_may_have_another_dtype(dtype, params, mode):
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
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
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
def test_a_subset_of_the_gradients_can_be_requested(setup, needs, prepared):
    case = prepared(setup, needs=needs, vectors="weight+bias+input_bias")
    out = assert_accurate(case)
    assert {name for name in out if name.startswith("d")} == {f"d{name}" for name in needs}


NEEDS_OF_ADD = [("x",), ("residual",), ("weight",), ("bias",), ("residual", "weight")]


@pytest.mark.parametrize("needs", NEEDS_OF_ADD, ids="+".join)
@SOME_SETUPS
def test_a_subset_of_the_gradients_can_be_requested_with_a_residual(setup, needs, prepared):
    assert_accurate(prepared(setup, needs=needs, residual="contiguous"))


@SOME_SETUPS
def test_only_one_of_the_two_outputs_may_be_used(setup, prepared):
    assert_accurate(prepared(setup, residual="contiguous", used=("y",)))
    case = prepared(setup, residual="apart", used=("total",), needs=("x", "residual"))
    out = assert_accurate(case)
    dtotal = make(case).dtotal
    assert torch.equal(out["dx"], dtotal)
    assert torch.equal(out["dresidual"], dtotal)


@SOME_SETUPS
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("running", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_running_statistics_are_accurate(setup, momentum, running, prepared):
    case = prepared(setup, needs=(), running=running, momentum=momentum, offset=1e3)
    assert assert_accurate(case)["num_batches_tracked"] == 4


def test_running_statistics_need_no_counter():
    case = Case((5, 24), torch.bfloat16, running=torch.float32, tracked=False)
    assert "num_batches_tracked" not in assert_accurate(case)


def test_each_call_updates_the_running_statistics_with_its_own_momentum():
    for momentum in (0.25, 0.25, None):
        assert_accurate(Case((6, 12), running=torch.float32, momentum=momentum))


@SOME_SETUPS
def test_equal_calls_give_equal_bits_with_and_without_gradients(setup, prepared):
    for options in ({"running": torch.float32, "vectors": "bias+input_bias"}, {"residual": "odd"}):
        case = prepared(setup, **options)
        tensors = make(case)
        with torch.no_grad():
            bare = run(dataclasses.replace(case, needs=()), tensors, "triton")
        full = run(case, tensors, "triton")
        assert_same_bits(bare, {name: full[name] for name in bare})
        assert_same_bits(run(case, tensors, "triton"), full)


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


@pytest.mark.parametrize("low", HALVES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("asked", ["low", "float32"])
@pytest.mark.parametrize("residual", [None, "contiguous"])
def test_autocast_changes_only_the_dtype_of_the_output(residual, low, dtype, asked):
    case = Case((5, 24), dtype, params=torch.float32, residual=residual, mode="standard", offset=0)
    inputs = make(case).inputs(INPUTS)
    with torch.autocast("cpu", low):
        outputs = call(case, inputs, "triton", autocast_output=asked)
    y, total = outputs["y"], outputs.get("total", inputs["x"])
    assert y.dtype == (low if asked == "low" else torch.float32)
    assert total.dtype == dtype
    h, weight, bias = (t.detach().double() for t in (total, inputs["weight"], inputs["bias"]))
    dy = make(case).dy.to(y.dtype)
    leaves = [t for t in inputs.values() if t is not None]
    got = (y, *torch.autograd.grad(y, leaves, dy))
    exact = reference.gradients(
        reference.layer_norm, dy.double(), h, weight, normalized_shape=(24,)
    )
    through = (exact.dx,) if residual is None else (exact.dx, exact.dx)
    expected = (reference.layer_norm(h, (24,), weight, bias).y, *through, *exact[1:])
    for ours, truth, like in zip(got, expected, (y, *leaves), strict=True):
        assert ours.dtype == like.dtype
        close = {
            "rtol": 2 * torch.finfo(ours.dtype).eps,
            "atol": 8 * torch.finfo(torch.float32).eps,
        }
        torch.testing.assert_close(ours.double(), truth, **close)


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        y = functional.layer_norm(
            torch.randn(3, 8).double(), (8,), autocast_output="low", backend="triton"
        )
    assert y.dtype == torch.float64


def test_the_interpreter_gets_no_programs_that_wait_for_each_other(monkeypatch):
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


def test_more_parts_than_one_addition_takes_are_added_right(prepared, monkeypatch):
    seen, most = set(), {"KP", "FAN_IN"}

    def by_twos(constants):
        seen.update(most & constants.keys())
        return {**constants, **{n: min(constants[n], 2) for n in most & constants.keys()}}

    routes.watch_compiled(monkeypatch, by_twos)
    for setup in ("rows, uneven", "rows, folded", "wide", "wide, all late"):
        for dtype in (torch.float32, torch.float64):
            vectors = "weight+bias+input_bias"
            case = {"dtype": dtype, "offset": 1e3, "running": dtype, "vectors": vectors}
            assert_accurate(prepared(setup, **case))
    assert seen == most


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
@given(case=ANY_CALL, full_parameters=st.booleans(), cut=st.sampled_from(["", "rows", "wide"]))
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_any_call_is_as_close_to_float64_as_torch(case, full_parameters, cut):
    vectors = case.vectors.split("+")
    if case.residual is not None and "input_bias" in vectors:
        vectors.remove("input_bias")
    params = torch.promote_types(case.dtype, torch.float32) if full_parameters else None
    case = dataclasses.replace(
        case, dims=min(case.dims, len(case.shape)), vectors="+".join(vectors), params=params
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        if cut == "rows":
            reschedule(monkeypatch, held(2, 4, 2), held(2, 4, 2, keep=True))
        elif cut == "wide":
            # With the smallest lag allowed: the number of tiles per row.
            reschedule(
                monkeypatch,
                lambda shape: tiled(16, -(-shape.width // 16))(shape),
                lambda shape: blocks(2, 8, -(-shape.width // 8))(shape),
            )
        assert_accurate(case)
