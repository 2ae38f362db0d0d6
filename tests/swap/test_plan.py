"""What `plan` lists, and what the filters of `swap` accept."""

import pytest
import torch
from torch import nn

from normplug import plan, swap
from programs import program
from swap_cases import X, assert_frozen, frozen


@pytest.mark.parametrize(
    ("filters", "swapped"),
    [
        ({}, {"stem.1", "flat", "norm"}),
        ({"include": "stem.*"}, {"stem.1"}),
        ({"include": ["stem.*", "fl?t"]}, {"stem.1", "flat"}),
        ({"exclude": "stem.*"}, {"flat", "norm"}),
        ({"exclude": "head.1"}, {"stem.1", "flat"}),  # any name of a shared layer counts
        ({"include": "*", "exclude": ["flat", "again"]}, {"stem.1"}),
        ({"include": r"re:(stem\.\d|norm)"}, {"stem.1", "norm"}),
        ({"exclude": nn.LayerNorm}, {"stem.1", "flat"}),
        (
            {"include": lambda path, m: getattr(m, "num_features", 0) == 8},
            {"stem.1", "flat"},
        ),
        ({"include": (nn.BatchNorm2d, "norm")}, {"stem.1", "norm"}),
    ],
)
def test_filters_choose_the_same_layers_in_plan_and_swap(net, filters, swapped):
    planned = {row.path for row in plan(net, **filters) if row.becomes}
    swap(net, **filters)
    assert planned == swapped
    rows = [
        row for row in plan(net) if type(row.module).__module__.startswith("normplug")
    ]
    assert {row.path for row in rows} == swapped


def test_an_include_that_matches_nothing_is_an_error_and_an_exclude_warns(net):
    before = frozen(net)
    text = "include='layer9.*' matches no norm layer; the model has: stem.1, flat, norm"
    with pytest.raises(ValueError, match=text):
        swap(net, "golden", include="layer9.*")
    with pytest.raises(ValueError, match="not a valid regular expression"):
        swap(net, "golden", include="re:(")
    with pytest.raises(TypeError, match="include must be a glob"):
        swap(net, "golden", include=[3])
    assert_frozen(net, before)
    for call in (plan, swap):
        with pytest.warns(
            UserWarning, match="exclude='haed.*' matches no norm layer"
        ) as caught:
            call(net, exclude="haed.*")
        assert caught[0].filename == __file__


def test_nothing_to_swap_warns_with_what_was_seen():
    model = nn.Sequential(*(nn.LocalResponseNorm(n) for n in (2, 3)), nn.CrossMapLRN2d(2))
    text = (
        r"2 LocalResponseNorm \(nothing to do: no normplug counterpart\), 1 CrossMapLRN2d"
    )
    with pytest.warns(UserWarning, match=text):
        assert swap(model, "golden") is model
    with pytest.warns(
        UserWarning, match=r"nothing to swap in Linear; norm layers seen: none\.$"
    ):
        swap(nn.Linear(2, 2), "golden")


def test_subclasses_and_other_norms_are_left_and_plan_says_so(net):
    class Odd(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    net.odd = Odd(4)
    net.local = nn.LocalResponseNorm(2)
    net.weighty = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    notes = {row.path: row.note for row in plan(net) if not row.becomes}
    assert notes == {
        "odd": "a subclass of nn.BatchNorm2d with a forward of its own: "
        "write an adapter (docs/add-a-norm.md)",
        "local": "nothing to do: no normplug counterpart",
    }
    swap(net, "golden")
    assert type(net.odd) is Odd
    text = str(plan(net))
    assert "swapped already, mode golden; also again; also head.1" in text
    swapped = "3 of 5 norm layers: 1 BatchNorm2d, 1 BatchNorm1d, 1 LayerNorm"
    assert f"{swapped}; left: 1 Odd (a sub" in text


class AdaGroupNorm(nn.Module):
    """As diffusion models have it: its scale is computed from another input."""

    def __init__(self):
        super().__init__()
        self.groups, self.eps = 2, 1e-5
        self.linear = nn.Linear(3, 4)


class NormedBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.inner = AdaGroupNorm()


def test_a_norm_whose_scale_comes_from_another_input_is_left_and_plan_says_so():
    notes = {row.path: row.note for row in plan(NormedBlock())}
    assert notes == {"inner": "nothing to do: its scale comes from layers of its own"}


def test_a_class_that_was_patched_before_the_swap_is_left_and_plan_says_so(
    net, monkeypatch
):
    forward = nn.modules.batchnorm._BatchNorm.forward
    monkeypatch.setattr(nn.BatchNorm1d, "forward", lambda self, x: forward(self, x) * 2)
    net.eval()
    expected = net(X)
    swap(net)
    assert type(net.flat) is nn.BatchNorm1d
    torch.testing.assert_close(net(X), expected)
    (row,) = [row for row in plan(net) if row.module is net.flat]
    text = "the forward of its class was replaced by other code: undo that, then swap"
    assert (row.becomes, row.note) == (None, text)
    assert type(net.stem[1]).__module__ == "normplug.modules.batch_norm"


PATCHED_FIRST = """
import functools
from torch import nn

@functools.wraps(nn.LayerNorm.forward)
def patch(self, x):
    return x

nn.LayerNorm.forward = patch
import normplug

model = normplug.swap(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4)))
print(*(type(m).__module__ for m in model))
"""


def test_a_class_may_have_been_patched_before_normplug_is_imported():
    done = program(PATCHED_FIRST)
    assert done.stdout.split() == [
        "torch.nn.modules.normalization",
        "normplug.modules.row_norms",
    ]
