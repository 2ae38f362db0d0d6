"""How tests call train.py, and the small runs that they share."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

SMOKE = ["experiment=smoke", "model=vit_tiny"]
TINY_IMAGES = ["data.image_size=8", "data.num_images=100"]
SMALL = [*SMOKE, *TINY_IMAGES, "data.batch_size=16", "trainer.max_epochs=1"]
PLAIN = "callbacks.variance=null"
# The sweep of the fixture `sweep`: 5 steps an epoch.
SWEEP = [
    *SMOKE,
    *TINY_IMAGES,
    "data.batch_size=13",
    "model.dropout=0.1",
    "trainer.max_epochs=3",
]
TWO_PROCESSES = ["trainer.accelerator=cpu", "trainer.strategy=ddp", "trainer.devices=2"]
ARMS = "mode=baseline,standard,golden"
GOLDEN = Path("logs/sweeps/smoke/vit_tiny/fake/golden/seed_0")  # a run of that sweep


def run_train(directory, *overrides, draws=False):
    """Call train.py as if started in `directory`; return (exit code, all that was printed).

    Without `draws`, skip the plots, which take longer than such a run.
    """
    import train

    code, printed = 0, io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        if not draws:
            patch.setattr("normplug._tools.heat_map.draw_heat_map", lambda *_: None)
        patch.chdir(directory)
        patch.setattr(sys, "argv", ["train.py", *overrides])
        try:
            train.main()
        except SystemExit as stop:
            code = stop.code
    return code, printed.getvalue()


def composed(*overrides, **options):
    """The configuration of a command line."""
    from hydra import compose, initialize_config_dir

    from normplug.experiment.errors import CONFIGS

    with initialize_config_dir(CONFIGS, version_base="1.3"):
        return compose("train", [*overrides], **options)


def result_of(run):
    return json.loads((run / "result.json").read_text())


def results(directory):
    found = [result_of(path.parent) for path in Path(directory).rglob("result.json")]
    return sorted(found, key=lambda result: (result["arm"], result["seed"]))


def logged(run, name):
    """What a run has logged under a name."""
    import pandas as pd

    return pd.read_csv(run / "metrics.csv")[name].dropna().tolist()
