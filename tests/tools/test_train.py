"""train.py as its user meets it: commands in, files and sentences out."""

import csv
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

import normplug
import train
from normplug._ops import recompute
from normplug.experiment.classifier import Classifier
from normplug.experiment.models import resnet, scale_norm_weights, vit
from normplug.experiment.run import arm_name

ROOT = Path(train.__file__).parent
CONFIGS = ROOT / "configs"
RESULT_KEYS = {
    "arm",
    "seed",
    "model",
    "data",
    "test_accuracy",
    "accuracy_by_epoch",
    "step_ms",
    "images_per_s",
    "loader_wait_ms",
    "peak_memory_bytes",
    "norms_swapped",
    "norms_fused",
    "recompute",
    "channels_last",
    "versions",
    "hardware",
    "status",
}
TINY = ["experiment=smoke", "model=vit_tiny", "data.num_images=400", "data.batch_size=16"]


def results(directory):
    found = [json.loads(path.read_text()) for path in Path(directory).rglob("result.json")]
    return sorted(found, key=lambda result: (result["arm"], result["seed"]))


def choices(group):
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


@pytest.mark.parametrize("model", choices("model"))
@pytest.mark.parametrize("optimizer", choices("optimizer"))
def test_every_model_trains_a_step_with_every_optimizer(model, optimizer):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = compose("train", [f"model={model}", f"optimizer={optimizer}"])
    net = instantiate(cfg.model, num_classes=7, image_size=16)
    before = [p.clone() for p in net.parameters()]
    y = net(torch.randn(2, 3, 16, 16))
    assert y.shape == (2, 7)
    y.square().sum().backward()
    instantiate(cfg.optimizer)(net.parameters()).step()
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("group", ["experiment", "logger", "callbacks", "data", "trainer"])
def test_every_config_composes(group):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        for choice in choices(group):
            cfg = compose("train", [f"{group}={choice}"])
            assert cfg.mode == "golden"


def test_the_command_line_wins_over_what_a_model_or_an_experiment_chooses():
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        assert compose("train", ["model=vit_tiny"]).optimizer._target_ == "torch.optim.AdamW"
        cfg = compose("train", ["model=vit_tiny", "optimizer=sgd", "trainer.max_epochs=3"])
        assert cfg.optimizer._target_ == "torch.optim.SGD"
        assert cfg.trainer.max_epochs == 3
        assert compose("train", ["experiment=cifar10_vit"]).model.depth == 9


def test_one_run_reports_and_writes_all_that_it_promises(command, tmp_path):
    code, output = command(*TINY, "mode=golden", "seed=0", "logger=tensorboard")
    assert code == 0, output
    (result,) = results(tmp_path)
    assert result.keys() >= RESULT_KEYS
    assert (result["arm"], result["seed"], result["model"], result["data"]) == (
        "golden",
        0,
        "vit_tiny",
        "fake",
    )
    assert result["status"] == "finished"
    assert result["norms_swapped"] == 9
    assert len(result["accuracy_by_epoch"]) == 2
    assert result["images_per_s"] == pytest.approx(16e3 / result["step_ms"], rel=0.5)
    assert result["peak_memory_bytes"] > 2**20
    assert result["versions"]["torch"] == torch.__version__
    directory = next(tmp_path.rglob("result.json")).parent
    for name in (
        "config.yaml",
        "metrics.csv",
        "variance.csv",
        "variance.png",
        "checkpoints/last.ckpt",
    ):
        assert (directory / name).stat().st_size > 0, name
    assert list((directory / "tensorboard").iterdir())
    with (directory / "variance.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["layer"] for row in rows}) == 9
    assert all(
        abs(float(row["output_variance"]) - 0.618) < 0.002 for row in rows if row["depth"] != "8"
    )
    for words in (
        f"{100 * result['test_accuracy']:.2f} %",
        "images/s",
        "MiB",
        "9 swapped",
        str(directory),
    ):
        assert words in output
    assert "encoder_layer_3.ln_2" in output


def test_a_sweep_pairs_its_arms_skips_what_is_done_and_compares(command, tmp_path):
    sweep = [*TINY, "trainer.max_epochs=1", "seed=0,1", "-m"]
    code, output = command("mode=baseline,standard,0.5", *sweep)
    assert code == 0, output
    root = tmp_path / "logs/sweeps/smoke"
    found = results(root)
    assert [(r["arm"], r["seed"]) for r in found] == [
        (a, s) for a in ("0.5", "baseline", "standard") for s in (0, 1)
    ]
    by_arm = {(r["arm"], r["seed"]): r for r in found}
    for seed in (0, 1):  # same weights, same order, same function: the same numbers
        baseline, standard = by_arm["baseline", seed], by_arm["standard", seed]
        assert baseline["accuracy_by_epoch"] == standard["accuracy_by_epoch"]
        assert (baseline["norms_swapped"], standard["norms_swapped"]) == (0, 9)
    assert (root / "vit_tiny/fake/0.5/seed_1/variance.csv").exists()
    assert (root / "vit_tiny/fake/baseline/seed_1/variance.csv").exists()
    assert "| standard |" in output
    for name in ("summary.md", "summary.csv", "runs.csv", "seeds_vit_tiny_fake.png"):
        assert (root / name).exists()

    times = {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    code, output = command("mode=baseline,standard,0.5", *sweep)
    assert code == 0
    assert output.count("skipped: ") == 6
    assert {path: path.stat().st_mtime_ns for path in root.rglob("result.json")} == times

    code, output = command("warmup=0.5", "mode=baseline", *sweep)
    assert code == 1
    assert "holds a finished run with another value of warmup" in output
    assert {path: path.stat().st_mtime_ns for path in root.rglob("result.json")} == times


def test_a_failed_arm_is_recorded_and_shown_and_the_others_go_on(command, tmp_path):
    # 3 does not divide 16 pixels; the other arm's patches do
    code, output = command(
        "mode=baseline,golden", *TINY, "trainer.max_epochs=1", "model.patch_size=3", "-m"
    )
    assert code == 1
    assert [r["status"] for r in results(tmp_path)] == ["failed", "failed"]
    assert "golden, seed 0: failed: normplug.experiment: model.patch_size must divide" in output


def test_resuming_goes_on_where_it_stopped_and_refuses_another_mode(command, tmp_path):
    steady = [*TINY, "schedule=constant", "warmup=0", "logger=csv"]
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert command(*steady, f"hydra.run.dir={whole}")[0] == 0
    assert command(*steady, f"hydra.run.dir={half}", "trainer.max_epochs=1")[0] == 0
    checkpoint = f"ckpt_path={half}/checkpoints/last.ckpt"
    rest = tmp_path / "rest"
    code, output = command(*steady, f"hydra.run.dir={rest}", checkpoint)
    assert code == 0, output
    (a,), (b,) = results(whole), results(rest)
    assert a["accuracy_by_epoch"] == b["accuracy_by_epoch"]
    weights = [
        torch.load(d / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
        for d in (whole, rest)
    ]
    for key, value in weights[0].items():
        torch.testing.assert_close(weights[1][key], value, msg=key)
    code, output = command(*steady, checkpoint, "mode=0.5")
    assert code == 1
    assert "the checkpoint is of arm 'golden', this run of '0.5'" in output


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["mode=gold"], "mode must be 'golden'"),
        (["mode=-1"], "got -1. Or mode=baseline"),
        (["model=resnet99"], "Could not find 'model/resnet99'"),
        (["data=image_folder"], "root must name a directory of images"),
        (
            ["data=image_folder", "data.root=/nowhere", "data.image_size=8"],
            "root must be a directory, got /nowhere",
        ),
        (["seed=x"], "seed must be an integer; got 'x'"),
        (["gamma0=-1"], "gamma0 scales the norms' initial weights"),
        (["optimizer.lr=fast"], "optimizer.lr must be a finite number above 0; got 'fast'"),
        (["schedule=warp"], "schedule must be one of one_cycle, cosine, constant; got 'warp'"),
        (["warmup=2"], "warmup is a fraction of all steps"),
        (["ckpt_path=/nowhere"], "ckpt_path must be a checkpoint file; got /nowhere"),
        (["+trainer.sync_batchnorm=true"], "which would drop mode=golden"),
        (["swap.include=layer9"], "include='layer9' matches no norm layer"),
        (["trainer.strategy=ddp", "trainer.devices=2", "-m"], "would be the whole sweep"),
    ],
)
def test_a_wrong_value_ends_in_a_sentence_and_no_trace(command, overrides, sentence):
    code, output = command(*overrides)
    assert code == 1
    assert sentence in output
    assert "Traceback" not in output


def test_fast_dev_run(command):
    code, output = command(*TINY, "trainer.fast_dev_run=true")
    assert code == 0, output
    assert "not timed: too few steps" in output


def test_two_processes_train_one_model(tmp_path):
    options = [
        "trainer.accelerator=cpu",
        "trainer.strategy=ddp",
        "trainer.devices=2",
        "trainer.max_epochs=1",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *TINY, *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (result,) = results(tmp_path)
    assert result["hardware"].startswith("CPU")
    with next(tmp_path.rglob("variance.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["rank"], row["world_size"]) for row in rows} == {("0", "2")}
    assert len(rows) == 9 * len({row["step"] for row in rows})
    assert "rank 0 of 2's part of the batch" in done.stdout


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 100])
def test_the_learning_rate_rises_to_its_value_and_norms_and_biases_do_not_decay(schedule, steps):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    sgd = partial(torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1)
    model = Classifier(net, 4, sgd, schedule=schedule, warmup=0.2)
    model._trainer = SimpleNamespace(estimated_stepping_batches=steps)
    configured = model.configure_optimizers()
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    decays = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {id(p): 0.1 if p.dim() == 2 else 0 for p in net.parameters()}
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert max(rates) == pytest.approx(0.5, rel=0.01)
    if steps == 100:
        assert rates.index(max(rates)) == pytest.approx(20, abs=1)
        assert rates[0] < 0.05
        assert (rates[-1] < 0.01) == (schedule != "constant")


def test_arms_have_names_that_tell_them_apart():
    assert arm_name("baseline") == "baseline"
    assert arm_name(1) == "standard"
    assert arm_name(0.5) == "0.5"
    assert arm_name("standard", 0.786) == "standard-gamma0_0.786"
    assert arm_name("golden", tag="lr0.1") == "golden-lr0.1"


def test_gamma0_starts_as_the_mode_whose_root_it_is():
    torch.manual_seed(0)
    nets = [resnet("resnet18", num_classes=4, image_size=16)]
    nets.append(resnet("resnet18", num_classes=4, image_size=16))
    nets[1].load_state_dict(nets[0].state_dict())
    normplug.swap(nets[0], "golden")
    scale_norm_weights(nets[1], normplug.target_variance("golden") ** 0.5)
    x = torch.randn(4, 3, 16, 16)
    torch.testing.assert_close(nets[0](x), nets[1](x))


def test_the_transformer_validates_with_the_norms_that_it_trains():
    net = normplug.swap(vit(num_classes=4, image_size=8), "golden")
    x = torch.randn(3, 3, 8, 8)
    trained = net.train()(x)
    with torch.no_grad():
        torch.testing.assert_close(net.eval()(x), trained)
        normplug.set_mode(net, "standard")
        assert not torch.allclose(net(x), trained)


def test_stems_and_patches_suit_the_image():
    assert resnet("resnet18", num_classes=2, image_size=32).conv1.stride == (1, 1)
    assert resnet("resnet18", num_classes=2, image_size=224).conv1.stride == (2, 2)
    sizes = {size: vit(num_classes=2, image_size=size).patch_size for size in (8, 28, 32, 224)}
    assert sizes == {8: 2, 28: 4, 32: 4, 224: 28}
    with pytest.raises(ValueError, match="must divide the image size 8; got 3"):
        vit(num_classes=2, image_size=8, patch_size=3)


@pytest.mark.parametrize(("model", "fused"), [("resnet18", 17), ("vit_tiny", 8)])
def test_a_fused_run_in_channels_last_gives_the_same_accuracy(command, tmp_path, model, fused):
    tiny = ["experiment=smoke", f"model={model}", "data.num_images=200", "trainer.max_epochs=1"]
    for fuse in (True, False):
        code, output = command(*tiny, "mode=golden", f"fuse={fuse}", "channels_last=true",
                               f"hydra.run.dir={tmp_path}/{fuse}")  # fmt: skip
        assert code == 0, output
        assert f"swapped, {fused if fuse else 0} fused" in output
    (one,), (other,) = results(tmp_path / "True"), results(tmp_path / "False")
    assert (one["norms_fused"], other["norms_fused"]) == (fused, 0)
    assert one["channels_last"] is True
    assert one["accuracy_by_epoch"] == other["accuracy_by_epoch"]


def test_only_swapped_norms_are_fused_and_a_wrong_setting_is_refused(command, tmp_path):
    code, output = command(*TINY, "mode=baseline", "fuse=true", "trainer.max_epochs=1")
    assert code == 0, output
    assert results(tmp_path)[0]["norms_fused"] == 0
    code, output = command(*TINY, "fuse=maybe")
    assert code == 1
    assert "fuse must be true, false or null; got 'maybe'" in output


def test_results_are_computed_anew_of_fused_norms_only(command, tmp_path):
    for wrong in (["fuse=false"], ["fuse=true", "compile=true"]):
        code, output = command(*TINY, "recompute=true", *wrong)
        assert code == 1
        assert "recompute=true is for fused norms" in output
    code, output = command(*TINY, "recompute=always")
    assert code == 1
    assert "recompute must be true or false; got 'always'" in output
    if not recompute.AVAILABLE:
        code, output = command(*TINY, "fuse=true", "recompute=true")
        assert code == 1
        assert "recompute needs torch 2.8" in output
        return
    code, output = command(*TINY, "fuse=true", "recompute=true", "trainer.max_epochs=1",
                           f"hydra.run.dir={tmp_path}/fused")  # fmt: skip
    assert code == 0, output
    assert results(tmp_path / "fused")[0]["recompute"] is True
    code, output = command(*TINY, "mode=baseline", "recompute=true", "trainer.max_epochs=1",
                           f"hydra.run.dir={tmp_path}/baseline")  # fmt: skip
    assert code == 0, output
    assert results(tmp_path / "baseline")[0]["recompute"] is False
