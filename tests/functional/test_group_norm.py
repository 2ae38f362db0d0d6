"""functional.group_norm and functional.instance_norm, computed by PyTorch's kernels."""

import math
from functools import partial

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


@pytest.mark.parametrize("affine", ["", "weight", "bias", "weight+bias"])
@pytest.mark.parametrize("groups", [2, None])
@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", ("leaky_relu", 0.2)])
def test_forward_and_gradients_match_the_reference(groups, activation, affine):
    x, weight, bias, dy = make((3, 4, 2, 3), torch.float64, affine=affine)
    got = run(ours(groups, activation=activation, mode="golden"), x, weight, bias, dy)
    options = {"target_variance": GOLDEN}
    pre = reference.group_norm(x, groups or 4, weight, bias, **options).y
    torch.testing.assert_close(got["y"], reference.activation(pre, activation))
    dpre = reference.activation_backward(dy, pre, activation)
    expected = reference.group_norm_backward(dpre, x, groups or 4, weight, **options)
    for name, value in expected._asdict().items():
        if name in got:
            torch.testing.assert_close(got[name], value)


@pytest.mark.parametrize("groups", [2, None])
def test_second_derivatives_are_right(groups):
    leaves = [leaf(t) for t in make((2, 4, 3), torch.float64, offset=0.5)[:3]]
    norm = ours(groups, activation="silu")
    assert torch.autograd.gradcheck(norm, leaves)
    assert torch.autograd.gradgradcheck(norm, leaves)


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


@pytest.mark.parametrize("groups", [2, None])
def test_an_empty_batch_leaves_the_statistics_unchanged_and_gives_zero_gradients(groups):
    mean, var = torch.full((4,), 2.0), torch.full((4,), 3.0)
    x, weight = leaf(torch.randn(0, 4, 3)), leaf(torch.randn(4))
    if groups is None:
        y = functional.instance_norm(x, mean, var, weight)
    else:
        y = functional.group_norm(x, groups, weight)
    dx, dweight = torch.autograd.grad(y.sum(), (x, weight))
    assert y.shape == dx.shape == (0, 4, 3)
    assert torch.equal(dweight, torch.zeros(4))
    assert (mean == 2).all()
    assert (var == 3).all()


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_mixed_dtypes_are_promoted_and_rounded_once(x_dtype):
    params = torch.float64 if x_dtype == torch.float32 else torch.float32
    x, weight, bias, _ = make((2, 4, 5), torch.float64)
    x, weight, bias = x.to(x_dtype), weight.to(params), bias.to(params)
    y = functional.group_norm(x, 2, weight, bias, mode="standard")
    exact = F.group_norm(x.double(), 2, weight.double(), bias.double())
    assert y.dtype == x_dtype
    torch.testing.assert_close(y, exact.to(x_dtype))


def test_autocast_output_sets_the_dtype_under_autocast():
    x, weight = torch.randn(2, 4, 5), torch.ones(4)
    with torch.autocast("cpu", torch.bfloat16):
        low = functional.group_norm(x, 2, weight, autocast_output="low")
        full = functional.group_norm(x, 2, weight)
        double_ = functional.group_norm(x.double(), 2, weight.double(), autocast_output="low")
        instance = functional.instance_norm(x, weight=weight)
    dtypes = (low.dtype, full.dtype, double_.dtype, instance.dtype)
    assert dtypes == (torch.bfloat16, torch.float32, torch.float64, torch.float32)


X = torch.randn(2, 6, 3)
group_norm, instance_norm = functional.group_norm, functional.instance_norm
RUNNING = {"running_mean": torch.zeros(6), "running_var": torch.ones(6)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (partial(group_norm, X, 4), ValueError, "num_groups must be a divisor of the 6 .* got 4"),
        (partial(group_norm, X, 0), ValueError, "num_groups must be at least 1; got 0"),
        (partial(group_norm, X, 2.0), TypeError, "num_groups must be an integer; got 2.0"),
        (partial(group_norm, X[0, 0], 1), ValueError, r"input must be \(N, C\)"),
        (partial(group_norm, X[:1, :, :1], 6), ValueError, "larger than one value per group"),
        (partial(group_norm, X, 2, torch.ones(2)), ValueError, r"weight must be \(C,\) = \(6,\)"),
        (partial(group_norm, X, 2, activation="tanh"), ValueError, "activation must be None or"),
        (partial(group_norm, X, 2, autocast_output="half"), ValueError, "'low', 'float32'; got"),
        (partial(group_norm, X, 2, eps="1"), TypeError, "eps must be a number"),
        (partial(group_norm, X, 2, backend="triton"), NotImplementedError, "but.*(on cpu|not in)"),
        (partial(instance_norm, X[:, :, :1]), ValueError, "more than one spatial position"),
        (partial(instance_norm, X[:, :, 0]), ValueError, "more than one spatial position"),
        (partial(instance_norm, X[0, 0]), ValueError, r"input must be \(N, C\)"),
        (partial(instance_norm, X, torch.zeros(6)), ValueError, "go together"),
        (partial(instance_norm, X, torch.zeros(2), torch.ones(2)), ValueError, r"= \(6,\) for"),
        (partial(instance_norm, X, use_input_stats=False), ValueError, "which are None. Pass"),
        (partial(instance_norm, X, use_input_stats=1), TypeError, "must be True or False"),
        (partial(instance_norm, X, momentum="x"), TypeError, "momentum must be a number"),
        (partial(instance_norm, "x"), TypeError, "input must be a torch.Tensor"),
    ],
)
def test_an_invalid_call_raises_an_error_with_the_rule_and_the_values(call, error, message):
    name = call.func.__name__
    with pytest.raises(error, match=rf"normplug.functional.{name}: .*{message}"):
        call()
