"""BatchNorm's kernels on a GPU: waiting, graphs, streams, compilers, sizes, alignment."""

import math

import pytest
import torch
import torch.nn.functional as F

import kernel_cases
import normplug
from accuracy import error
from graphs import skip_below
from kernel_cases import Case, run
from normplug import functional

pytestmark = pytest.mark.gpu
GPU = "cuda"
GOLDEN = math.sqrt(normplug.target_variance("golden"))


@pytest.mark.parametrize("offset", [3.0, 1e3])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    "shape", [(257, 33), (32, 33, 14, 15), (4096, 64), (64, 512, 7, 7), (16, 64, 40, 40)], ids=str
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
    y = functional.batch_norm(x, None, None, weight, bias, True, mode="standard", backend="triton")
    for channel in (0, 7):
        values = x[:, channel].double()
        truth = (values - values.mean()) / (values.var(correction=0) + 1e-5).sqrt()
        assert error(y[:, channel], truth) < 5e-3


def test_tensors_may_be_unaligned_or_strided_and_dy_may_have_another_layout():
    flat = torch.randn(1 + 8 * 16 * 12 * 12, device=GPU).bfloat16()
    strided = torch.randn(8, 16, 12, 24, device=GPU).bfloat16()[..., ::2]
    weight, bias = torch.rand(16, device=GPU) + 0.5, torch.randn(16, device=GPU)
    for x in (flat[1:].view(8, 16, 12, 12), strided):
        for _ in range(2):
            x = x.detach().requires_grad_()
            y = functional.batch_norm(
                x, None, None, weight, bias, True, mode="standard", backend="triton"
            )
            truth = F.batch_norm(x.float(), None, None, weight, bias, True)
            dy = torch.randn_like(truth).contiguous(memory_format=torch.channels_last)
            (dx,) = torch.autograd.grad(y, x, dy.bfloat16())
            (expected,) = torch.autograd.grad(truth, x, dy)
            assert error(y, truth) < 4e-3
            assert error(dx, expected) < 6e-3


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_channel_stats_are_accurate_far_from_zero(layout):
    x = kernel_cases.make(Case((64, 48, 30, 30), layout=layout, offset=1e3), GPU).x
    mean, var = functional.channel_stats(x)
    exact = x.double()
    assert error(mean, exact.mean((0, 2, 3))) < 1e-6
    assert error(var, exact.var((0, 2, 3), correction=0)) < 1e-4
