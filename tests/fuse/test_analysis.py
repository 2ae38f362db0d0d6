"""What `fusions` lists, before and after `fuse` and later changes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuse_cases import Block, Encoder, Half, assert_same_step, swapped
from normplug import fuse, fusions, swap, unfuse
from normplug._convert import fused_modules
from normplug._fuse.edit import REASON
from normplug.modules import LayerNorm, TargetVarianceNorm
from normplug.modules.base import FusionSites


@pytest.mark.parametrize("blocks", [2, 16])
def test_residual_blocks_are_traced_once_each(blocks, traces):
    fuse(swapped(nn.Sequential(*(Block() for _ in range(blocks)))))
    assert traces() == blocks + 1


def test_fusions_lists_the_same_before_and_after_fuse():
    model = swapped(
        nn.Sequential(Block(), Encoder(), Half(), nn.Sequential(Half(), nn.Tanh()))
    )
    before = fusions(model)
    assert not fused_modules(model)
    assert {row.label is None for row in before} == {True, False}
    assert fusions(fuse(model)).rows == before.rows


def test_later_changes_are_reported():
    model = fuse(swapped(nn.Sequential(Block(), Block(), Block(), Block(act=nn.SiLU()))))
    model[0].scale = 2.0
    unfuse(model[1])
    model[2].down = swap(nn.Sequential(nn.BatchNorm2d(8)))
    model[3].act = nn.Tanh()
    notes = {row.path: row.note for row in fusions(model)}
    changed = "not fused since the last change; normplug.fuse(model) fuses it"
    assert notes == {
        # The first norm and its activation are one statement, which depends on nothing else.
        **dict.fromkeys(["0.bn1", "2.bn1"], ""),
        **dict.fromkeys(["0.bn2", "1.bn1", "1.bn2", "2.bn2"], changed),
        "2.down.0": REASON,
        "3.bn1": REASON,
        "3.bn2": changed,  # its addition
    }
    labels = {row.path: row.label for row in fusions(model)}
    assert (labels["0.bn1"], labels["0.bn2"], labels["1.bn1"]) == ("ReLU", None, None)
    left = [row.path for row in fusions(fuse(model)) if not row.label]
    assert left == ["2.down.0", "3.bn1"]


def test_a_block_that_a_second_fuse_cannot_fuse_is_no_longer_fused():
    model = fuse(swapped(nn.Sequential(Block(), Block())))
    model[0].act = nn.Tanh()
    model[0].bn2 = nn.Identity()
    assert list(fused_modules(fuse(model))) == ["1"]


class Toy(TargetVarianceNorm):
    """A norm that `normplug._fuse` knows nothing about."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.target_variance, self.backend = 0.5, "torch"
        self.made = []

    def forward(self, x):
        scale = (
            x.square().mean(-1, keepdim=True).add(1e-5).rsqrt()
            * self.target_variance**0.5
        )
        return x * scale * self.weight


class Declared(Toy):
    """A norm that declares what can be fused with it."""

    forward = Toy.forward

    def _fused(self, x, residual=None, activation=None):
        assert residual is None
        self.made.append(activation)
        return getattr(F, activation)(self.forward(x))

    def _fused_add(self, a, b):
        self.made.append("add")
        return self.forward(a + b), a + b

    _fusion_sites = FusionSites(
        {"forward": forward}, after=("activation",), before=("sum",)
    )


class Further(Declared):
    def forward(self, x):
        return super().forward(x) * 2


class Around(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.act = norm, nn.SiLU()

    def forward(self, x):
        return self.act(self.norm(x))


class Sum(Around):
    def forward(self, x):
        total = x + x
        return self.norm(total) + total


class SumByName(Around):
    """Not traced, since its forward takes keyword arguments."""

    def forward(self, x, **options):
        total = x + x
        return self.norm(total) + total


@pytest.mark.parametrize(
    ("around", "call"), [(Around, "silu"), (Sum, "add"), (SumByName, "add")]
)
def test_a_norm_is_fused_with_what_its_class_declares(around, call, calls):
    model = around(Declared()).double()
    plain = copy.deepcopy(model)
    fuse(model)
    x = torch.randn(4, 8, dtype=torch.double)
    assert_same_step(model, plain, x)
    assert model.norm.made == [call]


class AddedBefore(Around):
    """The norm declares no addition after it, and a LayerNorm no activation."""

    def forward(self, x):
        return self.act(self.norm(x) + x)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Around(Toy()), "nothing to do: no fusion for Toy"),
        (
            lambda: Around(Further()),
            "nothing to do: a subclass with a forward of its own",
        ),
        (lambda: AddedBefore(Declared()), REASON),
        (lambda: Around(LayerNorm(8)), REASON),
    ],
)
def test_what_a_class_does_not_declare_is_not_fused_and_the_reason_is_given(make, why):
    with pytest.warns(UserWarning, match=rf"not fused: 1 \({why}\)"):
        fuse(make())


def test_stock_norms_are_left_and_reported_as_such():
    model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), nn.ReLU())
    nothing = r"Sequential; 0 of 2 norm layers fused; not fused: 2 \(not swapped\)\."
    with pytest.warns(UserWarning, match=nothing):
        fuse(model)
    swap(model, include="0")
    could = "1 of 2 norm layers can be fused by normplug.fuse(model): 1 with ReLU; not fused: 1"
    assert fusions(model).summary() == f"{could} (not swapped)"
    fuse(model)
    notes = [(row.label, row.note) for row in fusions(model)]
    assert notes == [("ReLU", ""), (None, "not swapped")]
    assert "1 of 2 norm layers fused: 1 with ReLU" in str(fusions(model))
    fuse(swap(model))  # again, with more to fuse
    assert [row.label for row in fusions(model)] == ["ReLU", "ReLU"]
