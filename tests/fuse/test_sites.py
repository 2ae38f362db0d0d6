"""Which sites are fused, and which are left."""

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
    written,
)
from normplug import fuse, fusions
from normplug._fuse.edit import REASON

SQUARE = torch.randn(4, 8, 8, 8, dtype=torch.double)


class Scaled(Parts):
    def forward(self, x, scale):
        return self.norm(x * scale)


class Fused(Parts):
    """Each method is a forward with norms that are fused."""

    def max_pooling_function(self, x):
        return F.max_pool2d(F.relu(self.norm(x)), 2)

    def functions_and_methods(self, x):
        y = F.relu(self.norm(x), inplace=True)
        return torch.relu(self.second(y).add(x))

    def number_for_a_module(self, x):
        return self.act(self.inner(x, 2.0))

    def training_flag(self, x):
        return F.dropout(self.act(self.norm(x) + x), 0.5, self.training)

    def leaky_relu(self, x):
        x = F.leaky_relu(self.norm(x), 0.3)
        x = F.leaky_relu(self.other(x), negative_slope=0.1, inplace=True)
        return self.leaky(self.third(F.leaky_relu(x)))

    def permute_method(self, x):
        return self.line(self.rows(self.conv(x).permute(0, 2, 3, 1)))

    def permute_function(self, x):
        return self.line(self.rows(torch.permute(self.conv(x), (0, 3, 2, 1))))


class Left(Parts):
    """Each method is a forward with norms that are left."""

    def changed_before_the_addition(self, x):
        x = x * 1
        y = self.norm(x)
        return self.act(y + self.in_place(x))

    def sum_in_place(self, x):
        y = self.line(x)
        x = x * 1
        z = x
        x += y
        return self.rows(x) + z

    def sum_that_changes(self, x):
        total = x + self.line(x)
        total.mul_(2)
        return self.rows(total)

    def called_twice(self, x):
        return self.act(self.norm(self.act(self.norm(x) + x)) + x)

    def read_twice(self, x):
        y = self.norm(x)
        return self.act(y) + y

    def added_to_itself(self, x):
        y = self.norm(x)
        return self.act(y + y)

    def called_by_a_module_in_between(self, x):
        y = self.norm(self.conv(x))
        return self.act(y + self.down(x))

    def channels_first(self, x):
        return self.line(self.rows(self.conv(x).permute(0, 1, 3, 2)))

    def permuted_read_twice(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        return y + self.line(self.rows(y))

    def called_in_between(self, x):
        y = self.conv(x)
        x = self.rows(x)
        return self.rows(y.permute(0, 2, 3, 1)) + x

    def no_bias(self, x):
        return self.line(self.rows(self.without_bias(x).permute(0, 2, 3, 1)))

    def two_dimensions(self, x):
        return self.line(self.planes(self.conv(x).permute(0, 2, 3, 1)))


def parts_of(*names):
    made = {
        "norm": nn.BatchNorm2d(8),
        "second": nn.BatchNorm2d(8),
        "other": nn.InstanceNorm2d(8),
        "third": nn.GroupNorm(2, 8),
        "rows": nn.LayerNorm(8),
        "planes": nn.LayerNorm((8, 8)),
        "act": nn.ReLU(),
        "in_place": nn.ReLU(inplace=True),
        "leaky": nn.LeakyReLU(0.2),
        "conv": nn.Conv2d(8, 8, 3, padding=1, groups=8),
        "without_bias": nn.Conv2d(8, 8, 1, bias=False),
        "line": nn.Linear(8, 8),
        "inner": Scaled(norm=nn.BatchNorm2d(8)),
    }
    made["down"] = nn.Sequential(nn.AvgPool2d(1), made["norm"])
    made["down"].register_forward_hook(lambda *_: None)  # so it is not traced
    return {name: made[name] for name in names}


# Forward -> its layers, the labels of its norms, and what is computed in one call with each.
LEAKY = [("leaky_relu", slope) for slope in (0.3, 0.1, 0.2)]
BIAS = ["bias of Conv2d"], ["bias before"]
FUSED = {
    "max_pooling_function": (["norm"], ["ReLU"], ["relu"]),
    "functions_and_methods": (
        ["norm", "second"],
        ["ReLU", "add, ReLU"],
        ["relu", "add, relu"],
    ),
    "number_for_a_module": (["inner", "act"], ["ReLU"], ["relu"]),
    "training_flag": (["norm", "act"], ["add, ReLU"], ["add, relu"]),
    "leaky_relu": (["norm", "other", "third", "leaky"], ["LeakyReLU"] * 3, LEAKY),
    "permute_method": (["conv", "rows", "line"], *BIAS),
    "permute_function": (["conv", "rows", "line"], *BIAS),
}


@pytest.mark.parametrize("name", FUSED)
def test_norms_are_fused_with_the_operations_next_to_them_in_every_mode(name, calls):
    parts, labels, expected = FUSED[name]
    model, plain = twins(written(Fused, name, **parts_of(*parts)))
    assert [row.label for row in fusions(model)] == labels
    for mode in ("golden", "standard", 2.0):
        for each in (model, plain):
            normplug.set_mode(each, mode)
        for training in (True, False):
            calls.clear()
            assert_same_step(model, plain, X, training=training)
            assert calls == expected


class Optional(Parts):
    def forward(self, x, shift=None, *, scale=None):
        if shift is not None:
            x = x + shift
        return self.act(self.norm(x) + x)


@pytest.mark.parametrize(
    ("args", "kwargs", "fused"),
    [
        ((X,), {}, True),
        ((X, None), {"scale": None}, True),
        ((), {"shift": None, "x": X}, True),
        ((X,), {"shift": X}, False),  # the trace was made without it
        ((X, X), {}, False),
    ],
)
def test_inputs_at_their_defaults_may_be_passed_to_a_traced_forward(
    args, kwargs, fused, calls
):
    model, plain = twins(Optional(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    expected = plain(*args, **kwargs)
    assert torch.equal(model(*args, **kwargs), expected)
    assert calls == ["add, relu"] * fused
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*args, **kwargs), expected)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((X,), {"x": X}),
        ((X,), {"other": None}),
        ((X, None, None), {}),
    ],
)
def test_a_traced_forward_refuses_the_calls_that_the_users_own_refuses(args, kwargs):
    model, plain = twins(Optional(norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    for each in (model, plain):
        with pytest.raises(TypeError, match="forward"):
            each(*args, **kwargs)


ROWS_ONLY = ("sum_in_place", "sum_that_changes")
LEFT = {
    **dict.fromkeys(ROWS_ONLY, ["rows", "line"]),
    "changed_before_the_addition": ["norm", "act", "in_place"],
    **dict.fromkeys(["called_twice", "read_twice", "added_to_itself"], ["norm", "act"]),
    "called_by_a_module_in_between": ["conv", "norm", "act", "down"],
    "channels_first": ["conv", "rows", "line"],
    "permuted_read_twice": ["conv", "rows", "line"],
    "called_in_between": ["conv", "rows"],
    "no_bias": ["without_bias", "rows", "line"],
    "two_dimensions": ["conv", "planes", "line"],
}


@pytest.mark.parametrize("name", LEFT)
def test_a_norm_is_left_where_one_call_could_change_the_result(name, calls):
    with pytest.warns(UserWarning, match=REASON):
        model, plain = twins(written(Left, name, **parts_of(*LEFT[name])))
    assert not any(row.label for row in fusions(model))
    x = ROWS if name in ROWS_ONLY else SQUARE
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert calls == []


class SecondOfTwo(nn.MaxPool2d):
    def forward(self, x):
        return super().forward(x)[..., 1:]


@pytest.mark.parametrize(
    ("act", "pool"),
    [
        (nn.ReLU(), SecondOfTwo(2)),
        (nn.ReLU(), nn.AvgPool2d(2)),
        (nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        (nn.SiLU(), nn.MaxPool2d(2)),
    ],
)
def test_other_poolings_are_left(act, pool):
    model = fuse(swapped(nn.Sequential(nn.BatchNorm2d(8), act, pool)))
    assert [row.label for row in fusions(model)] == [type(act).__name__]


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


def test_a_compiled_forward_leaves_the_bias_of_a_convolution_to_the_norm(calls):
    model, plain = twins(Depthwise())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
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
