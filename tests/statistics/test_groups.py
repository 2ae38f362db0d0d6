"""`param_groups` and `python -m normplug`."""

import os
import runpy

import pytest
import torch
from torch import nn

import normplug
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
    runpy.run_module("normplug", run_name="__main__")
    out = capsys.readouterr().out
    for text in (normplug.__version__, str(torch.__version__), "host path", "NORMPLUG_BACKEND"):
        assert text in out
