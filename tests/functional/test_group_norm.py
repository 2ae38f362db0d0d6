"""functional.group_norm and functional.instance_norm, computed by PyTorch's kernels."""

import math

import pytest
import torch
import torch.nn.functional as F

from accuracy import assert_no_worse, assert_same_bits, leaf
from batch_norm_cases import DTYPES, LAYOUTS, double, laid_out, with_gradients
from normplug import functional, reference, target_variance

GOLDEN = target_variance("golden")
# Shape and number of groups; None for instance_norm.
CASES = [((3, 6), 2), ((2, 6, 5), 3), ((2, 4, 3, 2), 1), ((2, 4, 3, 5), None)]
CASES += [((2, 4, 2, 3, 2), 4), ((3, 4, 7), None), ((2, 3, 2, 3, 2), None)]


def make(shape, dtype, layout="contiguous", affine="weight+bias", offset=3.0):
    generator = torch.Generator().manual_seed(0)
    x = laid_out((torch.randn(shape, generator=generator) * 2 + offset).to(dtype), layout)
    weight, bias = torch.rand(2, shape[1], generator=generator).add(0.5).to(dtype)
    dy = torch.randn(shape, generator=generator).to(dtype)
    return x, weight if "weight" in affine else None, bias if "bias" in affine else None, dy


def run(norm, x, weight, bias, dy):
    x, weight, bias = leaf(x), leaf(weight), leaf(bias)
    return with_gradients(norm(x, weight, bias), dy, x, weight, bias)


def ours(groups, **options):
    if groups is None:
        return lambda x, w, b: functional.instance_norm(x, weight=w, bias=b, **options)
    return lambda x, w, b: functional.group_norm(x, groups, w, b, **options)


def stock(groups, mode="standard"):
    root = math.sqrt(target_variance(mode))

    def norm(x, weight, bias):
        if root != 1:
            weight = x.new_full((x.shape[1],), root) if weight is None else weight * root
        if groups is None:
            return F.instance_norm(x, weight=weight, bias=bias)
        return F.group_norm(x, groups, weight, bias)

    return norm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "groups"), CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_standard_equals_torch_bit_for_bit_and_golden_is_as_close_to_float64(
    dtype, shape, groups, layout
):
    for offset in (3.0, 1000.0):
        tensors = make(shape, dtype, layout, offset=offset)
        theirs = run(stock(groups), *tensors)
        assert_same_bits(run(ours(groups, mode="standard"), *tensors), theirs)
        golden = run(ours(groups, mode="golden"), *tensors)
        theirs = run(stock(groups, "golden"), *tensors)
        truth = run(stock(groups, "golden"), *map(double, tensors))
        spare = 1e-9 if dtype == torch.float64 else 0.0  # the float64 truth is rounded, too
        for name, value in truth.items():
            assert_no_worse(name, golden[name], theirs[name], value, spare=spare)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_instance_norm_updates_its_running_statistics_as_torch_and_uses_them_in_eval(dtype):
    running = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=dtype)
    theirs = tuple(r.clone() for r in running)
    for step in range(3):
        x, weight, bias, _ = make((3, 4, 5), dtype, offset=step)
        options = {"weight": weight, "bias": bias, "momentum": 0.3}
        y = functional.instance_norm(x, *running, mode="standard", **options)
        assert torch.equal(y, F.instance_norm(x, *theirs, **options))
    y = functional.instance_norm(x, *running, use_input_stats=False, mode="golden", **options)
    exact = reference.instance_norm(
        x.double(), double(weight), double(bias), mean=running[0], var=running[1],
        target_variance=GOLDEN,
    ).y  # fmt: skip
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(y.double(), exact, **tolerance)
    for ours_, theirs_ in zip(running, theirs, strict=True):
        assert torch.equal(ours_, theirs_)
