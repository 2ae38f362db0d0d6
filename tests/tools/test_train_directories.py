"""Who owns a run's directory, and what a failure while a run is set up costs a sweep."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from omegaconf import OmegaConf

import training
from normplug.experiment.compare.frame import find_runs
from normplug.experiment.errors import UserError
from normplug.experiment.resume import FORMER, LAST, LOCK, RunDirectory
from training import GOLDEN, PLAIN, result_of

SMALL = [*training.SMALL, PLAIN]
HOLD = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def contents(folder):
    """Every file but Hydra's own, which it writes before train.py has a say, and its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and ".hydra" not in path.parts and path.name not in ("train.log", LOCK)
    }


def record(folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(values))


def test_a_directory_of_a_live_run_is_refused_and_left_alone(refuses, tmp_path):
    run = tmp_path / "run"
    record(run, status="running", process="123 on hostname", date="2026-11-22T16:00:00+00:00")
    (run / "metrics.csv").write_text("of the live run")
    before = contents(run)
    with FileLock(str(run / LOCK)):
        output = refuses(*SMALL, f"hydra.run.dir={run}")
    (line,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert f"{run} belongs to a run that is still running (process 123 on hostname, since" in line
    assert "hydra.run.dir=DIR, or study=NAME" in line
    assert contents(run) == before


def test_a_sweep_leaves_the_arm_of_another_live_sweep_alone(refuses, tmp_path):
    arm = tmp_path / GOLDEN
    record(arm, arm="golden", seed=0, model="vit_tiny", data="fake", status="running")
    before = contents(arm)
    with FileLock(str(arm / LOCK)):
        output = refuses(*SMALL, "mode=golden,baseline", "-m")
    assert f"failed: {arm}: normplug.experiment: {arm} belongs to a run that is still" in output
    assert "golden, seed 0: running: no test accuracy (" in output
    assert contents(arm) == before
    assert result_of(arm.parent.with_name("baseline") / "seed_0")["status"] == "finished"


def test_a_killed_process_frees_its_directory(tmp_path):
    lock = tmp_path / LOCK
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        place = RunDirectory(tmp_path, OmegaConf.create())
        with pytest.raises(UserError, match="still running"):
            place.take()
        holder.kill()
        holder.wait()
        place.take()
        with pytest.raises(UserError, match="still running"):
            RunDirectory(tmp_path, OmegaConf.create()).take()
        place.lock.release()
    RunDirectory(tmp_path, OmegaConf.create()).take()


def test_what_a_dead_run_left_is_kept_and_found_again(trains, tmp_path):
    run = tmp_path / "run"
    options = [*training.SMALL, f"hydra.run.dir={run}", "trainer.max_epochs=2"]
    trains(*options)
    record(run, status="interrupted")
    last = (run / LAST).read_bytes()
    (run / "notes.txt").write_text("mine")
    for number, typo in enumerate(["warmup=0.3", "warmup=0.4"], start=1):
        output = trains(*options, typo)
        aside = run / FORMER / str(number)
        assert f"set aside: {aside} has the files of an earlier run" in output
        assert "resuming" not in output
        record(run, status="interrupted")
    assert (run / FORMER / "1" / LAST).read_bytes() == last
    assert (run / FORMER / "1/variance.csv").exists()
    (run / FORMER / "7").mkdir()  # the others between were removed
    output = trains(*options, f"ckpt_path={run / FORMER / '1' / LAST}")  # goes on with the first
    assert f"resuming: {run / FORMER / '1' / LAST}" in output
    assert (run / FORMER / "1" / LAST).read_bytes() == last
    assert (run / FORMER / "8" / LAST).exists()
    assert (run / "notes.txt").read_text() == "mine"
    assert result_of(run)["status"] == "finished"


def test_runs_can_be_moved(trains, tmp_path):
    one = [*SMALL, "mode=golden", "trainer.max_epochs=2", "-m"]
    trains(*one)
    (tmp_path / "logs").rename(tmp_path / "elsewhere")
    assert "skipped: " in trains(
        *one[:-1], f"hydra.sweep.dir={tmp_path}/elsewhere/sweeps/smoke", "-m"
    )


def test_a_run_that_resumes_keeps_the_files_that_it_continues(trains, tmp_path):
    run = tmp_path / "run"
    trains(*SMALL, f"hydra.run.dir={run}")
    record(run, status="running")
    resume = f"ckpt_path={run}/checkpoints/last.ckpt"
    output = trains(*SMALL, f"hydra.run.dir={run}", resume, "trainer.max_epochs=2")
    assert f"set aside: {run / FORMER}/1 has" in output
    assert [path.name for path in (run / FORMER / "1").iterdir()] == ["metrics.csv"]
    assert torch.load(run / "checkpoints/last.ckpt", weights_only=True)["epoch"] == 1


def test_a_mistaken_arm_fails_and_the_others_are_trained_and_compared(refuses, tmp_path):
    output = refuses(*SMALL, "mode=gold,golden", "seed=x,0", "-m")
    lines = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(lines) == 3
    assert "gold/seed_0: normplug: mode must be 'golden'" in lines[1]
    assert "gold, seed 0: failed: normplug: mode must be 'golden'" in output
    assert "gold/seed_x: normplug.experiment: seed should be a valid integer; got 'x'" in lines[0]
    root = tmp_path / GOLDEN.parents[1]
    for failed in ("gold/seed_x", "gold/seed_0", "golden/seed_x"):
        assert result_of(root / failed)["status"] == "failed"
    assert result_of(root / "golden/seed_0")["status"] == "finished"


def test_a_folder_of_the_users_own_keeps_what_it_has(trains, refuses, tmp_path):
    mine = {"checkpoints/best.ckpt": "weights", "former/a": "b", "metrics.csv": "c", "x.txt": "d"}
    own = tmp_path / "own"
    for name, text in mine.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    output = refuses(*SMALL, f"hydra.run.dir={own}")
    assert (
        f"{own} has metrics.csv, checkpoints, but no result.json of a run, so they stay" in output
    )
    assert {name: (own / name).read_text() for name in mine} == mine
    (own / "metrics.csv").unlink()
    (own / "checkpoints").rename(own / "weights")
    trains(*SMALL, f"hydra.run.dir={own}")
    assert (own / "former/a").read_text() == "b"


def test_names_of_directories_leave_logs_by_no_way(trains, refuses, tmp_path):
    trains(*training.SMALL, "callbacks=null")
    (run,) = (tmp_path / "logs/runs").iterdir()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_vit_tiny_golden_seed_0", run.name)
    refuses(*SMALL, "tag=../../x", "mode=..", "+swap.foo='a/b=c'")
    refuses(*SMALL, "study=../../y", "seed=/../../../z", "-m")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_a_finished_or_damaged_result_is_a_failed_arm_and_stays(trains, refuses, tmp_path):
    arm = tmp_path / GOLDEN
    trains(*SMALL, f"hydra.run.dir={arm}")
    result = (arm / "result.json").read_bytes()
    damaged = arm.with_name("seed_1") / "result.json"
    damaged.parent.mkdir()
    damaged.write_bytes(b'{"arm": ')
    output = refuses(*SMALL, "warmup=0.2", "mode=golden,baseline", "seed=0,1", "-m")
    one, other = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert f"{arm} holds a finished run with another config.yaml. Name this one: study=NAME" in one
    assert f"{damaged} cannot be read: Expecting value" in other
    assert "golden, seed 0: failed: normplug.experiment: " in output
    assert "| baseline |" in output
    assert (arm / "result.json").read_bytes() == result
    assert damaged.read_bytes() == b'{"arm": '
    assert list(find_runs([arm])[0].status) == ["finished"]  # no refusal is left
    assert "skipped: " in trains(*SMALL, f"hydra.run.dir={arm}")


@pytest.mark.parametrize("single", [True, False])
def test_a_disk_that_cannot_be_written_is_one_line(refuses, tmp_path, monkeypatch, single):
    real = os.mkdir

    def mkdir(path, *arguments, **options):
        if "logs" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    more = [] if single else ["-m"]
    output = refuses(*SMALL, *more)
    line = output.splitlines()[-1]
    assert line.startswith(f"normplug.experiment: {tmp_path}/logs")
    assert "cannot be written: Read-only file system. Free up space or make it" in line
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    place = f"hydra.run.dir={tmp_path}/file/run" if single else f"hydra.sweep.dir={tmp_path}/file"
    why = "Not a directory" if single else "File exists"
    assert f"cannot be written: {why}. Free up space" in refuses(*SMALL, place, *more)
