"""RMSNorm on LayerNorm's kernels, on a GPU."""

import pytest
import torch

import normplug
import routes
from accuracy import assert_same_bits
from normplug import functional
from row_cases import Case, assert_accurate, make, run

pytestmark = pytest.mark.gpu
GPU = "cuda"
RMS = {"centred": False, "vectors": "weight"}
SHAPES = [
    (3, 7), (4096, 64), (50_001, 128), (4096, 768), (20_000, 1000), (700, 4096), (300, 8192),
    (150, 16384), (40, 40_000), (9, 70_001),
]  # fmt: skip


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_close_to_float64_as_torch(shape, dtype):
    for options in (
        {"offset": 1e3, "eps": None},
        {"residual": "contiguous", "weight_offset": 1.0},
        {"running": torch.float32, "params": torch.promote_types(dtype, torch.float32)},
    ):
        case = Case(shape, dtype, **RMS, **options)
        assert_same_bits(run(case, make(case, GPU), "triton"), assert_accurate(case, GPU))
    routes.assert_counters_are_zero()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [7, 64, 128, 768, 1000, 1024, 4096, 8192, 40_000])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_a_row_has_the_same_bits_however_many_rows_there_are(name, width, dtype, residual):
    rows = min((1 << 25) // width, 20_000)
    x, beside = (torch.randn(rows, width, device=GPU, dtype=dtype) for _ in range(2))
    weight = torch.rand(width, device=GPU, dtype=dtype)

    def norm(part):
        # Cloned, since a slice of rows of odd width starts at another alignment.
        ours, other = x[part].clone(), beside[part].clone()
        if not residual:
            return getattr(functional, name)(ours, (width,), weight, backend="triton")
        add = getattr(functional, f"add_{name}")
        return add(ours, other, (width,), weight, backend="triton")[0]

    expected = norm(slice(rows))
    for first, last in ((0, 1), (rows - 1, rows), (3, 10), (5, 700), (1, rows)):
        assert torch.equal(norm(slice(first, last)), expected[first:last])


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["heads", "permuted", "apart"])
def test_heads_of_queries_and_keys_are_not_copied(layout, dtype, width, monkeypatch):
    case = Case((4, 12, 100, width), dtype, **RMS, layout=layout)
    assert_accurate(case, GPU)
    launches, tensors = routes.watch_launches(monkeypatch), make(case, GPU)
    run(case, tensors, "triton")
    forward, backward = launches
    assert forward["x"] == backward["x"] == tensors.x.data_ptr()
    assert backward["dy"] == tensors.dy.data_ptr()


# torch warns of half-precision input beside a float32 weight, where autocast does not cast both.
@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_a_layer_matches_the_stock_one_under_autocast():
    x, stock = torch.randn(60, 256, device=GPU), torch.nn.RMSNorm(256, device=GPU)
    ours = normplug.RMSNorm(256, device=GPU, mode="standard", backend="triton")
    low = normplug.RMSNorm(256, device=GPU, autocast_output="low", backend="triton")
    for given in (x, x.bfloat16()):
        with torch.autocast(GPU, torch.bfloat16):
            expected, y = stock(given), ours(given)
            assert low(given).dtype == torch.bfloat16
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-3)
