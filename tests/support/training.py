"""How tests call train.py, and the small runs that they share."""

import contextlib
import csv
import io
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMOKE = ["experiment=smoke", "model=vit_tiny"]
TINY_IMAGES = ["data.image_size=8", "data.num_images=100"]
SMALL = [*SMOKE, *TINY_IMAGES, "data.batch_size=16", "trainer.max_epochs=1"]
PLAIN = "callbacks.variance=null"
# The sweep of the fixture `sweep`: 5 steps an epoch.
FIVE_STEPS = [*TINY_IMAGES, "data.batch_size=13"]
SWEEP = [*SMOKE, *FIVE_STEPS, "model.dropout=0.1", "trainer.max_epochs=3"]
TWO_PROCESSES = ["trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"]
ARMS = "mode=baseline,standard,golden"
GOLDEN = Path("logs/sweeps/smoke/vit_tiny/fake/golden/seed_0")  # a run of that sweep


def run_in(directory, monkeypatch, *overrides, draws=False):
    """Call train.py as if started in `directory`; return the exit code.

    Without `draws`, skip the plots, which take longer than such a run.
    """
    pytest.importorskip("torchvision")
    import train

    if not draws:
        monkeypatch.setattr("normplug.experiment.compare.draw", lambda *_: [])
        heat_map = "normplug._statistics.heat_map.draw_heat_map"
        monkeypatch.setattr(heat_map, lambda *_: None)
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["train.py", *overrides])
    try:
        train.main()
    except SystemExit as stop:
        return stop.code
    return 0


def output_in(directory, monkeypatch, *overrides, **how):
    """Call `run_in`; return (exit code, all that was printed)."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        code = run_in(directory, monkeypatch, *overrides, **how)
    return code, printed.getvalue()


@contextlib.contextmanager
def one_thread():
    """Use one thread: sums round by the number of threads, and compared runs must round alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def result_of(run):
    return json.loads((run / "result.json").read_text())


def results(directory):
    found = [result_of(path.parent) for path in Path(directory).rglob("result.json")]
    return sorted(found, key=lambda result: (result["arm"], result["seed"]))


def variance_rows(run):
    with (run / "variance.csv").open() as file:
        return list(csv.DictReader(file))
