"""`param_groups` and `python -m normplug`."""

import os

import pytest
import torch
from torch import nn

import normplug
from normplug import __main__ as entry
from normplug import param_groups, swap


def names(model, groups):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return [[by_id[id(p)] for p in group["params"]] for group in groups]


def test_matrices_decay_and_norms_biases_and_tied_ones_are_taken_once():
    model = nn.Sequential(
        nn.Embedding(7, 4), nn.LayerNorm((3, 4)), nn.Bilinear(4, 4, 4), nn.Linear(4, 7)
    )
    model[3].weight = model[0].weight
    groups = param_groups(model, 0.05)
    assert [group["weight_decay"] for group in groups] == [0.05, 0.0]
    decayed, plain = names(model, groups)
    assert decayed == ["0.weight", "2.weight"]
    assert plain == ["1.weight", "1.bias", "2.bias", "3.bias"]
    swapped = swap(model)
    assert names(swapped, param_groups(swapped, 0.05)) == [decayed, plain]
    torch.optim.AdamW(groups)


def test_a_norm_of_another_library_does_not_decay():
    timm = pytest.importorskip("timm")
    model = timm.create_model("convnext_atto", num_classes=3)
    decayed, plain = names(model, param_groups(model, 0.1))
    assert decayed
    assert not [name for name in decayed if "norm" in name or name.endswith("bias")]
    assert len(decayed) + len(plain) == len(list(model.parameters()))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="weight_decay must be at least 0; got -1"):
        param_groups(nn.Linear(2, 2), -1)
    with pytest.raises(ValueError, match="uninitialized parameter"):
        param_groups(nn.Sequential(nn.LazyLinear(3)), 0.1)


def test_the_module_prints_what_an_issue_needs(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "NORMPLUG_BACKEND", "auto")
    entry.main([])
    out = capsys.readouterr().out
    for text in (
        normplug.__version__,
        str(torch.__version__),
        "C++ launcher",
        "NORMPLUG_BACKEND",
    ):
        assert text in out


class NormedLinear(nn.Linear):
    """A classifier over directions, as mmdetection has it."""


class NormalHead(nn.Conv2d):
    """Predicts normals of surfaces."""


class ChannelNorm(nn.Module):
    """A norm that only its name tells, with a weight for each channel and a projection."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, 4, 1, 1))
        self.mixing = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return x * self.gain


class OwnNorm(nn.LayerNorm):
    """A subclass of a known norm."""


def test_a_name_alone_takes_no_decay_from_a_matrix():
    model = nn.Sequential(
        NormedLinear(4, 4),
        NormalHead(4, 1, 1),
        NormalHead(1, 4, 1),
        ChannelNorm(),
        OwnNorm((2, 4)),
    )
    decayed, plain = names(model, param_groups(model, 0.1))
    assert decayed == ["0.weight", "1.weight", "2.weight", "3.mixing"]
    assert plain == ["0.bias", "1.bias", "2.bias", "3.gain", "4.weight", "4.bias"]


def test_the_parameters_of_parametrizations_belong_to_the_tensors_they_make():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((3, 4)), nn.Bilinear(4, 4, 4))
    for layer, name in ((model[0], "weight"), (model[1], "weight"), (model[1], "bias")):
        nn.utils.parametrize.register_parametrization(layer, name, Doubled())
    nn.utils.parametrizations.weight_norm(model[2])
    decayed, plain = names(model, param_groups(model, 0.1))
    inner = "2.parametrizations.weight.original"
    assert decayed == ["0.parametrizations.weight.original", f"{inner}0", f"{inner}1"]
    assert sorted(plain) == [
        *(
            "0.bias",
            "1.parametrizations.bias.original",
            "1.parametrizations.weight.original",
        ),
        "2.bias",
    ]
    optimizer = torch.optim.SGD(param_groups(model, 0.1))
    assert not decaying(model[:2], optimizer)
    assert decaying(model[:2], torch.optim.SGD(model.parameters(), weight_decay=0.1)) == [
        "1"
    ]


def decaying(model, optimizer):
    found = normplug.doctor(model, torch.randn(9, 3, 4), optimizer=optimizer)
    return [row.layer for row in found if row.finding == "norm parameters that decay"]


def test_doctor_names_no_matrix_that_its_name_makes_a_norm():
    model = nn.Sequential(nn.LayerNorm(4), NormedLinear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), weight_decay=0.1)
    assert decaying(model, optimizer) == ["0"]
