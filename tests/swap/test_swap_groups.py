"""GroupNorm and InstanceNorm in models: what they watch, what is fused with them, their kernels."""

import copy

import pytest
import torch
from torch import nn

from normplug import fuse, fusions, plan, swap, unswap
from normplug.modules.probe import Probe
from routes import watch_fused

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 + 1


class Net(nn.Module):
    """GroupNorm and SiLU as in a diffusion model, InstanceNorm and ReLU as in style transfer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.group = nn.GroupNorm(2, 8)
        self.act = nn.SiLU()
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, bias=False), nn.InstanceNorm2d(8), nn.ReLU())
        self.tracked = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x):
        x = self.act(self.group(self.stem(x)))
        return self.tracked(self.body(x))


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    for norm in (net.group, net.tracked):
        for parameter in norm.parameters():
            nn.init.normal_(parameter, 1, 0.3)
    return net


def test_the_activation_after_a_norm_is_fused(net, monkeypatch):
    assert plan(net).summary() == "3 of 3 norm layers: 1 GroupNorm, 2 InstanceNorm2d"
    expected = swap(net, "golden").eval()(X)
    fuse(net)
    assert fusions(net).summary().startswith("2 of 3 norm layers fused: 1 with SiLU, 1 with ReLU;")
    made = watch_fused(monkeypatch)
    assert torch.equal(net(X), expected)
    assert made == ["silu", "relu"]
    net.group._probe = Probe()
    assert torch.equal(net(X), expected)  # measured by its forward, so not fused
    assert made == ["silu", "relu", "relu"]
    del net.group._probe
    torch.testing.assert_close(unswap(net)(X), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_kernels_train_a_model_as_torch_does(net, memory_format):
    net, x = net.cuda(), X.cuda().contiguous(memory_format=memory_format)
    ours, theirs = (
        swap(copy.deepcopy(net), "golden", backend=name) for name in ("triton", "torch")
    )
    fuse(ours)
    close = {"rtol": 1e-2, "atol": 1e-2}  # convolutions round to TF32
    for _ in range(3):  # the first calls teach the C++ path, which runs the others
        y, expected = ours(x), theirs(x)
        torch.testing.assert_close(y, expected, **close)
        dy = torch.randn_like(y)
        gradients = (
            torch.autograd.grad(out, list(model.parameters()), dy)
            for out, model in ((y, ours), (expected, theirs))
        )
        for got, wanted in zip(*gradients, strict=True):
            scale = wanted.abs().max()
            torch.testing.assert_close(got / scale, wanted / scale, rtol=0, atol=2e-2)
    torch.testing.assert_close(ours.tracked.running_var, theirs.tracked.running_var, **close)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), **close)
