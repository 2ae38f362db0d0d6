"""The reference formulas, checked against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from accuracy import leaf
from normplug import reference

GOLDEN = 0.6180339887498949


SHAPES = [(7, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 4)]
ROWS = [((6, 5), (5,)), ((2, 3, 4), (3, 4)), ((5,), (5,))]
OPTIONS = {"target_variance": GOLDEN}


def tensors(shape, affine):
    """x, weight, bias and dy in float64; and the weight of a stock norm that computes the same."""
    x, weight, bias = (leaf(torch.randn(s).double() + 3) for s in (shape, affine, affine))
    return x, weight, bias, torch.randn(shape).double(), weight * GOLDEN**0.5


def assert_torchs(y, gradients, stock, leaves, dy):
    """Compare a result and its gradients with a stock norm's."""
    torch.testing.assert_close(y, stock)
    expected = torch.autograd.grad(stock, leaves, dy)
    torch.testing.assert_close(tuple(gradients), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_batch_norm_and_its_gradients_are_torchs(shape, training):
    x, weight, bias, dy, scaled = tensors(shape, (3,))
    running = None if training else (torch.rand(3).double(), torch.rand(3).double())
    given = {} if training else dict(zip(("mean", "var"), running, strict=True))
    y, mean, var = reference.batch_norm(x, weight, bias, **OPTIONS, **given)
    got = reference.batch_norm_backward(dy, x, weight, mean, var, training=training, **OPTIONS)
    stock = F.batch_norm(x, *(running or (None, None)), scaled, bias, training)
    assert_torchs(y, got, stock, (x, weight, bias), dy)


@pytest.mark.parametrize(("shape", "row"), ROWS)
def test_layer_norm_and_its_gradients_are_torchs(shape, row):
    x, weight, bias, dy, scaled = tensors(shape, row)
    y = reference.layer_norm(x, row, weight, bias, **OPTIONS).y
    got = reference.layer_norm_backward(dy, x, row, weight, **OPTIONS)
    assert_torchs(y, got, F.layer_norm(x, row, scaled, bias), (x, weight, bias), dy)


@pytest.mark.parametrize(("shape", "row"), ROWS)
def test_rms_norm_and_its_gradients_are_torchs(shape, row):
    x, weight, _, dy, scaled = tensors(shape, row)
    options = OPTIONS | {"weight_offset": 1.0}
    y = reference.rms_norm(x, row, weight - 1, **options).y
    got = reference.rms_norm_backward(dy, x, row, weight - 1, **options)
    eps = torch.finfo(torch.double).eps
    assert_torchs(y, got, F.rms_norm(x, row, scaled, eps), (x, weight), dy)


@pytest.mark.parametrize("shape", [(3, 4), (2, 6, 5), (2, 4, 3, 2), (2, 4, 2, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2, None])
def test_group_norm_and_its_gradients_are_torchs(shape, groups):
    x, weight, bias, dy, scaled = tensors(shape, shape[1:2])
    if groups is None:
        y = reference.instance_norm(x, weight, bias, **OPTIONS).y
    else:
        y = reference.group_norm(x, groups, weight, bias, **OPTIONS).y
    groups = groups or shape[1]
    got = reference.group_norm_backward(dy, x, groups, weight, **OPTIONS)
    assert_torchs(y, got, F.group_norm(x, groups, scaled, bias), (x, weight, bias), dy)


def test_standard_equals_torch_and_the_output_has_the_target_variance():
    x = torch.randn(64, 5, 6, dtype=torch.double) * 3 + 100
    running = torch.zeros(5).double(), torch.ones(5).double()
    expected = F.batch_norm(x, *running, training=True, momentum=0.3)
    y, mean, var = reference.batch_norm(x)
    torch.testing.assert_close(y, expected)
    n = x.numel() / 5
    for before, batch, after in zip((0.0, 1.0), (mean, var * n / (n - 1)), running, strict=True):
        start = torch.full((5,), before).double()
        torch.testing.assert_close(reference.running_average(start, batch, 0.3, 1), after)
    golden = reference.batch_norm(x, eps=0.0, target_variance=GOLDEN).y
    torch.testing.assert_close(golden.var((0, 2), correction=0), torch.full((5,), GOLDEN).double())


def test_a_cumulative_average_weighs_all_batches_equally():
    average = torch.tensor(0.0)
    for count, value in enumerate((2.0, 4.0, 9.0), start=1):
        average = reference.running_average(average, torch.tensor(value), None, count)
    assert average.item() == pytest.approx(5.0)


@pytest.mark.parametrize("name", [None, "relu", "silu", "gelu", "relu6", "hardswish", "leaky_relu"])
def test_activations_and_their_gradients_match_torch(name):
    pre = leaf(torch.cat([torch.randn(50).double() * 4, torch.zeros(1).double()]))
    dy = torch.randn(51).double()
    expected = pre * 1 if name is None else getattr(F, name)(pre)
    torch.testing.assert_close(reference.activation(pre, name), expected)
    (gradient,) = torch.autograd.grad(expected, pre, dy)
    torch.testing.assert_close(reference.activation_backward(dy, pre, name), gradient)
