"""A model with norms of each kind, and what a conversion may do to it."""

import sys

import pytest
import torch
from torch import nn

from accuracy import assert_same_bits
from normplug import _convert, target_variance
from normplug.modules import TargetVarianceNorm

GOLDEN = target_variance("golden")
X = torch.randn(16, 3, 6, 6)
# There, compiled stock layers miss such changes, too: its dicts have no version to guard on.
NEEDS_GUARDS = pytest.mark.skipif(
    sys.version_info[:3] == (3, 13, 0),
    reason="what torch compiles with Python 3.13.0 misses changes of attributes",
)


class Net(nn.Module):
    """One norm of each kind, a shared one, and an alias."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flat = nn.BatchNorm1d(8)
        self.norm = nn.LayerNorm(8)
        self.again = self.norm
        self.head = nn.Sequential(nn.Linear(8, 8), self.norm, nn.Linear(8, 4))

    def forward(self, x):
        x = self.flat(self.pool(self.stem(x)).flatten(1))
        return self.head(self.again(x))


class Stubborn(nn.LayerNorm):
    """A stock norm whose conversion fails."""


class TargetStubborn(TargetVarianceNorm, Stubborn):
    def _affine_shape(self):
        return self.normalized_shape

    @classmethod
    def _adopt(cls, module, track_running_stats, device):
        raise MemoryError("no room")


_convert.register(TargetStubborn, Stubborn)


def one_graph(model):
    """Compile the model; more than one graph is an error."""
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def train_step(model, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    loss = model(torch.randn(16, 3, 6, 6)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def frozen(model):
    """All that a refused call must not change: classes, attributes, values and identities."""
    layers = [
        (path, type(m), sorted(vars(m)), {**m._parameters, **m._buffers})
        for path, m in model.named_modules(remove_duplicate=False)
    ]
    return layers, {k: v.clone() for k, v in model.state_dict().items()}


def assert_frozen(model, before):
    layers, values = frozen(model)
    for now, then in zip(layers, before[0], strict=True):
        assert now[:3] == then[:3]
        assert {k: id(v) for k, v in now[3].items()} == {
            k: id(v) for k, v in then[3].items()
        }
    assert_same_bits(values, before[1])
