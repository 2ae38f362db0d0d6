"""What is fused, and what is left."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
import routes
from fuse_cases import (
    ROWS,
    ZOO,
    Depthwise,
    Encoder,
    X,
    assert_runs_unfused,
    assert_same,
    outcome,
    swapped,
    twins,
)
from normplug import fuse, fusions


class Pooled(nn.Module):
    """A stem with its pooling as a function."""

    def __init__(self, way):
        super().__init__()
        self.bn, self.way, self.padding = nn.BatchNorm2d(8), way, 1

    def forward(self, x):
        y = F.relu(self.bn(x))
        if self.way == "numbers":
            return F.max_pool2d(y, 3, 2, 1)
        if self.way == "names":
            return F.max_pool2d(y, kernel_size=[3, 2], padding=(self.padding, 0), ceil_mode=True)
        if self.way == "dilated":
            return F.max_pool2d(y, 2, dilation=2)
        if self.way == "method":
            return torch.max_pool2d(y, 2)
        return F.max_pool2d(y, 2, return_indices=True)[0]


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("numbers", "relu, max pool"),
        ("names", "relu, max pool"),
        ("dilated", "relu"),
        ("method", "relu, max pool"),
        ("indices", "relu"),
    ],
)
def test_max_pooling_may_be_a_function(way, call, calls):
    model, plain = twins(Pooled(way))
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == [call]


class SecondOfTwo(nn.MaxPool2d):
    def forward(self, x):
        return super().forward(x)[..., 1:]


def test_other_poolings_are_left(calls):
    for pool in (SecondOfTwo(2), nn.AvgPool2d(2), nn.MaxPool2d(2, return_indices=True)):
        model = fuse(swapped(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), pool)))
        assert [row.label for row in fusions(model)] == ["ReLU"]
    read_twice = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2))
    assert [row.label for row in fusions(fuse(swapped(read_twice)))] == ["SiLU"]


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn, self.other = nn.BatchNorm2d(8), nn.BatchNorm2d(8)

    def forward(self, x):
        y = F.relu(self.bn(x), inplace=True)
        z = self.other(y).add(x)
        return torch.relu(z)


@pytest.mark.parametrize("mode", ["golden", "standard", 0.5])
def test_functions_and_methods_are_fused_as_modules_are(mode, calls):
    model, plain = twins(Functional(), mode)
    assert [row.label for row in fusions(model)] == ["ReLU", "add, ReLU"]
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == ["relu", "add, relu"]
    normplug.set_mode(model, 2.0)
    normplug.set_mode(plain, 2.0)
    assert_same(outcome(model, X), outcome(plain, X))


def test_the_addition_at_a_blocks_end_is_fused_with_the_next_blocks_norm(calls):
    model, plain = twins(Encoder())
    rows = {row.path: row for row in fusions(model)}
    assert rows["blocks.0.norm1"].note == "preceded by the start of the module"
    assert rows["blocks.1.norm1"].owner == "blocks"
    assert rows["norm"].owner == ""
    assert_same(outcome(model, ROWS), outcome(plain, ROWS))
    assert calls == ["add before"] * 4
    # A hook on a block, or a block in evaluation, is nothing that a call past it may miss.
    seen, other = [], []
    for one, list_ in ((model, seen), (plain, other)):
        one.blocks[1].register_forward_hook(lambda m, args, y, list_=list_: list_.append(y))
    calls.clear()
    assert_same(outcome(model, ROWS), outcome(plain, ROWS))
    assert len(seen) == len(other) == 1
    assert calls == ["add before"] * 2


class ByFunction(Depthwise):
    def forward(self, x):
        return self.linear(self.norm(torch.permute(self.conv(x), (0, 3, 2, 1))))


class ChannelsFirst(Depthwise):
    def forward(self, x):
        return self.linear(self.norm(self.conv(x).permute(0, 1, 3, 2)))


class ReadTwice(Depthwise):
    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        return y + self.linear(self.norm(y))


class CalledAmid(Depthwise):
    def forward(self, x):
        y = self.conv(x)
        x = self.norm(x)
        return self.norm(y.permute(0, 2, 3, 1)) + x


@pytest.mark.parametrize("cls", [Depthwise, ByFunction])
def test_the_bias_of_a_convolution_is_added_by_the_layer_norm_after_it(cls, calls):
    model = swapped(cls())
    plain = copy.deepcopy(model)
    assert fusions(fuse(model)).summary() == "1 of 1 norm layers fused: 1 with bias of Conv2d"
    for training in (True, False):
        calls.clear()
        ours = outcome(model, X, training=training)
        assert calls == ["bias before"]
        assert_same(ours, outcome(plain, X, training=training))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    calls.clear()
    torch.testing.assert_close(compiled(X), plain(X))
    assert calls == ["bias before"]


class Embedding(nn.Module):
    """Patches of an input with so many dimensions, and the LayerNorm of each."""

    def __init__(self, dims):
        super().__init__()
        convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.conv = convolution(3, 8, 3, stride=2, padding=1, padding_mode="circular")
        self.norm = nn.LayerNorm(8)
        self.order = (0, *range(2, dims + 2), 1)

    def forward(self, x):
        return self.norm(torch.permute(self.conv(x), self.order))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_every_rank_leave_their_bias_to_the_norm(dims, calls):
    model = swapped(Embedding(dims))
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, *[6] * dims, dtype=torch.double)
    ours = outcome(fuse(model), x)
    assert calls == ["bias before"]
    assert_same(ours, outcome(plain, x))


@pytest.mark.parametrize(
    "make",
    [
        ChannelsFirst,
        ReadTwice,
        CalledAmid,
        partial(Depthwise, bias=False),
        partial(Depthwise, shape=(8, 8)),
    ],
)
@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
def test_other_layer_norms_after_a_convolution_are_left(make, calls):
    model = swapped(make())
    plain = copy.deepcopy(model)
    assert not any(row.label for row in fusions(fuse(model)))
    x = torch.randn(2, 8, 8, 8, dtype=torch.double)
    assert_same(assert_runs_unfused(model, calls, x), outcome(plain, x))


def test_on_a_cpu_a_convolution_adds_its_bias_itself(monkeypatch):
    biases = routes.watch_input_biases(monkeypatch)
    fuse(swapped(Depthwise()))(X)
    assert biases == [None]


def test_integers_may_be_added_before_a_layer_norm():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, counts, x):
            return self.norm(counts + x)

    model = fuse(swapped(Counts()))
    counts = torch.arange(8).expand(4, 3, 8)
    assert torch.equal(model(counts, ROWS), model(counts.double(), ROWS))


def test_a_residual_of_another_dtype_or_shape_is_added_as_before(calls):
    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
            self.norm = nn.LayerNorm(5)

        def forward(self, x, residual):
            y = self.bn(self.conv(x))
            y += residual
            return self.norm(self.act(y) + residual)

    model, plain = twins(Add())
    for residual in (X.float(), X[:1], X[:, :, :1, :1]):
        assert_same(outcome(model, X, residual), outcome(plain, X, residual))
    assert calls == ["add before"]  # of the first, whose shape is that of the sum
    model.float(), plain.float()
    low = X.float(), X.double()
    assert torch.equal(model(*low), plain(*low))


def test_a_value_that_changes_between_norm_and_addition_is_not_read_late():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act, self.change = nn.BatchNorm2d(8), nn.ReLU(), nn.ReLU(inplace=True)

        def forward(self, x):
            x = x * 1
            y = self.norm(x)
            return self.act(y + self.change(x))

    class Adding(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.line = nn.LayerNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.line(x)
            x = x * 1
            z = x
            x += y
            return self.norm(x) + z

    class Later(Adding):
        def forward(self, x):
            total = x + self.line(x)
            total.mul_(2)
            return self.norm(total)

    for cls, x in ((Changing, X), (Adding, ROWS), (Later, ROWS)):
        model = swapped(cls())
        plain = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="may change|others may see"):
            fuse(model)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


def test_a_norm_that_is_called_twice_or_read_twice_is_left():
    class Activated(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU()

    class Twice(Activated):
        def forward(self, x):
            return self.act(self.norm(self.act(self.norm(x))))

    class Read(Activated):
        def forward(self, x):
            y = self.norm(x)
            return self.act(y) + y

    for cls, why in ((Twice, "called more than once"), (Read, "its result is used 2 times")):
        model = swapped(cls())
        with pytest.warns(UserWarning, match=why):
            fuse(model)


def test_a_norm_that_another_module_calls_amid_keeps_its_order():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.act = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
            self.down = nn.Sequential(nn.AvgPool2d(1), self.norm)
            self.down.register_forward_hook(lambda *_: None)

        def forward(self, x):
            y = self.norm(self.conv(x))
            return self.act(y + self.down(x))

    model = swapped(Shared())
    plain = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="called inside another module"):
        fuse(model)
    assert_same(outcome(model, X), outcome(plain, X))


def test_a_norm_that_only_a_fused_addition_reads_is_called_as_such(monkeypatch):
    lone = []
    fused = normplug.BatchNorm2d.fused

    def noted(layer, *arguments, **options):
        lone.extend([layer] * options.get("single", False))
        return fused(layer, *arguments, **options)

    model = fuse(swapped(ZOO["resnet18"][0]()))
    monkeypatch.setattr(normplug.BatchNorm2d, "fused", noted)
    model(torch.randn(2, 3, 32, 32, dtype=torch.double))
    shortcuts = [m for n, m in model.named_modules() if n.endswith("downsample.1")]
    assert len(lone) == len(shortcuts) > 0
    assert all(any(layer is m for m in shortcuts) for layer in lone)
