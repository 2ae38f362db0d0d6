"""Runs of train.py that stop and go on: the same numbers as one that never stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from normplug.experiment import checkpoint
from normplug.experiment.classifier import Classifier
from training import run_in

TINY = [
    "experiment=smoke",
    "model=vit_tiny",
    "model.dropout=0.1",
    "data.num_images=250",
    "data.batch_size=32",
]
SWEEP = [*TINY, "trainer.max_epochs=3", "mode=baseline,golden", "-m"]
ARM = Path("logs/sweeps/smoke/vit_tiny/fake/golden/seed_0")
SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """As in the processes that are killed: sums round by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The sweep, never interrupted."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run_in(directory, monkeypatch, *SWEEP) == 0
    return directory / ARM


def result_of(run):
    return json.loads((run / "result.json").read_text())


def assert_same_results(run, whole):
    for key in ("accuracy_by_epoch", "test_accuracy", "epochs", "status"):
        assert result_of(run)[key] == result_of(whole)[key], key
    for name in ("metrics.csv", "variance.csv"):
        assert (run / name).read_text() == (whole / name).read_text()


def assert_same_run(run, whole):
    assert_same_results(run, whole)
    ours, other = (torch.load(d / "checkpoints/last.ckpt", weights_only=True) for d in (run, whole))
    for key, value in other["state_dict"].items():
        assert torch.equal(ours["state_dict"][key], value), key
    assert str(ours["optimizer_states"]) == str(other["optimizer_states"])


def stop_at(step, monkeypatch, act):
    """Let `act` happen in the forward of an optimizer step."""
    training_step = Classifier.training_step

    def stopping(self, batch, batch_idx):
        if self.trainer.global_step == step:
            act()
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", stopping)


@pytest.mark.parametrize("signum", SIGNALS, ids=lambda s: s.name)
def test_a_sweep_that_is_killed_goes_on_to_the_same_numbers(
    signum, whole, tmp_path, monkeypatch, capsys
):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, train.__file__, *SWEEP],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = tmp_path / ARM
    while process.poll() is None and not (run / "checkpoints/last.ckpt").exists():
        time.sleep(0.005)
    variance = (run / "variance.csv").read_text()
    while process.poll() is None and (run / "variance.csv").read_text() == variance:
        time.sleep(0.005)  # rows of steps after the checkpoint
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert result_of(run)["status"] == ("running" if signum == signal.SIGKILL else "interrupted")
    if signum == signal.SIGKILL:
        assert process.returncode == -signum
    else:
        assert process.returncode == 128 + signum
        assert "The same sweep skips finished runs and resumes this one from" in errors
        assert "Traceback" not in errors
    first = tmp_path / "logs/sweeps/smoke/vit_tiny/fake/baseline/seed_0/result.json"
    written = first.stat().st_mtime_ns
    assert run_in(tmp_path, monkeypatch, *SWEEP) == 0
    assert "resuming: after epoch " in capsys.readouterr().err
    assert first.stat().st_mtime_ns == written
    assert_same_run(run, whole)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "constant"])
def test_a_run_resumes_with_more_epochs_on_the_curve_of_the_new_total(command, tmp_path, schedule):
    options = [*TINY, f"schedule={schedule}", "callbacks.variance.every_n_steps=100"]
    for name, epochs in (("short", 2), ("whole", 4)):
        code, output = command(
            *options, f"trainer.max_epochs={epochs}", f"hydra.run.dir={tmp_path / name}"
        )
        assert code == 0, output
    code, output = command(
        *options,
        "trainer.max_epochs=4",
        f"hydra.run.dir={tmp_path / 'more'}",
        f"ckpt_path={tmp_path / 'short/checkpoints/last.ckpt'}",
    )
    assert code == 0, output
    more, whole = (rates(tmp_path / name) for name in ("more", "whole"))
    assert more.keys() == whole.keys() == set(range(20))
    for step in range(10, 20):
        assert more[step] == whole[step]
    assert len(result_of(tmp_path / "more")["accuracy_by_epoch"]) == 4


def rates(run):
    rows = checkpoint.whole_rows(run / "metrics.csv")
    names = [name for name in rows[0] if name.startswith("lr-")]
    return {int(row["step"]): [row[n] for n in names] for row in rows if row[names[0]]}


def test_hyperparameters_of_the_command_win_over_the_checkpoints(command, tmp_path):
    options = [*TINY, "schedule=one_cycle", "trainer.max_epochs=2"]
    run = tmp_path / "first"
    assert command(*options, "trainer.max_epochs=1", f"hydra.run.dir={run}")[0] == 0
    for name, rate in (("again", 0.001), ("lower", 0.0001)):
        code, output = command(
            *options,
            f"hydra.run.dir={tmp_path / name}",
            f"optimizer.lr={rate}",
            f"ckpt_path={run / 'checkpoints/last.ckpt'}",
        )
        assert code == 0, output
    again, lower = (rates(tmp_path / name) for name in ("again", "lower"))
    for step in range(5, 10):
        assert float(again[step][0]) == pytest.approx(10 * float(lower[step][0]), rel=1e-6)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_an_interrupted_run_says_how_to_resume_and_resumes(
    command, tmp_path, monkeypatch, whole, signum
):
    options = [*TINY, "trainer.max_epochs=3", "mode=golden", "study=default"]
    with monkeypatch.context() as patch:
        stop_at(9, patch, lambda: signal.raise_signal(signum))
        code, output = command(*options, f"hydra.run.dir={tmp_path / 'cut'}")
    assert code == 128 + signum
    found = result_of(tmp_path / "cut")
    last = tmp_path / "cut/checkpoints/last.ckpt"
    assert found["status"] == "interrupted"
    assert f"{signum.name}. Resume with: python train.py experiment=smoke" in found["error"]
    assert found["error"] in output
    assert found["error"].endswith(f"ckpt_path={last}")
    code, output = command(*options, f"ckpt_path={last}", f"hydra.run.dir={tmp_path / 'rest'}")
    assert code == 0, output
    assert_same_run(tmp_path / "rest", whole)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_without_a_checkpoint_the_advice_is_to_start_again(command, tmp_path, monkeypatch):
    stop_at(2, monkeypatch, lambda: signal.raise_signal(signal.SIGINT))
    code, output = command(*TINY, f"hydra.run.dir={tmp_path / 'cut'}")
    assert code == 130
    assert "There is no checkpoint yet. Start again with: python train.py" in output
    assert "ckpt_path" not in output


def test_a_second_signal_ends_the_process_at_once(tmp_path):
    code = (
        "import signal, time\n"
        "from normplug.experiment.signals import Interrupted, Signals\n"
        "Signals().install()\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except Interrupted:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "print('still here')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGINT
    assert not done.stdout


class Kill(BaseException):
    """In place of a SIGKILL, which would end the tests."""


@pytest.mark.parametrize("change", [[], ["warmup=0.4"]], ids=["same", "changed"])
def test_only_a_run_of_the_same_configuration_is_continued(command, tmp_path, monkeypatch, change):
    options = [*TINY, "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}"]

    def die():
        raise Kill

    with monkeypatch.context() as patch:
        stop_at(9, patch, die)
        with pytest.raises(Kill):
            command(*options)
    assert result_of(tmp_path / "run")["status"] == "running"
    code, output = command(*options, *change)
    assert code == 0, output
    assert ("resuming: after epoch 1" in output) == (not change)
    assert len(rates(tmp_path / "run")) == 10
    assert result_of(tmp_path / "run")["epochs"] == 2


def test_a_run_that_starts_over_never_resumes_from_an_earlier_runs_checkpoint(
    command, tmp_path, monkeypatch
):
    options = [*TINY, "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'run'}"]
    for step in (9, 2):  # the first with a checkpoint, the second of another configuration before
        with monkeypatch.context() as patch:
            stop_at(step, patch, lambda: signal.raise_signal(signal.SIGINT))
            code, _ = command(*options, f"warmup=0.{step}")
            assert code == 130
    code, output = command(*options, "warmup=0.2")
    assert code == 0
    assert "resuming" not in output


def test_a_run_that_has_trained_all_epochs_is_only_evaluated(command, tmp_path, monkeypatch):
    options = [*TINY, "trainer.max_epochs=1"]
    run = tmp_path / "run"
    assert command(*options, f"hydra.run.dir={run}")[0] == 0
    last = run / "checkpoints/last.ckpt"
    code, output = command(*options, f"hydra.run.dir={tmp_path / 'again'}", f"ckpt_path={last}")
    assert code == 0, output
    assert "resuming: nothing is left to train" in output
    assert_same_results(tmp_path / "again", run)
    more = [*options, "trainer.max_epochs=2", f"hydra.run.dir={tmp_path / 'more'}"]
    assert command(*more, f"ckpt_path={last}")[0] == 0
    fewer = [*options, f"hydra.run.dir={tmp_path / 'fewer'}"]
    code, output = command(*fewer, f"ckpt_path={tmp_path / 'more/checkpoints/last.ckpt'}")
    assert code == 1
    assert "has trained 2 epochs, more than trainer.max_epochs=1" in output
    assert "Traceback" not in output
    assert not (tmp_path / "fewer/result.json").exists()


def test_a_kill_while_a_checkpoint_is_written_leaves_the_former_one(tmp_path, monkeypatch):
    io = checkpoint.AtomicCheckpoints()
    path = tmp_path / "checkpoints/last.ckpt"
    io.save_checkpoint({"a": torch.ones(3)}, path)

    def half(content, file):
        Path(file).write_bytes(b"half a file")
        raise Kill

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(Kill):
        io.save_checkpoint({"a": torch.zeros(3)}, path)
    assert torch.equal(torch.load(path, weights_only=True)["a"], torch.ones(3))


def test_the_runs_checkpoints_are_written_in_their_own_directory(command, tmp_path, monkeypatch):
    written = []
    save = torch.save

    def spy(content, file, *args, **kwargs):
        written.append(str(file))
        save(content, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", spy)
    assert command(*TINY, "trainer.max_epochs=1", f"hydra.run.dir={tmp_path / 'run'}")[0] == 0
    assert written == [str(tmp_path / "run/checkpoints/last.ckpt.part")]


def test_rows_that_a_kill_cut_off_are_not_continued(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\r\n1,0.5\r\n12,0.25\r\n1")
    assert checkpoint.whole_rows(path) == [
        {"step": "1", "loss": "0.5"},
        {"step": "12", "loss": "0.25"},
    ]
