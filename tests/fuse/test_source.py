"""Which forwards can be traced, and that tracing leaves the model unchanged."""

import ast
import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fuse_cases import (
    Half,
    Nested,
    Parts,
    X,
    assert_same_after,
    assert_same_step,
    swapped,
    twins,
    written,
)
from normplug import fuse, fusions
from normplug._convert import fused_modules


class Functions(Half):
    def forward(self, x):
        return F.relu(self.norm(torch.add(self.inner(self.act(x)), x)))


def test_a_trace_leaves_the_model_unchanged():
    model = swapped(nn.Sequential(Functions(), Half(), nn.Dropout(), Nested())).eval()
    state = {m: dict(vars(m)) for m in model.modules()}
    methods = {name: vars(nn.Module)[name] for name in ("__call__", "__getattr__")}
    looks = []

    def look():
        looks.append(True)
        assert {name: vars(nn.Module)[name] for name in methods} == methods
        assert all(vars(m) == before for m, before in state.items())

    class DuringTrace(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            look()
            return func(*args, **(kwargs or {}))

    with DuringTrace():
        fusions(model)
    assert looks
    look()


class Reversed(nn.ModuleList):
    def __iter__(self):
        return reversed(list(super().__iter__()))


def test_a_container_with_its_own_order_of_iteration_is_not_fused(calls):
    nested = Nested()
    nested.stages[0] = Reversed(nested.stages[0])
    model, plain = twins(nested)
    assert "" not in fused_modules(model)
    assert_same_step(model, plain, X)
    assert calls == []


def test_a_module_with_two_names_is_called_by_the_name_that_the_forward_uses(calls):
    class Named(Parts):  # conv is in the holder too, which the forward does not call
        def forward(self, x):
            return self.act(self.norm(self.conv(x)))

    conv = nn.Conv2d(8, 8, 1)
    holder = nn.Sequential(conv)
    model, plain = twins(
        Named(holder=holder, conv=conv, norm=nn.BatchNorm2d(8), act=nn.ReLU())
    )
    assert_same_after(lambda named: named.holder.__setitem__(0, nn.Tanh()), model, plain)
    assert calls == ["relu"]


CELL = """
import torch
class InNotebook(Parts):
    def forward(self, x):
        return self.act(torch.add(self.norm(x), x))
"""


@pytest.mark.parametrize("source", [CELL, CELL.replace("act(", "act(2 * ")])
def test_a_forward_is_traced_only_if_it_matches_its_source(source, monkeypatch):
    names = {"__name__": __name__, "Parts": Parts}
    for statement in ast.parse(CELL).body:  # a notebook compiles them one by one
        exec(compile(ast.Module([statement], []), "<cell>", "exec"), names)
    lines = source.splitlines(True)
    monkeypatch.setitem(linecache.cache, "<cell>", (len(source), None, lines, "<cell>"))
    (row,) = fusions(swapped(names["InNotebook"](norm=nn.BatchNorm2d(8), act=nn.ReLU())))
    if source == CELL:
        assert row.label == "add, ReLU"
    else:
        assert row.note == "InNotebook: its forward does not match its source"


def test_messages_of_errors_may_be_formatted(calls):
    class Checked(Parts):
        def forward(self, x):
            torch._assert(
                x.dim() == self.size, f"got {x.dim()} dimensions, not {self.size}"
            )
            if self.size < 0:
                raise ValueError(f"{self.size}")
            return self.act(self.norm(x) + x)

    model, plain = twins(Checked(norm=nn.BatchNorm2d(8), act=nn.ReLU(), size=4))
    assert_same_step(model, plain, X)
    assert calls == ["add, relu"]


def multiplied_by(noise):
    def closure(self, x):
        return self.act(self.norm(x) + x) * noise[0]

    return closure


class Filler(nn.Module):
    def forward(self, x, found):
        found.append(x)
        return x


class Untraceable(Parts):
    """Each method, as a forward, depends on something that a trace would bake in.

    They add x to the norm's output, since an activation right after it is fused without a trace.
    """

    saved = None
    flag = True

    def result(self, x):
        return self.act(self.norm(x) + x)

    def data(self, x):
        return self.act(self.norm(x) + x) if x.sum() > 0 else x

    def random(self, x):
        return self.act(self.norm(x) + x) * torch.rand(1)

    def context(self, x):
        with torch.no_grad():
            return self.act(self.norm(x) + x)

    closure = multiplied_by([1.0])

    def setting(self, x):
        return self.act(self.norm(x) + x) if self.settings["flag"] else x

    def attribute_of_class(self, x):
        return self.act(self.norm(x) + x) if self.flag else x

    def stores(self, x):
        self.saved = self.act(self.norm(x) + x)
        return self.saved

    def attribute_of_child(self, x):
        return self.act(self.norm(x) + x) if self.norm.eps > 0 else x

    def text(self, x):
        return self.act(self.norm(x) + x) if f"{self.size}" == "1" else x

    def other_method(self, x):
        return checkpoint(self.result, x, use_reentrant=False)

    def default(self, x, shift=torch.ones(1)):  # noqa: B008
        return self.act(self.norm(x) + x + shift)

    def starred(self, *xs):
        return self.act(self.norm(xs[0]) + xs[0])

    def loop(self, x):
        for layer in self.list:
            if layer.training:
                x = layer(x)
        return self.act(self.norm(x) + x)

    @torch.no_grad()
    def decorated(self, x):
        return self.act(self.norm(x) + x)

    def list_for_a_child(self, x):
        found = []
        x = self.act(self.norm(x) + x)
        return self.filler(x, found), found


FORWARDS = [
    name for name, f in vars(Untraceable).items() if callable(f) and name != "result"
]


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_that_a_trace_would_bake_values_into_is_left_with_the_reason(name):
    children = {
        "norm": nn.BatchNorm2d(8),
        "act": nn.ReLU(),
        "list": nn.ModuleList([nn.Identity()]),
        "filler": Filler(),
    }
    parts = {**children, "settings": {"flag": True}, "size": 1}
    model = swapped(written(Untraceable, name, **parts))
    before = {p: (type(m), dict(vars(m))) for p, m in model.named_modules()}
    with pytest.warns(UserWarning, match="normplug.fuse: nothing to fuse in Written"):
        fuse(model)
    for path, module in model.named_modules():
        assert (type(module), vars(module)) == before[path]
    (row,) = fusions(model)
    assert row.label is None
    assert row.note.startswith("Written: ")


def test_a_branch_on_the_input_or_the_training_flag_is_the_reason():
    class Branches(Parts):
        def forward(self, x):
            y = self.act(self.norm(x) + x)
            return y if self.training else y + 1

    children = {"norm": nn.BatchNorm2d(8), "act": nn.ReLU()}
    why = "its forward has a branch on its input or on `self.training`"
    for model in (Branches(**children), written(Untraceable, "data", **children)):
        with pytest.warns(UserWarning, match="nothing to fuse"):
            fuse(swapped(model))
        (row,) = fusions(model)
        assert why in row.note
