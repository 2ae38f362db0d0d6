"""The kernels of gated and adaptive norms of rows."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from torch._dynamo.testing import CompileCounterWithBackend

import routes
from accuracy import assert_same_bits
from calls import INPUTS, saved_bytes
from calls import Tensors as Inputs
from modulated_cases import (
    EVERY,
    NEEDS,
    Case,
    any_case,
    assert_accurate,
    call_of,
    make,
    run,
)
from normplug import functional
from normplug._kernels import power_of_2
from normplug._kernels.layer_norm.schedule import RowTiles
from normplug._ops.call import call
from normplug._ops.row_norms import PLAIN, LayerNormSpec
from normplug._ops.spec import Tensors
from row_cases import LAYOUTS


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_kind_is_as_close_to_float64_as_torch(case):
    assert_accurate(case)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_64_bit_offsets_are_accurate(case, monkeypatch):
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(case)


@pytest.mark.parametrize("case", NEEDS, ids=str)
def test_a_subset_of_the_gradients_can_be_requested(case):
    found = assert_accurate(case)
    assert {name for name in found if name != "y"} == {f"d{name}" for name in case.needs}


def held(r, bc, each, **rest):
    """Tiles of r rows, in blocks of bc columns; so many programs take those of a set."""

    def change(shape):
        cut = {"r": r, "u": -(-power_of_2(shape.width) // bc), "bc": bc, "lanes": r}
        sizes = {"programs": each * shape.sets, "sets": shape.sets, "warps": 1}
        given = {**cut, **sizes, "stages": 1, "finish": 8, "keep": True, **rest}
        return RowTiles(shape.rows, shape.width, **given)

    return change


SETUPS = {
    "one program a set": held(2, 8, 1),
    "several": held(2, 8, 2),
    "even": held(1, 8, 3, keep=False),
    "folded": held(4, 32, 2, lanes=1, finish=32),
}


@pytest.mark.parametrize("case", EVERY, ids=str)
@pytest.mark.parametrize("setup", SETUPS)
def test_sets_of_rows_may_be_cut_in_any_way(setup, case, monkeypatch):
    routes.reschedule(monkeypatch, layer_norm_backward=SETUPS[setup])
    assert_accurate(replace(case, mode=0.25))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [
        {"gate": "first", "group_size": 3},
        {"gate": "last"},
        {"vectors": "scale+shift", "outer": (3,), "centred": True},
        {"vectors": "scale+shift", "outer": (3, 2), "centred": True},
        {"vectors": "scale+shift", "outer": (3, 2, 2), "centred": True},
    ],
    ids=str,
)
def test_rows_may_have_any_layout(layout, options):
    case = Case((3, 2, 2, 6), **options)
    for name in ("layout", "dy", "gate_layout"):
        if name != "gate_layout" or case.gate:
            found = assert_accurate(replace(case, **{name: layout}))
            assert found["y"].is_contiguous()


def test_scales_and_shifts_that_lie_differently_are_copied():
    case = Case((2, 5, 24), outer=(2,), vectors="scale+shift", centred=True)
    tensors = make(case)
    expected = run(case, tensors, "triton")
    tensors["shift"] = tensors["shift"].contiguous()
    assert tensors["scale"].stride() != tensors["shift"].stride()
    assert_same_bits(run(case, tensors, "triton"), expected)


def test_scales_that_change_within_samples_alone_are_left_to_torch():
    x, scale = torch.randn(2, 3, 8), torch.randn(1, 3, 8)
    options = {"normalized_shape": (8,), "scale": scale}
    functional.layer_norm(x, **options)
    with pytest.raises(NotImplementedError, match="the same for all samples"):
        functional.layer_norm(x, **options, backend="triton")


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("rms_norm", {"gate": torch.zeros(1, 8193)}, "too wide"),
        ("layer_norm", {"scale": torch.zeros(1, 1, 8193)}, "too wide"),
        ("rms_norm", {"gate": torch.zeros(1, 8193).double()}, "too wide"),
    ],
)
def test_wide_rows_are_left_to_torch(name, options, why):
    norm, x = getattr(functional, name), torch.randn(1, 1, 8193)
    options = {n: t.reshape(x.shape) for n, t in options.items()}
    with pytest.raises(NotImplementedError, match=why):
        norm(x, (8193,), **options, backend="triton")
    assert norm(x, (8193,), **options).isfinite().all()


def test_an_input_bias_beside_a_scale_is_left_to_torch():
    x, bias = torch.randn(2, 3, 8), torch.randn(8)
    options = {"scale": x, "input_bias": bias, "backend": "triton"}
    with pytest.raises(NotImplementedError, match="an input_bias"):
        functional.layer_norm(x, (8,), **options)


@pytest.mark.parametrize("params", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("gate", ["first", "last"])
@pytest.mark.parametrize("rounding", ["input", "weight", "output"])
def test_a_gated_norm_rounds_where_its_library_does(rounding, gate, params):
    case = Case((6, 24), torch.float16, gate=gate, params=params)
    t = make(case)
    numbers = (None, 1e-5, 0.5, None, "float32", False, 0.0)
    spec = LayerNormSpec((24,), *numbers, rounding, gate)
    results = []
    for backend in ("triton", "torch"):
        leaves = [t[name].detach().requires_grad_() for name in ("x", "gate", "weight")]
        y = call("test", Tensors(*leaves), spec, backend)
        results.append((y, *torch.autograd.grad(y, leaves, t["dy"].to(y.dtype))))
    promoted = gate == "first" and rounding != "output" and params == torch.float32
    assert results[0][0].dtype == (torch.float32 if promoted else torch.float16)
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=2**-8)
    same = results[0][0] == results[1][0]
    assert promoted or same.float().mean() > 0.95


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_running_statistics_are_those_of_what_is_normalised(case):
    t = make(case)
    found = []
    for backend in ("triton", "torch"):
        running = {"running_var": torch.ones(()), "num_batches_tracked": torch.tensor(0)}
        if case.centred:
            running["running_mean"] = torch.zeros(())
        norm = functional.layer_norm if case.centred else functional.rms_norm
        given = {name: each for name, each in t.items() if name not in ("x", "dy")}
        first = {} if case.centred else {"gate_first": case.gate == "first"}
        of_groups = {} if case.centred else {"group_size": case.group_size}
        options = {**given, **first, **of_groups, "momentum": 0.5, **running}
        norm(t["x"], (24,), **options, backend=backend)
        found.append(running)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert found[0]["running_var"] != 1


@given(case=any_case())
@settings(
    max_examples=settings.default.max_examples // 8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
def test_any_call_is_as_close_to_float64_as_torch(case):
    assert_accurate(case)


class Slots:
    """Cases as the other norms have them: their tensors in the slots of a call."""

    @staticmethod
    def make(case, device):
        t = make(case, device)
        weight, bias = (t.get(name) for name in ("weight", "bias"))
        if case.outer:
            weight, bias = t.get("scale"), t.get("shift")
        empty = {"running_mean": None, "running_var": None}
        return Inputs(t["x"], weight, bias, t.get("gate"), **empty, dy=t["dy"])

    @staticmethod
    def operators(case):
        offset = 1.0 if case.outer else case.weight_offset
        kind = (0.5, None, "float32", case.centred, offset, None)
        modulation = (case.gate or None, case.group_size, bool(case.outer), False)
        return PLAIN, (list(case.shape[-1:]), None, 1e-5, *kind, *modulation)


OPERATED = [replace(case, needs=INPUTS) for case in EVERY if "scale+" not in case.vectors]
OPERATED += [
    replace(case, needs=INPUTS) for case in EVERY if case.vectors == "scale+shift"
]


@pytest.mark.parametrize("case", OPERATED, ids=str)
def test_the_operators_pass_opcheck(case):
    routes.check_operators(Slots, case, "cpu", compiles=case in OPERATED[::3])


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_the_operators_give_the_same_bits_as_eager_calls(case, monkeypatch):
    tensors = make(case)
    eager = run(case, tensors, "triton")
    routes.use_operators(monkeypatch)
    assert_same_bits(run(case, tensors, "triton"), eager)


@pytest.mark.parametrize("case", [*EVERY[2:4], *EVERY[6:8], EVERY[10]], ids=str)
def test_second_derivatives_are_right(case):
    case = replace(case, dtype=torch.float64, params=None, gate_dtype=None)
    t = make(case)
    names = [name for name in t if name != "dy"]

    def norm(*given):
        named = dict(zip(names, given, strict=True))
        return call_of(case, named, "triton")

    leaves = [t[name].detach().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(norm, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(norm, leaves, fast_mode=True)


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("case", [EVERY[2], EVERY[7], EVERY[10]], ids=str)
def test_one_compiled_graph_serves_every_number_of_tokens(case, backend):
    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def norm(tensors):
        return call_of(case, tensors, backend)

    compiled = torch.compile(norm, fullgraph=True, backend=graphs)
    for tokens in (5, 6, 9):
        shape = (2, tokens, 24)
        outer = (2, tokens) if len(case.outer) == 2 else case.outer
        t = make(replace(case, shape=shape, outer=outer))
        leaves = {n: each.detach().requires_grad_() for n, each in t.items() if n != "dy"}
        found = []
        for each in (compiled, norm):
            y = each(leaves)
            found.append((y, *torch.autograd.grad(y, [*leaves.values()], t["dy"])))
        torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("gate", ["first", "last"])
def test_a_gated_norm_saves_its_inputs_and_one_number_per_row(gate):
    case = Case((32, 24), torch.float16, gate=gate)
    tensors = make(case)
    saved = saved_bytes(lambda: run(case, tensors, "triton"))
    assert saved == 2 * 32 * 24 * 2 + 24 * 2 + 32 * 4


def test_runs_give_the_same_bits():
    for case in EVERY:
        tensors = make(case)
        first, second = (run(case, tensors, "triton") for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
