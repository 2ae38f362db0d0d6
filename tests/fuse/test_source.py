"""Which forwards are traced, and that a trace leaves the model alone."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fuse_cases import Half, Nested, X, assert_runs_unfused, assert_same, outcome, swapped, twins
from normplug import fuse, fusions
from normplug._fuse.fuse import fused_modules


class Amid(TorchFunctionMode):
    """Calls a function whenever a forward calls one of torch's."""

    def __init__(self, look):
        super().__init__()
        self.look = look

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.look()
        return func(*args, **(kwargs or {}))


class Functions(Half):
    def forward(self, x):
        return F.relu(self.norm(torch.add(self.inner(self.act(x)), x)))


def test_a_trace_leaves_the_model_as_it_is():
    model = swapped(nn.Sequential(Functions(), Half(), nn.Dropout(), Nested())).eval()
    state = {m: dict(vars(m)) for m in model.modules()}
    methods = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    looks = []

    def look():
        looks.append(True)
        assert {name: vars(nn.Module)[name] for name in methods} == methods
        assert all(vars(m) == before for m, before in state.items())

    with Amid(look):
        fusions(model)
    assert looks
    look()


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

    model, plain = twins(Named())
    for each in (model, plain):
        each.holder[0] = nn.Tanh()
    assert_same(outcome(model, X), outcome(plain, X))
    assert calls == ["relu"]


def test_other_arguments_than_tensors_run_as_written(calls):
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(8), nn.ReLU()

        def forward(self, x, shift=None):
            if shift is not None:
                x = x + shift
            return self.act(self.norm(x))

    model, plain = twins(Optional())
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
