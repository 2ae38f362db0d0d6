"""Runs of train.py that cannot go on: wrong checkpoints, and losses that are not finite."""

import pytest

pytest.importorskip("normplug.experiment")

import errno
from unittest.mock import Mock

import torch

from normplug.compare import compare
from normplug.experiment.learner import Learner
from normplug.experiment.task import LAST
from programs import program
from training import PLAIN, SWEEP, TWO_PROCESSES, result_of, results

TINY = [*SWEEP, "trainer.max_epochs=1", PLAIN]
HAS = "cannot be restored (ValueError: it has"


def test_what_is_no_checkpoint_is_refused_before_anything_starts(
    refuses, sweep, tmp_path
):
    run = tmp_path / "run"
    advice = f"A run's checkpoint is {LAST} in its directory; ckpt_path=last looks in"
    for path in (tmp_path / "none.ckpt", sweep.golden, "last"):
        output = refuses(*SWEEP, f"ckpt_path='{path}'", f"hydra.run.dir={run}")
        assert f"must be a checkpoint file; got {path}. {advice}" in output
        assert not (run / "result.json").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("text", "UnpicklingError: Weights only load failed). Give a complete"),
        ("weights", "KeyError"),
        ("optimizer", "ValueError: it lacks the optimizer"),
        ("locked", "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_a_checkpoint_that_cannot_be_restored_is_one_sentence(
    refuses, sweep, tmp_path, monkeypatch, change, words
):
    path = tmp_path / "spoilt.ckpt"
    content = torch.load(sweep.golden / LAST, weights_only=True)
    if change == "text":
        path.write_text("not a checkpoint")
    elif change == "locked":
        path.write_text("")
        denied = PermissionError(errno.EACCES, "Permission denied", str(path))
        monkeypatch.setattr(torch, "load", Mock(side_effect=denied))
    elif change == "weights":
        torch.save(content["state_dict"], path)
    else:
        torch.save(content | {"optimizer_states": []}, path)
    more = [
        f"ckpt_path='{path}'",
        "trainer.max_epochs=4",
        f"hydra.run.dir={tmp_path}/run",
    ]
    output = refuses(*SWEEP, PLAIN, "mode=golden", *more)
    (sentence,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert words in sentence
    assert f"the checkpoint {path} cannot be restored (" in sentence
    assert result_of(tmp_path / "run")["status"] == "failed"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([*SWEEP, "mode=0.5"], f"{HAS} arm 'golden', this run has '0.5'"),
        (
            [*SWEEP, "mode=golden", "optimizer=sgd"],
            f"{HAS} optimizer 'torch.optim.AdamW', this run has",
        ),
        (
            [*SWEEP, "mode=golden", "model.hidden_dim=32"],
            "size mismatch for net.class_token",
        ),
        (
            ["model=vit_tiny", "mode=golden", "data=digits"],
            f"{HAS} data 'fake', this run has 'digits'",
        ),
    ],
)
def test_another_runs_checkpoint_is_refused(refuses, sweep, tmp_path, options, sentence):
    path = sweep.golden / LAST
    assert sentence in refuses(
        *options, f"ckpt_path={path}", f"hydra.run.dir={tmp_path}/run"
    )


def test_a_loss_that_is_not_finite_stops_the_run_and_is_recorded(refuses, tmp_path):
    run = tmp_path / "run"
    output = refuses(*TINY, "optimizer.lr=1e10", "warmup=0", f"hydra.run.dir={run}")
    result = result_of(run)
    assert result["status"] == "diverged"
    assert result["step"] == 1
    assert (
        "the training loss is nan at step 1 (epoch 1). Lower optimizer.lr"
        in result["error"]
    )
    assert result["error"] in output
    assert not (run / "checkpoints/last.ckpt").exists()


@pytest.fixture
def spoil(monkeypatch):
    """Make the outputs of a Learner nan where `when(learner)`."""
    forward = Learner.forward

    def patch(when):
        def spoilt(self, images):
            return forward(self, images) * (float("nan") if when(self) else 1)

        monkeypatch.setattr(Learner, "forward", spoilt)

    return patch


def test_a_sweep_with_a_diverged_arm_goes_on_and_leaves_it_out(refuses, tmp_path, spoil):
    spoil(lambda model: model.cfg.mode == 0.5)
    output = refuses(*TINY, "mode=0.5,golden", "-m")
    table = compare(tmp_path / "logs").table
    assert dict(zip(table.arm, table.n_finished, strict=True)) == {"0.5": 0, "golden": 1}
    found = {result["arm"]: result["status"] for result in results(tmp_path)}
    assert found == {"0.5": "diverged", "golden": "finished"}
    assert (
        "target 0.5, seed 0: diverged: normplug.experiment: the training loss is nan"
        in output
    )


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_an_evaluation_whose_loss_is_not_finite_is_no_result(
    refuses, tmp_path, spoil, stage
):
    doing = {"validation": "validating", "test": "testing"}[stage]
    spoil(lambda model: getattr(model.trainer, doing))
    run = tmp_path / "run"
    refuses(*TINY, f"hydra.run.dir={run}")
    result = result_of(run)
    assert result["status"] == "diverged"
    assert f"the {stage} loss is nan at step 5 (epoch 1)." in result["error"]
    assert (run / "checkpoints/last.ckpt").exists() == (stage == "test")


SPOILT = """
import train
from normplug.experiment.learner import Learner

forward = Learner.forward
def spoilt(self, images):
    bad = self.trainer.global_step == self.trainer.global_rank == 1
    return forward(self, images * float("nan") if bad else images)
Learner.forward = spoilt
train.main()
"""


def test_all_processes_stop_where_one_diverges(tmp_path):
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    # The first process starts the second by running the script.
    done = program(SPOILT, script, *TINY, *TWO_PROCESSES, directory=tmp_path)
    assert done.returncode == 1, done.stderr
    (result,) = results(tmp_path)
    assert result["status"] == "diverged"
    assert result["step"] == 1
    assert "(epoch 1)" in result["error"]
    assert "Traceback" not in done.stderr
