"""Fused modules that are changed after `fuse` run as they are written."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from fuse_cases import (
    Block,
    Depthwise,
    Half,
    Nested,
    Parts,
    Resnet,
    X,
    assert_same_after,
    assert_same_step,
    outcome,
    renamed,
    swapped,
    twins,
)
from normplug import fuse, fusions, unswap
from normplug.modules import TargetVarianceNorm
from normplug.modules.probe import Probe, averages


def hooked(module):
    module.register_forward_hook(lambda module, args, y: y * 2)


# Changes to the pooling of a fused stem, and what the norm's call then still computes.
POOL_CHANGES = {
    "another kernel": (
        lambda pool: setattr(pool, "kernel_size", (3, 2)),
        "relu, max pool",
    ),
    "no stride": (lambda pool: setattr(pool, "stride", None), "relu, max pool"),
    "a dilation": (lambda pool: setattr(pool, "dilation", (1, 2)), "relu"),
    "a hook": (hooked, "relu"),
    "a forward of its own": (lambda pool: setattr(pool, "forward", torch.neg), "relu"),
    # As accelerate leaves it when it removes its hooks.
    "its class's forward": (
        lambda pool: setattr(pool, "forward", pool.forward),
        "relu, max pool",
    ),
}


@pytest.mark.parametrize("change", POOL_CHANGES)
def test_a_changed_pooling_computes_what_it_would_unfused(change, calls):
    layers = nn.Sequential(
        nn.BatchNorm2d(8), nn.Identity(), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    )
    model, plain = twins(layers)
    changed, call = POOL_CHANGES[change]
    assert_same_after(lambda layers: changed(layers[3]), model, plain)
    assert calls == [call]


def test_a_pooling_that_is_set_to_return_indices_returns_them():
    model = fuse(swapped(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2))))
    expected = model(X)
    model[2].return_indices = True
    y, indices = model(X)
    assert torch.equal(y, expected)
    assert indices.dtype == torch.int64


@pytest.mark.parametrize(
    "change",
    [
        lambda model: hooked(model.conv),
        lambda model: register_parametrization(model.conv, "weight", nn.Tanh()),
        lambda model: setattr(model.conv, "bias", None),
        lambda model: setattr(model, "conv", nn.Conv2d(8, 8, 1, dtype=torch.double)),
    ],
)
def test_a_changed_convolution_is_called_unfused(change, calls):
    assert_same_after(change, *twins(Depthwise()))
    assert calls == []


# Changes to a fused block, after which it must behave like an unfused one.
CHANGES = {
    "a child set to None": lambda m: setattr(m, "down", None),
    "a child that was None": lambda m: setattr(m, "down", nn.Conv2d(8, 8, 1).double()),
    "a child replaced in _modules": lambda m: m._modules.__setitem__("act", nn.Tanh()),
    "another constant": lambda m: setattr(m, "scale", 0.5),
    "unswapped norms": lambda m: [unswap(m.bn1), unswap(m.bn2)],
    "a forward set on the instance": lambda m: setattr(
        m, "forward", partial(Block.forward, m)
    ),
}


@pytest.mark.parametrize("down", [None, nn.Conv2d(8, 8, 1)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_block_runs_as_it_is_written(change, down, calls):
    assert_same_after(CHANGES[change], *twins(Block(down=copy.deepcopy(down))))


class Doubled(Half):
    def forward(self, x):
        return 2 * super().forward(x)


# Changes to a fused model whose modules are nested deep in containers.
DEEP_CHANGES = {
    "replaced by an equal one": lambda m: m.stages[0].__setitem__(1, swapped(Half())),
    "appended to an empty list": lambda m: m.extra.append(nn.Sigmoid()),
    "a dict's values exchanged": lambda m: m.heads.update(
        {"a": m.heads["c"], "c": m.heads["a"]}
    ),
    "a dict's keys exchanged": lambda m: renamed(m.heads, a="c", c="a"),
    "containers of another class": lambda m: setattr(m, "tail", nn.ModuleList(m.tail)),
    "another slice": lambda m: setattr(m, "start", 2),
    "another child of a child": lambda m: m.tail[1].inner.append(nn.Sigmoid()),
    "another attribute": lambda m: setattr(m.stages[0][1], "scale", 2),
    "a hook": lambda m: hooked(m.stages[0][1]),
    "a hook on a child": lambda m: hooked(m.stages[1][0].norm),
    "a forward set on the instance": lambda m: setattr(
        m.stages[0][1], "forward", torch.tanh
    ),
    "another class": lambda m: setattr(m.stages[0][1], "__class__", Doubled),
    "compiled": lambda m: m.stages[0][1].compile(backend="eager"),
}


@pytest.mark.parametrize("change", DEEP_CHANGES)
@pytest.mark.parametrize("how", ["fused", "copied"])
def test_a_changed_module_deep_inside_runs_as_it_is_written(how, change, calls):
    model, plain = twins(Nested())
    if how == "copied":
        model = copy.deepcopy(model)
    assert_same_step(model, plain, X)
    assert calls == ["relu"] * 7
    assert_same_after(DEEP_CHANGES[change], model, plain)
    torch.compiler.reset()


class Around(Parts):
    def forward(self, x):
        return self.act(self.inner(self.act(self.norm(x) + x)))


def test_a_hook_before_fuse_runs_and_leaves_other_norms_fused(calls):
    plain = swapped(Around(inner=Half(), norm=nn.BatchNorm2d(8), act=nn.ReLU()))
    hooked(plain.inner)
    model = fuse(copy.deepcopy(plain))
    assert_same_step(model, plain, X)
    assert calls == ["add, relu"]


class Unpacked(Parts):
    def forward(self, pair):
        x, residual = pair
        return self.act(self.norm(x) + residual)


class FirstUnpacked(Parts):
    def forward(self, pairs):
        all_pairs = [pairs] if isinstance(pairs, torch.Tensor) else pairs
        x, residual = all_pairs[0]
        return self.act(self.norm(x) + residual)


@pytest.mark.parametrize("cls", [Unpacked, FirstUnpacked])
def test_an_input_of_another_type_runs_the_forward_as_it_is_written(cls, calls):
    model, plain = twins(cls(norm=nn.BatchNorm2d(8), act=nn.ReLU()))

    def argument(pair):
        return pair if cls is Unpacked else [pair]

    traced = argument(torch.stack([X, 2 * X]))
    assert torch.equal(model(traced), plain(traced))
    assert calls == ["add, relu"]
    with pytest.raises(ValueError, match="too many values"):
        model(argument((X, X, X)))


class Counted(Parts):
    def forward(self, x, counts):
        shift = counts * self.scale
        return self.act(self.norm(x) + shift)


def test_an_attribute_of_another_type_is_another_value(calls):
    model, plain = twins(Counted(norm=nn.BatchNorm2d(8), act=nn.ReLU(), scale=1))
    # float32, the dtype of counts * 1.0, rounds it.
    counts = torch.full(X.shape, 2**24 + 1)
    for scale in (1, 1.0):
        model.scale = plain.scale = scale
        assert torch.equal(model(X, counts), plain(X, counts))


# Attributes of activations, and the calls that stay fused when they change.
SETTINGS = {
    "gelu": (nn.GELU, "approximate", "tanh", []),
    "relu6, upper": (nn.ReLU6, "max_val", 1.0, []),
    "relu6, in place": (nn.ReLU6, "inplace", True, ["relu6"]),
    "silu, in place": (nn.SiLU, "inplace", True, ["silu"]),
    "leaky relu, slope": (nn.LeakyReLU, "negative_slope", 0.5, [("leaky_relu", 0.5)]),
    "leaky relu, below 0": (nn.LeakyReLU, "negative_slope", -0.5, []),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
def test_an_activation_computes_what_its_attributes_say(setting, when, calls):
    make, name, value, expected = SETTINGS[setting]
    layers = nn.Sequential(nn.BatchNorm2d(8), make())
    if when == "before":
        setattr(layers[1], name, value)
    model, plain = twins(layers)
    setattr(model[1], name, value)
    setattr(plain[1], name, value)
    assert_same_step(model, plain, 9 * X)  # beyond every activation's bounds
    assert calls == expected


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@pytest.mark.parametrize("name", ["bn1", "act"])
def test_hooks_on_norms_and_activations_run(name, kind, calls):
    model, plain = twins(Block(act=nn.ReLU()))
    seen, other = [], []
    for each, list_ in ((plain, other), (model, seen)):
        register = getattr(each.get_submodule(name), f"register_{kind}_hook")
        handle = register(lambda *args, list_=list_: list_.append(args[0]))
    assert_same_step(model, plain, X)
    assert len(seen) == len(other) > 0
    handle.remove()
    calls.clear()
    outcome(model, X)
    assert calls == ["relu", "add, relu"]


@pytest.mark.parametrize("make", [Block, Resnet])  # the first is traced, the other edited
def test_global_hooks_and_forwards_patched_on_the_class_run(make, calls, monkeypatch):
    model, seen = fuse(swapped(make())), []
    norm = next(m for m in model.modules() if isinstance(m, TargetVarianceNorm))
    with nn.modules.module.register_module_forward_hook(
        lambda m, args, y: seen.append(m)
    ):
        outcome(model, X)
    assert norm in seen
    monkeypatch.setattr(make, "forward", lambda self, x, times=2: x * times)
    assert torch.equal(model(X), X * 2)
    assert torch.equal(model(X, times=3), X * 3)
    assert not any(row.label for row in fusions(model))
    assert calls == []


def test_a_probe_on_a_fused_norm_measures_as_when_unfused(calls):
    model, plain = twins(Block())
    assert_same_after(lambda block: setattr(block.bn1, "_probe", Probe()), model, plain)
    fused, unfused = averages([model.bn1._probe, plain.bn1._probe])
    assert fused[1] > 0
    assert torch.equal(fused, unfused)
    assert calls == ["add, relu"]  # the norm's own output is measured, so it runs unfused
