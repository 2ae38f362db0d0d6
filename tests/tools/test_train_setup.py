"""What train.py refuses before it trains, in one sentence each, and what simply works."""

import os
import shlex
from unittest.mock import Mock

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
from training import SMALL, python


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


WHOLE = "must be an integer >= 1"
POSITIVE = "must be a finite number above 0"
FLAG = "must be true or false"
SEED = "must be from 0 to 4294967295"
GAMMA = "scales the norms' initial weights and must be a finite number above 0, or null"
FRACTION = "is a fraction of all steps, at least 0 and below 1"
NAME = "must be a name: at most 100 characters, without slashes, not beginning with a dot"
PATTERNS = "must be null, a pattern such as 'layer4.*', or a list of at least one pattern"
# Keys, with the choices before them; what they must be; and values that each of them refuses.
WRONG_VALUES = [
    ("seed, data.seed", SEED, "-1 4294967296"),
    ("seed, data.seed", "must be an integer", "true null 1.5 'x'"),
    ("gamma0", GAMMA, "true inf"),
    ("compile, recompute, channels_last", FLAG, "'maybe' null"),
    ("data.augment.flip, optimizer.nesterov", FLAG, "'maybe'"),
    ("+swap.sync, +trainer.detect_anomaly", FLAG, "'maybe'"),
    ("fuse, model.small_stem", "must be true, false or null", "1 'maybe'"),
    ("ckpt_path", "must be the path of a checkpoint, or null", "5"),
    ("schedule", "must be one of one_cycle, cosine, constant", "null"),
    ("warmup", FRACTION, "1 -0.1 'x'"),
    ("label_smoothing", "must be a number from 0 to 1", "5 -1 'x' nan"),
    ("tag", f"{NAME}; or null", f"'../../x' 'a/b' '..' ['a'] '{'x' * 101}'"),
    ("study", NAME, "'../x' '/tmp/x' null ''"),
    ("swap", "must be a mapping", "null"),
    ("swap.include, swap.exclude", PATTERNS, "5 []"),
    ("data.batch_size", WHOLE, "0 -4 2.5 null"),
    ("+data.val_fraction", "must be above 0 and below 1", "0 1 2 'x'"),
    ("data.augment", "must be a mapping or null", "5"),
    ("data.augment.pad, trainer.log_every_n_steps", "must be an integer >= 0", "-1 1.5"),
    ("data=fake data.image_size", f"{WHOLE}, or null", "0 2.5"),
    ("data=image_folder data.image_size", f"{WHOLE}, or null", "'x'"),
    ("data=fake data.image_size", "must be an integer", "null"),
    ("data=fake data.num_classes", "must be an integer >= 2", "1"),
    ("data=fake data.num_images", WHOLE, "-5"),
    ("data=image_folder data.root", "must be text or null", "5"),
    ("data=image_folder data.memory_gib", "must be a finite number >= 0", "-1"),
    ("data=image_folder data.num_workers", "must be an integer >= 0", "-1"),
    ("data=cifar10 data.root, model.arch, logger.csv.save_dir", "must be text", "null"),
    ("model=vit_tiny model.patch_size", f"{WHOLE}, or null", "0"),
    ("model=vit_tiny model.hidden_dim, model=vit_tiny model.depth", WHOLE, "0"),
    ("model=vit_tiny model.heads, model=vit_tiny model.mlp_ratio", WHOLE, "0 1.5"),
    ("model=vit_tiny model.dropout", "must be at least 0 and below 1", "1"),
    ("optimizer.lr", POSITIVE, "'abc' 0 nan true"),
    ("optimizer.weight_decay", "must be a number", "'x'"),
    ("optimizer=adamw optimizer.betas", "must be a list", "3"),
    ("trainer.max_epochs", f"{WHOLE}, or null with +trainer.max_steps", "0 -1 1.5 null 'x'"),
    ("+trainer.max_steps", f"{WHOLE}, or -1 for no limit", "0"),
    ("+trainer.limit_train_batches, +trainer.limit_test_batches", f"{POSITIVE}, or null", "0"),
    ("+trainer.accumulate_grad_batches", WHOLE, "0"),
    ("+trainer.check_val_every_n_epoch", f"{WHOLE}, or null", "0"),
    ("+trainer.val_check_interval", "must be above 0, a time, or null", "0"),
    ("trainer.devices", "must be a list, text or an integer", "1.5"),
    ("trainer.gradient_clip_val", "must be a finite number >= 0, or null", "-1"),
    ("trainer.num_sanity_val_steps", "must be an integer >= -1", "'x'"),
    ("trainer.enable_model_summary", "must be true, false or null", "'maybe'"),
    ("trainer.enable_progress_bar", "must be true, false or null", "'maybe'"),
    ("trainer.fast_dev_run", "must be an integer, true or false", "'maybe'"),
    ("trainer.default_root_dir", "must be text or null", "5"),
    ("callbacks.checkpoint.filename", "must be text or null", "5"),
    ("callbacks.variance.every_n_steps", "must be an integer", "1.5"),
    ("+callbacks.foo", "must be a mapping with a _target_", "1"),
]
# A command line, and what the sentence about it says.
MISTAKES = {
    f"{key}={value}": f"{key.split()[-1].lstrip('+')} {rule}; got {value}."
    for keys, rule, values in WRONG_VALUES
    for key in keys.split(", ")
    for value in values.split()
} | {
    # single keys
    "+foo=1": "foo is not a key of the configuration. Leave it out (~foo), or use one of",
    "+warmpu=0.1": "warmpu is not a key of the configuration. Did you mean warmup?",
    "~warmup": "the configuration needs warmup, and has none.",
    "warmup=???": "warmup: Missing mandatory value",
    "warmup=${nowhere}": "warmup: Interpolation key 'nowhere' not found",
    # swap
    "+swap.foo=1": "swap.foo is not an argument of normplug.swap.",
    "+swap.includes=x": "swap.includes is not an argument of normplug.swap. Did you mean swap.incl",
    "+swap.mode=golden": "swap.mode comes from the key mode. Leave swap.mode out.",
    # data
    "data=null": "the configuration needs data, and has none.",
    "+data.foo=1": "data.foo is not an argument of normplug.experiment.data.Digits.",
    "+data.num_classes=3": "data.num_classes is not an argument of normplug.experiment.data.Dig",
    "data._target_=nowhere.Data": "data._target_ must be the import path of a class or function",
    "experiment=smoke data=digits": "Leave it out (~data.image_size), or use one of augment",
    # model
    "model=null": "the configuration needs model, and has none.",
    "~model.arch": "model needs arch for normplug.experiment.models.resnet. Give +model.arch=",
    "+model.num_classes=5": "model.num_classes comes from the data. Leave model.num_classes out.",
    "+model.foo=1": "model.foo is not an argument of normplug.experiment.models.resnet.",
    "experiment=cifar10_vit model=resnet18": "Leave it out (~model.hidden_dim), or use one of",
    # optimizer
    "optimizer=null": "the configuration needs optimizer, and has none.",
    "optimizer.weight_decay=-1": "torch.optim.SGD refuses its settings: Invalid weight_decay valu",
    "optimizer.momentum=-1": "torch.optim.SGD refuses its settings: Invalid momentum value: -1",
    "optimizer.momentum=0": "Nesterov momentum requires a momentum and zero dampening; got lr=0.1",
    "optimizer=adamw optimizer.betas=[2,2]": "torch.optim.AdamW refuses its settings: Invalid bet",
    "+optimizer.foo=1": "optimizer.foo is not an argument of torch.optim.SGD.",
    "+optimizer.params=[]": "optimizer.params comes from the model.",
    "optimizer._partial_=false": "torch.optim.SGD refuses its settings: SGD.__init__() missing 1",
    "optimizer._target_=torch.optim.LBFGS": "optimizer.momentum is not an argument of torch.opti",
    # trainer
    "trainer=null": "the configuration needs trainer, and has none.",
    "+trainer.max_epoch=3": "trainer.max_epoch is not an argument of lightning.pytorch.Trainer. D",
    "+trainer.callbacks=[]": "trainer.callbacks comes from the group callbacks.",
    "+trainer.logger=false": "trainer.logger comes from the group logger.",
    "+trainer.sync_batchnorm=true": "which would drop mode=golden",
    "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms, foo: 1}]'": "trainer.plugins.foo",
    "trainer.precision=foo": "trainer.precision must be 64, 32, 16,",
    # callbacks and loggers
    "+callbacks.variance.foo=1": "callbacks.variance.foo is not an argument of normplug.lightning",
    "callbacks=minimal +callbacks.variance.every_n_steps=4": "callbacks.variance must be a mappi",
    "+callbacks.checkpoint.save_top_kk=1": "Did you mean callbacks.checkpoint.save_top_k?",
    "+logger.csv.foo=1": "logger.csv.foo is not an argument of lightning.pytorch.loggers.CSVLogger",
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
    ("line", "sentence"),
    [
        ("trainer.accelerator=gpu", "trainer cannot be built: No supported gpu backend found"),
        ("trainer.devices=0", "the command gives trainer.max_epochs=1, trainer.devices=0. "),
        ("trainer.accelerator=foo", "You selected an invalid accelerator name"),
        ("trainer.strategy=foo", "You selected an invalid strategy name"),
        ("trainer.fast_dev_run=-1", "fast_dev_run=-1 is not a valid configuration"),
        ("model.heads=3", "model.heads must divide model.hidden_dim=64; got 3."),
        ("model=resnet18 model.arch=vit_b_16", "model.arch must be one of resnet101"),
        ("+data.augment.foo=1", "data cannot be built: Augment.__init__() got an unexpected"),
        ("data.num_images=5", "both parts of a split need an image"),
        ("callbacks.variance.every_n_steps=0", "every_n_steps must be at least 1; got 0"),
        ("+callbacks.checkpoint.save_top_k=-5", "callbacks.checkpoint cannot be built: Invalid"),
        ("+callbacks.foo._target_=os.getcwd", "must make a Lightning callback or logger; got str"),
        ("mode=true", "Or mode=baseline, which swaps nothing."),
        ("seed=${nowhere}", "hydra.run.dir has no value: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_only_the_object_itself_can_tell_is_one_sentence_too(
    refuses, tmp_path, line, sentence
):
    if "gpu" in line and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    output = refuses(*SMALL, *line.split())
    (said,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert sentence in said
    assert '"running"' not in "".join(p.read_text() for p in tmp_path.rglob("result.json"))
    assert not list(tmp_path.rglob(f".*.{os.getpid()}"))  # half-written files


def test_an_image_folder_of_one_class_is_refused(refuses, tmp_path):
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    output = refuses("data=image_folder", "data.root=photos", "data.image_size=8")
    assert "the data must have two classes or more to tell apart; got 1. An image folder" in output


def test_data_that_cannot_be_downloaded_are_one_sentence(refuses, tmp_path, monkeypatch):
    monkeypatch.setattr(Cifar10, "_open", Mock(side_effect=OSError("no network")))
    output = refuses("data=cifar10", "trainer.max_epochs=1")
    assert "CIFAR10 must be in data, or be downloaded to it (no network). Check" in output


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("callbacks=minimal", {"metrics.csv"}),
        ("callbacks=null logger=null", set()),
        ("logger=null", {"checkpoints", "variance.csv", "variance.png"}),
    ],
)
def test_groups_can_be_switched_off(trains, tmp_path, line, others):
    trains(*SMALL, *line.split(), f"hydra.run.dir={tmp_path}/run")
    files = {path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."}
    assert files == {"result.json", "config.yaml", "train.log"} | others


def test_null_is_rewritten_only_for_whole_groups():
    line = ["callbacks=null", "logger=csv,null", "gamma0=null", "swap.include=null", "data=nullx"]
    done = ["callbacks=[]", "logger=csv,[]", "gamma0=null", "swap.include=null", "data=nullx"]
    assert groups_off(line, train.CONFIGS) == done


@pytest.mark.parametrize("devices", ["2", "'2'"])
def test_a_sweep_that_would_start_itself_again_is_refused(refuses, devices):
    output = refuses(*SMALL, "trainer.accelerator=cpu", f"trainer.devices={devices}", "-m")
    assert "2 devices with DDPStrategy start each process by running the command again" in output


def test_the_command_itself_prints_one_line(tmp_path):
    done = python(train.__file__, *SMALL, "tag=../../x", "-m", directory=tmp_path)
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
