"""The reference formulas, checked against autograd and against torch in float64."""

import pytest
import torch
import torch.nn.functional as F

from accuracy import leaf
from normplug import reference

GOLDEN = 0.6180339887498949


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(7, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 4)])
def test_batch_norm_backward_is_the_gradient_of_the_forward(shape, training):
    x, weight, bias = (leaf(torch.randn(s, dtype=torch.double) + 3) for s in (shape, (3,), (3,)))
    dy = torch.randn(shape, dtype=torch.double)
    given = {} if training else {"mean": torch.rand(3).double(), "var": torch.rand(3).double()}
    y, mean, var = reference.batch_norm(x, weight, bias, target_variance=GOLDEN, **given)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    options = {"target_variance": GOLDEN, "training": training}
    got = reference.batch_norm_backward(dy, x, weight, mean, var, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("shape", "normalized"), [((6, 5), (5,)), ((2, 3, 4), (3, 4)), ((5,), (5,))]
)
def test_layer_norm_backward_is_the_gradient_of_the_forward(shape, normalized):
    x, weight, bias = (leaf(torch.randn(s).double() + 3) for s in (shape, normalized, normalized))
    dy = torch.randn(shape).double()
    y = reference.layer_norm(x, normalized, weight, bias, target_variance=GOLDEN).y
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    got = reference.layer_norm_backward(dy, x, normalized, weight, target_variance=GOLDEN)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", [(3, 4), (2, 6, 5), (2, 4, 3, 2), (2, 4, 2, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2, None])
def test_group_norm_backward_is_the_gradient_of_the_forward(shape, groups):
    c = shape[1]
    x, weight, bias = (leaf(torch.randn(s).double() + 3) for s in (shape, (c,), (c,)))
    dy = torch.randn(shape).double()
    options = {"target_variance": GOLDEN}
    if groups is None:
        y = reference.instance_norm(x, weight, bias, **options).y
    else:
        y = reference.group_norm(x, groups, weight, bias, **options).y
    plain = F.group_norm(x, groups or c, weight * GOLDEN**0.5, bias)
    torch.testing.assert_close(y, plain)
    expected = torch.autograd.grad(y, (x, weight, bias), dy)
    got = reference.group_norm_backward(dy, x, groups or c, weight, **options)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


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
