"""Runs of train.py that stop and go on: the same numbers as one that never stopped."""

import pytest

pytest.importorskip("normplug.experiment")

import signal

import torch

import train
from normplug.experiment.learner import Learner
from normplug.experiment.task import LAST
from programs import program
from statistics_cases import rows_of
from training import GOLDEN, PLAIN, SMALL, SWEEP, logged, result_of, run_train

TINY = [*SWEEP, PLAIN, "mode=golden"]  # no variance
RESULTS = ("accuracy_by_epoch", "test_accuracy", "epochs", "status")


@pytest.fixture(scope="module")
def more(sweep, tmp_path_factory):
    """The shared sweep's golden run, resumed after its three epochs for a fourth."""
    directory = tmp_path_factory.mktemp("more")
    resume = [f"ckpt_path={sweep.golden / LAST}", f"hydra.run.dir={directory}"]
    code, output = run_train(directory, *TINY, "trainer.max_epochs=4", *resume)
    assert code == 0, output
    return directory


def assert_same_run(run, whole):
    for key in RESULTS:
        assert result_of(run)[key] == result_of(whole)[key], key
    assert (run / "variance.csv").read_text() == (whole / "variance.csv").read_text()
    metrics, other = ((d / "metrics.csv").read_text().splitlines() for d in (run, whole))
    assert metrics == [other[0], *other[-len(metrics) + 1 :]]
    ours, other = (
        torch.load(d / "checkpoints/last.ckpt", weights_only=True) for d in (run, whole)
    )
    for key, value in other["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], value), key
    assert str(ours["optimizer_states"]) == str(other["optimizer_states"])


def interrupted(command, signum, *overrides):
    """The output of a run that gets a signal in the tenth step of the arm golden."""
    training_step = Learner.training_step

    def stopping(self, batch, batch_idx):
        if self.trainer.global_step == 9 and self.cfg.mode == "golden":
            signal.raise_signal(signum)
        return training_step(self, batch, batch_idx)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "training_step", stopping)
        code, output = command(*overrides)
    assert code == 128 + signum
    return output


KILLED = """
import os, signal, train
from normplug.experiment.learner import Learner

training_step = Learner.training_step
def killing(self, batch, batch_idx):
    if self.trainer.global_step == 9:  # after rows of steps that the checkpoint does not have
        os.kill(os.getpid(), signal.SIGKILL)
    return training_step(self, batch, batch_idx)
Learner.training_step = killing
train.main()
"""


def test_a_sweep_that_is_killed_goes_on_to_the_same_numbers(trains, sweep, tmp_path):
    sweep_of_one = [*SWEEP, "mode=golden", "-m"]
    killed = program(KILLED, train.__file__, *sweep_of_one, directory=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    run = tmp_path / GOLDEN
    assert result_of(run)["status"] == "running"
    assert rows_of(run / "variance.csv")[-1]["step"] == "8"
    assert f"resuming: {run / LAST}" in trains(*sweep_of_one)
    assert_same_run(run, sweep.golden)


def test_a_sweep_that_is_interrupted_skips_and_resumes(command, trains, tmp_path):
    arms = [*SWEEP, PLAIN, "trainer.max_epochs=2", "mode=baseline,golden", "-m"]
    first = tmp_path / GOLDEN.parents[1] / "baseline/seed_0"
    output = interrupted(command, signal.SIGINT, *arms)
    assert "The same sweep skips what has finished and resumes this run." in output
    assert "Traceback" not in output
    assert result_of(tmp_path / GOLDEN)["status"] == "interrupted"
    written = (first / "result.json").stat().st_mtime_ns
    assert "resuming: " in trains(*arms)
    assert (first / "result.json").stat().st_mtime_ns == written
    assert result_of(tmp_path / GOLDEN)["status"] == "finished"


def test_a_resumed_run_takes_rates_and_epochs_from_its_command(
    trains, tmp_path, sweep, more
):
    whole, lower = tmp_path / "whole", tmp_path / "lower"
    trains(*TINY, "trainer.max_epochs=4", "model.depth=1", f"hydra.run.dir={whole}")
    options = [
        "trainer.max_epochs=4",
        f"ckpt_path={sweep.golden / LAST}",
        f"hydra.run.dir={lower}",
    ]
    trains(*TINY, *options, "optimizer.lr=0.002")  # 0.02 in experiment=smoke
    found, one, other = (logged(run, "lr-AdamW/pg1") for run in (more, whole, lower))
    assert found == one[15:]
    assert found == pytest.approx([10 * rate for rate in other], rel=1e-6)
    assert len(result_of(more)["accuracy_by_epoch"]) == 4


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_an_interrupted_run_says_how_to_resume_and_resumes(
    command, trains, tmp_path, sweep, signum
):
    cut = tmp_path / "cut"
    line = [*SWEEP, "mode=golden", f"hydra.run.dir={cut}"]
    output = interrupted(command, signum, *line)
    found = result_of(cut)
    assert found["status"] == "interrupted"
    advice = f"{signum.name}. Resume with the same command and hydra.run.dir={cut}."
    assert found["error"].endswith(advice)
    assert found["error"] in output
    trains(*line)
    assert_same_run(cut, sweep.golden)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_that_has_trained_all_epochs_is_only_evaluated(
    trains, refuses, tmp_path, sweep, more
):
    trains(
        *SWEEP,
        "mode=golden",
        f"ckpt_path={sweep.golden / LAST}",
        f"hydra.run.dir={tmp_path / 'again'}",
    )
    for key in RESULTS:
        assert result_of(tmp_path / "again")[key] == result_of(sweep.golden)[key], key
    output = refuses(
        *TINY, f"hydra.run.dir={tmp_path / 'fewer'}", f"ckpt_path={more / LAST}"
    )
    assert "it has 4 epochs, more than trainer.max_epochs=3" in output


def test_a_disk_that_fills_leaves_the_former_checkpoint_and_one_line(
    refuses, trains, tmp_path
):
    limits = pytest.importorskip("resource")
    run = tmp_path / "run"
    trains(*SMALL, PLAIN, f"hydra.run.dir={run}")
    before = (run / LAST).read_bytes()
    soft, hard = limits.getrlimit(limits.RLIMIT_FSIZE)
    more = [f"ckpt_path={run / LAST}", f"hydra.run.dir={run}", "trainer.max_epochs=2"]
    (run / "result.json").write_text('{"status": "interrupted"}')
    limits.setrlimit(limits.RLIMIT_FSIZE, (2**16, hard))  # less than a checkpoint
    try:
        output = refuses(*SMALL, PLAIN, *more)
    finally:
        limits.setrlimit(limits.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be read or written: File too large. Free up space or make it" in output
    assert "Traceback" not in output
    assert (run / LAST).read_bytes() == before
    assert result_of(run)["status"] == "failed"
    assert f"resuming: {run / LAST}" in trains(*SMALL, PLAIN, *more[1:])


def test_the_last_checkpoint_is_found_tested_and_the_best_one_kept(trains, tmp_path):
    best = [*SMALL, "trainer.max_epochs=2", "callbacks=best", PLAIN]
    trains(*best, f"hydra.run.dir={tmp_path}/runs/one")
    assert (tmp_path / "runs/one/checkpoints/best.ckpt").is_file()
    last = torch.load(tmp_path / "runs/one" / LAST, weights_only=True)
    (scores,) = (state for key, state in last["callbacks"].items() if "val/loss" in key)
    val = logged(tmp_path / "runs/one", "val/loss")
    # Of the epoch of the checkpoint.
    assert float(scores["current_score"]) == pytest.approx(val[-1])
    assert float(scores["best_model_score"]) == pytest.approx(min(val))
    trained = result_of(tmp_path / "runs/one")
    tested = ["train=false", "ckpt_path=last", f"hydra.run.dir={tmp_path}/runs/two"]
    output = trains(*SMALL, "trainer.max_epochs=2", PLAIN, *tested)
    assert f"testing: {tmp_path}/runs/one/{LAST}" in output
    assert (
        result_of(tmp_path / "runs/two")["accuracy_by_epoch"]
        == trained["accuracy_by_epoch"]
    )
