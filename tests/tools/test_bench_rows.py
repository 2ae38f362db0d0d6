"""The rows of the bench of models: networks, first steps, and files that are updated."""

import json
import subprocess
import sys
import warnings
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from normplug import native
from normplug.bench import first_step, groups, models
from normplug.bench.__main__ import main
from normplug.bench.architectures import UNet3d
from normplug.bench.models import USUAL
from normplug.bench.nets import MODELS, Case, Text
from normplug.bench.results import MODELS as KIND
from normplug.bench.results import STEP, Results
from normplug.bench.table import render

ROW = {"model": "encoder_6x256", "batch": 2, "arm": "swap"}
TIMES = {"ms": 10.0, "median_ms": 20.0, "images_per_s": 1.0, "peak_gib": 2.0, "host_ms": 3.0}


WIDTHS = {"num_layers": 1, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 32}
TINY = {  # name -> its network made small, and its samples
    "llama_16x1024": {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 50,
        "length": 5,
        "classes": 50,
    },
    "t5_small": {**WIDTHS, "vocab_size": 50, "length": 5, "target_length": 3, "classes": 50},
    "unet2d": {
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
        "image_size": 8,
    },
    "nnunet3d": {"widths": (4, 8), "size": 8},
}


def tiny(name):
    """The model with a small network; it skips where its library is missing."""
    model = MODELS[name]
    if model.library:
        pytest.importorskip(model.library)
    own = {field.name for field in fields(model)}
    sizes = {key: value for key, value in TINY[name].items() if key not in own}
    if name == "nnunet3d":
        build = partial(UNet3d, 1, model.classes, **sizes)
    else:
        build = partial(getattr(model.build, "func", model.build), **sizes)
    return replace(
        model, build=build, **{key: value for key, value in TINY[name].items() if key in own}
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_network_takes_its_batch_and_its_output_has_a_loss(name):
    model = MODELS[name]
    if model.library:
        pytest.importorskip(model.library)
    if isinstance(model, Text):
        model = replace(model, length=4)
    # These read values: RegNet of its widths, GPT-2 and Llama of their positions.
    reads = name in ("regnet_y_1_6gf", "gpt2", "llama_16x1024")
    device = "cpu" if reads else "meta"
    if name == "llama_16x1024":
        model = tiny(name)
    with torch.device(device):
        net = model.build().eval()
    batch = model.random_batch(1, "cpu")
    with torch.no_grad():
        output = net(*(tensor.to(device) for tensor in batch.inputs))
        assert model.loss(output, batch.target.to(device)).shape == ()
    if not batch.target.is_floating_point():
        assert 0 <= batch.target.min() <= batch.target.max() < model.classes


@pytest.mark.parametrize("name", TINY)
def test_a_network_of_today_trains_swapped_as_it_is(name, monkeypatch):
    model = tiny(name)
    monkeypatch.setattr(models, "MODE", "standard")
    monkeypatch.setattr(models, "DTYPE", torch.float32)
    torch.manual_seed(0)
    stock, batch = model.build(), model.random_batch(2, "cpu")
    losses = []
    for arm in USUAL:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "normplug")  # there may be nothing to fuse
            warnings.filterwarnings("ignore", ".*autocast")
            net = models.build(stock, arm, model, "cpu")
            torch.manual_seed(1)  # of dropout
            losses.append(models.make_step(net, model, batch)().item())
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the command line run where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_a_model_of_vectors_trains(monkeypatch):
    short = replace(MODELS["encoder_6x256"], length=3)
    monkeypatch.setitem(MODELS, "encoder_6x256", short)
    for arm in ("eager", "swap"):
        assert 0 < first_step.measured("encoder_6x256", "2", arm, "cpu")["first_step_s"] < 60


def test_a_first_step_says_where_its_kernels_came_from(monkeypatch):
    monkeypatch.setitem(MODELS, "encoder_6x256", replace(MODELS["encoder_6x256"], length=3))
    came = native.status()._replace(kernels={"here": 1, "workers": 5, "cache": 2})
    monkeypatch.setattr(first_step, "status", lambda: came)
    found = first_step.measured("encoder_6x256", "2", "eager", "cpu")["first_step_kernels"]
    assert found == {"distinct": 8, "here": 1, "workers": 5, "cache": 2}


def test_a_first_step_has_a_process_and_empty_caches_of_its_own(monkeypatch):
    asked = []

    def run(command, env, **options):
        asked.append((command, {name: env[name] for name in first_step.CACHES}))
        return SimpleNamespace(returncode=0, stdout='a line\n{"first_step_s": 1.5}\n')

    monkeypatch.setattr(subprocess, "run", run)
    case = Case("resnet50", 256)
    found = [first_step.in_a_process(case, "swap", "cuda") for _ in range(2)]
    assert found == [{"first_step_s": 1.5}] * 2
    (command, one), (_, two) = asked
    assert command == [
        sys.executable, "-m", "normplug.bench.first_step", "resnet50", "256", "swap", "cuda"
    ]  # fmt: skip
    assert len({*one.values(), *two.values()}) == 4


def test_the_process_of_a_first_step_says_why_it_failed():
    with pytest.raises(RuntimeError, match="^KeyError: 'nothing'$"):
        first_step.in_a_process(Case("nothing", 1), "eager", "cpu")


FIRST = {"first_step_s": 2.5, "first_step_kernels": {"distinct": 3, "here": 1, "workers": 2}}


def test_first_steps_are_added_to_the_rows_of_their_file(tmp_path, monkeypatch, capsys, on_a_gpu):
    def in_a_process(case, arm, device):
        if arm == "compile":
            raise RuntimeError("no compiler")
        return FIRST

    monkeypatch.setattr(first_step, "in_a_process", in_a_process)
    monkeypatch.setattr(first_step.native, "build", lambda: None)
    path = tmp_path / "rows.json"
    results = Results(path, KIND, models.PACKAGES, settings=models.SETTINGS)
    results.update({**ROW, **TIMES}, STEP)
    command = ["models", "--first-step", "--rows", "encoder_6x256", "--batch", "2"]
    main([*command, "--arms", "eager", "compile", "swap", "eager+graph", "--json", str(path)])
    swap, eager = json.loads(path.read_text())["rows"]
    assert swap.items() >= {**ROW, **TIMES, **FIRST}.items()
    assert eager == {**ROW, "arm": "eager", **FIRST, "date": eager["date"]}
    error = capsys.readouterr().err
    assert "compile is left out: RuntimeError('no compiler')" in error
    assert "eager+graph is left out: its first step is that of the same arm without" in error

    lines = render(KIND, json.loads(path.read_text())).splitlines()
    assert "| encoder_6x256 | 2 | 2.5 | 2.5 | 1.00x |" in lines
    assert "| encoder_6x256 | 2 | 20.00 ms, 1/s |" in lines
    assert "| encoder_6x256 | 2 | 10.00 |" in lines


def test_a_first_step_has_neither_rounds_nor_a_profile():
    options = ["--profile", "p.json", "--rounds", "3"]
    with pytest.raises(SystemExit, match=r"got --profile p\.json, --rounds 3\. Leave that out, or"):
        main(["models", "--rows", "encoder_6x256", "--first-step", *options])


def test_a_run_updates_its_rows_and_keeps_the_others(tmp_path):
    path = tmp_path / "rows.json"
    eager = {**ROW, "arm": "eager", "ms": 5.0}
    for rows in [{**ROW, "ms": 1.0, "first_step_s": 3.0}, eager], [{**ROW, "ms": 2.0}]:
        results = Results(path, KIND, resume=True, settings={"mode": "golden"})
        for row in rows:
            results.update(row, STEP)
    first, second = json.loads(path.read_text())["rows"]
    assert first == {**ROW, "ms": 2.0, "first_step_s": 3.0, "date": first["date"]}
    assert second.items() >= eager.items()


def test_rows_of_another_kind_of_run_are_not_mixed(tmp_path, on_a_gpu):
    path = tmp_path / "rows.json"
    settings = {**models.SETTINGS, "mode": "standard"}
    Results(path, KIND, models.PACKAGES, settings=settings).add(ROW)
    before = path.read_bytes()
    with pytest.raises(SystemExit, match="results of another run: its settings is .* another file"):
        main(["models", "--rows", "encoder_6x256", "--json", str(path)])
    assert path.read_bytes() == before


def test_a_row_whose_library_is_missing_is_left_out_aloud(monkeypatch, capsys, on_a_gpu):
    asked = []
    monkeypatch.setattr(models, "run", lambda cases, *others: asked.extend(cases) or True)
    monkeypatch.setitem(sys.modules, "transformers", None)
    main(["models", "--rows", "gpt2", "encoder_6x256"])
    assert asked == [Case("encoder_6x256", 64)]
    message = 'normplug.bench models needs transformers: pip install "normplug[zoo]"'
    assert capsys.readouterr().err == f"{message} (left out: gpt2, batch 16)\n"


def test_the_gpu_is_busy_while_any_kernel_runs():
    def event(ts, dur, cat="kernel"):
        return {"cat": cat, "ts": ts, "dur": dur}

    events = [event(500, 100), event(0, 300), event(100, 50), event(200, 200, "gpu_memcpy")]
    assert groups.busy_ms([*events, event(0, 9e9, "cpu_op")], 2) == pytest.approx(0.25)
    assert groups.busy_ms([], 2) == 0
