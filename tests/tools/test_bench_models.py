"""Whole training steps: arms that start alike and differ as named, and what is reported."""

import copy
import gc
import json
import sys
from functools import partial
from importlib.util import find_spec
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import normplug
from normplug.bench import models
from normplug.bench.__main__ import main
from normplug.bench.models import ARMS, GRAPHED, ROUNDS, TURN, USUAL, WARM_UPS, Captured
from normplug.bench.nets import MODELS, Case, Images, select
from normplug.bench.results import MODELS as KIND
from normplug.bench.results import PROFILE, Results
from training import python

TINY = Case("tiny", 4)
UNFUSED = ["eager", "swap", "no-norm"]  # and uncompiled


class SubLayerNorm(nn.LayerNorm):
    pass


class TinyNet(nn.Sequential):
    """5 classes of images of 6x6 pixels."""

    def __init__(self):
        shared = SubLayerNorm(6)
        stem = (nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        norms = (nn.LayerNorm(6), shared, nn.Identity(), shared)
        super().__init__(*stem, *norms, nn.Flatten(), nn.Linear(4 * 6**2, 5))


class Still:
    """A stopwatch that calls, and shows the same every time; it keeps what it was asked for."""

    def __init__(self):
        self.turns = []
        self.held = count(1000, 100)  # each arm holds 100 bytes when the next is made

    def turn_ms(self, step, count):
        step()
        self.turns.append(step)
        return [10.0, 40.0, 20.0, 20.0, 30.0][:count]

    def host_ms(self, step):
        return 7.0

    def peak_bytes(self, step):
        return 5000

    def held_bytes(self):
        return next(self.held)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    model = Images(TinyNet, (4, 2), image_size=6, classes=5)
    monkeypatch.setitem(MODELS, "tiny", model)
    monkeypatch.setattr(models, "profiled", lambda step: {"gpu_ms": 6.0})
    return model


def measured(arms, tmp_path, stopwatch=None, profiles=None):
    results = Results(tmp_path / "rows.json", KIND, models.PACKAGES, settings=models.SETTINGS)
    models.measure(TINY, arms, ROUNDS, stopwatch or Still(), "cpu", results, profiles)
    assert json.loads((tmp_path / "rows.json").read_text()) == results.content
    return results.content


@pytest.mark.parametrize("name", ["resnet50", "vit_b_16", "swin_t"])
def test_a_network_has_the_weights_of_torchvisions(name):
    get_model = pytest.importorskip("torchvision.models").get_model
    with torch.device("meta"):
        ours = MODELS[name].build().state_dict()
        theirs = get_model(name).state_dict()
    assert {key: t.shape for key, t in ours.items()} == {k: t.shape for k, t in theirs.items()}


def test_the_network_for_cifar_has_a_stem_for_small_images():
    pytest.importorskip("torchvision")
    with torch.device("meta"):
        net = MODELS["resnet18-cifar"].build()
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert (net.conv1.kernel_size, net.conv1.stride) == ((3, 3), (1, 1))
    assert not any(isinstance(module, nn.MaxPool2d) for module in net.modules())


def test_select_takes_each_models_own_batches_unless_told():
    own = [Case("vit_b_16", 128), Case("tiny", 4), Case("tiny", 2)]
    assert select(["tiny", "vit_b_16"], None) == own
    assert select(["tiny"], 3) == [Case("tiny", 3)]
    named = [case.model for case in select(None, None)]
    assert list(dict.fromkeys(named)) == list(MODELS)


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "liger"])
def test_an_arm_is_what_it_is_named_for(arm, tiny, monkeypatch):
    def fuse(net, recompute=False):
        assert type(net[1]) is normplug.BatchNorm2d
        return net

    fused = Mock(side_effect=fuse)
    monkeypatch.setattr(normplug, "fuse", fused)
    torch.manual_seed(1)
    stock = TinyNet()
    before = copy.deepcopy(stock.state_dict())
    net = models.build(stock, arm, tiny, "cpu")
    compiled = isinstance(net, torch._dynamo.eval_frame.OptimizedModule)
    assert compiled == arm.endswith("compile")
    inner = net._orig_mod if compiled else net

    becomes = {"eager": nn, "compile": nn}.get(arm.partition("+")[0], normplug)
    if arm == "no-norm":
        assert len(normplug.plan(inner)) == 0
        assert sum(isinstance(module, nn.Identity) for module in inner) == 5
    else:
        assert [type(inner[1]), type(inner[3])] == [becomes.BatchNorm2d, becomes.LayerNorm]
        assert inner[4] is inner[6]
        assert type(inner[4]) is SubLayerNorm
        assert becomes is nn or inner[1].mode.name == models.MODE == "golden"
    assert fused.call_count == ("fuse" in arm)

    assert inner.training
    assert inner[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(before[key], t) for key, t in inner.named_parameters())
    assert type(stock[1]) is nn.BatchNorm2d  # the next arm starts from it
    assert all(torch.equal(before[key], t) for key, t in stock.state_dict().items())


class Llama(nn.Module):
    """A Llama of transformers, as far as Liger-Kernel's arm asks."""


@pytest.fixture
def modeling(monkeypatch):
    module = SimpleNamespace(LlamaRMSNorm="stock", LlamaForCausalLM=Llama)
    monkeypatch.setitem(sys.modules, "transformers.models.llama.modeling_llama", module)
    return module


def test_ligers_arm_replaces_the_norms_of_one_llama_only(modeling, tiny, monkeypatch):
    asked = []

    def apply(model, **parts):
        asked.append((model, [part for part, replaced in parts.items() if replaced]))
        modeling.LlamaRMSNorm = "Liger's"

    package = SimpleNamespace(apply_liger_kernel_to_llama=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    net = models.build(nn.Sequential(Llama()), "liger", tiny, "cpu")
    assert asked == [(net[0], ["rms_norm"])]
    assert modeling.LlamaRMSNorm == "stock"
    with pytest.raises(ValueError, match="arm liger is for a LlamaForCausalLM only"):
        models.build(TinyNet(), "liger", tiny, "cpu")


def test_ligers_arm_names_the_package_that_it_needs(modeling, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(ImportError, match=r'liger, needs liger_kernel.*"normplug\[bench\]"'):
        models.build(nn.Sequential(Llama()), "liger", tiny, "cpu")


@pytest.mark.parametrize("arms", [["swap", "swap+fuse"], ["eager", "compile"]])
def test_a_faster_arm_trains_as_the_plain_one(arms, tmp_path, monkeypatch):
    monkeypatch.setitem(ARMS, "compile", (partial(torch.compile, backend="aot_eager"),))
    rows = measured(arms, tmp_path)["rows"]
    assert [row["arm"] for row in rows] == arms
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=0.02)


def test_a_step_trains_under_autocast_and_leaves_the_weights(tiny):
    torch.manual_seed(0)
    net = models.build(TinyNet(), "swap", tiny, "cpu")
    batch = tiny.random_batch(4, "cpu")
    (images,), labels = batch
    assert images.shape == (4, 3, 6, 6)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert set(labels.tolist()) <= set(range(5))

    dtypes, gradients = [], []
    net[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.any()))
    before = [parameter.clone() for parameter in net.parameters()]
    step = models.make_step(net, tiny, batch)
    losses = [step(), step()]
    assert dtypes == [torch.bfloat16] * 2
    assert len(gradients) == 2 * len(before)
    assert all(gradients)
    assert losses[0] == losses[1]
    assert not losses[0].requires_grad
    for start, parameter in zip(before, net.parameters(), strict=True):
        assert parameter.grad is None
        assert torch.equal(start, parameter)


def test_a_row_says_what_was_measured(tmp_path, capsys):
    content = measured(UNFUSED, tmp_path)
    assert content["settings"]["mode"] == "golden"
    assert content["versions"].keys() >= {"torch", "normplug"}
    assert [row["arm"] for row in content["rows"]] == UNFUSED
    for row in content["rows"]:
        times = {"ms": 10.0, "median_ms": 25.0, "ms_p20": 10.0, "ms_p80": 40.0, "gpu_ms": 6.0}
        times |= {"host_ms": 7.0, "median_host_ms": 7.0}
        counts = {"steps": ROUNDS * TURN, "images_per_s": pytest.approx(4 / 0.025)}
        others = {key: row[key] for key in ("arm", "peak_gib", "loss", "native", "date")}
        assert row == {"model": "tiny", "batch": 4, **times, **counts, **others}
        assert 0 < row["loss"] < 5
    # The batch weighs 100 bytes and counts; it and what came before hold 1100, each arm 100.
    peaks = [row["peak_gib"] * 2**30 for row in content["rows"]]
    assert peaks == [5000 - (held - 100) for held in (1200, 1300, 1400)]
    assert capsys.readouterr().out.startswith("tiny, batch 4 | eager 10.00 ms, GPU 6.00, ")


def test_arms_take_turns_in_an_order_that_changes_and_is_the_same_each_time(tmp_path):
    def order():
        stopwatch = Still()
        measured(UNFUSED, tmp_path, stopwatch)
        names = {id(step): place for place, step in enumerate(dict.fromkeys(stopwatch.turns))}
        places = [names[id(step)] for step in stopwatch.turns]
        return [tuple(places[i : i + 3]) for i in range(0, len(places), 3)]

    rounds = order()
    assert len(rounds) == ROUNDS
    assert all(sorted(each) == [0, 1, 2] for each in rounds)
    assert len(set(rounds)) > 1
    assert order() == rounds


def fail(net):
    raise torch.OutOfMemoryError("too large")


def infinite(net):
    with torch.no_grad():
        net[-1].weight.fill_(torch.inf)
    return net


def fail_late(net):
    calls = count()

    def hook(module, inputs):
        if next(calls) > WARM_UPS + ROUNDS // 2:
            raise torch.OutOfMemoryError("no room")

    net.register_forward_pre_hook(hook)
    return net


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fail, "OutOfMemoryError('too large')"),
        (fail_late, "OutOfMemoryError('no room')"),
        (infinite, "the loss is nan, which would make"),
    ],
)
def test_an_arm_that_fails_is_left_out_aloud(change, reason, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARMS, "swap", (change,))
    steps = {row["arm"]: row["steps"] for row in measured(UNFUSED, tmp_path)["rows"]}
    assert steps == {"eager": ROUNDS * TURN, "no-norm": ROUNDS * TURN}
    error = capsys.readouterr().err
    assert error.startswith("tiny, batch 4: swap is left out: ")
    assert error.count("left out") == 1
    assert reason in error


def test_a_case_without_an_arm_that_works_has_no_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(ARMS, "swap", (fail,))
    assert measured(["swap"], tmp_path)["rows"] == []
    assert capsys.readouterr().out == "tiny, batch 4: no arm\n"


def test_a_case_that_fails_does_not_end_the_run(monkeypatch, capsys):
    def measure(case, *others):
        if case.batch == 4:
            raise torch.OutOfMemoryError("too many images")
        print(f"{case} is measured")
        return True

    monkeypatch.setattr(models, "measure", measure)
    monkeypatch.setattr(models, "StepStopwatch", Still)
    monkeypatch.setattr(models.native, "build", lambda: None)
    assert models.run(select(["tiny"], None), list(ARMS), 1, Results(None, KIND), None)
    shown = capsys.readouterr()
    assert "tiny, batch 4 is left out: OutOfMemoryError('too many images')" in shown.err
    assert "tiny, batch 2 is measured" in shown.out


def test_there_is_a_profile_of_each_arm(tmp_path, monkeypatch):
    def profiled(step):
        return {"gpu_ms": 6.0, "groups_ms": {"norm": float(step())}}

    monkeypatch.setattr(models, "profiled", profiled)
    path = tmp_path / "profile.json"
    measured(UNFUSED, tmp_path, profiles=Results(path, PROFILE, settings=models.SETTINGS))
    rows = json.loads(path.read_text())["rows"]
    cases = [(row["model"], row["batch"], row["arm"]) for row in rows]
    assert cases == [("tiny", 4, arm) for arm in UNFUSED]
    assert all(row["groups_ms"]["norm"] > 0 for row in rows)


@pytest.fixture
def runs(monkeypatch):
    """Let the command line run where there is no GPU; what it would measure, and the rows."""
    figures = dict.fromkeys(("ms", "images_per_s", "peak_gib", "host_ms"), 20.0)
    asked, rows = [], [{"model": "tiny", "batch": 4, "arm": "eager", **figures}]

    def run(cases, arms, rounds, results, profiles):
        asked.append((cases, arms, rounds, results.path, profiles and profiles.path))
        results.content["rows"] += rows
        return bool(rows)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(models, "run", run)
    return asked, rows


def test_the_command_line_chooses(runs, tmp_path):
    asked, _ = runs
    libraries = {name: made.library for name, made in MODELS.items()}
    installed = [name for name, library in libraries.items() if not library or find_spec(library)]
    main(["models"])
    chosen = ["--rows", "tiny", "--arms", "no-norm", "eager", "--batch", "3", "--rounds", "2"]
    files = {name: tmp_path / name for name in ("json", "markdown", "profile")}
    options = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    main(["models", *chosen, *options])
    assert asked == [
        (select(installed, None), list(USUAL), ROUNDS, None, None),
        ([Case("tiny", 3)], ["eager", "no-norm"], 2, files["json"], files["profile"]),
    ]
    assert "| tiny | 4 | 20.00 ms" in files["markdown"].read_text()


def test_the_command_line_fails_where_nothing_could_be_measured(runs):
    runs[1].clear()
    with pytest.raises(SystemExit, match="every arm was left out"):
        main(["models", "--rows", "tiny"])


@pytest.mark.gpu
def test_a_captured_step_holds_on_to_the_weights_that_it_reads(tiny):
    batch = tiny.random_batch(4, "cuda")
    net = TinyNet().cuda()
    step = models.make_step(net, tiny, batch)
    expected = step().item()
    captured = Captured(step)
    del net, step
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(3):
        assert captured().item() == pytest.approx(expected, rel=1e-2)


@pytest.mark.gpu
def test_a_small_model_from_end_to_end(tmp_path):
    pytest.importorskip("torchvision")
    files = {name: tmp_path / f"{name}.json" for name in ("json", "profile")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    arms = [*UNFUSED, "compile", *GRAPHED]
    case = ["--rows", "resnet18-cifar", "--batch", 64]
    done = python("-m", "normplug.bench", "models", *case, "--arms", *arms, *options)
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    rows = {row["arm"]: row for row in json.loads(files["json"].read_text())["rows"]}
    assert set(rows) == set(arms)
    for row in rows.values():
        assert 0 < row["ms"] <= row["ms_p20"] <= row["median_ms"] <= row["ms_p80"] < 1000
        assert 0 < row["host_ms"] <= row["median_host_ms"] < 1000
        assert 0 < row["gpu_ms"] < 2 * row["ms"]
        assert 0 < row["peak_gib"] < 10
        assert row["steps"] == ROUNDS * TURN
    assert rows["no-norm"]["peak_gib"] < rows["eager"]["peak_gib"]
    for arm in ("compile", *GRAPHED):
        assert rows[arm]["loss"] == pytest.approx(rows["eager"]["loss"], abs=0.05)
    for row in json.loads(files["profile"].read_text())["rows"]:
        busy = row["groups_ms"]
        assert busy["conv/gemm"] > 0
        assert busy["optimizer"] > 0
        assert (busy["norm"] > 0) == (row["arm"] != "no-norm")
        assert sum(busy.values()) < 2 * rows[row["arm"]]["ms"]
