"""Norms are fused with the activation after them by editing forwards that cannot be traced."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from fuse_cases import Parts, Resnet, X, assert_same_step, outcome, swapped, twins
from normplug import fuse, fusions, swap
from normplug._fuse.edit import REASON
from zoo.check import observe

# How many norms are fused, for each thing that the block does before its second activation.
WAYS = {"add": 2, "other": 2, "scale": 1, "none": 1}
NOTE = f"Resnet: its forward takes *args or **kwargs, and {REASON}"


@pytest.mark.parametrize("way", WAYS)
def test_a_diffusion_models_block_is_fused(way, calls, traces):
    model, plain = twins(Resnet(way))
    found = {row.path: (row.label, row.note) for row in fusions(model)}
    assert found["norm1"] == ("SiLU", "")
    assert found["norm2"] == (("SiLU", "") if WAYS[way] == 2 else (None, NOTE))
    assert traces() == 0
    for training in (True, False):
        calls.clear()
        assert_same_step(model, plain, X, X.mean(), training=training)
        assert calls == ["silu"] * WAYS[way]
    assert torch.equal(model(X, None, 1, scale=2), plain(X))


class Statements(Parts):
    """Each method is a forward whose statements are edited, or left alone."""

    def nested(self, x, **options):
        return self.line(self.act(self.norm(x)))

    def functions(self, x, **options):
        x = F.silu(self.norm(x))
        x = self.second(x)
        return nn.functional.silu(x)

    def inside_expressions(self, x, **options):
        x = self.norm(x)
        x = self.line(self.act(x)) + x.shape[0] if self.flag is None else self.line(self.act(x))
        x = self.second(self.line(x))
        return self.line(self.act(x))

    def chained(self, x, **options):
        x = self.norm(x)
        x = self.second(self.act(x))
        x = self.act(x)
        return self.line(x)

    def if_statement(self, x, **options):
        y = self.norm(x)
        if self.flag and options is not None:
            y = self.act(y)
        return y * 2

    def optional_activation(self, x, **options):
        x = self.norm(x)
        if self.second is not None:
            x = self.act(x)
        return x

    def for_loop(self, x, **options):
        for i in range(3):
            if i != 1:
                x = self.norm(x)
            x = self.act(x)
            x = self.line(x)
        return x

    def new_name(self, x, **options):
        y = self.norm(x)
        z = self.act(y)
        return z + x

    def read_twice(self, x, **options):
        y = self.norm(x)
        return self.act(y) + y

    def read_later(self, x, **options):
        y = self.norm(x)
        z = self.act(y)
        return y + z

    def aliased(self, x, **options):
        x = self.norm(x)
        y = x
        x = self.act(x)
        return x + y

    def stored_in_a_tuple(self, x, **options):
        x = self.norm(x)
        both = (x, 1)
        x = self.act(x)
        return x + both[0]

    def closure(self, x, **options):
        x = self.norm(x)
        later = lambda: x  # noqa: E731
        return self.act(x) + later()

    def finally_clause(self, x, **options):
        seen = []
        try:
            x = self.norm(x)
            return self.act(x) + 0 * self.line(x)
        finally:
            seen.append(x)

    def changed_between(self, x, **options):
        x = self.norm(x)
        x.mul_(2)
        return self.act(x)

    def keyword_argument(self, x, **options):
        return self.act(input=self.norm(input=x))

    def in_place(self, x, **options):
        y = 1.0
        y += self.norm(x)
        return self.act(y)

    def local_function(self, x, **options):
        F = nn.Tanh()
        return F(self.norm(x))


EDITED = {
    "nested": 1,
    "functions": 2,
    "inside_expressions": 1,
    "chained": 2,
    "optional_activation": 1,
    "for_loop": 2,
    "new_name": 1,
}
LEFT = [
    name
    for name, f in vars(Statements).items()
    if callable(f) and name not in EDITED and not name.startswith("_")
]


def statements(name, **parts):
    cls = type("Written", (Statements,), {"forward": vars(Statements)[name]})
    norms = {"norm": nn.GroupNorm(2, 8), "second": nn.BatchNorm2d(8)}
    return cls(**norms, line=nn.Conv2d(8, 8, 1), act=nn.SiLU(), flag=True, **parts)


@pytest.mark.parametrize("name", EDITED)
def test_a_statement_is_edited_if_nothing_else_reads_the_norms_output(name, calls):
    model, plain = twins(statements(name))
    assert_same_step(model, plain, X)
    assert calls == ["silu"] * EDITED[name]
    for each in (model, plain):
        each.flag = False
    assert_same_step(model, plain, X)


@pytest.mark.parametrize("name", LEFT)
def test_a_statement_is_left_if_something_else_may_read_the_norms_output(name, calls):
    with pytest.warns(UserWarning, match="nothing to fuse"):
        model, plain = twins(statements(name))
    assert_same_step(model, plain, X)
    assert calls == []


def test_a_norm_before_an_activation_without_kernels_is_left():
    block = Resnet()
    block.act = nn.Mish()
    with pytest.warns(UserWarning, match=f"not fused: 2 .{re.escape(NOTE)}"):
        fuse(swapped(block))
    model = fuse(swapped(Resnet()))
    model.act = nn.Mish()
    assert {row.note for row in fusions(model)} == {NOTE}


class Watching(Resnet):
    """Records the names that reach `__getattr__`."""

    def __getattr__(self, name):
        vars(self).setdefault("seen", []).append(name)
        return super().__getattr__(name)


class Changing(Watching):
    def __getattribute__(self, name):
        return super().__getattribute__(name)


def test_a_class_with_getattr_is_fused_and_sees_the_same_lookups(calls):
    model, plain = twins(Watching())
    for each in (model, plain):
        each.seen = []
        outcome(each, X)
    assert calls == ["silu"] * 2
    # The activation's name is looked up before the norm runs, not after.
    assert sorted(model.seen) == sorted(plain.seen)
    with pytest.warns(UserWarning, match="its class defines"):
        fuse(swapped(Changing()))


@pytest.mark.parametrize(
    ("name", "fused", "of"),
    [("UNet2DModel", 17, 21), ("AutoencoderKL", 22, 24), ("UNet2DConditionModel", 17, 33)],
)
@pytest.mark.filterwarnings("ignore")
def test_diffusers_models_are_fused_and_give_the_same_bits(name, fused, of):
    listed = pytest.importorskip("zoo.diffusers_models", exc_type=ImportError).architectures()
    architecture = next(a for a in listed if a.name == name)
    torch.manual_seed(0)
    plain = swap(architecture.build())
    model = fuse(copy.deepcopy(plain))
    rows = list(fusions(model))
    assert (sum(row.label == "SiLU" for row in rows), len(rows)) == (fused, of)
    assert model.to_json_string() == plain.to_json_string()
    inputs = architecture.inputs(model)
    ours, theirs = observe(model, inputs), observe(plain, inputs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert normplug.check(model)
