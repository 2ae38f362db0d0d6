"""Copies of fused models are fused, and pickles are not."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from fuse_cases import Block, Half, Nested, Resnet, X, assert_same_step, outcome, swapped
from matrix import reloaded
from normplug import fuse, fusions, unfuse
from normplug._convert import fused_modules
from normplug._fuse import fusion
from programs import program

COPIES = {"copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.fixture(autouse=True)
def unsaid():
    """As in a process that has pickled nothing yet."""
    fusion._warn_once.cache_clear()


PICKLES = {
    "torch.save": partial(reloaded, weights_only=False),
    **{
        f"pickle {n}": lambda m, n=n: pickle.loads(pickle.dumps(m, n))
        for n in (0, 2, pickle.HIGHEST_PROTOCOL)
    },
}


@pytest.mark.parametrize("how", COPIES)
def test_copies_are_fused_and_independent_and_are_not_traced(how, traces, calls):
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half(), Resnet())))
    before, fused = traces(), set(fused_modules(model))
    copied = COPIES[how](model)
    assert traces() == before > 0
    assert str(fusions(copied)) == str(fusions(model))
    assert list(copied.state_dict()) == list(model.state_dict())
    assert_same_step(copied, unfuse(copy.deepcopy(copied)), X)
    assert len(calls) == 11
    assert type(copied[3]).__qualname__ == "Resnet"
    if how == "deepcopy":
        fused_modules(copied)["1"].act = nn.Tanh()
        assert isinstance(model[1].act, nn.ReLU)
        assert not fused_modules(unfuse(copied))
        assert set(fused_modules(model)) == fused


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


class Choosy(Block):
    """Says itself what it is pickled and copied from."""

    def __getstate__(self):
        return {**vars(self), "lock": None}


@pytest.mark.parametrize("how", PICKLES)
@pytest.mark.parametrize("make", [Block, Choosy, lambda: nn.Sequential(Nested(), Half())])
def test_a_pickle_is_the_swapped_model_and_says_once_that_it_is_not_fused(
    how, make, calls
):
    model = fuse(swapped(make()))
    with pytest.warns(
        UserWarning, match=r"pickled without its fusion.*normplug\.fuse"
    ) as said:
        loaded = PICKLES[how](model)
    assert len(said) == 1
    plain = unfuse(copy.deepcopy(model))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in plain.modules()]
    assert not fused_modules(loaded)
    assert vars(loaded).keys() - {"lock"} == vars(plain).keys() - {"lock"}
    PICKLES[how](model)  # does not warn again
    assert_same_step(loaded, plain, X)
    assert calls == []
    assert str(fusions(fuse(loaded))) == str(fusions(model))
    assert fused_modules(loaded)


@pytest.mark.filterwarnings("ignore:normplug. a fused model is pickled")
def test_a_pickle_does_not_refer_to_the_fusion():
    model = fuse(swapped(nn.Sequential(Nested(), Block())))
    assert b"normplug._fuse" not in pickle.dumps(model, 0)


LOAD = """
import sys, warnings
import torch
warnings.simplefilter("error", UserWarning)
model, x, y = torch.load(sys.argv[0], weights_only=False)
torch.testing.assert_close(model(x), y)
"""


@pytest.mark.filterwarnings("ignore:normplug. a fused model is pickled")
def test_a_pickle_is_loaded_in_another_process(tmp_path):
    model = fuse(swapped(nn.Sequential(Nested(), Block(), Half()))).eval()
    torch.save((model, X, model(X)), tmp_path / "model.pt")
    done = program(LOAD, tmp_path / "model.pt")
    assert done.returncode == 0, done.stderr
