"""What train.py refuses before it trains, in one sentence each, and what simply works."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

import train
from normplug.experiment.checks import check
from normplug.experiment.command import groups_off
from normplug.experiment.data import Cifar10
from normplug.experiment.errors import UserError
from normplug.experiment.names import LONGEST_NAME, path_name
from training import SMALL

ROOT = Path(train.__file__).parent


@pytest.fixture
def checked(tmp_path):
    """Compose the configuration of a command line and check it."""
    singleton = HydraConfig.instance()

    def call(line):
        overrides = groups_off(shlex.split(line), train.CONFIGS)
        with initialize_config_dir(train.CONFIGS, version_base="1.3"):
            cfg = compose("train", overrides, return_hydra_config=True)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = str(tmp_path)
            singleton.set_config(cfg)
            del cfg["hydra"]
        check(cfg)

    yield call
    singleton.cfg = None


# A command line, and what the sentence about it says.
MISTAKES = {
    # single keys
    "seed=-1": "seed must be from 0 to 4294967295; got -1.",
    "seed=4294967296": "seed must be from 0 to 4294967295; got 4294967296.",
    "seed=true": "seed must be an integer; got true.",
    "seed=null": "seed must be an integer; got null.",
    "seed=1.5": "seed must be an integer; got 1.5.",
    "gamma0=true": "gamma0 scales the norms' initial weights and must be a finite number above 0",
    "gamma0=inf": "gamma0 scales the norms' initial weights and must be a finite number above 0",
    "compile=maybe": "compile must be true or false; got 'maybe'.",
    "compile=null": "compile must be true or false; got null.",
    "fuse=1": "fuse must be true, false or null; got 1.",
    "recompute=null": "recompute must be true or false; got null.",
    "channels_last=maybe": "channels_last must be true or false; got 'maybe'.",
    "ckpt_path=5": "ckpt_path must be the path of a checkpoint, or null; got 5.",
    "schedule=null": "schedule must be one of one_cycle, cosine, constant; got null.",
    "warmup=1": "warmup is a fraction of all steps, at least 0 and below 1; got 1.",
    "warmup=-0.1": "warmup is a fraction of all steps, at least 0 and below 1; got -0.1.",
    "warmup=x": "warmup is a fraction of all steps, at least 0 and below 1; got 'x'.",
    "label_smoothing=5": "label_smoothing must be a number from 0 to 1; got 5.",
    "label_smoothing=-1": "label_smoothing must be a number from 0 to 1; got -1.",
    "label_smoothing=x": "label_smoothing must be a number from 0 to 1; got 'x'.",
    "label_smoothing=nan": "label_smoothing must be a number from 0 to 1; got nan.",
    "tag=../../x": "tag must be a name: at most 100 characters, without slashes",
    "tag=a/b": "tag must be a name",
    "tag=..": "tag must be a name",
    "tag=[a]": "tag must be a name",
    f"tag={'x' * 101}": "tag must be a name",
    "study=../x": "study must be a name",
    "study=/tmp/x": "study must be a name",
    "study=null": "study must be a name",
    "study=''": "study must be a name",
    "+foo=1": "foo is not a key of the configuration. Leave it out (~foo), or use one of",
    "+warmpu=0.1": "warmpu is not a key of the configuration. Did you mean warmup?",
    "~warmup": "the configuration needs warmup, and has none.",
    "warmup=???": "warmup: Missing mandatory value",
    "warmup=${nowhere}": "warmup: Interpolation key 'nowhere' not found",
    # swap
    "swap=null": "swap must be a mapping; got null.",
    "swap.include=5": "swap.include must be null, a pattern such as 'layer4.*', or a list",
    "swap.include=[]": "swap.include must be null, a pattern such as 'layer4.*', or a list",
    "swap.exclude=5": "swap.exclude must be null, a pattern",
    "+swap.foo=1": "swap.foo is not an argument of normplug.swap.",
    "+swap.includes=x": "swap.includes is not an argument of normplug.swap. Did you mean swap.incl",
    "+swap.sync=maybe": "swap.sync must be true or false; got 'maybe'.",
    "+swap.mode=golden": "swap.mode comes from the key mode. Leave swap.mode out.",
    # data
    "data=null": "the configuration needs data, and has none.",
    "data.seed=x": "data.seed must be an integer; got 'x'.",
    "data.seed=-1": "data.seed must be from 0 to 4294967295; got -1.",
    "data.batch_size=0": "data.batch_size must be an integer >= 1; got 0.",
    "data.batch_size=-4": "data.batch_size must be an integer >= 1; got -4.",
    "data.batch_size=2.5": "data.batch_size must be an integer >= 1; got 2.5.",
    "data.batch_size=null": "data.batch_size must be an integer >= 1; got null.",
    "+data.val_fraction=0": "data.val_fraction must be above 0 and below 1; got 0.",
    "+data.val_fraction=1": "data.val_fraction must be above 0 and below 1; got 1.",
    "+data.val_fraction=2": "data.val_fraction must be above 0 and below 1; got 2.",
    "+data.val_fraction=x": "data.val_fraction must be above 0 and below 1; got 'x'.",
    "data.augment=5": "data.augment must be a mapping or null; got 5.",
    "data.augment.pad=-1": "data.augment.pad must be an integer >= 0; got -1.",
    "data.augment.pad=1.5": "data.augment.pad must be an integer >= 0; got 1.5.",
    "data.augment.flip=maybe": "data.augment.flip must be true or false; got 'maybe'.",
    "+data.foo=1": "data.foo is not an argument of normplug.experiment.data.Digits.",
    "+data.num_classes=3": "data.num_classes is not an argument of normplug.experiment.data.Dig",
    "data=fake data.image_size=0": "data.image_size must be an integer >= 1, or null; got 0.",
    "data=fake data.image_size=2.5": "data.image_size must be an integer >= 1, or null; got 2.5.",
    "data=fake data.image_size=null": "data.image_size must be an integer; got null.",
    "data=fake data.num_classes=1": "data.num_classes must be an integer >= 2; got 1.",
    "data=fake data.num_images=-5": "data.num_images must be an integer >= 1; got -5.",
    "data=image_folder data.root=5": "data.root must be text or null; got 5.",
    "data=image_folder data.memory_gib=-1": "data.memory_gib must be a finite number >= 0; got -1.",
    "data=image_folder data.num_workers=-1": "data.num_workers must be an integer >= 0; got -1.",
    "data=image_folder data.image_size=x": "data.image_size must be an integer >= 1, or null",
    "data=cifar10 data.root=null": "data.root must be text; got null.",
    "data._target_=nowhere.Data": "data._target_ must be the import path of a class or function",
    "experiment=smoke data=digits": "Leave it out (~data.image_size), or use one of augment",
    # model
    "model=null": "the configuration needs model, and has none.",
    "model.small_stem=maybe": "model.small_stem must be true, false or null; got 'maybe'.",
    "model.arch=null": "model.arch must be text; got null.",
    "~model.arch": "model needs arch for normplug.experiment.models.resnet. Give +model.arch=",
    "+model.num_classes=5": "model.num_classes comes from the data. Leave model.num_classes out.",
    "+model.foo=1": "model.foo is not an argument of normplug.experiment.models.resnet.",
    "model=vit_tiny model.patch_size=0": "model.patch_size must be an integer >= 1, or null; got",
    "model=vit_tiny model.hidden_dim=0": "model.hidden_dim must be an integer >= 1; got 0.",
    "model=vit_tiny model.depth=0": "model.depth must be an integer >= 1; got 0.",
    "model=vit_tiny model.heads=0": "model.heads must be an integer >= 1; got 0.",
    "model=vit_tiny model.mlp_ratio=1.5": "model.mlp_ratio must be an integer >= 1; got 1.5.",
    "model=vit_tiny model.dropout=1": "model.dropout must be at least 0 and below 1; got 1.",
    "experiment=cifar10_vit model=resnet18": "Leave it out (~model.hidden_dim), or use one of",
    # optimizer
    "optimizer=null": "the configuration needs optimizer, and has none.",
    "optimizer.lr=abc": "optimizer.lr must be a finite number above 0; got 'abc'.",
    "optimizer.lr=0": "optimizer.lr must be a finite number above 0; got 0.",
    "optimizer.lr=nan": "optimizer.lr must be a finite number above 0; got nan.",
    "optimizer.lr=true": "optimizer.lr must be a finite number above 0; got true.",
    "optimizer.weight_decay=-1": "torch.optim.SGD refuses its settings: Invalid weight_decay valu",
    "optimizer.weight_decay=x": "optimizer.weight_decay must be a number; got 'x'.",
    "optimizer.momentum=-1": "torch.optim.SGD refuses its settings: Invalid momentum value: -1",
    "optimizer.momentum=0": "Nesterov momentum requires a momentum and zero dampening; got lr=0.1",
    "optimizer.nesterov=maybe": "optimizer.nesterov must be true or false; got 'maybe'.",
    "optimizer=adamw optimizer.betas=3": "optimizer.betas must be a list; got 3.",
    "optimizer=adamw optimizer.betas=[2,2]": "torch.optim.AdamW refuses its settings: Invalid bet",
    "+optimizer.foo=1": "optimizer.foo is not an argument of torch.optim.SGD.",
    "+optimizer.params=[]": "optimizer.params comes from the model.",
    "optimizer._partial_=false": "torch.optim.SGD refuses its settings: SGD.__init__() missing 1",
    "optimizer._target_=torch.optim.LBFGS": "optimizer.momentum is not an argument of torch.opti",
    # trainer
    "trainer=null": "the configuration needs trainer, and has none.",
    "trainer.max_epochs=0": "trainer.max_epochs must be an integer >= 1, or null with +trainer.ma",
    "trainer.max_epochs=-1": "trainer.max_epochs must be an integer >= 1, or null with +trainer.m",
    "trainer.max_epochs=1.5": "trainer.max_epochs must be an integer >= 1, or null with +trainer.",
    "trainer.max_epochs=null": "trainer.max_epochs must be an integer >= 1, or null with +trainer",
    "trainer.max_epochs=x": "trainer.max_epochs must be an integer >= 1, or null with +trainer.max",
    "+trainer.max_steps=0": "trainer.max_steps must be an integer >= 1, or -1 for no limit; got 0",
    "+trainer.max_epoch=3": "trainer.max_epoch is not an argument of lightning.pytorch.Trainer. D",
    "+trainer.callbacks=[]": "trainer.callbacks comes from the group callbacks.",
    "+trainer.logger=false": "trainer.logger comes from the group logger.",
    "+trainer.limit_train_batches=0": "trainer.limit_train_batches must be a finite number above",
    "+trainer.limit_test_batches=0": "trainer.limit_test_batches must be a finite number above 0",
    "+trainer.accumulate_grad_batches=0": "trainer.accumulate_grad_batches must be an integer >=",
    "+trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch must be an integer >=",
    "+trainer.val_check_interval=0": "trainer.val_check_interval must be above 0, a time, or null",
    "+trainer.detect_anomaly=maybe": "trainer.detect_anomaly must be true or false; got 'maybe'.",
    "+trainer.sync_batchnorm=true": "which would drop mode=golden",
    "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms, foo: 1}]'": "trainer.plugins.foo",
    "trainer.precision=foo": "trainer.precision must be 64, 32, 16,",
    "trainer.devices=1.5": "trainer.devices must be a list, text or an integer; got 1.5.",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val must be a finite number >= 0, or n",
    "trainer.log_every_n_steps=-1": "trainer.log_every_n_steps must be an integer >= 0; got -1.",
    "trainer.num_sanity_val_steps=x": "trainer.num_sanity_val_steps must be an integer >= -1; go",
    "trainer.enable_model_summary=maybe": "trainer.enable_model_summary must be true, false or n",
    "trainer.enable_progress_bar=maybe": "trainer.enable_progress_bar must be true, false or nul",
    "trainer.fast_dev_run=maybe": "trainer.fast_dev_run must be an integer, true or false; got",
    "trainer.default_root_dir=5": "trainer.default_root_dir must be text or null; got 5.",
    # callbacks and loggers
    "callbacks.variance.every_n_steps=1.5": "callbacks.variance.every_n_steps must be an integer;",
    "+callbacks.variance.foo=1": "callbacks.variance.foo is not an argument of normplug.lightning",
    "+callbacks.foo=1": "callbacks.foo must be a mapping with a _target_; got 1.",
    "callbacks=minimal +callbacks.variance.every_n_steps=4": "callbacks.variance must be a mappi",
    "+callbacks.checkpoint.save_top_kk=1": "Did you mean callbacks.checkpoint.save_top_k?",
    "callbacks.checkpoint.filename=5": "callbacks.checkpoint.filename must be text or null; got 5.",
    "+logger.csv.foo=1": "logger.csv.foo is not an argument of lightning.pytorch.loggers.CSVLogger",
    "logger.csv.save_dir=null": "logger.csv.save_dir must be text; got null.",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_key_and_the_rule(checked, line):
    with pytest.raises(UserError) as caught:
        checked(line)
    sentence = str(caught.value)
    assert MISTAKES[line] in sentence
    assert sentence.startswith("normplug.experiment: ")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "line",
    [
        "",
        "callbacks=null",
        "logger=null",
        "experiment=null",
        "callbacks=null logger=null experiment=smoke",
        "experiment=smoke callbacks=minimal",
        "experiment=smoke callbacks=default",
        "callbacks.variance=null",
        "logger=tensorboard +logger.tensorboard.flush_secs=1",
        "logger.csv.name=null",
        "model=vit_tiny trainer.max_epochs=3",
        "experiment=cifar10_vit",
        "experiment=cifar10_resnet18",
        "experiment=smoke data=digits ~data.image_size ~data.num_images",
        "data=image_folder data.root=/tmp data.image_size=8",
        "data.augment=null",
        "data.seed=5",
        "mode=0.5 gamma0=0.786 tag=5",
        "'tag=\"a b=c\"'",
        "study=2026",
        "swap.include=layer4.*",
        "swap.include=[layer4.*,layer3.*]",
        "+swap.sync=true",
        "trainer.max_epochs=null +trainer.max_steps=4",
        "trainer.max_epochs=-1 +trainer.max_steps=4",
        "+trainer.limit_val_batches=0",
        "+trainer.limit_train_batches=0.5",
        "+trainer.deterministic=warn",
        "trainer.precision=bf16-true",
        "trainer.precision=16",
        "trainer.fast_dev_run=3",
        "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'",
        "optimizer._target_=torch.optim.RMSprop ~optimizer.nesterov",
    ],
)
def test_what_can_run_passes(checked, line):
    checked(line)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["trainer.accelerator=gpu"], "trainer cannot be built: No supported gpu backend found"),
        (["trainer.devices=0"], "the command gives trainer.max_epochs=1, trainer.devices=0. "),
        (["trainer.accelerator=foo"], "You selected an invalid accelerator name"),
        (["trainer.strategy=foo"], "You selected an invalid strategy name"),
        (["trainer.fast_dev_run=-1"], "fast_dev_run=-1 is not a valid configuration"),
        (["model.heads=3"], "model.heads must divide model.hidden_dim=64; got 3."),
        (["model=resnet18", "model.arch=vit_b_16"], "model.arch must be one of resnet101"),
        (["+data.augment.foo=1"], "data cannot be built: Augment.__init__() got an unexpected"),
        (["data.num_images=5"], "both parts of a split need an image"),
        (["callbacks.variance.every_n_steps=0"], "every_n_steps must be at least 1; got 0"),
        (["+callbacks.checkpoint.save_top_k=-5"], "callbacks.checkpoint cannot be built: Invalid"),
        (
            ["+callbacks.foo._target_=os.getcwd"],
            "must make a Lightning callback or logger; got str",
        ),
        (["mode=true"], "Or mode=baseline, which swaps nothing."),
        (["seed=${nowhere}"], "hydra.run.dir has no value: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_only_the_object_itself_can_tell_is_one_sentence_too(
    command, tmp_path, overrides, sentence
):
    if "gpu" in overrides[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code, output = command(*SMALL, *overrides)
    assert code == 1
    (line,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert sentence in line
    assert "Traceback" not in output
    assert '"running"' not in "".join(p.read_text() for p in tmp_path.rglob("result.json"))
    assert not list(tmp_path.rglob(f".*.{os.getpid()}"))  # half-written files


def test_an_image_folder_of_one_class_is_refused(command, tmp_path):
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    code, output = command("data=image_folder", "data.root=photos", "data.image_size=8")
    assert code == 1
    assert "the data must have two classes or more to tell apart; got 1. An image folder" in output
    assert "Traceback" not in output


def test_data_that_cannot_be_downloaded_are_one_sentence(command, tmp_path, monkeypatch):
    def refuse(self, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(Cifar10, "_open", refuse)
    code, output = command("data=cifar10", "trainer.max_epochs=1")
    assert code == 1
    assert "CIFAR10 must be in data, or be downloaded to it (no network). Check" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "overrides",
    [["callbacks=minimal"], ["callbacks=null", "logger=null"], ["logger=null"]],
    ids=" ".join,
)
def test_groups_can_be_switched_off(command, tmp_path, overrides):
    code, output = command(*SMALL, *overrides, f"hydra.run.dir={tmp_path}/run")
    assert code == 0, output
    files = {path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."}
    expected = {"result.json", "config.yaml", "train.log"}
    if overrides == ["callbacks=minimal"]:
        expected.add("metrics.csv")
    if overrides == ["logger=null"]:
        expected |= {"checkpoints", "variance.csv", "variance.png"}
    assert files == expected


def test_null_is_rewritten_only_for_whole_groups():
    line = ["callbacks=null", "logger=csv,null", "gamma0=null", "swap.include=null", "data=nullx"]
    done = ["callbacks=[]", "logger=csv,[]", "gamma0=null", "swap.include=null", "data=nullx"]
    assert groups_off(line, train.CONFIGS) == done


@pytest.mark.parametrize("devices", ["2", "'2'"])
def test_a_sweep_that_would_start_itself_again_is_refused(command, devices):
    code, output = command(*SMALL, "trainer.accelerator=cpu", f"trainer.devices={devices}", "-m")
    assert code == 1
    assert "2 devices with DDPStrategy start each process by running the command again" in output
    assert "Traceback" not in output


def test_the_command_itself_prints_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *SMALL, "tag=../../x", "-m"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "normplug" in line]
    assert "tag must be a name" in line
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


def test_paths_have_plain_and_bounded_names():
    assert path_name("a=b/c d") == "a_b_c_d"
    assert path_name("../../x") == "_.._.._x"
    assert path_name("..") == "_.."
    assert path_name(None) == "None"
    assert path_name("0.5") == "0.5"
    one, other = path_name("x" * 300 + "1"), path_name("x" * 300 + "2")
    assert one != other
    assert len(one) == len(other) == LONGEST_NAME


def test_the_checks_leave_the_configuration_as_it_is(tmp_path):
    with initialize_config_dir(train.CONFIGS, version_base="1.3"):
        cfg = compose("train", ["callbacks=[]", "logger=[]", "trainer.default_root_dir=null"])
    before = OmegaConf.to_yaml(cfg)
    check(cfg)
    assert OmegaConf.to_yaml(cfg) == before
