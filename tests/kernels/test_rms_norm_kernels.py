"""RMSNorm on LayerNorm's kernels, in Triton's interpreter: see `test_interpreter`.

These tests cover what is compiled differently for RMSNorm.
"""

import pytest
import torch

import interpreted
import routes
from accuracy import leaf
from normplug import functional
from normplug._kernels.layer_norm import schedule
from normplug._kernels.layer_norm.schedule import Rows
from normplug._ops.call import call
from normplug._ops.row_norms import LayerNormSpec
from normplug._ops.spec import Tensors
from row_cases import Case, assert_accurate, make

pytestmark = interpreted.MARKS
RMS = {"centred": False, "vectors": "weight"}
VARIANTS = [
    {"dtype": torch.bfloat16, "params": torch.float32, "offset": 1e3, "mode": "standard"},
    {"dtype": torch.float16, "weight_offset": 1.0, "residual": "apart"},
    {"running": torch.float32, "offset": 1e3, "dy": "odd"},
    {"dtype": torch.float64, "vectors": "", "running": torch.float64, "momentum": None},
    {"residual": "contiguous", "weight_offset": 1.0, "needs": ("x", "weight")},
]


SETUPS = ("rows, uneven", "rows, even", "rows, folded", "wide", "wide, one block")
# Every setup with two of them.
SOME = [(setup, VARIANTS[(i + k) % 5]) for i, setup in enumerate(SETUPS) for k in (0, 2)]


@pytest.mark.parametrize(("setup", "options"), SOME, ids=str)
def test_as_close_to_float64_as_torch(setup, options, prepared):
    assert_accurate(prepared(setup, **{**RMS, **options}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(5,), (4, 1), (3, 2, 96), (2, 4097)], ids=str)
def test_the_schedules_own_choices_are_accurate(shape, dtype):
    assert_accurate(Case(shape, dtype, **RMS, eps=None, running=torch.float32))


@pytest.mark.parametrize("params", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("setup", "rounding"), [("rows, uneven", "input"), ("wide", "input"), ("wide", "weight")]
)
def test_a_norm_that_rounds_before_the_weight_matches_torch(setup, rounding, params, prepared):
    """Gradients included. Values close to a tie between two of float16 may round either way."""
    case = prepared(setup, dtype=torch.float16, params=params, **RMS)
    t = make(case)
    spec = LayerNormSpec(case.row, None, 1e-5, 0.5, None, "float32", False, 0.0, rounding)
    results = []
    for backend in ("triton", "torch"):
        x, weight = leaf(t.x), leaf(t.weight)
        y = call("test", Tensors(x, weight=weight), spec, backend)
        results.append((y, *torch.autograd.grad(y, (x, weight), t.dy.to(y.dtype))))
    (y, dx, dweight), theirs = results
    assert y.dtype == params
    assert [a.dtype for a in results[0]] == [a.dtype for a in theirs]
    assert torch.isclose(y, theirs[0], rtol=1e-6, atol=0).float().mean() > 0.95
    torch.testing.assert_close(y, theirs[0], rtol=2**-9, atol=0)
    torch.testing.assert_close(dx, theirs[1], rtol=2**-8, atol=2**-9)
    torch.testing.assert_close(dweight, theirs[2], rtol=2**-8, atol=2**-8)


QKV = [
    ("packed by kind", lambda B, S, H, D: torch.randn(B, S, 3, H, D)[:, :, 1]),
    ("packed by head", lambda B, S, H, D: torch.randn(B, S, H, 3 * D).chunk(3, -1)[1]),
    ("transposed", lambda B, S, H, D: torch.randn(B, S, H, D).transpose(1, 2)),
    (
        "packed and transposed",
        lambda B, S, H, D: torch.randn(B, S, 3, H, D).permute(2, 0, 3, 1, 4)[1],
    ),
]


@pytest.mark.parametrize(("name", "make_heads"), QKV, ids=[name for name, _ in QKV])
@pytest.mark.parametrize("setup", ["rows, uneven", "wide"])
def test_heads_of_queries_and_keys_are_not_copied(name, make_heads, setup, prepared, monkeypatch):
    prepared(setup)
    if setup == "wide":
        routes.use_64_bit_offsets(monkeypatch)
    launches = routes.watch_launches(monkeypatch)
    x, dy = (make_heads(2, 2, 3, 12).detach() for _ in range(2))
    weight = torch.rand(12)
    results = []
    for backend in ("triton", "torch"):
        given, own = x.detach().requires_grad_(), leaf(weight)
        y = functional.rms_norm(given, (12,), own, backend=backend)
        results.append((y, *torch.autograd.grad(y, (given, own), dy)))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)
    forward, backward = launches
    assert (forward["x"], backward["x"]) == (x.data_ptr(), x.data_ptr())
    assert backward["dy"] == dy.data_ptr()
    y, dx, _ = results[0]
    assert y.is_contiguous()
    assert dx.stride() == x.stride() if name == "transposed" else dx.is_contiguous()


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("running", [False, True])
def test_the_schedule_of_a_row_does_not_depend_on_the_number_of_rows(running, itemsize):
    for width in (7, 64, 128, 256, 768, 1000, 1024, 4096, 5120, 8192, 16384, 100_000):
        cuts = set()
        for rows in (1, 5, 4096, 128 * 132, 128 * 132 + 1, 1_000_000):
            cut = schedule.layer_norm_forward(rows, width, 1, itemsize, running, 132)
            is_held = isinstance(cut, Rows)
            if is_held:
                values = cut.r * cut.u * cut.bc / cut.warps  # a warp: Triton's layout depends on it
                cuts.add((cut.u, cut.bc, cut.vector, values))
            else:
                cuts.add((cut.block, cut.warps))
        assert len(cuts) == 1, width
