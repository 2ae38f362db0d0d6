"""Models for the tests of recomputation, the results of their steps, and the inputs they keep."""

import copy
import gc

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from accuracy import assert_same_bits
from fuse_cases import PreNorm, outcome
from normplug import fuse, swap


class Feed(PreNorm):
    """A transformer block whose second norm is read by a module of several layers."""

    def __init__(self, width=8):
        super().__init__(width)
        layers = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        self.mlp = nn.Sequential(*layers)


class Attend(nn.Module):
    """An addition, a norm, and attention, which permutes the norm's result and copies that."""

    def __init__(self, width=8):
        super().__init__()
        self.mix, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        x = x + self.mix(x)
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Residual(nn.Module):
    """A residual block whose input is read only by a convolution and the addition."""

    def __init__(self, act=None, down=None, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.act = act or nn.ReLU(inplace=True)
        self.down = down

    def forward(self, x):
        y = self.bn2(self.conv2(self.act(self.bn1(self.conv1(x)))))
        return self.act(y + (x if self.down is None else self.down(x)))


def convolutions(*between, width=4):
    """Convolutions, each followed by a BatchNorm and one of `between`, and a last convolution."""
    layers = []
    for module in between:
        conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(width), module]
    return nn.Sequential(*layers, nn.Conv2d(width, width, 1))


def twins(model, **options):
    """The model swapped and fused, and its copy without recompute."""
    swap(model.train(), backend="triton", **options)
    plain = fuse(copy.deepcopy(model))
    return fuse(model, recompute=True), plain


def check_same(ours, plain, x, low=None, steps=1):
    """Assert that steps of both models give the same bits."""
    how = {"training": ours.training, "low": low}
    for _ in range(steps):
        assert_same_bits(outcome(ours, x, **how), outcome(plain, x, **how))


def check_as_exact(ours, plain, exact, x, low):
    """Assert the plain step's outputs, and gradients as close to float64's as the plain ones.

    exact: what `outcome` returns for the stock model and x in float64.
    """
    results = [outcome(model, x, training=True, low=low) for model in (ours, plain)]
    assert torch.equal(results[0]["y"], results[1]["y"])
    for name, truth in exact.items():
        errors = [(result[name].double() - truth).norm() for result in results]
        assert errors[0] <= 1.5 * errors[1] + 1e-6 * truth.norm(), name


def kept(model, x, low=None):
    """The convolutions and linear layers whose input is still in memory after the forward."""
    inputs, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):

            def note(module, args, name=name):
                inputs[name] = StorageWeakRef(args[0].untyped_storage())

            handles.append(module.register_forward_pre_hook(note))
    with torch.autocast(x.device.type, low, enabled=low is not None):
        y = model(x.detach().requires_grad_())
    for handle in handles:
        handle.remove()
    if not x.is_cuda:
        gc.collect()  # Triton's interpreter leaves cycles behind
    assert y.grad_fn is not None
    return {name for name, storage in inputs.items() if not storage.expired()}
