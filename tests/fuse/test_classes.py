"""What other code sees of a fused class, and what it may do with a fused module's class."""

import abc
import copy
import functools
import inspect
import types
import typing

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate

import normplug
from fuse_cases import (
    ROWS,
    Block,
    Parts,
    PreNorm,
    X,
    assert_same_step,
    swapped,
    twins,
    written,
)
from matrix import process_group
from normplug import _convert, fuse, fusions, swap, unfuse, unswap
from normplug._convert import fused_modules


def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)

    return call


class Parameters(Parts):
    """Each method is a forward with other parameters. Each norm is followed by its activation."""

    def plain(self, features, mask=None):
        return self.act(self.norm(features)) * (1 if mask is None else mask)

    def annotated(module, x: torch.Tensor, scale: "float" = 2.0) -> torch.Tensor:
        return module.act(module.norm(x)) * scale

    def positional(self, x, /, scale=1.0):
        return self.act(self.norm(x)) * scale

    def named(self, x, *, input, normplug=3.0):
        return self.act(self.norm(x)) * input * normplug

    def starred(self, x, *args, scale=1.0, **kwargs):
        return self.act(self.norm(x)) * scale + len(args) + len(kwargs)

    @logged
    def decorated(self, x, scale=1.0):
        return self.act(self.norm(x)) * scale


CALLS = {
    "plain": [((X,), {}), ((X, 2.0), {}), ((), {"features": X, "mask": 0.5})],
    "annotated": [((X,), {}), ((X, 3.0), {}), ((X,), {"scale": 0.5})],
    "positional": [((X,), {}), ((X,), {"scale": 0.5})],
    "named": [
        ((X,), k) for k in ({"input": X}, {"input": 2.0}, {"input": 2.0, "normplug": 1.0})
    ],
    "starred": [((X,), {}), ((X, 1, 2), {"scale": 3.0, "more": 4})],
    "decorated": [((X,), {}), ((X,), {"scale": 0.5})],
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_forward_shows_and_takes_the_parameters_of_the_users_own(name, calls):
    parts = {"norm": nn.BatchNorm2d(8), "act": nn.ReLU()}
    model, plain = twins(written(Parameters, name, **parts))
    ours, theirs = model.forward, plain.forward
    for look in (inspect.signature, typing.get_type_hints, inspect.getsource):
        assert look(ours) == look(theirs)
    innermost = inspect.unwrap(theirs)
    assert inspect.getfullargspec(ours) == inspect.getfullargspec(innermost)
    assert (ours.__name__, ours.__doc__) == (theirs.__name__, theirs.__doc__)
    for args, kwargs in CALLS[name]:
        calls.clear()
        assert torch.equal(model(*args, **kwargs), plain(*args, **kwargs))
        assert calls == ["relu"]
    for wrong in ((), (X, *range(9))) if name != "starred" else ((),):
        with pytest.raises(TypeError):
            model(*wrong)


class Locked(Block):
    """Refuses new values of its attributes."""

    def __setattr__(self, name, value):
        if name != "training" and vars(self).get("is_locked"):
            raise AttributeError(f"locked: {name}")
        super().__setattr__(name, value)


def test_a_class_that_refuses_new_attributes_is_fused(calls):
    block = Locked()
    vars(block)["is_locked"] = True
    model, plain = twins(block)
    assert_same_step(model, plain, X)
    assert calls == ["relu", "add, relu"]
    assert type(unfuse(model)) is Locked


def test_a_fuse_that_fails_leaves_the_model_unfused(monkeypatch):
    model = swap(nn.ModuleList([Block(), Block()]))
    before = [(type(block), dict(vars(block))) for block in model]
    assign = _convert.assign_class

    def failing(module, cls):
        if module is model[1] and cls is not Block:
            raise RuntimeError("no")
        assign(module, cls)

    monkeypatch.setattr(_convert, "assign_class", failing)
    with pytest.raises(RuntimeError, match="no"):
        fuse(model)
    assert [(type(block), dict(vars(block))) for block in model] == before


class Registered(nn.Module):
    known: typing.ClassVar = []

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        Registered.known.append(cls.__name__)


class Meta(abc.ABCMeta):
    def __init__(cls, name, bases, namespace, **options):
        super().__init__(name, bases, namespace)
        Registered.known.append(f"meta {name}")


@pytest.mark.parametrize("bases", [(Registered,), (Parts,)])
def test_fuse_makes_no_entry_in_a_registry_of_classes(bases, calls):
    class One(Block, *bases, **({"metaclass": Meta} if bases == (Parts,) else {})):
        pass

    known = list(Registered.known)
    model, plain = twins(One())
    copy.deepcopy(model)
    assert Registered.known == known
    assert_same_step(model, plain, X)
    assert calls == ["relu", "add, relu"]
    assert isinstance(model, One)
    assert isinstance(plain, One)
    assert not isinstance(plain, type(model))
    assert type(unfuse(model)) is One
    model = fuse(swap(model))
    type("Other", (type(model),), {})
    assert len(Registered.known) == len(known) + 1  # a user's own subclass is registered


class Helped(Parts):
    def helper(self, x):
        return x

    def forward(self, x):
        return self.act(self.norm(self.helper(x)) + x)


def derived(module):
    """Give a module a class derived from its own, as token merging does."""

    def helper(self, x):
        return x * 2

    def forward(self, x):
        return super(made, self).forward(x) + 1

    former = type(module)
    made = type(
        "Derived", (former,), {"helper": helper, "forward": forward, "former": former}
    )
    module.__class__ = made


@pytest.mark.filterwarnings("ignore:normplug.fuse. nothing to fuse")
def test_a_class_that_others_derive_from_a_fused_one_stays_and_is_not_fused():
    model, plain = twins(nn.Sequential(Helped(norm=nn.BatchNorm2d(8), act=nn.ReLU())))
    for each in (model, plain):
        derived(each[0])
    assert [row.label for row in fusions(model)] == [None]
    assert normplug.check(model, X)
    for each in (model, copy.deepcopy(model), fuse(copy.deepcopy(model))):
        assert type(each[0]).__name__ == "Derived"
        assert_same_step(each, copy.deepcopy(plain), X)
    (row,) = fusions(fuse(model))
    assert (
        row.note
        == "Derived: its class derives from one that normplug.fuse made: derive it before"
    )
    unswap(model)
    assert type(model[0]).__name__ == "Derived"
    torch.testing.assert_close(model(X), unswap(plain)(X))
    model[0].__class__ = model[0].former  # as a tool that undoes its change
    assert type(unfuse(model)[0]) is Helped


def doubled(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return 2 * forward(*args, **kwargs)

    return wrapper


WRAPPERS = {
    "the function": lambda m: types.MethodType(
        doubled(m.forward.__func__), m
    ),  # as accelerate
    "the method": lambda m: doubled(m.forward),
    "the class": lambda m: functools.partial(doubled(type(m).forward), m),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("undo", [unfuse, unswap])
@pytest.mark.parametrize("path", ["", "0"])
def test_a_wrapper_around_a_fused_forward_stays_when_the_class_changes(
    wrap, undo, path, calls
):
    model, plain = twins(Block() if path == "" else nn.Sequential(Block(), nn.Tanh()))
    for each in (model.eval(), plain.eval()):
        module = each.get_submodule(path)
        module.forward = wrap(module)
    assert torch.equal(model(X), plain(X))
    assert calls == ["relu", "add, relu"]
    calls.clear()
    undo(model), undo(plain)
    assert type(model.get_submodule(path)) is Block
    assert not fused_modules(model)
    assert "forward" in vars(model.get_submodule(path))
    assert torch.equal(model(X), plain(X))
    assert calls == []


def test_replicate_keeps_its_class_when_a_fused_root_is_unswapped():
    model = fuse(swapped(Block()))
    expected = model.eval()(X)
    with process_group():
        replicate(model)
        added = type(model).__bases__[0]
        torch.testing.assert_close(model(X), expected)
        unswap(model)
        assert type(model).__bases__ == (added, Block)
        assert not fused_modules(model)
        torch.testing.assert_close(model(X), expected)


class Aliased(nn.Module):
    """Has its layers as attributes and in a Sequential that it calls, as nnU-Net's blocks."""

    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 1), norm(8), nn.ReLU()
        self.all_modules = nn.Sequential(self.conv, self.norm, self.act)

    def forward(self, x):
        return self.all_modules(x)


class Listed(nn.Module):
    """Has its blocks as attributes, too; each ends with an addition."""

    def __init__(self):
        super().__init__()
        self.first, self.second = PreNorm(), PreNorm()
        self.blocks = nn.Sequential(self.first, self.second)
        self.norm = nn.LayerNorm(8)
        self.last = nn.ModuleList([self.norm])

    def forward(self, x):
        return self.last[0](self.blocks(x))


@pytest.mark.parametrize("make", [Aliased, lambda: nn.Sequential(Aliased(), Aliased())])
def test_norms_with_two_names_are_fused(make, calls):
    model, plain = twins(make())
    found = fusions(model)
    assert {row.label for row in found} == {"ReLU"}
    assert {(row.path[-4:], row.owner[-11:]) for row in found} == {
        ("norm", "all_modules")
    }
    assert_same_step(model, plain, X)
    assert calls == ["relu"] * len(found)
    model, plain = twins(Listed())
    assert [row.path for row in fusions(model) if not row.label] == ["first.norm1"]
    assert_same_step(model, plain, ROWS)
    assert calls[-4:] == ["add before"] * 4
