"""Norms in evaluation whose weight and bias need no gradient: what they save and compute."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from batch_norm_cases import laid_out
from calls import saved_bytes
from normplug import freeze, swap

SHAPES = [(6, 5), (3, 9, 4, 5), (2, 20, 9, 8)]


def layer_of(shape, dtype, mode="standard"):
    torch.manual_seed(0)
    layer = (nn.BatchNorm1d if len(shape) == 2 else nn.BatchNorm2d)(shape[1])
    for t in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
        t.data.uniform_(0.5, 2.0)
    return freeze(swap(layer.to(dtype), mode, backend="triton"))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("adds", [False, True])
def test_only_what_dx_needs_is_saved_and_gradients_are_right(
    shape, layout, activation, adds
):
    layer = layer_of(shape, torch.float32, 0.5)
    x, r = (laid_out(torch.randn(shape), layout).requires_grad_() for _ in range(2))
    r = r if adds else None
    made = []
    size = saved_bytes(
        lambda: made.append(layer._fused(x, r, activation)),
        besides=[layer.weight, layer.bias],
    )
    y = made[0]
    statistics = 2 * shape[1] * 4
    whole = x.numel() * 4
    if activation == "silu":
        assert size == statistics + whole * (2 if adds else 1)
    elif activation is None:
        assert size == statistics
    else:
        assert statistics < size < statistics + whole // 2
    scale = (0.5**0.5) * layer.weight
    numbers = layer.running_mean, layer.running_var, scale, layer.bias
    expected = F.batch_norm(x, *numbers) + (0 if r is None else r)
    expected = expected if activation is None else getattr(F, activation)(expected)
    torch.testing.assert_close(y, expected)
    dy, inputs = torch.randn_like(y), [x, r] if adds else [x]
    for got, want in zip(
        torch.autograd.grad(y, inputs, dy, retain_graph=True),
        torch.autograd.grad(expected, inputs, dy, retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
        assert got.stride() == x.stride()
    second = [
        torch.autograd.grad(
            torch.autograd.grad(out, x, dy, create_graph=True)[0].sum(), dy
        )[0]
        for dy in [dy.requires_grad_()]
        for out in (y, expected)
    ]
    torch.testing.assert_close(*second)


def test_a_weight_that_trains_again_gets_its_gradient():
    layer = layer_of((3, 4, 5, 5), torch.float32)
    x = torch.randn(3, 4, 5, 5, requires_grad=True)
    layer(x).sum().backward()
    layer.weight.requires_grad_(True)
    layer(x).sum().backward()
    expected = F.batch_norm(x, layer.running_mean, layer.running_var).sum((0, 2, 3))
    torch.testing.assert_close(layer.weight.grad, expected.detach())
