"""The reference formulas, checked against torch in float64.

The tests of each norm's function compare the gradients, and what the modes and activations change.
"""

import pytest
import torch
import torch.nn.functional as F

from accuracy import leaf
from normplug import reference

GOLDEN = 0.6180339887498949


@pytest.mark.parametrize("shape", [(7, 3), (2, 3, 4, 5)])
def test_batch_norm_and_its_gradients_in_evaluation_are_torchs(shape):
    x, weight, bias = (leaf(torch.randn(s).double() + 3) for s in (shape, (3,), (3,)))
    dy, mean, var = torch.randn(shape).double(), torch.rand(3).double(), torch.rand(3).double()
    stock = F.batch_norm(x, mean, var, weight * GOLDEN**0.5, bias)
    options = {"target_variance": GOLDEN, "mean": mean, "var": var}
    y = reference.batch_norm(x, weight, bias, **options).y
    torch.testing.assert_close(y, stock)
    got = reference.gradients(reference.batch_norm, dy, x, weight, **options)
    torch.testing.assert_close(got, torch.autograd.grad(stock, (x, weight, bias), dy))


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
