"""Which sites are fused, and which are left."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from fuse_cases import (
    ROWS,
    Depthwise,
    Encoder,
    Parts,
    X,
    assert_same_step,
    swapped,
    twins,
)
from normplug import fuse, fusions
from normplug._fuse.edit import REASON


class Pooled(Parts):
    def forward(self, x):
        return F.max_pool2d(F.relu(self.bn(x)), 2)


def test_a_max_pooling_function_is_called_after_the_fused_norm(calls):
    model, plain = twins(Pooled(bn=nn.BatchNorm2d(8)))
    assert_same_step(model, plain, X)
    assert calls == ["relu"]


class SecondOfTwo(nn.MaxPool2d):
    def forward(self, x):
        return super().forward(x)[..., 1:]


def test_other_poolings_are_left(calls):
    for pool in (SecondOfTwo(2), nn.AvgPool2d(2), nn.MaxPool2d(2, return_indices=True)):
        model = fuse(swapped(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), pool)))
        assert [row.label for row in fusions(model)] == ["ReLU"]
    with_silu = nn.Sequential(nn.BatchNorm2d(8), nn.SiLU(), nn.MaxPool2d(2))
    assert [row.label for row in fusions(fuse(swapped(with_silu)))] == ["SiLU"]


class Functional(Parts):
    def forward(self, x):
        y = F.relu(self.bn(x), inplace=True)
        z = self.other(y).add(x)
        return torch.relu(z)


@pytest.mark.parametrize("mode", ["golden", "standard", 0.5])
def test_functions_and_methods_are_fused_like_modules(mode, calls):
    model, plain = twins(Functional(bn=nn.BatchNorm2d(8), other=nn.BatchNorm2d(8)), mode)
    assert [row.label for row in fusions(model)] == ["ReLU", "add, ReLU"]
    assert_same_step(model, plain, X)
    assert calls == ["relu", "add, relu"]
    normplug.set_mode(model, 2.0)
    normplug.set_mode(plain, 2.0)
    assert_same_step(model, plain, X)


class Scaled(Parts):
    def forward(self, x, scale):
        return self.norm(x * scale)


class GivesANumber(Parts):
    def forward(self, x):
        return self.act(self.inner(x, 2.0))


def test_a_norm_in_a_module_that_is_called_with_a_number_is_fused(calls):
    model, plain = twins(
        GivesANumber(inner=Scaled(norm=nn.BatchNorm2d(8)), act=nn.ReLU())
    )
    assert_same_step(model, plain, X)
    assert calls == ["relu"]


class Dropped(Parts):
    def forward(self, x):
        return F.dropout(self.act(self.norm(x) + x), 0.5, self.training)


def test_a_forward_that_passes_its_training_flag_on_is_fused_for_both_values(calls):
    model, plain = twins(Dropped(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    for training in (True, False):
        assert_same_step(model, plain, X, training=training)
    assert calls == ["add, relu"] * 2


class Leaky(Parts):
    def forward(self, x):
        x = F.leaky_relu(self.first(x), 0.3)
        x = F.leaky_relu(self.second(x), negative_slope=0.1, inplace=True)
        return self.act(self.third(F.leaky_relu(x)))


def test_leaky_relu_is_fused_with_its_slope(calls):
    norms = nn.GroupNorm(2, 8), nn.InstanceNorm2d(8), nn.BatchNorm2d(8)
    parts = dict(zip(("first", "second", "third"), norms, strict=True))
    model, plain = twins(Leaky(**parts, act=nn.LeakyReLU(0.2)))
    assert [row.label for row in fusions(model)] == ["LeakyReLU"] * 3
    assert_same_step(model, plain, X)
    assert calls == [("leaky_relu", slope) for slope in (0.3, 0.1, 0.2)]


def test_the_addition_at_a_blocks_end_is_fused_with_the_next_blocks_norm(calls):
    model, plain = twins(Encoder())
    rows = {row.path: row for row in fusions(model)}
    assert rows["blocks.0.norm1"].note == REASON
    assert rows["blocks.1.norm1"].owner == "blocks"
    assert rows["norm"].owner == ""
    assert_same_step(model, plain, ROWS)
    assert calls == ["add before"] * 4
    # No call may be fused across a block that has a hook, or whose training flag differs.
    seen, other = [], []
    for one, list_ in ((model, seen), (plain, other)):
        one.blocks[1].register_forward_hook(
            lambda m, args, y, list_=list_: list_.append(y)
        )
    calls.clear()
    assert_same_step(model, plain, ROWS)
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


class CalledInBetween(Depthwise):
    def forward(self, x):
        y = self.conv(x)
        x = self.norm(x)
        return self.norm(y.permute(0, 2, 3, 1)) + x


@pytest.mark.parametrize("cls", [Depthwise, ByFunction])
def test_the_bias_of_a_convolution_is_added_by_the_layer_norm_after_it(cls, calls):
    model, plain = twins(cls())
    assert fusions(model).summary() == "1 of 1 norm layers fused: 1 with bias of Conv2d"
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, X, training=training)
        assert calls == ["bias before"]
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    calls.clear()
    torch.testing.assert_close(compiled(X), plain(X))
    assert calls == ["bias before"]


class Embedding(Parts):
    """A patch embedding, and the LayerNorm of each patch."""

    def forward(self, x):
        return self.norm(torch.permute(self.conv(x), self.order))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_of_every_rank_leave_their_bias_to_the_norm(dims, calls):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    conv = convolution(3, 8, 3, stride=2, padding=1, padding_mode="circular")
    order = (0, *range(2, dims + 2), 1)
    model, plain = twins(Embedding(conv=conv, norm=nn.LayerNorm(8), order=order))
    assert_same_step(model, plain, torch.randn(2, 3, *[6] * dims, dtype=torch.double))
    assert calls == ["bias before"]


OTHERS = [partial(Depthwise, bias=False), partial(Depthwise, shape=(8, 8))]


@pytest.mark.parametrize("make", [ChannelsFirst, ReadTwice, CalledInBetween, *OTHERS])
@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
def test_other_layer_norms_after_a_convolution_are_left(make, calls):
    model, plain = twins(make())
    assert not any(row.label for row in fusions(model))
    assert_same_step(model, plain, torch.randn(2, 8, 8, 8, dtype=torch.double))
    assert calls == []


def test_without_kernels_the_modules_run_as_they_are_written(monkeypatch):
    ran = []
    for name in ("_fused_add", "_fused_bias"):
        monkeypatch.setattr(
            normplug.LayerNorm, name, lambda *arguments: ran.append(arguments)
        )
    for model, x in ((Depthwise(), X), (Encoder(), ROWS)):
        assert_same_step(*twins(model), x)
    assert ran == []


def test_integers_may_be_added_before_a_layer_norm():
    class Counts(Parts):
        def forward(self, counts, x):
            return self.norm(counts + x)

    model = fuse(swapped(Counts(norm=nn.LayerNorm(8))))
    counts = torch.arange(8).expand(4, 3, 8)
    assert torch.equal(model(counts, ROWS), model(counts.double(), ROWS))


def test_a_residual_of_another_dtype_or_shape_is_added_unfused(calls):
    class Add(Parts):
        def forward(self, x, residual):
            y = self.bn(self.conv(x))
            y += residual
            return self.norm(self.act(y) + residual)

    norms = {"bn": nn.BatchNorm2d(8), "norm": nn.LayerNorm(5)}
    model, plain = twins(Add(conv=nn.Conv2d(8, 8, 1), act=nn.ReLU(), **norms))
    for residual in (X.float(), X[:1], X[:, :, :1, :1]):
        assert_same_step(model, plain, X, residual)
    assert calls == ["add before"]  # the first, which has the shape of the sum
    model.float(), plain.float()
    low = X.float(), X.double()
    assert torch.equal(model(*low), plain(*low))


class NormFirst(Parts):
    def forward(self, x, residual):
        return self.act(self.norm(x) + residual)


class ResidualFirst(Parts):
    def forward(self, x, residual):
        return self.act(residual + self.norm(x))


@pytest.mark.parametrize("order", [NormFirst, ResidualFirst])
def test_a_sum_of_two_memory_formats_has_that_of_its_left_operand(order, calls):
    model, plain = twins(order(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    last = X.contiguous(memory_format=torch.channels_last)
    for x, residual in ((X, last), (last, X)):
        y, expected = model(x, residual), plain(x, residual)
        assert y.stride() == expected.stride()
        assert torch.equal(y, expected)
    assert calls == []
    model(last, last)
    assert calls == ["add, relu"]


def test_a_value_that_changes_between_norm_and_addition_is_not_read_late():
    class Changing(Parts):
        def forward(self, x):
            x = x * 1
            y = self.norm(x)
            return self.act(y + self.change(x))

    class Adding(Parts):
        def forward(self, x):
            y = self.line(x)
            x = x * 1
            z = x
            x += y
            return self.norm(x) + z

    class Later(Parts):
        def forward(self, x):
            total = x + self.line(x)
            total.mul_(2)
            return self.norm(total)

    for written, x in (
        (
            Changing(norm=nn.BatchNorm2d(8), act=nn.ReLU(), change=nn.ReLU(inplace=True)),
            X,
        ),
        (Adding(norm=nn.LayerNorm(8), line=nn.Linear(8, 8)), ROWS),
        (Later(norm=nn.LayerNorm(8), line=nn.Linear(8, 8)), ROWS),
    ):
        with pytest.warns(UserWarning, match=REASON):
            model, plain = twins(written)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


def test_a_norm_that_is_called_twice_or_whose_output_is_read_twice_is_left():
    class Twice(Parts):
        def forward(self, x):
            return self.act(self.norm(self.act(self.norm(x) + x)) + x)

    class Read(Parts):
        def forward(self, x):
            y = self.norm(x)
            return self.act(y) + y

    class AddedToItself(Parts):
        def forward(self, x):
            y = self.norm(x)
            return self.act(y + y)

    for cls in (Twice, Read, AddedToItself):
        model = swapped(cls(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
        with pytest.warns(UserWarning, match=REASON):
            fuse(model)


def test_a_norm_that_another_module_calls_in_between_keeps_its_order():
    class Shared(Parts):
        def forward(self, x):
            y = self.norm(self.conv(x))
            return self.act(y + self.down(x))

    norm = nn.BatchNorm2d(8)
    down = nn.Sequential(nn.AvgPool2d(1), norm)
    down.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=REASON):
        model, plain = twins(
            Shared(conv=nn.Conv2d(8, 8, 1), norm=norm, act=nn.ReLU(), down=down)
        )
    assert_same_step(model, plain, X)
