"""Copies and pickles of fused models."""

import copy
import copyreg
import io
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normplug
from forks import forked
from fuse_cases import Block, Half, Nested, Parts, X, assert_same_step, outcome, swapped
from matrix import reloaded
from normplug import fuse, fusions, unfuse
from normplug._fuse import calls as fused_calls
from normplug._fuse import fused_class, fusion
from normplug._fuse.fingerprint import fingerprint
from normplug._fuse.fuse import fused_modules

COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "torch.save": partial(reloaded, weights_only=False),
    **{
        f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, n))
        for n in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", f"pickle {pickle.DEFAULT_PROTOCOL}"])
def test_copies_are_fused_and_independent(how, calls):
    model = fuse(swapped(nn.Sequential(Block(), Block())))
    copied = COPIES[how](model)
    assert_same_step(copied, model, X)
    assert calls == ["relu", "add, relu"] * 4
    fused_modules(copied)["0"].act = nn.Tanh()
    assert isinstance(model[0].act, nn.ReLU)
    assert not fused_modules(unfuse(copied))
    assert len(fused_modules(model)) == 2


@pytest.mark.parametrize("how", COPIES)
def test_copying_and_loading_do_not_trace(how, traces, calls):
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half())))
    found = str(fusions(model))
    before = traces()
    copied = COPIES[how](model)
    assert str(fusions(copied)) == found
    assert traces() == before > 0
    plain = unfuse(copy.deepcopy(copied))
    assert_same_step(copied, plain, X)
    assert len(calls) == 9


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("start", ["block", "act"])
def test_a_reference_cycle_is_copied_with_its_fusion(how, start, calls):
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


# Earlier versions, by the module of the functions that their pickles name: how they reduced a
# `Fusion`, and the functions' names.
EARLIER = {
    # It stored only whether a fused module recomputes.
    "normplug.fuse": (lambda _: (bool, (False,)), {fused_class.restore: "_restore"}),
    "normplug._fusion": (
        lambda made: (fusion.load, made.__reduce__()[1][:3]),
        {fused_class.restore: "restore", fusion.load: "load"},
    ),
}


def earlier(model, version):
    """Pickle a model as an earlier version did."""
    reduce, names = EARLIER[version]
    file = io.BytesIO()
    pickler = pickle.Pickler(file, 0)  # names functions in plain text
    pickler.dispatch_table = copyreg.dispatch_table | {fusion.Fusion: reduce}
    pickler.dump(model)
    pickled = file.getvalue()
    for function, then in names.items():
        now = f"c{function.__module__}\n{function.__name__}\n".encode()
        assert now in pickled
        pickled = pickled.replace(now, f"c{version}\n{then}\n".encode())
    return pickled


def another_forward(self, x):
    y = self.act(self.bn1(self.conv1(x)))
    y = self.bn2(self.conv2(y))
    y += x * self.scale
    return self.act(2 * y)


# What may change between pickling and loading.
OTHER_CODE = {
    "forward": lambda patch: patch.setattr(Block, "forward", another_forward),
    "normplug": lambda patch: patch.setattr(normplug, "__version__", "0"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "3.0"),
    "a fused call": lambda patch: patch.setattr(
        fused_calls, "norm_add_activation", lambda *args: None
    ),
    "no fused call": lambda patch: patch.delattr(fused_calls, "norm_add_activation"),
}


@pytest.mark.parametrize("change", [*OTHER_CODE, *EARLIER])
def test_a_pickle_from_other_code_is_loaded_unfused(change, monkeypatch, calls):
    model = fuse(swapped(Block()))
    if change in OTHER_CODE:
        pickled = pickle.dumps(model)
        OTHER_CODE[change](monkeypatch)
    else:
        pickled = earlier(model, change)
    with pytest.warns(UserWarning, match=r"a Block was fused with other versions.*normplug\.fuse"):
        loaded = pickle.loads(pickled)
    assert type(loaded) is Block
    assert not fused_modules(loaded)
    assert_same_step(loaded, unfuse(model), X)
    assert calls == []


chosen = F.relu


class Chosen(Parts):
    def forward(self, x):
        return chosen(self.norm(x))


def test_a_pickle_is_loaded_unfused_if_a_global_of_its_module_has_changed(monkeypatch):
    pickled = pickle.dumps(fuse(swapped(Chosen(norm=nn.BatchNorm2d(8)))))
    assert fused_modules(pickle.loads(pickled))
    monkeypatch.setitem(globals(), "chosen", F.silu)
    with pytest.warns(UserWarning, match="a Chosen was fused with other versions or"):
        loaded = pickle.loads(pickled)
    assert torch.equal(loaded(X), F.silu(loaded.norm(X)))


def test_partials_and_instances_differ_by_what_they_are():
    def function(x):
        return x

    prints = set()
    values = [partial(int, 1), partial(int, 2), partial(float, 2), partial(int, base=1), nn.ReLU()]
    for value in (*values, nn.Tanh()):
        function.__defaults__ = (value,)
        prints.add(fingerprint([function]))
    assert len(prints) == len(values) + 1


LOAD = """
import logging, sys, warnings
import torch
logging.basicConfig(level=logging.DEBUG)
warnings.simplefilter("error", UserWarning)
model, x, y = torch.load(sys.argv[0], weights_only=False)
assert len([m for m in model.modules() if "_normplug_fusion" in vars(m)]) == int(sys.argv[1])
torch.testing.assert_close(model(x), y)
"""


def test_a_pickle_is_fused_in_another_process(tmp_path):  # strings hash differently there
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half()))).eval()
    torch.save((model, X, model(X)), tmp_path / "model.pt")
    done = forked(LOAD, tmp_path / "model.pt", len(fused_modules(model)))
    assert done.returncode == 0, done.stderr
    assert "normplug.fuse" not in done.stderr  # the logger, which reports each trace
