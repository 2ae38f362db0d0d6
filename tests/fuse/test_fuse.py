"""Fused models next to unfused ones: the same numbers and modules, and no change unnoticed."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import normplug
import recompute_cases
from accuracy import assert_no_worse
from fuse_cases import Block, Depthwise, Encoder, Half, Nested, PreNorm, check_saved_bytes
from graphs import captured
from normplug import functional, fuse, fusions, swap, unfuse, unswap
from normplug._fuse import calls as _sites
from normplug._fuse import fusion as _fusion
from normplug._fuse import trace as _trace
from normplug._fuse.fuse import fused_modules
from normplug._ops import choice, recompute

X = torch.randn(4, 8, 5, 5, dtype=torch.double)
ROWS = torch.randn(4, 3, 8, dtype=torch.double)


def swapped(model, mode="golden"):
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 1, 0.3)
    return swap(model.double(), mode)


def outcome(model, *inputs, training=True):
    """All that a step gives: output, gradients, buffers."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    model.train(training).zero_grad()
    y = model(*inputs)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device)
    (y * dy.view_as(y)).sum().backward()
    return {
        "y": y.detach(),
        **{f"dx{i}": x.grad for i, x in enumerate(inputs)},
        **{f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None},
        **{name: buffer.clone() for name, buffer in model.named_buffers()},
    }


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.fixture
def calls(monkeypatch):
    """What goes through the fused functions."""
    made = []
    batch_norm, add_layer_norm = functional._fused_batch_norm, functional.add_layer_norm
    pooled, layer_norm = functional._batch_norm_max_pool, functional.layer_norm

    def watched_batch_norm(*args, residual=None, activation=None, **options):
        if residual is not None or activation is not None:
            made.append("add, " * (residual is not None) + str(activation))
        return batch_norm(*args, residual=residual, activation=activation, **options)

    def watched_pool(*args, **options):
        before = len(made)
        y = pooled(*args, **options)
        made[before:] = ["relu, max pool"]  # beside or in place of a call without
        return y

    def watched_add(*args, **options):
        made.append("add before")
        return add_layer_norm(*args, **options)

    def watched_layer_norm(*args, input_bias=None, **options):
        if input_bias is not None:
            made.append("bias before")
        return layer_norm(*args, input_bias=input_bias, **options)

    monkeypatch.setattr(choice, "has_kernels", lambda who, backend, x: True)  # on the CPU, too
    monkeypatch.setattr(functional, "layer_norm", watched_layer_norm)
    monkeypatch.setattr(functional, "_fused_batch_norm", watched_batch_norm)
    monkeypatch.setattr(functional, "_batch_norm_max_pool", watched_pool)
    monkeypatch.setattr(functional, "add_layer_norm", watched_add)
    return made


def assert_runs_unfused(model, calls, *inputs):
    """The model computes what it does unfused, and by the plain calls."""
    calls.clear()
    ours = outcome(model, *inputs)
    assert calls == []
    return ours


def torchvision_model(name, **options):
    models = pytest.importorskip("torchvision.models")
    return models.get_model(name, num_classes=3, **options)


def swin():
    transformer = pytest.importorskip("torchvision.models.swin_transformer").SwinTransformer
    return transformer([2, 2], 16, [2, 2], [2, 2], [2, 2], num_classes=3)


def layer_norm_2d():
    return pytest.importorskip("torchvision.models.convnext").LayerNorm2d(8)


def convnext():
    models = pytest.importorskip("torchvision.models.convnext")
    blocks = [models.CNBlockConfig(8, 16, 2), models.CNBlockConfig(16, None, 1)]
    return models.ConvNeXt(blocks, num_classes=3)


ZOO = {
    "resnet18": (partial(torchvision_model, "resnet18"), 17),
    "resnext50": (partial(torchvision_model, "resnext50_32x4d"), 49),
    "regnet": (partial(torchvision_model, "regnet_y_400mf"), 49),
    "mobilenet_v2": (partial(torchvision_model, "mobilenet_v2"), 45),
    "mobilenet_v3": (partial(torchvision_model, "mobilenet_v3_small"), 29),
    "densenet121": (partial(torchvision_model, "densenet121"), 121),
    "shufflenet": (partial(torchvision_model, "shufflenet_v2_x0_5"), 37),
    "efficientnet": (partial(torchvision_model, "efficientnet_b0"), 33),
    "vit": (
        lambda: pytest.importorskip("torchvision.models").VisionTransformer(
            32, 8, 3, 2, 16, 32, dropout=0.1, num_classes=3
        ),
        6,
    ),
    "swin": (swin, 8),
    "convnext": (convnext, 3),
    "block": (Block, 2),
    "convolutions and batch norms in sequence": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(inplace=True),
            nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.BatchNorm2d(8),
        ),
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOO)
def test_a_fused_model_computes_what_the_unfused_one_does(name, calls):
    make, count = ZOO[name]
    torch.manual_seed(0)
    model = swapped(make())
    plain = copy.deepcopy(model)
    assert fuse(model) is model
    if any("torch.fx cannot follow" in row.note for row in fusions(model)):
        pytest.skip("torch.fx of this version takes no sequence for torch.cat")
    assert sum(row.label is not None for row in fusions(model)) == count
    x = X if name == "block" else torch.randn(2, 3, 32, 32, dtype=torch.double)
    for training in (True, False):
        calls.clear()
        ours = outcome(model, x, training=training)
        assert len(calls) == count
        assert_same(ours, outcome(plain, x, training=training))
    assert unfuse(model) is model
    assert {p: type(m) for p, m in model.named_modules()} == {
        p: type(m) for p, m in plain.named_modules()
    }
    for now, then in zip(model.modules(), plain.modules(), strict=True):
        assert vars(now).keys() == vars(then).keys()
    y, expected = outcome(model, x)["y"], outcome(plain, x)["y"]
    assert torch.equal(y, expected)


POOLED = {
    "resnet18": ("bn1", ""),
    "resnext50": ("bn1", ""),
    "densenet121": ("features.norm0", "features"),
    "shufflenet": ("conv1.1", ""),  # the pooling is outside of the block that has the norm
}


@pytest.mark.parametrize("name", POOLED)
def test_the_max_pooling_of_a_stem_is_fused_with_its_norm(name, calls):
    model = fuse(swapped(ZOO[name][0]()))
    found = [(row.path, row.owner) for row in fusions(model) if row.label == "ReLU, max pool"]
    assert found == [POOLED[name]]
    model.train()(torch.randn(2, 3, 32, 32, dtype=torch.double))
    assert calls.count("relu, max pool") == 1


@pytest.mark.parametrize(("name", "count"), [("resnet18", 17), ("resnet26t", 27)])
def test_blocks_of_timm_are_fused(name, count):
    timm = pytest.importorskip("timm")
    model = swapped(timm.create_model(name, num_classes=3))
    plain = copy.deepcopy(model)
    fuse(model)
    assert sum(row.label is not None for row in fusions(model)) == count
    assert [row.path for row in fusions(model) if row.label == "ReLU, max pool"] == ["bn1"]
    x = torch.randn(2, 3, 32, 32, dtype=torch.double)
    assert_same(outcome(model, x), outcome(plain, x))


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
    model = swapped(Pooled(way))
    plain = copy.deepcopy(model)
    fuse(model)
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


# What may happen to the pooling of a fused stem, and what it then does: as unfused, and by what.
POOL_CHANGES = {
    "another kernel": (lambda pool: setattr(pool, "kernel_size", (3, 2)), "relu, max pool"),
    "no stride": (lambda pool: setattr(pool, "stride", None), "relu, max pool"),
    "a dilation": (lambda pool: setattr(pool, "dilation", (1, 2)), "relu"),
    "a hook": (lambda pool: pool.register_forward_hook(lambda m, args, y: y * 2), "relu"),
    "a forward of its own": (lambda pool: setattr(pool, "forward", torch.neg), "relu"),
}


@pytest.mark.parametrize("change", POOL_CHANGES)
def test_a_pooling_that_has_changed_is_called_as_it_is(change, calls):
    layers = nn.Sequential(nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    model = swapped(layers)
    plain = copy.deepcopy(model)
    fuse(model)
    changed, call = POOL_CHANGES[change]
    changed(model[3])
    changed(plain[3])
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == [call]


def test_a_pooling_that_gives_its_indices_now_gives_them():
    model = fuse(swapped(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))))
    expected = model(X)
    model[2].return_indices = True
    y, indices = model(X)
    assert torch.equal(y, expected)
    assert indices.dtype == torch.int64


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
    model = swapped(Functional(), mode)
    plain = copy.deepcopy(model)
    fuse(model)
    assert [row.label for row in fusions(model)] == ["ReLU", "add, ReLU"]
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == ["relu", "add, relu"]
    normplug.set_mode(model, 2.0)
    normplug.set_mode(plain, 2.0)
    assert_same(outcome(model, X), outcome(plain, X))


def test_the_addition_at_a_blocks_end_is_fused_with_the_next_blocks_norm(calls):
    model = swapped(Encoder())
    plain = copy.deepcopy(model)
    fuse(model)
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


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.conv.register_forward_hook(lambda m, args, y: y * 2),
        lambda model: nn.utils.parametrize.register_parametrization(
            model.conv, "weight", nn.Tanh()
        ),
        lambda model: setattr(model.conv, "bias", None),
        lambda model: setattr(model, "conv", nn.Conv2d(8, 8, 1, dtype=torch.double)),
    ],
)
def test_a_convolution_that_has_changed_is_called_as_it_is(change, calls):
    model = swapped(Depthwise())
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        torch.manual_seed(0)
        change(each)
    assert_same(assert_runs_unfused(model, calls, X), outcome(plain, X))


def test_on_a_cpu_a_convolution_adds_its_bias_itself(monkeypatch):
    biases = []
    layer_norm = functional._layer_norm

    def watched(*args, **options):
        biases.append(options.get("input_bias"))
        return layer_norm(*args, **options)

    monkeypatch.setattr(functional, "_layer_norm", watched)
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


def test_names_parameters_and_an_optimizer_from_before_stay():
    model = swapped(nn.Sequential(Block(), Block()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain = copy.deepcopy(model)
    before = [dict(m._parameters) | dict(m._buffers) for m in model.modules()]
    keys = list(model.state_dict())
    fuse(model)
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], Block)
    for then, module in zip(before, model.modules(), strict=True):
        now = dict(module._parameters) | dict(module._buffers)
        assert all(now[name] is tensor for name, tensor in then.items())
    outcome(model, X)
    optimizer.step()
    assert not torch.equal(model[0].conv1.weight, plain[0].conv1.weight)
    plain.load_state_dict(model.state_dict())
    fuse(plain).load_state_dict(model.state_dict())
    assert_same(outcome(plain, X), outcome(model, X))


def test_a_fused_model_is_freed_as_soon_as_it_is_let_go():
    model = fuse(swapped(Encoder()))
    gone = [weakref.ref(m) for m in model.modules()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert all(ref() is None for ref in gone)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_fused_and_stand_by_themselves(how, tmp_path, calls):
    model = fuse(swapped(nn.Sequential(Block(), Block())))
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    first = outcome(copied, X)
    assert len(calls) == 4
    assert_same(first, outcome(model, X))
    fused_modules(copied)["0"].act = nn.Tanh()
    assert isinstance(model[0].act, nn.ReLU)
    assert not fused_modules(unfuse(copied))
    assert len(fused_modules(model)) == 2


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    **{
        f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, n))
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("how", COPIES)
def test_copying_and_loading_do_not_trace(how, monkeypatch, calls):
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half())))
    monkeypatch.setattr(_trace, "trace", None)
    copied = COPIES[how](model)
    plain = unfuse(copy.deepcopy(copied))
    ours = outcome(copied, X)
    assert len(calls) == 9
    assert_same(ours, outcome(plain, X))


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("start", ["block", "act"])
def test_a_cycle_of_references_is_copied_with_its_fusion(how, start, calls):
    block = swapped(Block(act=nn.ReLU()))
    vars(block.act)["owner"] = block
    fuse(block)
    if how == "copy" and start == "act":
        pytest.skip("the copy has the same owner")
    copied = COPIES[how](block if start == "block" else block.act)
    copied = copied if start == "block" else copied.owner
    assert copied is not block
    assert copied.act.owner is (block if how == "copy" else copied)
    outcome(copied, X)
    assert calls == ["relu", "add, relu"]


def written_by_an_earlier_version(model, monkeypatch):
    """A pickle that says of a fused module only whether it recomputes."""
    with monkeypatch.context() as patch:
        patch.setattr(_fusion.Fusion, "__reduce__", lambda self: (bool, (self.recompute,)))
        patch.setattr(_fusion.restore, "__module__", "normplug.fuse")
        patch.setattr(_fusion.restore, "__qualname__", "_restore")
        return pickle.dumps(model)


def another_forward(self, x):
    y = self.act(self.bn1(self.conv1(x)))
    y = self.bn2(self.conv2(y))
    y += x * self.scale
    return self.act(2 * y)


# What may have changed between a pickle and its load.
OTHER_CODE = {
    "forward": lambda patch: patch.setattr(Block, "forward", another_forward),
    "normplug": lambda patch: patch.setattr(normplug, "__version__", "0"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0"),
    "a fused call": lambda patch: patch.setattr(_sites, "norm_add_activation", lambda *args: None),
    "no fused call": lambda patch: patch.delattr(_sites, "norm_add_activation"),
}


@pytest.mark.parametrize("change", [*OTHER_CODE, "an earlier version of the pickle"])
def test_a_pickle_from_other_code_runs_as_that_is_written(change, monkeypatch, calls):
    model = fuse(swapped(Block()))
    if change in OTHER_CODE:
        pickled = pickle.dumps(model)
        OTHER_CODE[change](monkeypatch)
    else:
        pickled = written_by_an_earlier_version(model, monkeypatch)
    with pytest.warns(
        UserWarning, match=r"a Block was fused with other versions or other code.*normplug\.fuse"
    ):
        loaded = pickle.loads(pickled)
    assert type(loaded) is Block
    assert not fused_modules(loaded)
    assert_same(assert_runs_unfused(loaded, calls, X), outcome(unfuse(model), X))


def pick(name):
    """A function in whose global a forward finds an activation."""
    globals()["chosen"] = getattr(F, name)


pick("relu")


class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return chosen(self.norm(x))  # noqa: F821 - see `pick`


def test_a_pickle_from_a_module_with_other_globals_runs_as_it_is_written():
    pickled = pickle.dumps(fuse(swapped(Chosen())))
    assert fused_modules(pickle.loads(pickled))
    pick("silu")
    try:
        with pytest.warns(
            UserWarning, match="a Chosen was fused with other versions or other code"
        ):
            loaded = pickle.loads(pickled)
        assert torch.equal(loaded(X), F.silu(loaded.norm(X)))
    finally:
        pick("relu")


LOAD = """
import pickle, sys
import torch
from normplug._fuse import trace as _trace
_trace.trace = None
model, x, y = torch.load(sys.argv[1], weights_only=False)
assert len([m for m in model.modules() if "_normplug_fusion" in vars(m)]) == int(sys.argv[2])
torch.testing.assert_close(model(x), y)
"""


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_pickle_is_fused_in_another_process(seed, tmp_path):
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half()))).eval()
    torch.save((model, X, model(X)), tmp_path / "model.pt")
    paths = [str(Path(normplug.__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": seed}
    command = [sys.executable, "-W", "error::UserWarning", "-c", LOAD, tmp_path / "model.pt"]
    command.append(str(len(fused_modules(model))))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_threads_run_while_models_are_fused_copied_and_checked():
    stock = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), Block()).double()
    inside = swapped(nn.Sequential(Block(), Nested()))
    models = [stock.eval(), copy.deepcopy(inside).eval(), fuse(inside).eval()]
    expected = [model(X).detach() for model in models]
    stop, errors, runs = threading.Event(), [], Counter()

    def until_the_end(name, step):
        try:
            while not stop.is_set():
                step()
                runs[name] += 1
        except Exception as error:
            errors.append(f"{name}: {error!r}")
            stop.set()

    def run(model, y):
        with torch.no_grad():
            assert torch.equal(model(X), y)

    def change(model):
        fuse(model)
        assert len(fused_modules(model)) > 1
        copy.deepcopy(model)
        pickle.loads(pickle.dumps(model))
        fusions(model)
        normplug.check(model)
        unfuse(model)

    steps = {
        f"model {i}": partial(run, m, y)
        for i, (m, y) in enumerate(zip(models, expected, strict=True))
    }
    for i in range(2):
        steps[f"change {i}"] = partial(change, swapped(nn.Sequential(Block(), Nested())))
    threads = [threading.Thread(target=until_the_end, args=item) for item in steps.items()]
    for thread in threads:
        thread.start()
    stop.wait(3)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []
    assert all(runs[name] > 0 for name in steps)


def test_a_trace_leaves_the_model_as_it_is(monkeypatch):
    model = swapped(nn.Sequential(Half(), Half(), nn.Dropout(), Nested())).eval()
    state = {m: dict(vars(m)) for m in model.modules()}
    methods = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    trace = _trace._Tracer.record

    def watched(tracer, training):
        result = trace(tracer, training)
        assert {name: vars(nn.Module)[name] for name in methods} == methods
        assert all(vars(m) == before for m, before in state.items())
        return result

    monkeypatch.setattr(_trace._Tracer, "record", watched)
    fusions(model)


@pytest.mark.parametrize(("blocks", "traces"), [(2, 3), (16, 17)])
def test_residual_blocks_are_traced_once_each(blocks, traces, monkeypatch):
    model = swapped(nn.Sequential(*(Block() for _ in range(blocks))))
    made = []
    trace = _trace.trace
    monkeypatch.setattr(_trace, "trace", lambda *args: made.append(args) or trace(*args))
    fuse(model)
    assert len(made) == traces


# What may happen to a fused block afterwards: it must go on as an unfused one would.
CHANGES = {
    "another child": lambda m: setattr(m, "bn1", nn.Identity()),
    "no child": lambda m: setattr(m, "down", None),
    "a child that was none": lambda m: setattr(m, "down", nn.Conv2d(8, 8, 1).double()),
    "a child behind torch's back": lambda m: m._modules.__setitem__("act", nn.Tanh()),
    "another constant": lambda m: setattr(m, "scale", 0.5),
    "a stock norm": lambda m: [unswap(m.bn1), unswap(m.bn2)],
    "a method of the instance": lambda m: setattr(m, "forward", partial(Block.forward, m)),
}


@pytest.mark.parametrize("down", [None, nn.Conv2d(8, 8, 1)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_block_that_has_changed_runs_as_it_was_written(change, down, calls):
    model = swapped(Block(down=copy.deepcopy(down)))
    plain = copy.deepcopy(model)
    fuse(model)
    for block in (model, plain):
        torch.manual_seed(2)
        CHANGES[change](block)
    assert_same(outcome(model, X), outcome(plain, X))


def hooked(module):
    module.register_forward_hook(lambda module, args, y: y * 2)


def exchanged(container):
    container._modules.update(zip("01", reversed(container), strict=True))


def renamed(container, **names):
    children = {names.get(name, name): m for name, m in container._modules.items()}
    container._modules.clear()
    container._modules.update(children)


class Doubled(Half):
    def forward(self, x):
        return 2 * super().forward(x)


def half(act=None):
    return swapped(Half(act=act))


# What may happen to a fused model whose modules lie deep in containers.
DEEP_CHANGES = {
    "replaced by another class": lambda m: m.stages[0].__setitem__(1, nn.Tanh()),
    "replaced by its class": lambda m: m.stages[0].__setitem__(1, half(nn.GELU())),
    "replaced by an equal one": lambda m: m.stages[0].__setitem__(1, half()),
    "appended": lambda m: m.stages[1].append(half()),
    "appended to an empty list": lambda m: m.extra.append(nn.Sigmoid()),
    "inserted": lambda m: m.stages[1].insert(0, nn.Sigmoid()),
    "deleted": lambda m: m.stages[0].__delitem__(0),
    "a list deleted": lambda m: m.stages.__delitem__(1),
    "a list appended": lambda m: m.stages.append(nn.ModuleList([half()])),
    "a list replaced": lambda m: m.stages.__setitem__(0, nn.ModuleList([half(), half()])),
    "reordered": lambda m: m.stages[0]._modules.update(
        zip("01", reversed(m.stages[0]), strict=True)
    ),
    "lists exchanged": lambda m: m.stages._modules.update(
        zip("01", reversed(m.stages), strict=True)
    ),
    "a dict's values exchanged": lambda m: m.heads.update({"a": m.heads["c"], "c": m.heads["a"]}),
    "a dict's keys exchanged": lambda m: renamed(m.heads, a="c", c="a"),
    "a dict reordered": lambda m: m.heads.update({"a": m.heads.pop("a")}),
    "a dict's entry replaced": lambda m: m.heads.update({"b": nn.Sigmoid()}),
    "containers of another class": lambda m: setattr(m, "tail", nn.ModuleList(m.tail)),
    "the slice": lambda m: setattr(m, "start", 2),
    "inside the slice": lambda m: m.tail.append(nn.Sigmoid()),
    "another child": lambda m: setattr(m.stages[0][1], "act", nn.GELU()),
    "another child of a child": lambda m: m.tail[1].inner.append(nn.Sigmoid()),
    "another attribute": lambda m: setattr(m.stages[0][1], "scale", 2),
    "another attribute in a dict": lambda m: setattr(m.heads["c"], "scale", 2.0),
    "another attribute in a slice": lambda m: setattr(m.tail[2], "scale", torch.full((5,), 2.0)),
    "a hook": lambda m: hooked(m.stages[0][1]),
    "a hook in a dict": lambda m: hooked(m.heads["a"]),
    "a hook on a child": lambda m: hooked(m.stages[1][0].norm),
    "a forward of the instance": lambda m: setattr(m.stages[0][1], "forward", torch.tanh),
    "another class": lambda m: setattr(m.stages[0][1], "__class__", Doubled),
    "compiled": lambda m: m.stages[0][1].compile(backend="eager"),
}


@pytest.mark.parametrize("change", DEEP_CHANGES)
@pytest.mark.parametrize("how", ["fused", "copied", "pickled"])
def test_a_module_deep_inside_that_has_changed_runs_as_it_was_written(how, change, calls):
    model = swapped(Nested())
    plain = copy.deepcopy(model)
    fuse(model)
    if how != "fused":
        model = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == ["relu"] * 7
    for each in (model, plain):
        torch.manual_seed(2)
        DEEP_CHANGES[change](each)
    assert_same(outcome(model, X), outcome(plain, X))
    torch.compiler.reset()


def test_a_missing_key_is_an_error_as_it_was():
    model = fuse(swapped(Nested()))
    renamed(model.heads, b="d")
    with pytest.raises(KeyError, match="b"):
        model(X)


class Reversed(nn.ModuleList):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def test_a_container_with_an_order_of_its_own_is_gone_through_in_it(calls):
    model = swapped(Nested())
    model.stages[0] = Reversed(model.stages[0])
    plain = copy.deepcopy(model)
    fuse(model)
    assert "" not in fused_modules(model)
    assert_same(assert_runs_unfused(model, calls, X), outcome(plain, X))


def test_a_module_with_two_names_is_called_by_the_one_that_the_forward_used(calls):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.holder = nn.Sequential(nn.Conv2d(8, 8, 1))  # which the forward only calls
            self.conv, self.norm, self.act = self.holder[0], nn.BatchNorm2d(8), nn.ReLU()

        def forward(self, x):
            return self.act(self.norm(self.conv(x)))

    model = swapped(Named())
    plain = copy.deepcopy(model)
    fuse(model)
    for each in (model, plain):
        each.holder[0] = nn.Tanh()
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == ["relu"]


# Attributes that change what an activation computes, and those that do not.
SETTINGS = {
    "gelu": (nn.GELU, "approximate", "tanh", []),
    "relu6, upper": (nn.ReLU6, "max_val", 1.0, []),
    "relu6, lower": (nn.ReLU6, "min_val", -1.0, []),
    "relu6, in place": (nn.ReLU6, "inplace", True, ["relu6"]),
    "silu, in place": (nn.SiLU, "inplace", True, ["silu"]),
    "hardswish, in place": (nn.Hardswish, "inplace", True, ["hardswish"]),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
def test_an_activation_computes_what_its_attributes_say(setting, when, calls):
    make, name, value, expected = SETTINGS[setting]
    model = swapped(nn.Sequential(nn.BatchNorm2d(8), make()))
    plain = copy.deepcopy(model)
    if when == "before":
        setattr(model[1], name, value)
    fuse(model)
    setattr(model[1], name, value)
    setattr(plain[1], name, value)
    x = 9 * X  # past every bound
    assert_same(outcome(model, x), outcome(plain, x))
    assert calls == expected


def test_a_method_that_was_patched_on_the_class_is_called(monkeypatch):
    model = fuse(swapped(Block()))
    monkeypatch.setattr(Block, "forward", lambda self, x: x * 2)
    assert torch.equal(model(X), X * 2)


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["bn1", "act"])
def test_hooks_on_norms_and_activations_run(name, kind, calls):
    model = swapped(Block(act=nn.ReLU()))
    plain = copy.deepcopy(model)
    fuse(model)
    seen, other = [], []
    handles = [
        getattr(m.get_submodule(name), kind)(lambda *args, list_=list_: list_.append(args[0]))
        for m, list_ in ((model, seen), (plain, other))
    ]
    assert_same(outcome(model, X), outcome(plain, X))
    assert len(seen) == len(other) > 0
    handles[0].remove()
    calls.clear()
    outcome(model, X)
    assert calls == ["relu", "add, relu"]


def test_hooks_on_all_modules_run(calls):
    model, seen = fuse(swapped(Block())), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, y: seen.append(m))
    try:
        assert_runs_unfused(model, calls, X)
    finally:
        handle.remove()
    assert model.bn1 in seen


def test_a_norm_that_is_measured_is_measured_as_before():
    model = swapped(Block())
    plain = copy.deepcopy(model)
    fuse(model)
    for block in (model, plain):
        block.bn1._probe = torch.zeros(4)
    assert_same(outcome(model, X), outcome(plain, X))
    assert model.bn1._probe[1] > 0
    assert torch.equal(model.bn1._probe, plain.bn1._probe)


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

    model = swapped(Add())
    plain = copy.deepcopy(model)
    fuse(model)
    for residual in (X.float(), X[:1], X[:, :, :1, :1]):
        assert_same(outcome(model, X, residual), outcome(plain, X, residual))
    assert calls == ["add before"]  # of the first, whose shape is that of the sum
    model.float(), plain.float()
    low = X.float(), X.double()
    assert torch.equal(model(*low), plain(*low))


def test_other_arguments_than_tensors_run_as_written(calls):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU()

        def forward(self, x, shift=None):
            if shift is not None:
                x = x + shift
            return self.act(self.norm(x))

    model = swapped(Optional())
    plain = copy.deepcopy(model)
    fuse(model)
    assert torch.equal(model(X), plain(X))
    assert calls == ["relu"]
    assert torch.equal(model(X, 1.0), plain(X, 1.0))
    assert torch.equal(model(X, shift=1.0), plain(X, shift=1.0))
    assert torch.equal(model(x=X), plain(x=X))
    assert calls == ["relu"]
    with pytest.raises(TypeError):
        model()


class Untraceable(nn.Module):
    """Each forward depends on something that a trace would burn in."""

    saved = None
    flag = True

    def __init__(self, way):
        super().__init__()
        self.norm, self.act, self.settings = nn.BatchNorm2d(8), nn.ReLU(), {"flag": True}
        self.way = way
        self.list = nn.ModuleList([nn.Identity()])

    def result(self, x):
        return self.act(self.norm(x))


def _ways():  # noqa: C901
    noise = [1.0]

    class Data(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) if x.sum() > 0 else x

    class Random(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) * torch.rand(1)

    class Noise(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) + torch.normal(0.0, 1.0, (8, 5, 5))

    class GradMode(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) if torch.is_grad_enabled() else x

    class Context(Untraceable):
        def forward(self, x):
            with torch.no_grad():
                return self.act(self.norm(x))

    class Closure(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) * noise[0]

    class Settings(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) if self.settings["flag"] else x

    class OfClass(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) if self.flag else x

    class Stores(Untraceable):
        def forward(self, x):
            self.saved = self.act(self.norm(x))
            return self.saved

    class OfChild(Untraceable):
        def forward(self, x):
            return self.act(self.norm(x)) if self.norm.eps > 0 else x

    class Other(Untraceable):
        def forward(self, x):
            return checkpoint(self.result, x, use_reentrant=False)

    class Types(Untraceable):
        def forward(self, *xs):
            return self.act(self.norm(xs[0]))

    class Loops(Untraceable):
        def forward(self, x):
            for layer in self.list:
                if layer.training:
                    x = layer(x)
            return self.act(self.norm(x))

    class HandsOn(Untraceable):
        def forward(self, x):
            norm = self.norm
            return self.act(norm(x))

    @torch.no_grad()
    def decorated(self, x):
        return self.act(self.norm(x))

    Decorated = type("Decorated", (Untraceable,), {"forward": decorated})
    return [
        Data, Random, Noise, GradMode, Context, Closure, Settings, OfClass, Stores, OfChild, Other,
        Types, Loops, HandsOn, Decorated,
    ]  # fmt: skip


@pytest.mark.parametrize("cls", _ways())
def test_what_a_trace_would_burn_in_is_left_with_the_reason(cls):
    model = swapped(cls("way"))
    before = {p: (type(m), dict(vars(m))) for p, m in model.named_modules()}
    with pytest.warns(UserWarning, match=rf"normplug.fuse: nothing to fuse in {cls.__name__}"):
        fuse(model)
    for path, module in model.named_modules():
        assert (type(module), vars(module)) == before[path]
    (row,) = fusions(model)
    assert row.label is None
    assert row.note.startswith(f"{cls.__name__}: ")


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
    class Twice(Untraceable):
        def forward(self, x):
            return self.act(self.norm(self.act(self.norm(x))))

    class Read(Untraceable):
        def forward(self, x):
            y = self.norm(x)
            return self.act(y) + y

    for cls, why in ((Twice, "called more than once"), (Read, "its result is used 2 times")):
        model = swapped(cls("way"))
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


def test_stock_norms_are_left_and_reported_as_such():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), nn.ReLU())
    with pytest.warns(UserWarning, match=r"2 \(not swapped\)"):
        fuse(model)
    fuse(swap(model, include="0"))
    assert [(row.label, row.note) for row in fusions(model)] == [
        ("ReLU", ""),
        (None, "not swapped"),
    ]
    assert "1 of 2 norm layers fused: 1 with ReLU" in str(fusions(model))
    fuse(swap(model))  # again, with more to fuse
    assert [row.label for row in fusions(model)] == ["ReLU", "ReLU"]


def test_only_modules_can_be_fused():
    for call in (fuse, unfuse, fusions):
        with pytest.raises(TypeError, match="model must be an nn.Module"):
            call("model")


def test_unswap_unfuses_first_and_swapped_leaves_nothing_fused():
    model = Block().double()
    stock = copy.deepcopy(model)
    fuse(swapped(model))
    assert normplug.check(model, X)
    expected = outcome(model.eval(), X, training=False)["y"]
    unswap(model)
    assert type(model) is Block
    assert vars(model).keys() == vars(stock).keys()
    torch.testing.assert_close(model(X), expected)
    with normplug.swapped(model) as inside:
        fuse(inside)
        assert fused_modules(model)
    assert not fused_modules(model)
    fuse(swap(model))
    with normplug.swapped(model, 0.5):
        pass
    assert list(fused_modules(model)) == [""]


@pytest.mark.parametrize("undo", [unfuse, unswap])
def test_a_fused_block_with_a_forward_of_its_own_is_not_undone(undo):
    model = fuse(swapped(Block()))
    model.forward = partial(type(model).forward, model)
    with pytest.raises(ValueError, match="the forward of .the model itself., which is fused"):
        undo(model)
    assert fused_modules(model)
    assert isinstance(model.bn1, normplug.BatchNorm2d)
    del model.forward
    assert type(undo(model)) is Block


def test_checkpointing_recomputes_the_same():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    model = swapped(Checkpointed())
    plain = copy.deepcopy(model)
    fuse(model)
    assert list(fused_modules(model)) == ["block"]
    assert_same(outcome(model, X), outcome(plain, X))


def test_channels_last_stays():
    model = swapped(nn.Sequential(Block(), Block())).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    fuse(model)
    x = X.to(memory_format=torch.channels_last)
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    plain(x)
    assert_same(outcome(model, x), outcome(plain, x))


def test_float32_is_as_close_to_float64_as_unfused():
    exact = swapped(nn.Sequential(Block(), Block(), nn.Flatten(2), PreNorm(25)))
    plain = copy.deepcopy(exact).float()
    fused = fuse(copy.deepcopy(plain))
    truth, theirs, ours = outcome(exact, X), outcome(plain, X.float()), outcome(fused, X.float())
    for name, value in ours.items():
        if value.is_floating_point():
            assert_no_worse(name, value, theirs[name], truth[name])


NEEDS_HOOKS = pytest.mark.skipif(not recompute.AVAILABLE, reason="needs torch 2.8")
BOTH = [False, pytest.param(True, marks=NEEDS_HOOKS)]


@pytest.mark.parametrize("anew", BOTH)
def test_compiled_in_one_graph(anew, calls):
    for model, x in ((nn.Sequential(Block(), Block()), X), (Encoder(), ROWS)):
        swapped(model)
        plain = copy.deepcopy(model)
        fuse(model, recompute=anew)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        for training in (True, False):
            calls.clear()
            ours = outcome(compiled, x, training=training)
            theirs = outcome(plain, x, training=training)
            assert len(calls) == 4
            assert_same({k.replace("_orig_mod.", ""): v for k, v in ours.items()}, theirs)
    torch.compiler.reset()


@NEEDS_HOOKS
def test_where_no_kernel_runs_everything_is_kept():
    model = fuse(swapped(nn.Sequential(Block(), Block())), recompute=True)
    plain = fuse(copy.deepcopy(model))
    convolutions = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert recompute_cases.kept(model, X) == recompute_cases.kept(plain, X) == convolutions
    assert_same(outcome(model, X), outcome(plain, X))


def test_computing_anew_needs_a_torch_that_tells_of_hooks(monkeypatch):
    monkeypatch.setattr(recompute, "AVAILABLE", False)
    model = swapped(Block())
    with pytest.raises(NotImplementedError, match="normplug.fuse: recompute needs torch 2.8"):
        fuse(model, recompute=True)
    assert not fused_modules(model)


@pytest.mark.parametrize("anew", BOTH)
def test_traced_exported_and_scripted_as_the_unfused_model(anew):
    model = swapped(Block()).eval()
    plain = copy.deepcopy(model)
    fuse(model, recompute=anew)
    expected = plain(X)
    assert torch.equal(torch.export.export(model, (X,)).module()(X), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(X), expected)
    assert torch.equal(
        torch.func.functional_call(model, dict(model.named_parameters()), (X,)), expected
    )
    torch.testing.assert_close(torch.vmap(model)(X[None])[0], expected)


def test_under_distributed_data_parallel(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    if not dist.is_available():
        pytest.skip("torch without torch.distributed")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    try:
        model = swapped(Block())
        plain = copy.deepcopy(model)
        wrapped = nn.parallel.DistributedDataParallel(fuse(model))
        ours = {k.removeprefix("module."): v for k, v in outcome(wrapped, X).items()}
        ours = {k.replace("dmodule.", "d"): v for k, v in ours.items()}
        assert_same(ours, outcome(plain, X))
        # Synchronised over processes, a norm is no longer one kernel.
        swap(model, sync=True), swap(plain, sync=True)
        assert_same(outcome(model, X), outcome(plain, X))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_fused_activation_is_not_kept_and_a_residual_costs_a_bit(memory_format):
    check_saved_bytes(memory_format, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["resnet18", "vit", "densenet121", "convnext"])
def test_fused_on_the_gpu_is_as_close_to_float64_as_unfused(name, dtype, calls):
    torch.manual_seed(0)
    exact = swapped(ZOO[name][0]()).cuda()
    for module in exact.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = torch.randn(8, 3, 64 if name != "vit" else 32, 64 if name != "vit" else 32).cuda()
    errors = {}
    for fused in (True, False):
        model = copy.deepcopy(exact).to(dtype)
        if fused:
            fuse(model)
        with torch.no_grad():
            truth = exact.train()(x.to(dtype).double())
        y = model.train()(x.to(dtype)).detach()
        errors[fused] = float((y.double() - truth).norm() / truth.norm())
    assert len(calls) == ZOO[name][1]
    assert errors[True] <= 2 * errors[False] + torch.finfo(dtype).eps


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


def operators_for_a_compiler(model, x):
    """How many operators of ours a compiler finds in the graph of `model(x)`."""
    operators = []

    def look(graph_module, inputs):
        calls = (n for n in graph_module.graph.nodes if n.op == "call_function")
        operators.extend(n for n in calls if "normplug" in str(n.target))
        return graph_module.forward

    torch.compile(model, backend=look, fullgraph=True)(x)
    return len(operators)


@pytest.mark.gpu
def test_a_compiler_gets_an_operator_for_a_norm_that_only_a_fused_call_reads(monkeypatch):
    monkeypatch.setattr(choice, "_BATCH_NORM_OPERATOR_BYTES", 0)  # however small the input
    model = fuse(swapped(ZOO["resnet18"][0]()).float().cuda())
    found = operators_for_a_compiler(model, torch.randn(2, 3, 64, 64).cuda())
    assert found == len([m for m in model.modules() if isinstance(m, nn.BatchNorm2d)])


@pytest.mark.gpu
def test_a_compiler_gets_an_operator_for_a_norm_that_adds_a_bias(monkeypatch):
    model = fuse(swapped(nn.Sequential(Depthwise())).float().cuda())
    assert operators_for_a_compiler(model, torch.randn(2, 8, 64, 64, device="cuda")) == 0  # small
    monkeypatch.setattr(choice, "_LAYER_NORM_OPERATOR_BYTES", 0)
    assert operators_for_a_compiler(model, torch.randn(2, 8, 32, 32, device="cuda")) == 1


@pytest.mark.gpu
def test_a_compiler_gets_an_operator_for_a_norm_over_innermost_channels(monkeypatch):
    images = torch.randn(2, 8, 64, 64, device="cuda")
    model = swapped(nn.Sequential(layer_norm_2d())).float().cuda()
    innermost = images.to(memory_format=torch.channels_last)
    assert operators_for_a_compiler(model, innermost) == 0  # small
    monkeypatch.setattr(choice, "_LAYER_NORM_OPERATOR_BYTES", 0)
    assert operators_for_a_compiler(model, innermost[:1]) == 1
    assert operators_for_a_compiler(model, images[:1]) == 0  # channels apart
    rows = swapped(nn.Sequential(nn.LayerNorm(8))).float().cuda()
    assert operators_for_a_compiler(rows, innermost.permute(0, 2, 3, 1)) == 0  # not said to be


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_compiled_with_operators_for_its_layer_norms_as_close_to_float64(
    memory_format, monkeypatch
):
    monkeypatch.setattr(choice, "_LAYER_NORM_OPERATOR_BYTES", 0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact = swapped(nn.Sequential(layer_norm_2d(), Depthwise(), nn.ReLU())).cuda()
    x = torch.randn(4, 8, 16, 16, device="cuda").to(memory_format=memory_format)
    ours, theirs = (copy.deepcopy(exact).float() for _ in range(2))
    ours = torch.compile(fuse(ours), fullgraph=True)
    truth = outcome(exact, x.double())
    theirs = outcome(theirs, x)
    for name, value in outcome(ours, x).items():
        name = name.replace("_orig_mod.", "")
        if value.is_floating_point():
            # Sums that cancel are wrong by what the order of their terms makes of it.
            assert_no_worse(name, value, theirs[name], truth[name], spare=1e-4)


def resnet18(memory_format):
    """A small-image ResNet-18, of which each step on a GPU gives the same bits."""
    model = torchvision_model("resnet18")
    model.maxpool = nn.Identity()
    return model.to("cuda", memory_format=memory_format)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_what_is_computed_anew_on_the_gpu_is_not_held_and_changes_no_bit(
    memory_format, low, monkeypatch
):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ours, plain = recompute_cases.twins(resnet18(memory_format))
    x = torch.randn(32, 3, 32, 32, device="cuda").contiguous(memory_format=memory_format)
    for _ in range(2):
        results = [recompute_cases.outcome(model, x, low) for model in (ours, plain)]
        recompute_cases.assert_same(*results)
    del results
    anew = [n for n, m in plain.named_modules() if isinstance(m, nn.Conv2d) and "conv2" in n]
    every = recompute_cases.kept(plain, x, low)
    assert every - recompute_cases.kept(ours, x, low) >= set(anew)
    dropped, held, peak = [], {}, {}
    handles = [
        plain.get_submodule(n).register_forward_pre_hook(lambda m, a: dropped.append(a[0].nbytes))
        for n in anew
    ]
    for model in (plain, ours):
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", low, enabled=low is not None):
            y = model(x)
        held[model] = torch.cuda.memory_allocated() - before
        y.sum().backward()
        del y
        peak[model] = torch.cuda.max_memory_allocated() - before
    for handle in handles:
        handle.remove()
    assert held[plain] - held[ours] >= sum(dropped) > 0
    assert peak[ours] < peak[plain]


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_every_second_blocks_result_is_computed_anew_on_the_gpu(memory_format, low, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    blocks = nn.Sequential(*(recompute_cases.Residual(width=64) for _ in range(4)))
    ours, plain = recompute_cases.twins(blocks.to("cuda", memory_format=memory_format))
    x = torch.randn(8, 64, 28, 28, device="cuda").contiguous(memory_format=memory_format)
    for _ in range(2):
        results = [recompute_cases.outcome(model, x, low) for model in (ours, plain)]
        recompute_cases.assert_same(*results)
    if low is None:
        anew = recompute_cases.kept(plain, x) - recompute_cases.kept(ours, x)
        assert anew == {"1.conv1", "3.conv1", *(f"{i}.conv2" for i in range(4))}


@pytest.mark.gpu
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [recompute_cases.Feed, recompute_cases.Attend])
def test_a_layer_norms_result_that_is_computed_anew_on_the_gpu_changes_no_bit(make, low):
    ours, plain = recompute_cases.twins(make(256).cuda())
    x = torch.randn(16, 100, 256, device="cuda")
    with sdpa_kernel(SDPBackend.MATH):  # the others may add in any order
        for _ in range(2):
            recompute_cases.assert_same(
                recompute_cases.outcome(ours, x, low), recompute_cases.outcome(plain, x, low)
            )
    held = {}
    for model in (plain, ours):
        model.zero_grad()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", low, enabled=low is not None):
            y = model(x)
        held[model] = torch.cuda.memory_allocated() - before
        del y
    result_bytes = x.numel() * (4 if low is None else 2)
    assert held[plain] - held[ours] >= result_bytes
    if low is None and make is recompute_cases.Feed:
        anew = recompute_cases.kept(plain, x) - recompute_cases.kept(ours, x)
        assert anew == {"mlp.0"}


@pytest.mark.gpu
# A graph is captured on a stream of its own, and gradients then accumulate on another.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_a_graph_computes_anew_at_each_replay(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    ours, plain = recompute_cases.twins(
        recompute_cases.convolutions(nn.ReLU(), nn.GELU(), width=32).cuda()
    )
    x = torch.randn(8, 32, 28, 28, device="cuda")

    def step(model):
        y = model(x)
        return torch.autograd.grad(y.square().sum(), list(model.parameters()))

    graph, got = captured(step, ours)
    for _ in range(3):
        x.normal_()
        graph.replay()
        for a, b in zip(got, step(plain), strict=True):
            assert torch.equal(a, b)
