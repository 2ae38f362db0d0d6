"""Swapped architectures of other libraries are right, and the check detects wrong swaps."""

import itertools
import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zoo.check
from normplug import _convert
from zoo import __main__, run
from zoo.check import Architecture, check, compare
from zoo.run import check_one
from zoo.table import render, summary

CPU = torch.device("cpu")
# Of most families, and a few seconds each at most. `python benchmarks/zoo` checks all.
NAMES = {
    "torchvision": """
        convnext_tiny efficientnet_b0 fasterrcnn_mobilenet_v3_large_fpn
        lraspp_mobilenet_v3_large mnasnet0_5 mobilenet_v3_large quantized_shufflenet_v2_x0_5
        raft_small regnet_y_400mf resnet18 shufflenet_v2_x0_5 squeezenet1_1
    """,
    "timm": """
        regnetx_002 skresnet18 test_convnext test_efficientnet test_resnet test_vit
    """,
    "transformers": """
        bert clip convnext gemma gpt2 llama resnet swin t5 vit wav2vec2
    """,
    "diffusers": """
        AutoencoderKL FluxTransformer2DModel LTXVideoTransformer3DModel UNet2DConditionModel
        WanTransformer3DModel
    """,
}


def architectures(library):
    module = pytest.importorskip(f"zoo.{library}_models", exc_type=ImportError)
    return {a.name: a for a in module.architectures()}


@pytest.mark.parametrize(
    ("library", "name"),
    [(library, n) for library, names in NAMES.items() for n in names.split()],
)
def test_a_swapped_architecture_is_its_stock_self(library, name):
    row = check_one(architectures(library)[name], large=False, device=CPU)
    expected = "none taken" if name == "squeezenet1_1" else "ok"
    assert (row["result"], row["reason"]) == (expected, "")


def test_the_list_of_timm_covers_its_families():
    timm = pytest.importorskip("timm")
    families = {
        timm.models._registry._model_to_module[name] for name in architectures("timm")
    }
    assert families == {
        timm.models._registry._model_to_module[name] for name in timm.list_models()
    }


class Net(nn.Module):
    """A norm of each kind, one without a weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.bn = nn.BatchNorm1d(6)
        self.bare = nn.LayerNorm(6, elementwise_affine=False)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return {"y": self.last(torch.tanh(self.bare(self.bn(self.first(x)))))}


class ReadsTheWeight(Net):
    """Bypasses the norm's forward, as fused inference does."""

    def forward(self, x):
        x = self.first(x)
        if self.training:
            return self.last(self.bn(x))
        bn = self.bn
        return self.last(
            F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias)
        )


class Cancelled(Net):
    """The output does not depend on the norms."""

    def forward(self, x):
        return 0 * self.last(self.bn(self.first(x))).sum() + x.sum()


class Raises(Net):
    def forward(self, x):
        raise RuntimeError("this model does not run")


def inputs(model=None):
    return {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}


def says(pattern, report):
    return any(re.match(pattern, failure) for failure in report.failures)


def test_a_sound_model_passes():
    report = check(Net(), inputs())
    assert report.taken == {"BatchNorm1d": 1, "LayerNorm": 1}
    assert report.failures == []


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            ReadsTheWeight,
            "golden is not the folded stock model: 1 of .* output in evaluation/0",
        ),
        (Cancelled, "golden is the same function as standard"),
    ],
)
def test_a_swap_that_does_not_reach_the_output_is_seen(model, said):
    assert says(said, check(model(), inputs()))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("target_variance", "golden is not the folded stock model"),
        ("eps", "standard is not the stock model"),
        ("momentum", "standard is not the stock model: .* statistic/bn.running"),
    ],
)
def test_a_wrong_setting_is_seen(broken, said, monkeypatch):
    convert = _convert.convert

    def wrong(module, tv, **options):
        convert(
            module,
            1.01 * tv if broken == "target_variance" and tv != 1 else tv,
            **options,
        )
        if broken != "target_variance":
            setattr(module, broken, 0.2)

    monkeypatch.setattr(_convert, "convert", wrong)
    assert says(said, check(Net(), inputs()))


def test_a_stock_model_that_differs_from_itself_is_not_judged():
    calls = itertools.count()

    class Unsteady(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + next(calls)

    model = Unsteady(nn.Linear(4, 4), nn.LayerNorm(4))
    report = check(model, {"x": torch.randn(2, 4)})
    assert "differs from itself in output" in report.unsteady
    assert not report.failures


def test_a_stock_model_that_rounding_moves_is_not_judged(monkeypatch):
    class Unstable(nn.Sequential):
        def forward(self, x):
            return super().forward(x) + 1e15 * (self[0].weight.sum() - weight)

    model = Unstable(nn.Linear(4, 4), nn.LayerNorm(4)).double()
    batch = {"x": torch.randn(2, 4).double()}
    weight = model[0].weight.sum().item()
    assert not check(model, batch).unsteady  # the same bits, so nothing looks for noise
    monkeypatch.setattr(
        zoo.check, "_swapped", lambda model, mode: zoo.check._nudged(model)
    )
    assert "differs from itself in output" in check(model, batch).unsteady


def test_what_unswap_leaves_behind_is_seen(monkeypatch):
    revert = _convert.revert
    monkeypatch.setattr(_convert, "revert", lambda m: (revert(m), setattr(m, "left", 1)))
    assert "bn has other attributes after unswap" in check(Net(), inputs()).failures


def test_differences_are_relative_and_a_missing_value_is_infinite():
    theirs = {"output/0": torch.tensor([100.0]), "output/1": torch.tensor([1e-9])}
    errors = compare(
        {"output/0": torch.tensor([101.0]), "output/1": torch.zeros(1)}, theirs
    )
    assert errors["output/0"] == pytest.approx(0.01)
    assert errors["output/1"] < 1e-7  # noise next to the other output
    assert compare({}, theirs)["output/0"] == float("inf")


def only(**models):
    """A library of these models."""
    return [Architecture("here", name, model, inputs) for name, model in models.items()]


def test_one_failing_architecture_does_not_stop_the_table(monkeypatch, capsys, tmp_path):
    listed = only(
        sound=Net, raises=Raises, bypass=ReadsTheWeight, plain=lambda: nn.Linear(4, 4)
    )
    monkeypatch.setattr(run, "_architectures", lambda libraries, missing: listed)
    path = tmp_path / "zoo.json"
    assert (
        __main__.main(["--json", str(path), "--markdown", str(tmp_path / "zoo.md")]) == 1
    )
    rows = json.loads(path.read_text())
    results = {row["name"]: row["result"] for row in rows}
    assert results == {
        "sound": "ok",
        "raises": "failed",
        "bypass": "failed",
        "plain": "none taken",
    }
    assert all({"device", "torch", "date", "commit"} < row.keys() for row in rows)
    table = (tmp_path / "zoo.md").read_text()
    assert table == render(rows)
    assert "| here | 4 | 1 | 1 | 2 | 0 |" in table
    assert "RuntimeError: this model does not run" in table
    assert summary(rows) in capsys.readouterr().out


def test_a_large_model_is_skipped_unless_all_are_asked_for(monkeypatch):
    monkeypatch.setattr(run, "LARGE", 10)
    (architecture,) = only(sound=Net)
    row = check_one(architecture, large=False, device=CPU)
    assert row["result"] == "skipped"
    assert row["reason"].endswith("--all takes it")
    assert check_one(architecture, large=True, device=CPU)["result"] == "ok"


def test_the_command_checks_what_it_is_asked_for(tmp_path, capsys):
    pytest.importorskip("torchvision")
    path = tmp_path / "zoo.json"
    arguments = [
        "--library",
        "torchvision",
        "--only",
        "shufflenet_v2_x0_5",
        "--json",
        str(path),
    ]
    assert __main__.main(arguments) == 0
    (row,) = json.loads(path.read_text())
    assert row["result"] == "ok"
    assert row["taken"] == {"BatchNorm2d": 56}
    assert "torchvision: 1 ok" in capsys.readouterr().out
    assert __main__.main(["--library", "torchvision", "--only", "no_such_net"]) == 1
    assert "no architecture matches 'no_such_net'" in capsys.readouterr().err


def test_a_library_that_is_not_installed_is_passed_over(monkeypatch, capsys):
    pytest.importorskip("torchvision")
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.delitem(sys.modules, "zoo.timm_models", raising=False)
    arguments = [
        "--library",
        "timm",
        "--library",
        "torchvision",
        "--only",
        "shufflenet_v2_x0_5",
    ]
    assert __main__.main(arguments) == 1  # timm was asked for
    said = capsys.readouterr()
    assert said.err == 'zoo --library timm needs timm: pip install "normplug[zoo]"\n'
    assert "torchvision: 1 ok" in said.out


@pytest.mark.gpu
def test_an_architecture_on_the_gpu_is_compared_in_float64():
    row = check_one(
        architectures("torchvision")["resnet18"], large=False, device=torch.device(0)
    )
    assert (row["result"], row["reason"]) == ("ok", "")


def test_a_float32_difference_is_decided_in_float64(monkeypatch):
    def found(architecture, *, exact, **_):
        return (
            {"result": "unsteady", "reason": "it varies"}
            if exact
            else {"result": "failed"}
        )

    monkeypatch.setattr(run, "_check", found)
    (architecture,) = only(sound=Net)
    row = check_one(architecture, large=False, device=CPU)
    assert (row["result"], row["reason"]) == ("unsteady", "in float64 it varies")
