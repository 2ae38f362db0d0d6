import itertools
import re

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import normplug
from batch_norm_cases import make
from normplug import functional, reference, target_variance
from programs import ROOT


@pytest.mark.parametrize("shape", [(4, 5, 6, 3), (3, 5, 2, 4, 3)], ids=str)
def test_the_output_and_the_input_gradient_keep_the_layout(shape):
    x, weight, bias = make(shape, (5,), torch.float32, "channels_last")
    x.requires_grad_()
    y = functional.batch_norm(
        x, None, None, weight, bias, True, residual=x, activation="relu"
    )
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.stride() == dx.stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_channel_stats_are_accurate_far_from_zero(dtype):
    x = (torch.randn(50, 4, 3, 3, dtype=torch.double) + 1e3).to(dtype)
    mean, var = functional.channel_stats(x)
    assert mean.dtype == reference.accumulator_dtype(dtype)
    exact = x.double()
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        var.double(), exact.var((0, 2, 3), correction=0), rtol=1e-4, atol=0
    )
    assert functional.channel_stats(x[:0])[1].isnan().all()


def test_the_documented_hook_prints_the_golden_variance(capsys):
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")]
    blocks = [
        block
        for page in pages
        for block in re.findall(r"```python\n(.*?)```", page, re.S)
    ]
    (example,) = (block for block in blocks if "channel_stats(" in block)
    torch.manual_seed(0)
    exec(compile(example, "the documentation", "exec"), {})
    assert capsys.readouterr().out == "0.618\n"


def test_fake_tensors_of_symbolic_size_are_accepted():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    batch = mode.from_tensor(torch.randn(4, 3)).shape[0]
    assert isinstance(batch, torch.SymInt)
    with mode:
        x = torch.empty(batch, 3, 8, 8, device="cuda")
        y = functional.batch_norm(x, None, None, training=True)
    assert y.shape == (batch, 3, 8, 8)
    assert y.device.type == "cuda"


def in_order(x, order):
    """A copy of x whose dimensions lie in memory in another order."""
    return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])


@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "shape", [(1, 4, 3, 3), (1, 4, 1, 3), (3, 4, 3, 1), (1, 3, 2, 1, 2)], ids=str
)
def test_a_gradient_of_any_layout_gives_the_right_gradients(shape, training, norm):
    channels = shape[1]
    vectors = [torch.rand(channels, dtype=torch.float64) + 0.5 for _ in range(4)]
    mean, var, weight, bias = vectors
    orders = [
        (0, 1, *range(2, len(shape))),
        (0, *range(2, len(shape)), 1),
        (2, 0, 1, 3, 4),
    ]
    orders = [order[: len(shape)] for order in orders]
    for x_order, dy_order in itertools.product(orders, orders):
        x = in_order(torch.randn(shape, dtype=torch.float64), x_order).requires_grad_()
        dy = in_order(torch.randn(shape, dtype=torch.float64), dy_order)
        inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
        running = (mean.clone(), var.clone())
        y = getattr(functional, norm)(x, *running, weight, bias, training, mode="golden")
        constants = {} if training else {"mean": mean, "var": var}
        kind = getattr(reference, norm)
        tv = target_variance("golden")
        expected = kind(x, weight, bias, eps=1e-5, target_variance=tv, **constants).y
        torch.testing.assert_close(y, expected)
        found, right = (torch.autograd.grad(z, inputs, dy) for z in (y, expected))
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(1, 4, 3, 1), (3, 4, 3, 1)], ids=str)
def test_a_layer_gives_the_right_gradient_for_one_of_any_layout(shape, training):
    layer = normplug.BatchNorm2d(4, dtype=torch.float64).train(training)
    orders = [(0, 1, 2, 3), (0, 2, 3, 1), (2, 0, 3, 1)]
    for x_order, dy_order in itertools.product(orders, repeat=2):
        x = in_order(torch.randn(shape, dtype=torch.float64), x_order).requires_grad_()
        dy = in_order(torch.randn(shape, dtype=torch.float64), dy_order)
        constants = (
            {} if training else {"mean": layer.running_mean, "var": layer.running_var}
        )
        expected = reference.batch_norm(x, layer.weight, layer.bias, **constants).y
        gradients = (torch.autograd.grad(y, x, dy) for y in (layer(x), expected))
        torch.testing.assert_close(*gradients)
