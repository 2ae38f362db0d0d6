"""LayerNorm's kernels on a GPU: sizes, waiting, graphs, streams, compilers."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

import normplug
import routes
from accuracy import assert_same_bits, error
from calls import HALVES
from fuse_cases import PreNorm
from graphs import skip_below
from normplug import functional, reference
from row_cases import (
    LAYOUTS,
    Case,
    assert_accurate,
    check_around_attention,
    check_compiled_around_attention,
    make,
    run,
)

pytestmark = pytest.mark.gpu
GPU = "cuda"
of_rows = partial(reference.gradients, reference.layer_norm)
WIDTHS = [
    1, 7, 256, 768, 1000, 1024, 4096, 5120, 8192, 12288, 16384, 32768, 40000, 65536, 131072, 262144,
]  # fmt: skip
MOST = 1 << 24  # values per tensor: float64 references take many times 8 bytes each
FULL = "weight+bias+input_bias"


def shapes(rows, widths):
    return [(min(rows, MOST // width), width) for width in widths]


GRID = [
    *((torch.bfloat16, shape) for rows in (3, 4096) for shape in shapes(rows, WIDTHS)),
    *((torch.float32, shape) for rows in (3, 4096) for shape in shapes(rows, WIDTHS)),
    *((torch.float64, shape) for shape in shapes(300, WIDTHS)),
    *((torch.float16, shape) for shape in shapes(300, [7, 1000, 4096, 12288, 40000, 131072])),
    *((torch.bfloat16, (rows, width)) for rows in (1, 64) for width in (1000, 8192, 65536)),
    *((dtype, (9, 70_001)) for dtype in (torch.bfloat16, torch.float32, torch.float64)),
    (torch.bfloat16, (50432, 768)),
    (torch.float32, (200_000, 7)),
    (torch.float32, (1_000_003, 24)),
]


@pytest.mark.parametrize(("dtype", "shape"), GRID, ids=str)
def test_as_close_to_float64_as_torch(dtype, shape):
    for offset in (3.0, 1e3):
        assert_accurate(Case(shape, dtype, offset=offset), GPU)


# With many narrow rows, a thread takes several in turn; an input_bias needs a third sum.
NARROW = [(30_001, 24), (40_000, 64), (50_007, 96), (20_000, 192), (9_001, 384), (5_000, 768)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", NARROW, ids=str)
def test_an_input_bias_of_many_narrow_rows_is_accurate(shape, dtype):
    params = torch.promote_types(dtype, torch.float32)
    for offset in (3.0, 1e3):
        case = Case(shape, dtype, params=params, vectors=FULL, offset=offset)
        out = assert_accurate(case, GPU)
        assert_same_bits(out, run(case, make(case, GPU), "triton"))


# Wide enough that programs share the columns of a row and wait for each other, where they can.
SHARED = [(132, 8704), (133, 12288), (300, 16384), (1024, 20480), (150, 40000), (257, 65536)]


def shares_columns(shape, dtype):
    from normplug._kernels import processors, shared_memory, unit_of
    from normplug._kernels.launch import COOPERATIVE
    from normplug._kernels.layer_norm import schedule

    device = torch.device("cuda", torch.cuda.current_device())
    machine = (processors(device), shared_memory(device), COOPERATIVE)
    unit = unit_of(shape[-1])
    cut = schedule.layer_norm_backward(*shape, unit, dtype.itemsize, False, *machine)
    return isinstance(cut, schedule.Rows) and cut.k > 1


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_programs_that_share_the_columns_of_a_row_are_accurate_and_deterministic(shape, dtype):
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
    {"layout": "odd", "dy": "repeated", "vectors": "weight+input_bias", "needs": ("weight",)},
    {"layout": "transposed", "dy": "expanded"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: str(Case((), **options)))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(5000, 96), (700, 1000), (2048, 4096), (40, 70_000)], ids=str)
def test_every_option_is_accurate_at_every_size(shape, dtype, options):
    assert_accurate(Case(shape, dtype, params=torch.float32, **options), GPU)


@pytest.mark.parametrize("running", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 24), (700, 768), (40, 40_000)], ids=str)
def test_float64_tensors_are_accurate(shape, running):
    vectors = "weight+input_bias"
    assert_accurate(Case(shape, torch.float64, running=running, vectors=vectors, offset=1e3), GPU)
    assert_accurate(Case(shape, torch.float64, residual="contiguous"), GPU)
    assert_accurate(Case(shape, torch.float32, params=torch.float64), GPU)
    assert_accurate(Case(shape, torch.bfloat16, params=torch.float64), GPU)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_may_have_any_layout(layout, dims):
    shape = (3, 4, 6, 8)
    assert_accurate(Case(shape, dims=dims, layout=layout, dy="contiguous"), GPU)
    assert_accurate(Case(shape, torch.bfloat16, dims=dims, residual=layout, dtotal=layout), GPU)
    assert_accurate(Case((24,), layout="contiguous"), GPU)


SOME_PERMUTED = list(itertools.product(["contiguous", "permuted"], repeat=4))
PERMUTED_SHAPES = [(16, 50, 768), (8, 7, 7, 96), (4, 40, 16384), (3, 7, 70_000)]


@pytest.mark.parametrize("layouts", SOME_PERMUTED, ids=" ".join)
@pytest.mark.parametrize("shape", PERMUTED_SHAPES, ids=str)
def test_any_of_the_tensors_may_be_permuted(shape, layouts):
    layout, residual, dy, dtotal = layouts
    case = Case(shape, torch.bfloat16, layout=layout, residual=residual, dy=dy, dtotal=dtotal)
    assert_accurate(case, GPU)
    if residual == dtotal == "contiguous":
        case = Case(shape, torch.bfloat16, layout=layout, dy=dy)
        out = assert_accurate(case, GPU)
        assert out["y"].is_contiguous()
        assert out["dx"].stride() == make(case, GPU).x.stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", PERMUTED_SHAPES, ids=str)
def test_permuted_rows_with_every_option_and_64_bit_offsets_are_accurate(shape, dtype, monkeypatch):
    case = Case(shape, dtype, layout="permuted", vectors=FULL, running=torch.float32, offset=1e3)
    assert_accurate(case, GPU)
    routes.use_64_bit_offsets(monkeypatch)
    assert_accurate(case, GPU)


@pytest.mark.parametrize("width", [768, 70_000])
@pytest.mark.parametrize("two", [False, True])
def test_rows_may_lie_2_to_the_31_values_apart(width, two):
    skip_below(gib=10)
    apart = (2**31 // width + 1) * width
    everything = torch.empty(apart + 3 * width, device=GPU, dtype=torch.bfloat16)
    shape, strides = ((3, 2, width), (width, apart, 1)) if two else ((2, width), (apart, 1))
    x = everything.as_strided(shape, strides)
    x.copy_(torch.randn(shape, device=GPU))
    dy, weight = torch.randn_like(x), torch.rand(width, device=GPU)
    results = []
    for given in (x, x.contiguous()):
        leaves = [given.detach().requires_grad_(), weight.detach().requires_grad_()]
        y = functional.layer_norm(leaves[0], (width,), leaves[1], backend="triton")
        results.append((y, *torch.autograd.grad(y, leaves, dy)))
    torch.testing.assert_close(*results, rtol=1e-2, atol=1e-3)


def test_norms_around_an_attention_accept_its_layouts(monkeypatch):
    check_around_attention(monkeypatch, GPU)


@pytest.mark.parametrize("shape", [(700, 768), (140, 16384), (20, 70_000)], ids=str)
def test_only_one_of_the_two_outputs_may_be_used(shape):
    assert_accurate(Case(shape, residual="contiguous", used=("y",)), GPU)
    needs = ("x", "residual")
    assert_accurate(Case(shape, residual="contiguous", used=("total",), needs=needs), GPU)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_norms_around_an_attention_compile(compiler):
    check_compiled_around_attention(GPU, compiler)


@pytest.mark.parametrize("width", [8192, 70_000])
def test_more_than_2_to_the_31_values_are_normalised(width):
    skip_below(gib=60)
    rows = 2**31 // width + 300
    x = torch.empty(rows, width, device=GPU, dtype=torch.bfloat16).normal_(1.0, 2.0)
    x.requires_grad_()
    weight, bias = (torch.ones(width, device=GPU, requires_grad=True) for _ in range(2))
    y = functional.layer_norm(x, (width,), weight, bias, backend="triton", mode="standard")
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


def test_the_total_keeps_its_dtype_under_autocast():
    x, residual = (torch.randn(60, 256, device=GPU, requires_grad=True) for _ in range(2))
    with torch.autocast(GPU, torch.bfloat16):
        for asked, expected in (("low", torch.bfloat16), ("float32", torch.float32)):
            for backend in ("triton", "torch"):
                y, total = functional.add_layer_norm(
                    x, residual, (256,), autocast_output=asked, backend=backend
                )
                assert y.dtype == expected
                assert total.dtype == torch.float32
        y, total = functional.add_layer_norm(x.bfloat16(), residual, (256,), backend="triton")
    assert (y.dtype, total.dtype) == (torch.float32, torch.float32)
    # A plan that was made under autocast must not serve calls without.
    assert functional.layer_norm(x.bfloat16(), (256,), backend="triton").dtype == torch.bfloat16


def test_transforms_fall_back_to_torch():
    x = torch.randn(3, 8, 64, device=GPU)
    weight, bias = torch.rand(64, device=GPU) + 0.5, torch.randn(64, device=GPU)

    def norm(x, **options):
        return functional.layer_norm(x, (64,), weight, bias, **options)

    assert error(torch.vmap(norm)(x), norm(x)) < 1e-6
    slope = torch.func.grad(lambda x: norm(x).square().sum())(x)
    x.requires_grad_()
    (expected,) = torch.autograd.grad(norm(x, backend="triton").square().sum(), x)
    assert error(slope, expected) < 1e-5


@pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"),
    reason="torch 2.6 cannot tell whether it is exporting",
)
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        (lambda: (nn.Conv2d(3, 16, 3), normplug.BatchNorm2d(16), nn.ReLU()), (8, 3, 16, 16)),
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


def test_a_swapped_model_passes_on_the_autocast_dtype():
    torch.manual_seed(0)
    model = nn.Sequential(*(PreNorm(128) for _ in range(3)), nn.LayerNorm(128)).to(GPU)
    normplug.swap(model, mode="standard", backend="triton")
    seen = []
    for block in model[:3]:
        block.norm2.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    x = torch.randn(40, 128, device=GPU)
    results = []
    for backend in ("triton", "torch"):
        for module in model.modules():
            if isinstance(module, normplug.LayerNorm):
                module.backend = backend
        with torch.autocast(GPU, torch.bfloat16):
            y = model(x)
            loss = y.float().sigmoid().square().mean()
        results.append((y, *torch.autograd.grad(loss, list(model.parameters()))))
        assert y.dtype == torch.bfloat16
    assert seen == [torch.bfloat16] * 6
    for ours, theirs in zip(*results, strict=True):
        assert error(ours, theirs) < 0.05
