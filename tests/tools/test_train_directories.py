"""Who owns a run's directory, and what a failure while a run is set up costs a sweep."""

import pytest

pytest.importorskip("normplug.experiment")

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import training
from normplug.experiment.task import FORMER, LAST, LOCK
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
        if path.is_file()
        and ".hydra" not in path.parts
        and path.name not in ("train.log", LOCK)
    }


def record(folder, **values):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(values))


def test_a_directory_of_a_live_run_is_left_alone(refuses, trains, tmp_path):
    arm = tmp_path / GOLDEN
    record(arm, status="running", date="2026-11-22T16:00:00+00:00")
    (arm / "metrics.csv").write_text("of the live run")
    before = contents(arm)
    command = [sys.executable, "-c", HOLD, arm / LOCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        for line in ([f"hydra.run.dir={arm}"], ["mode=baseline,golden", "-m"]):
            output = refuses(*SMALL, *line)
            assert (
                f"{arm} belongs to a run that is still running, since 2026-11-22T16"
                in output
            )
            assert "hydra.run.dir=DIR, or study=NAME" in output
            assert contents(arm) == before
        holder.kill()
    trains(*SMALL, f"hydra.run.dir={arm}")
    assert result_of(arm.parent.with_name("baseline") / "seed_0")["status"] == "finished"


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
    # Goes on with the first.
    output = trains(*options, f"ckpt_path={run / FORMER / '1' / LAST}")
    assert f"resuming: {run / FORMER / '1' / LAST}" in output
    assert (run / FORMER / "1" / LAST).read_bytes() == last
    assert (run / FORMER / "8" / LAST).exists()
    assert (run / "notes.txt").read_text() == "mine"
    assert result_of(run)["status"] == "finished"


def test_a_moved_run_is_skipped_or_goes_on(trains, tmp_path):
    trains(*SMALL, "mode=golden", "-m")
    (tmp_path / "logs").rename(tmp_path / "moved")
    moved = [
        *SMALL,
        "mode=golden",
        f"hydra.sweep.dir={tmp_path}/moved/sweeps/smoke",
        "-m",
    ]
    assert "skipped: " in trains(*moved)
    run = tmp_path / "moved" / Path(*GOLDEN.parts[1:])
    record(run, status="running")
    output = trains(*moved)
    assert f"resuming: {run / LAST}" in output
    assert f"set aside: {run / FORMER}/1 has" in output
    assert [path.name for path in (run / FORMER / "1").iterdir()] == ["metrics.csv"]


def test_a_mistaken_arm_fails_and_the_others_are_trained_and_compared(refuses, tmp_path):
    output = refuses(*SMALL, "mode=gold,golden", "seed=x,0", "-m")
    lines = [line for line in output.splitlines() if line.startswith("failed: ")]
    assert len(lines) == 3
    assert "gold/seed_0: normplug: mode must be 'golden'" in lines[1]
    assert "gold, seed 0: failed: normplug: mode must be 'golden'" in output
    assert (
        "gold/seed_x: normplug.experiment: seed should be a valid integer; got 'x'"
        in lines[0]
    )
    root = tmp_path / GOLDEN.parents[1]
    for failed in ("gold/seed_x", "gold/seed_0", "golden/seed_x"):
        assert result_of(root / failed)["status"] == "failed"
    assert result_of(root / "golden/seed_0")["status"] == "finished"


def test_a_folder_of_the_users_own_keeps_what_it_has(trains, refuses, tmp_path):
    mine = {
        "checkpoints/best.ckpt": "weights",
        "former/a": "b",
        "metrics.csv": "c",
        "x.txt": "d",
    }
    own = tmp_path / "own"
    for name, text in mine.items():
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text(text)
    output = refuses(*SMALL, f"hydra.run.dir={own}")
    assert (
        f"{own} has metrics.csv, checkpoints, but not the result of a run, so they"
        in output
    )
    assert {name: (own / name).read_text() for name in mine} == mine
    (own / "metrics.csv").unlink()
    (own / "checkpoints").rename(own / "weights")
    trains(*SMALL, f"hydra.run.dir={own}")
    assert (own / "former/a").read_text() == "b"


def test_a_sweep_over_models_of_timm_has_a_directory_and_a_table_for_each(
    trains, tmp_path
):
    pytest.importorskip("timm")
    models = ["model=timm", "model.name=test_convnext,test_vit"]
    images = [
        "data=fake",
        "data.image_size=8",
        "data.num_images=100",
        "data.batch_size=36",
    ]
    output = trains(*models, *images, "trainer.max_epochs=1", "callbacks=minimal", "-m")
    for model in ("test_convnext", "test_vit"):
        run = tmp_path / f"logs/sweeps/default/{model}/fake/standard/seed_0"
        assert result_of(run)["model"] == model
        assert f"\n## {model} on fake\n" in output


def test_a_model_is_named_by_what_is_trained(trains, tmp_path):
    tiny = [
        "data=fake",
        "data.image_size=8",
        "data.num_images=100",
        "trainer.max_epochs=1",
    ]
    trains("model=resnet18", "model.arch=resnet34", *tiny, "callbacks=minimal", "-m")
    run = tmp_path / "logs/sweeps/default/resnet34/fake/standard/seed_0"
    assert result_of(run)["model"] == "resnet34"


@pytest.mark.parametrize(
    ("swept", "names", "tag"),
    [
        ("model.depth=1,2", "model.depth", "${model.depth}"),
        ("optimizer=sgd,adamw", "optimizer", "${hydra:runtime.choices.optimizer}"),
        ("optimizer.lr=0.1,0.2 seed=0,1", "optimizer.lr", "${optimizer.lr}"),
        (
            "++trainer.max_steps=1,2 study=a,b",
            "trainer.max_steps, study",
            "${trainer.max_steps}_",
        ),
    ],
)
def test_a_sweep_whose_runs_would_share_a_directory_is_refused_before_the_first(
    refuses, tmp_path, swept, names, tag
):
    output = refuses(*SMALL, "mode=standard,golden", *swept.split(), "-m")
    assert f"the runs of a sweep over {names} would share a directory" in output
    assert f"Name an arm for each value: 'tag={tag}" in output
    assert not list(tmp_path.rglob("result.json"))


def test_the_keys_that_an_experiment_sweeps_over_must_name_directories_too(refuses):
    output = refuses("experiment=e1", "hydra.sweep.subdir=${mode}", "-m")
    assert "the runs of a sweep over optimizer.lr, seed would share a directory" in output


def test_a_tag_names_the_arms_of_a_sweep_over_other_keys(trains, tmp_path):
    tag = "tag=${model.depth}_${hydra:runtime.choices.optimizer}"
    trains(*SMALL, "model.depth=1,2", "optimizer=adamw,adamw", tag, "mode=golden", "-m")
    arms = {path.parts[-3] for path in tmp_path.rglob("result.json")}
    assert arms == {"golden-1_adamw", "golden-2_adamw"}


def test_names_of_directories_leave_logs_by_no_way(trains, refuses, tmp_path):
    trains(*training.SMALL, "~callbacks")
    (run,) = (tmp_path / "logs/runs").iterdir()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_vit_tiny_standard_seed_0", run.name
    )
    refuses(*SMALL, "mode=..", "+swap.foo='a/b=c'")
    refuses(*SMALL, "seed=/../../../z", "-m")
    trains(*SMALL, "study=../../y", "tag=../../x", "-m")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize("text", ['{"arm": ', "[]", '{"loss": 1}'])
def test_a_result_that_is_damaged_or_not_a_runs_stays(refuses, tmp_path, text):
    path = tmp_path / GOLDEN / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    output = refuses(*SMALL, "mode=golden,baseline", "-m")
    assert (
        f"{path.parent} has result.json, but not the result of a run, so they are left"
        in output
    )
    assert path.read_text() == text


@pytest.mark.parametrize("sweep", [[], ["-m"]])
@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOENT, errno.EPERM])
def test_a_directory_that_cannot_be_made_is_one_line(
    refuses, tmp_path, monkeypatch, number, sweep
):
    real = os.mkdir

    def mkdir(path, *arguments, **options):
        if "logs" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir)
    output = refuses(*SMALL, *sweep)
    line = output.splitlines()[-1]
    assert line.startswith(f"normplug.experiment: {tmp_path}/logs")
    why = f"cannot be read or written: {os.strerror(number)}. Free up space or make it"
    assert why in line
    assert not list(tmp_path.iterdir())
