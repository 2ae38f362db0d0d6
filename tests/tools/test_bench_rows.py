"""The rows of the bench of models: networks, first steps, and files that are updated."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from normplug.bench import first_step, groups, models
from normplug.bench.__main__ import main
from normplug.bench.nets import MODELS, Case, Text
from normplug.bench.results import MODELS as KIND
from normplug.bench.results import STEP, Results
from normplug.bench.table import render

ROW = {"model": "encoder_6x256", "batch": 2, "arm": "swap"}
TIMES = {"ms": 10.0, "median_ms": 20.0, "images_per_s": 1.0, "peak_gib": 2.0, "host_ms": 3.0}


@pytest.mark.parametrize("name", MODELS)
def test_a_network_takes_its_batch_and_gives_each_label_its_classes(name):
    model = MODELS[name]
    if model.library:
        pytest.importorskip(model.library)
    if isinstance(model, Text):
        model = replace(model, length=4)
    # These read values: RegNet of its widths, GPT-2 of its positions.
    device = "cpu" if name in ("regnet_y_1_6gf", "gpt2") else "meta"
    with torch.device(device):
        net = model.build().eval()
    samples, labels = model.random_batch(1, "cpu")
    with torch.no_grad():
        assert net(samples.to(device)).shape == (*labels.shape, model.classes)
    assert 0 <= labels.min() <= labels.max() < model.classes


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let the command line run where there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")


def test_a_model_of_vectors_trains(monkeypatch):
    short = replace(MODELS["encoder_6x256"], length=3)
    monkeypatch.setitem(MODELS, "encoder_6x256", short)
    for arm in ("eager", "swap"):
        assert 0 < first_step.seconds("encoder_6x256", "2", arm, "cpu") < 60


def test_a_first_step_has_a_process_and_empty_caches_of_its_own(monkeypatch):
    asked = []

    def run(command, env, **options):
        asked.append((command, {name: env[name] for name in first_step.CACHES}))
        return SimpleNamespace(returncode=0, stdout="a line\n1.5\n")

    monkeypatch.setattr(subprocess, "run", run)
    case = Case("resnet50", 256)
    assert [first_step.in_a_process(case, "swap", "cuda") for _ in range(2)] == [1.5, 1.5]
    (command, one), (_, two) = asked
    assert command == [
        sys.executable, "-m", "normplug.bench.first_step", "resnet50", "256", "swap", "cuda"
    ]  # fmt: skip
    assert len({*one.values(), *two.values()}) == 4


def test_the_process_of_a_first_step_says_why_it_failed():
    with pytest.raises(RuntimeError, match="^KeyError: 'nothing'$"):
        first_step.in_a_process(Case("nothing", 1), "eager", "cpu")


def test_first_steps_are_added_to_the_rows_of_their_file(tmp_path, monkeypatch, capsys, on_a_gpu):
    def in_a_process(case, arm, device):
        if arm == "compile":
            raise RuntimeError("no compiler")
        return 2.5

    monkeypatch.setattr(first_step, "in_a_process", in_a_process)
    monkeypatch.setattr(first_step.native, "build", lambda: None)
    path = tmp_path / "rows.json"
    results = Results(path, models.PACKAGES, settings=models.SETTINGS)
    results.update({**ROW, **TIMES}, STEP)
    command = ["models", "--first-step", "--rows", "encoder_6x256", "--batch", "2"]
    main([*command, "--arms", "eager", "compile", "swap", "eager+graph", "--json", str(path)])
    swap, eager = json.loads(path.read_text())["rows"]
    assert swap.items() >= {**ROW, **TIMES, "first_step_s": 2.5}.items()
    assert eager == {**ROW, "arm": "eager", "first_step_s": 2.5, "date": eager["date"]}
    assert "compile is left out: RuntimeError('no compiler')" in capsys.readouterr().err

    lines = render(json.loads(path.read_text())).splitlines()
    assert "| encoder_6x256 | 2 | 2.5 | 2.5 |" in lines
    assert "| encoder_6x256 | 2 | 20.00 ms, 1/s |" in lines
    assert "| encoder_6x256 | 2 | 10.00 |" in lines


def test_a_run_updates_its_rows_and_keeps_the_others(tmp_path):
    path = tmp_path / "rows.json"
    eager = {**ROW, "arm": "eager", "ms": 5.0}
    for rows in [{**ROW, "ms": 1.0, "first_step_s": 3.0}, eager], [{**ROW, "ms": 2.0}]:
        results = Results(path, resume=KIND, settings={"mode": "golden"})
        for row in rows:
            results.update(row, STEP)
    first, second = json.loads(path.read_text())["rows"]
    assert first == {**ROW, "ms": 2.0, "first_step_s": 3.0, "date": first["date"]}
    assert second.items() >= eager.items()


def test_rows_of_another_kind_of_run_are_not_mixed(tmp_path, on_a_gpu):
    path = tmp_path / "rows.json"
    Results(path, models.PACKAGES, settings={**models.SETTINGS, "mode": "standard"}).add(ROW)
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
