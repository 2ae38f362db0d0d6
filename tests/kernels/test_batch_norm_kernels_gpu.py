"""BatchNorm's kernels on a GPU, alone and with max pooling."""

import pytest
import torch

import kernel_cases
import normplug
import pair_cases
import routes
from accuracy import error
from graphs import skip_below
from kernel_cases import HALF, Case, run
from normplug import functional
from pair_cases import pair
from pool_cases import PoolCase, assert_accurate

pytestmark = pytest.mark.gpu
GPU = "cuda"


@pytest.mark.parametrize("offset", [3.0, 1e3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "shape",
    [(257, 33), (32, 33, 14, 15), (4096, 64), (64, 512, 7, 7), (16, 64, 40, 40)],
    ids=str,
)
def test_float64_matches_torch_to_the_last_digits(shape, layout, offset):
    for training in (True, False):
        case = Case(shape, torch.float64, layout, training=training, offset=offset)
        tensors = kernel_cases.make(case, GPU)
        ours, theirs = (run(case, tensors, backend) for backend in ("triton", "torch"))
        for name, value in ours.items():
            assert error(value, theirs[name]) < 5e-12, name


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_more_than_2_to_the_31_values_are_normalised(memory_format):
    skip_below(gib=24)
    x = torch.randn(700, 8, 640, 640, device=GPU, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=memory_format)
    weight, bias = torch.ones(8, device=GPU), torch.zeros(8, device=GPU)
    y = functional.batch_norm(
        x, None, None, weight, bias, True, mode="standard", backend="triton"
    )
    for channel in (0, 7):
        values = x[:, channel].double()
        truth = (values - values.mean()) / (values.var(correction=0) + 1e-5).sqrt()
        assert error(y[:, channel], truth) < 5e-3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_channel_stats_are_accurate_far_from_zero(layout):
    x = kernel_cases.make(Case((64, 48, 30, 30), layout=layout, offset=1e3), GPU).x
    mean, var = functional.channel_stats(x)
    exact = x.double()
    assert error(mean, exact.mean((0, 2, 3))) < 1e-6
    assert error(var, exact.var((0, 2, 3), correction=0)) < 1e-4


# With the norm of the residual: planes, small planes, own rows, items in phases, a slab alone.

PAIRS = [
    pair((32, 48, 40, 40), activation="relu", **HALF),
    pair((64, 96, 7, 7), {"affine": ""}, activation="silu", offset=1e3),
    pair((32, 128, 28, 28), activation="relu", layout="channels_last", **HALF),
    pair((128, 128, 56, 56), activation="relu", layout="channels_last", **HALF),
    pair(
        (16, 64, 28, 28), {"momentum": None}, dtype=torch.float64, layout="channels_last"
    ),
    pair((512, 200), {"needs": ("weight",)}, dtype=torch.float16, activation="relu"),
]


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_two_norms_in_one_call_are_as_close_to_float64_as_torch(case):
    pair_cases.assert_accurate(case, GPU)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_shortcuts_normalised_tensor_is_not_allocated(layout):
    case = pair((64, 64, 56, 56), activation="relu", layout=layout, **HALF)
    one, other = pair_cases.make(case, GPU)
    norm, shortcut = pair_cases.layers_of(case, (one, other))
    x, residual = one.x.requires_grad_(), other.x.requires_grad_()
    norm._fused_norms(x, residual, shortcut, "relu")  # allocates the workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = norm._fused_norms(x, residual, shortcut, "relu")
    spare = 4 << 20  # what the allocator rounds up, and relu's mask
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + spare
    y.backward(torch.ones_like(y))
    gradients = x.nbytes + residual.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 2 * y.nbytes + gradients + spare


# With max pooling.

POOL = routes.Pool((3, 3), (2, 2), (1, 1), False)
STEM = (256, 64, 112, 112)
CASES = [
    PoolCase((32, 64, 112, 112), **HALF),
    PoolCase((16, 64, 112, 112), torch.float64, offset=1e3),
    PoolCase((16, 64, 112, 111), torch.float16, affine="bias", training=False),
    PoolCase((8, 96, 57, 35), offset=1e3, momentum=None),
    PoolCase((8, 33, 57, 35), torch.bfloat16, affine="weight", stride=(1, 1)),
    PoolCase((8, 3, 57, 35), **HALF, kernel=(2, 2), padding=(0, 0), running=False),
    PoolCase(
        (8, 128, 14, 15), kernel=(2, 3), stride=(3, 1), padding=(1, 0), ceil_mode=True
    ),
    PoolCase(
        (4, 24, 40, 41), torch.float64, kernel=(5, 5), stride=(2, 3), padding=(2, 2)
    ),
    PoolCase(
        (4, 24, 40, 41), **HALF, kernel=(2, 2), stride=(5, 4), padding=(1, 1), affine=""
    ),
    PoolCase(
        (64, 192, 8, 8), stride=(2, 2), padding=(0, 0), ceil_mode=True, training=False
    ),
]


def channels_last(*shape):
    x = torch.randn(shape, device=GPU, dtype=torch.bfloat16) * 2 + 1
    return x.contiguous(memory_format=torch.channels_last)


def pooled(layer, x):
    return layer._fused(x, activation="relu", pool=POOL)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_window_is_as_close_to_float64_as_torch(case):
    assert_accurate(case, GPU)


def test_pooling_saves_and_allocates_no_full_size_tensor_besides_its_input():
    x = channels_last(64, 64, 56, 56).requires_grad_()
    layer = normplug.BatchNorm2d(64, device=GPU)
    pooled(layer, x)  # allocates the workspaces
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = pooled(layer, x)
    windows, spare = 2 * y.nbytes + y.numel(), 4 << 20  # what the allocator rounds up
    assert torch.cuda.max_memory_allocated() - before <= windows + spare < x.nbytes
    y.backward(torch.ones_like(y))
    del y
    assert torch.cuda.memory_allocated() - before <= x.nbytes + spare


def test_more_than_2_to_the_31_values_are_pooled():
    skip_below(gib=40)
    x = torch.empty(
        (700, 8, 640, 640),
        device=GPU,
        dtype=torch.bfloat16,
        memory_format=torch.channels_last,
    )
    x.normal_().requires_grad_()
    layer = normplug.BatchNorm2d(8, mode="standard", device=GPU).eval()
    y = pooled(layer, x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    for image in (0, -1):
        part = (
            x.detach()[image:][:1]
            .clone(memory_format=torch.channels_last)
            .requires_grad_()
        )
        expected = functional.batch_norm(
            part.double(), *(t.double() for t in layer.buffers() if t.dim()), eps=layer.eps,
            mode="standard", activation="relu",
        )  # fmt: skip
        torch.testing.assert_close(
            y[image:][:1].double(), POOL.of(expected), rtol=1e-2, atol=1e-2
        )
        one = pooled(layer, part)
        (alone,) = torch.autograd.grad(one, part, torch.ones_like(one))
        assert torch.equal(dx[image:][:1], alone)
