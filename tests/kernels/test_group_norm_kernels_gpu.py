"""GroupNorm's kernels on a GPU."""

import pytest
import torch
import torch.nn.functional as F

import routes
from accuracy import assert_same_bits, error
from graphs import skip_below
from group_kernel_cases import Case, assert_accurate, make, run
from kernel_cases import HALF
from normplug import functional

pytestmark = pytest.mark.gpu
GPU = "cuda"
SHAPES = [
    ((16, 320, 64, 64), 32),
    ((16, 640, 32, 32), 32),
    ((16, 1280, 16, 16), 32),
    ((1, 128, 256, 256), 32),
    ((2, 128, 300, 300), 1),
    ((64, 64, 56, 56), 32),
    ((128, 512, 7, 7), 512),
    ((2, 32, 33, 40, 41), 32),
    ((3, 66, 1, 1999), 11),
    ((700, 24), 6),
    ((15, 600, 20, 21), 20),
    ((2, 3000, 7, 7), 3),
]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=lambda value: str(value))
def test_as_close_to_float64_as_torch(shape, groups, layout):
    for options in (
        {**HALF, "activation": "silu"},
        {"offset": 1e3},
        {"dtype": torch.float16, "affine": "bias", "activation": "relu"},
        {"dtype": torch.float64, "affine": "weight", "activation": "gelu", "offset": 1e3},
    ):
        case = Case(shape, groups, layout=layout, **options)
        out = assert_accurate(case, GPU)
        assert_same_bits(run(case, make(case, GPU), "triton"), out)
    routes.assert_counters_are_zero()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_more_than_2_to_the_31_values_are_normalised(memory_format):
    skip_below(gib=60)
    x = torch.empty(700, 8, 640, 640, device=GPU, dtype=torch.bfloat16).normal_(1.0, 2.0)
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    y = functional.group_norm(x, 4, mode="standard", backend="triton")
    (dx,) = torch.autograd.grad(y, x, x.detach())
    for sample in (slice(0, 2), slice(698, 700)):
        exact = x.detach()[sample].double().requires_grad_()
        truth = F.group_norm(exact, 4)
        assert error(y[sample], truth) < 5e-3
        (exact_dx,) = torch.autograd.grad(truth, exact, exact.detach())
        assert (dx[sample] - exact_dx).abs().max() < 1e-2
