"""A fused norm, scale and shift run as one kernel, and give what the operations give."""

import copy

import pytest
import torch
from torch import nn

import routes
from normplug import fuse, native, swap


class Adaptive(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.line = nn.Linear(6, 12)

    def forward(self, x, c, **options):
        scale, shift = self.line(c).chunk(2, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None]


NORMS = [nn.LayerNorm(6), nn.LayerNorm(6, elementwise_affine=False), nn.RMSNorm(6)]


@pytest.mark.parametrize("norm", NORMS, ids=str)
def test_one_kernel_gives_what_the_operations_give(norm, monkeypatch):
    stock = Adaptive(copy.deepcopy(norm))
    for parameter in stock.norm.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    model = fuse(swap(copy.deepcopy(stock), backend="triton"))
    launches = routes.watch_launches(monkeypatch)
    leaves = [
        (1 + torch.randn(2, 3, 6)).requires_grad_(),
        torch.randn(2, 6).requires_grad_(),
    ]
    results = []
    for each in (model, stock):
        launches.clear()
        with native.python_way():
            y = each(*leaves)
            assert len(launches) == (each is model)
            parameters = [*leaves, *each.parameters()]
            gradients = torch.autograd.grad(y.square().sum(), parameters)
        results.append((y, *gradients))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
