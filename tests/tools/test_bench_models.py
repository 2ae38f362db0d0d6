"""`python -m normplug.bench model` and `measure`: what a user learns about a model."""

import copy
import gc
import json
import re
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import normplug
from normplug.bench import Rows, measure, models
from normplug.bench.__main__ import main

pytestmark = pytest.mark.usefixtures("quick")
FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x))).flatten(1)

def net(batch=3, width=4):
    return Net(width), torch.randn(batch, 3, 6, 6)

def with_step(power):
    model, batch = net()
    return model, batch, lambda model, x: model(x).abs().pow(power).mean()

def nothing():
    return None
"""


@pytest.fixture
def net():
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(16 * 4, 2), nn.LayerNorm(2))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_each_arm_has_a_row_and_one_sentence_says_how_much_faster_it_is(net):
    before = copy.deepcopy(net.state_dict())
    rows = measure(net, torch.randn(2, 3, 6, 6), mode="golden", rounds=3)
    assert [row["arm"] for row in rows] == list(models.usual_arms("golden"))
    for row in rows:
        assert row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["over_eager"] == pytest.approx(rows[0]["ms"] / row["ms"])
        assert row["mode"] == "golden"
        assert {"device", "commit", "date", "torch", "normplug"} <= row.keys()
        assert row["first_step_s"] > 0
    # The LayerNorm comes last, so the mean square of the outputs is the variance.
    assert [row["loss"] for row in rows] == pytest.approx(2 * [1] + 3 * [0.618], abs=0.01)
    ms = {row["arm"]: row["ms"] for row in rows}
    swapped, fused, faster, where = rows.notes
    assert swapped == "swapped: 1 BatchNorm2d, 1 LayerNorm, of 2 norm layers"
    assert fused.startswith("fused: 1 of 2 norm layers fused: 1 with ReLU")
    assert faster == (
        f"fuse: {ms['eager'] / ms['swap+fuse']:.2f} times eager; with torch.compile: "
        f"{ms['compile'] / ms['swap+fuse+compile']:.2f} times compile alone"
    )
    assert where.endswith(f"commit {rows[0]['commit']}")
    # The model is as it was.
    assert type(net[1]) is nn.BatchNorm2d
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_rows_are_text_html_and_a_frame():
    rows = Rows(
        [{"arm": "a<b", "ms": 1.234}, {"arm": "c", "ms": None}], ("arm", "ms", "gib")
    )
    rows.notes.append("a sentence")
    assert str(rows) == "arm  ms\na<b  1.23\nc    -\na sentence"
    assert rows[1]["arm"] == "c"
    frame = pytest.importorskip("pandas") and rows.to_pandas()
    assert (list(frame), frame["ms"].tolist()[0]) == (["arm", "ms"], 1.234)
    assert rows._repr_html_().startswith("<pre>arm  ms\na&lt;b  1.23")


def test_an_arm_that_fails_says_why_and_the_others_are_measured(net, monkeypatch, capsys):
    def broken(model):
        raise RuntimeError("no compiler here\nand a long story")

    monkeypatch.setattr(torch, "compile", broken)
    rows = measure(net, (torch.randn(2, 3, 6, 6),), rounds=1)
    why = "RuntimeError: no compiler here"
    assert [row["arm"] for row in rows] == ["eager", "swap", "swap+fuse"]
    assert f"compile is left out: {why}" in capsys.readouterr().err
    assert re.fullmatch(r"fuse: \d+\.\d\d times eager", rows.notes[-2])


def test_a_cuda_graph_needs_a_gpu(net, capsys):
    arms = {name: models.usual_arms("standard")["eager"] for name in ("eager", "x+graph")}
    rows = measure(net, torch.randn(2, 3, 6, 6), arms=arms, rounds=1)
    assert [row["arm"] for row in rows] == ["eager"]
    said = capsys.readouterr().err
    assert "x+graph is left out: RuntimeError" in said
    assert "needs a model on a CUDA device" in said


def test_verbose_says_each_arm_as_it_goes(net, capsys):
    arms = {"eager": lambda model: model, "swap": normplug.swap}
    measure(net, torch.randn(2, 3, 6, 6), rounds=2, arms=arms, verbose=True)
    told = capsys.readouterr().err
    words = [
        "eager: first steps", r"eager: the first took \S+ s",
        "swap: first steps", r"swap: the first took \S+ s", "2 rounds of eager, swap",
    ]  # fmt: skip
    assert re.fullmatch("".join(f"normplug.bench: {each}\n" for each in words), told)
    measure(net, torch.randn(2, 3, 6, 6), rounds=1, arms=arms)
    assert capsys.readouterr().err == ""


def test_a_step_without_a_finite_loss_that_has_gradients_is_refused(net):
    with pytest.raises(
        ValueError, match="the loss is nan, which would make the step faster"
    ):
        measure(net, torch.full((2, 3, 6, 6), float("inf")))
    net.register_forward_hook(lambda net, x, y: y.detach())
    with pytest.raises(ValueError, match="no tensor with a gradient. Pass a `step`"):
        measure(net, torch.randn(2, 3, 6, 6))


def test_a_function_of_a_file(file, tmp_path, capsys):
    path = tmp_path / "rows.json"
    words = ["model", f"{file}:net", "width=8", "--batch", "4", "--rounds", "1", "--json"]
    for _ in range(2):  # the second run's rows are appended
        main([*words, str(path)])
    assert "swapped: 1 BatchNorm2d, of 1 norm layers" in capsys.readouterr().out
    rows = json.loads(path.read_text())
    found = [(row["model"], row["batch"], row["mode"]) for row in rows]
    assert found == 10 * [(f"{file}:net", 4, "standard")]
    main(["table", str(path)])
    table = capsys.readouterr().out
    assert table.split()[:4] == ["model", "batch", "arm", "ms"]
    assert len(table.splitlines()) == 11
    model, batch, step = models.load(f"{file}:with_step", None, {"power": 3})
    assert step(model, batch).item() == pytest.approx(
        model(batch).abs().pow(3).mean().item()
    )


@pytest.mark.parametrize(
    ("target", "words", "says"),
    [
        ("{file}:nobody", [], "has no function 'nobody'"),
        ("{file}:nothing", [], "must return (model, batch) or (model, batch, step)"),
        ("{file}:with_step", ["--batch", "2"], "unexpected keyword argument 'batch'"),
        ("no/such.py:net", [], "No such file or directory"),
        ("resnet5", [], "no model 'resnet5' in torchvision, timm or transformers."),
        ("net.py", [], "For a function of a file, give net.py:NAME."),
    ],
)
def test_a_wrong_target_is_one_sentence(file, target, words, says):
    with pytest.raises(SystemExit) as caught:
        main(["model", target.format(file=file), *words, "--device", "cpu"])
    assert says in str(caught.value)
    assert str(caught.value).startswith("normplug.bench model: ")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    how = r"Not installed: .*timm, transformers \(pip install .*timm transformers\)\."
    with pytest.raises(ValueError, match=how):
        models.load("timm:x", None, {})


def test_a_wrong_mode_measures_nothing(file, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["model", f"{file}:net", "--mode", "gold", "--device", "cpu"])
    assert caught.value.code == 2
    assert "mode must be 'golden'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("library", "target", "options"),
    [
        ("torchvision", "resnet18", {"size": 32}),
        ("timm", "timm:test_resnet", {"size": 32}),
        ("transformers", "gpt2", {"n_layer": 1, "n_embd": 24, "n_head": 2, "length": 8}),
        ("transformers", "t5", {"num_layers": 1, "d_model": 16, "d_ff": 16, "length": 8}),
        ("transformers", "transformers:vit", {"num_hidden_layers": 1, "image_size": 32}),
    ],
)
def test_models_by_name_have_a_loss_with_gradients(library, target, options):
    pytest.importorskip(library)
    model, batch, step = models.load(target, 2, options)
    loss = (step or models.default_step(model, batch))(model.train(), batch)
    loss.backward()
    assert loss.isfinite()
    gradients = [row.module.weight.grad for row in normplug.plan(model)]
    assert len(gradients) > 0
    assert None not in gradients


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)

    def forward(self, x, y):
        return self.norm(self.linear(x) + y)


def test_the_step_gets_the_whole_batch_as_tensors():
    seen = []

    def step(model, batch):
        seen.append(batch)
        return model(batch["x"], batch["y"]).square().mean()

    batch = {"x": np.ones((4, 4)), "y": torch.randn(4, 6), "label": np.arange(4)}
    measure(Two(), batch, step, rounds=1, arms={"eager": lambda model: model})
    assert seen[0]["label"].tolist() == [0, 1, 2, 3]
    assert isinstance(batch["x"], np.ndarray)


@pytest.mark.gpu
def test_a_step_as_one_cuda_graph_trains_as_the_step_does(net):
    batch = torch.randn(2, 3, 6, 6, device="cuda")
    step, model = models.make_step(
        net.cuda(), batch, models.default_step(net, batch), None, lambda net: net
    )
    count = model[1].num_batches_tracked
    plain = step()
    replay = models.captured(step)
    kept = weakref.ref(model)
    del step, model
    gc.collect()
    torch.cuda.empty_cache()
    before = count.item()
    torch.testing.assert_close(replay(), plain)
    assert count.item() == before + 1
    assert kept() is not None  # else the graph would write to memory that is freed


@pytest.mark.gpu
def test_an_arm_of_a_graph_is_timed_and_has_no_peak_memory(net):
    stock = models.usual_arms("standard")["eager"]
    arms = {"eager": stock, "eager+graph": stock}
    eager, graph = measure(net.cuda(), torch.randn(2, 3, 6, 6), arms=arms, rounds=1)
    assert graph["loss"] == pytest.approx(eager["loss"], rel=1e-5)
    assert graph["gpu_ms"] > 0
    assert "peak_gib" in eager
    assert "peak_gib" not in graph


@pytest.mark.gpu
def test_on_a_gpu_its_busy_time_and_the_memory_are_known(net):
    batch = torch.randn(64, 3, 6, 6)
    for row in measure(net.cuda(), batch, rounds=2, autocast=torch.bfloat16):
        assert 0 < row["gpu_ms"] < 1.5 * row["ms"]
        assert batch.nbytes <= row["peak_gib"] * 2**30 < 1e8
