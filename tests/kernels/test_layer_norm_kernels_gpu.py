"""LayerNorm's and RMSNorm's kernels on a GPU: sizes, layouts, dtypes."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import normplug
import oracle
import routes
from accuracy import assert_same_bits, error
from calls import DTYPES, HALVES
from graphs import skip_below
from normplug import functional, reference
from row_cases import Case, assert_accurate, make, run

pytestmark = pytest.mark.gpu
GPU = "cuda"
of_rows = partial(oracle.gradients, reference.layer_norm)
WIDTHS = [1, 7, 256, 768, 1000, 4096, 8192, 12288, 16384, 40000, 65536, 262144]
MOST = 1 << 24  # values per tensor: float64 references take many times 8 bytes each
FULL = "weight+bias+input_bias"


def shapes(rows, widths):
    return [(min(rows, MOST // width), width) for width in widths]


LOW, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64
GRID = [
    *itertools.product((LOW, FLOAT), (*shapes(3, WIDTHS), *shapes(4096, WIDTHS))),
    *((DOUBLE, shape) for shape in shapes(300, WIDTHS)),
    *((torch.float16, shape) for shape in shapes(300, [7, 1000, 4096, 12288, 40000])),
    *((dtype, (9, 70_001)) for dtype in (LOW, FLOAT, DOUBLE)),
    (LOW, (1, 8192)),
    (LOW, (64, 65536)),
    (LOW, (50432, 768)),
    (FLOAT, (200_000, 7)),
    (FLOAT, (1_000_003, 24)),
]


@pytest.mark.parametrize(("dtype", "shape"), GRID, ids=str)
def test_as_close_to_float64_as_torch(dtype, shape):
    for offset in (3.0, 1e3):
        assert_accurate(Case(shape, dtype, offset=offset), GPU)


# With many narrow rows, a thread takes several in turn; an input_bias needs a third sum.
NARROW = [(30_001, 24), (50_007, 96), (9_001, 384), (5_000, 768)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", NARROW, ids=str)
def test_an_input_bias_of_many_narrow_rows_is_accurate(shape, dtype):
    params = torch.promote_types(dtype, torch.float32)
    for offset in (3.0, 1e3):
        case = Case(shape, dtype, params=params, vectors=FULL, offset=offset)
        out = assert_accurate(case, GPU)
        assert_same_bits(out, run(case, make(case, GPU), "triton"))


# Wide enough that programs share the columns of a row and wait for each other, where they can.
SHARED = [(132, 8704), (300, 16384), (1024, 20480), (150, 40000), (257, 65536)]


def shares_columns(shape, dtype):
    from normplug._kernels import processors, shared_memory, unit_of
    from normplug._kernels.launch import COOPERATIVE
    from normplug._kernels.layer_norm import schedule

    device = torch.device("cuda", torch.cuda.current_device())
    machine = (processors(device), shared_memory(device), COOPERATIVE)
    unit = unit_of(shape[-1])
    cut = schedule.layer_norm_backward(*shape, unit, dtype.itemsize, False, *machine)
    return isinstance(cut, schedule.RowTiles) and cut.k > 1


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_programs_that_share_the_columns_of_a_row_are_accurate_and_deterministic(
    shape, dtype
):
    if not shares_columns(shape, dtype):
        pytest.skip("this GPU or this Triton uses other kernels here")
    for options in (
        {"vectors": FULL, "offset": 1e3},
        {"residual": "contiguous"},
        {"needs": ("weight", "bias")},
        {"vectors": "", "layout": "apart"},
    ):
        case = Case(shape, dtype, **options)
        out = assert_accurate(case, GPU)
        assert_same_bits(out, run(case, make(case, GPU), "triton"))


OPTIONS = [
    {"vectors": FULL, "running": torch.float32},
    {"vectors": "bias", "running": torch.float32, "momentum": None, "offset": 1e3},
    {"vectors": "", "mode": "standard", "running": torch.float32, "tracked": False},
    {"residual": "contiguous", "residual_dtype": torch.float32},
    {"residual": "apart", "layout": "apart", "vectors": "weight"},
    {
        "layout": "odd",
        "dy": "repeated",
        "vectors": "weight+input_bias",
        "needs": ("weight",),
    },
    {"layout": "transposed", "dy": "expanded"},
    {"residual": "contiguous", "used": ("y",)},
    {"residual": "contiguous", "used": ("total",), "needs": ("x", "residual")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: str(Case((), **options)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape", [(5000, 96), (700, 1000), (2048, 4096), (140, 16384), (40, 70_000)], ids=str
)
def test_every_option_is_accurate_at_every_size(shape, dtype, options):
    assert_accurate(Case(shape, dtype, params=torch.float32, **options), GPU)


@pytest.mark.parametrize("running", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 24), (700, 768), (40, 40_000)], ids=str)
def test_float64_tensors_are_accurate(shape, running):
    vectors = "weight+input_bias"
    assert_accurate(
        Case(shape, torch.float64, running=running, vectors=vectors, offset=1e3), GPU
    )
    assert_accurate(Case(shape, torch.float64, residual="contiguous"), GPU)
    assert_accurate(Case(shape, torch.float32, params=torch.float64), GPU)
    assert_accurate(Case(shape, torch.bfloat16, params=torch.float64), GPU)


# Which of x, the residual, dy and dtotal are permuted.
SOME_PERMUTED = [
    layouts
    for layouts in itertools.product(["contiguous", "permuted"], repeat=4)
    if layouts.count("permuted") in (1, 2, 4)
]
PERMUTED_SHAPES = [(16, 50, 768), (8, 7, 7, 96), (4, 40, 16384), (3, 7, 70_000)]


@pytest.mark.parametrize("layouts", SOME_PERMUTED, ids=" ".join)
@pytest.mark.parametrize("shape", PERMUTED_SHAPES, ids=str)
def test_any_of_the_tensors_may_be_permuted(shape, layouts):
    layout, residual, dy, dtotal = layouts
    case = Case(
        shape, torch.bfloat16, layout=layout, residual=residual, dy=dy, dtotal=dtotal
    )
    assert_accurate(case, GPU)
    if residual == dtotal == "contiguous":
        case = Case(shape, torch.bfloat16, layout=layout, dy=dy)
        out = assert_accurate(case, GPU)
        assert out["y"].is_contiguous()
        assert out["dx"].stride() == make(case, GPU).x.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", PERMUTED_SHAPES, ids=str)
def test_permuted_rows_with_every_option_and_64_bit_offsets_are_accurate(
    shape, dtype, monkeypatch
):
    case = Case(
        shape, dtype, layout="permuted", vectors=FULL, running=torch.float32, offset=1e3
    )
    assert_accurate(case, GPU)
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(case, GPU)


@pytest.mark.parametrize("width", [768, 70_000])
@pytest.mark.parametrize("two", [False, True])
def test_rows_may_lie_2_to_the_31_values_apart(width, two):
    skip_below(gib=10)
    apart = (2**31 // width + 1) * width
    everything = torch.empty(apart + 3 * width, device=GPU, dtype=torch.bfloat16)
    shape, strides = (
        ((3, 2, width), (width, apart, 1)) if two else ((2, width), (apart, 1))
    )
    x = everything.as_strided(shape, strides)
    x.copy_(torch.randn(shape, device=GPU))
    dy, weight = torch.randn_like(x), torch.rand(width, device=GPU)
    results = []
    for given in (x, x.contiguous()):
        leaves = [given.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = functional.layer_norm(leaves[0], (width,), leaves[1], backend="triton")
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("width", [8192, 70_000])
def test_more_than_2_to_the_31_values_are_normalised(width):
    skip_below(gib=60)
    rows = 2**31 // width + 300
    x = torch.empty(rows, width, device=GPU, dtype=torch.bfloat16).normal_(1.0, 2.0)
    x.requires_grad_()
    weight, bias = (torch.ones(width, device=GPU, requires_grad=True) for _ in range(2))
    y = functional.layer_norm(
        x, (width,), weight, bias, backend="triton", mode="standard"
    )
    dy = torch.empty_like(x).normal_()
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        piece, gradient = x.detach()[part].double(), dy[part].double()
        truth = reference.layer_norm(piece, (width,), weight.double(), bias.double())
        assert error(y[part], truth.y) < 5e-3
        exact = of_rows(gradient, piece, weight.double(), normalized_shape=(width,))
        assert error(dx[part], exact.dx) < 5e-3
    sums = [0.0, 0.0]
    for part, gradient in zip(x.detach().split(1 << 12), dy.split(1 << 12), strict=True):
        tensors = gradient.double(), part.double(), weight.detach().double()
        _, *exact = of_rows(*tensors, normalized_shape=(width,))
        sums = [total + value for total, value in zip(sums, exact, strict=True)]
    assert error(dweight, sums[0]) < 1e-4
    assert error(dbias, sums[1]) < 1e-4


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="torch 2.6 cannot tell whether it is exporting",
)
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (
            lambda: (nn.Conv2d(3, 16, 3), normplug.BatchNorm2d(16), nn.ReLU()),
            (8, 3, 16, 16),
        ),
        (lambda: (nn.Linear(32, 64), normplug.LayerNorm(64), nn.GELU()), (8, 32)),
    ],
    ids=["batch", "layer"],
)
def test_an_exported_model_needs_no_normplug(layers, shape):
    model = nn.Sequential(*layers()).to(GPU).eval()
    x = torch.randn(shape, device=GPU)
    program = torch.export.export(model, (x,))
    assert "normplug" not in str(program.graph)
    assert error(program.module()(x), model(x)) < 1e-5


RMS = {"centred": False, "vectors": "weight"}
RMS_SHAPES = [
    (3, 7), (4096, 64), (50_001, 128), (4096, 768), (20_000, 1000), (700, 4096), (300, 8192),
    (150, 16384), (40, 40_000), (9, 70_001),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", RMS_SHAPES, ids=str)
def test_rms_norm_is_as_close_to_float64_as_torch(shape, dtype):
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
def test_a_row_has_the_same_bits_however_many_rows_there_are(
    name, width, dtype, residual
):
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
