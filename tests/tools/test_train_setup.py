"""What train.py refuses before it trains, in one sentence each, and what simply works."""

import copy
import os
import shlex
from functools import cache
from pathlib import Path
from unittest.mock import Mock

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

import train
from forks import forked
from normplug.experiment.checks import check
from normplug.experiment.command import groups_off
from normplug.experiment.data import Cifar10
from normplug.experiment.errors import UserError
from normplug.experiment.names import LONGEST_NAME, path_name
from normplug.experiment.rules import RULES
from training import ROOT, SMALL, SMOKE

GROUPS = {path.name for path in Path(train.CONFIGS).iterdir() if path.is_dir()}


@cache
def composed(*choices):
    with initialize_config_dir(train.CONFIGS, version_base="1.3"):
        return compose("train", [*choices], return_hydra_config=True)


@pytest.fixture
def checked(tmp_path):
    """Check the configuration of a command line, which leaves it as it is.

    Hydra reads the files of lines that choose the same ones once: it takes longer than the check.
    """
    singleton = HydraConfig.instance()

    def call(line):
        overrides = groups_off(shlex.split(line), train.CONFIGS)
        choices = [o for o in overrides if o.partition("=")[0] in GROUPS]
        others = [o for o in overrides if o not in choices]
        cfg = copy.deepcopy(composed(*choices))
        parsed = OverridesParser.create().parse_overrides(others)
        ConfigLoaderImpl._apply_overrides_to_config(parsed, cfg)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = str(tmp_path)
            singleton.set_config(cfg)
            del cfg["hydra"]
        before = OmegaConf.to_yaml(cfg)
        check(cfg)
        assert OmegaConf.to_yaml(cfg) == before

    yield call
    singleton.cfg = None


def lines_of(keys, values):
    """Command lines, each with its key and its value; choices may stand before a key."""
    for line in keys.split(", "):
        for value in values.split():
            yield f"{line}={value}", line.split()[-1].lstrip("+"), value


# Keys of RULES, and values that each of them refuses.
BREAK_A_RULE = {
    "seed, data.seed": "-1 4294967296 true null 1.5 'x'",
    "gamma0": "-1 true inf 'golden'",
    "compile, graph, recompute, channels_last, data.augment.flip, schedule": "'maybe' null",
    "fuse": "1 'maybe'",
    "ckpt_path": "5",
    "warmup": "1 -0.1 'x'",
    "label_smoothing": "5 -1 'x' nan",
    "study": "'../x' '/tmp/x' null ''",
    "tag": f"'../../x' 'a/b' '..' ['a'] '{'x' * 101}'",
    "swap.include, swap.exclude": "5 []",
    "data.batch_size": "0 -4 2.5 null",
    "+data.val_fraction": "0 1 2 'x'",
    "data.image_size": "0 2.5 'x'",
    "data.num_classes, model.dropout": "1",
    "data.num_images, model.hidden_dim, model.depth, model.heads, model.mlp_ratio": "0 1.5",
    "model=gpt_tiny data=text data.block_size, model=gpt_tiny model.width": "0 1.5",
    "model=gpt_tiny data=text data.megabytes": "0 -1",
    "data.augment.pad, trainer.log_every_n_steps": "-1 1.5",
    "data=image_folder data.memory_gib, data=image_folder data.num_workers": "-1",
    "optimizer.lr": "'abc' 0 nan true",
    "model.patch_size, +trainer.max_steps, +trainer.accumulate_grad_batches": "0",
    "+trainer.check_val_every_n_epoch, +trainer.val_check_interval": "0",
    "+trainer.limit_train_batches, +trainer.limit_test_batches": "0",
    "trainer.gradient_clip_val": "-1",
    "trainer.num_sanity_val_steps": "'x'",
}


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [case for keys, values in BREAK_A_RULE.items() for case in lines_of(keys, values)],
)
def test_what_a_rule_refuses_is_one_sentence_in_the_words_of_the_rule(checked, line, key, value):
    with pytest.raises(UserError) as caught:
        checked(" ".join([*SMOKE, line]))
    rule = str(caught.value).removeprefix(f"normplug.experiment: {key} ")
    assert rule.removesuffix(f"; got {value}.") in [rule.must for rule in RULES if rule.key == key]


# Other keys, what each of them must be, and values that it refuses.
ANNOTATED = [
    ("optimizer.nesterov, +swap.sync, +trainer.detect_anomaly", "true or false", "'maybe'"),
    ("model.small_stem", "true, false or null", "1 'maybe'"),
    ("trainer.enable_model_summary, trainer.enable_progress_bar", "true, false or null", "'maybe'"),
    ("swap", "a mapping", "null"),
    ("data.augment", "a mapping or null", "5"),
    ("data=fake data.image_size", "an integer", "null"),
    ("data=image_folder data.root, callbacks.checkpoint.filename", "text or null", "5"),
    ("trainer.default_root_dir", "text or null", "5"),
    ("data=cifar10 data.root, model.arch, logger.csv.save_dir", "text", "null"),
    ("optimizer.weight_decay", "a number", "'x'"),
    ("optimizer=adamw optimizer.betas", "a list", "3"),
    ("trainer.max_epochs", "an integer >= 1, or null with +trainer.max_steps", "0 -1 1.5 null 'x'"),
    ("trainer.devices", "a list, text or an integer", "1.5"),
    ("+trainer.num_nodes", "an integer", "true 1.0"),
    ("trainer.fast_dev_run", "an integer, true or false", "'maybe'"),
    ("callbacks.variance.every_n_steps", "an integer", "1.5"),
    ("+callbacks.foo", "a mapping with a _target_", "1"),
]
# A command line, and what the sentence about it says.
MISTAKES = {
    line: f"{key} must be {kind}; got {value}."
    for keys, kind, values in ANNOTATED
    for line, key, value in lines_of(keys, values)
}
MISTAKES |= {
    f"{group}=null": f"the configuration lacks the key {group}."
    for group in ("data", "model", "optimizer", "trainer")
}
MISTAKES |= {
    "+foo=1": "foo is not a key of the configuration. Leave it out (~foo), or use one of",
    "+warmpu=0.1": "warmpu is not a key of the configuration. Did you mean warmup?",
    "~warmup": "the configuration lacks the key warmup.",
    "warmup=???": "warmup: Missing mandatory value",
    "warmup=${nowhere}": "warmup: Interpolation key 'nowhere' not found",
    "+swap.foo=1": "swap.foo is not an argument of normplug.swap.",
    "+swap.mode=golden": "swap.mode comes from the key mode. Leave swap.mode out.",
    "data=text": "models.resnet does not take block_size, vocabulary, which normplug.experiment",
    "model=gpt_tiny data=digits": "models.GPT does not take image_size, num_classes, which normplu",
    "model=gpt_tiny +model.vocabulary=5": "model.vocabulary comes from the data. Leave model.voca",
    "model=gpt_tiny model.norm=batch": "model.norm must be 'layer' or 'rms'; got 'batch'.",
    "data.device=gpu": "data.device must be 'auto', 'cpu' or 'cuda'; got 'gpu'.",
    "model=gpt_tiny data.unit=word": "data.unit must be 'byte' or 'char'; got 'word'.",
    "data._target_=builtins.dict": "data._target_ must be a subclass of normplug.experiment.source",
    "+data.foo=1": "data.foo is not an argument of normplug.experiment.data.Digits.",
    "data._target_=nowhere.Data": "data._target_ must be the import path of a class or function",
    "experiment=smoke data=digits": "Leave it out (~data.image_size), or use one of augment",
    "~model.arch": "model needs arch for normplug.experiment.models.resnet. Set +model.arch=",
    "+model.num_classes=5": "model.num_classes comes from the data. Leave model.num_classes out.",
    "+model.foo=1": "model.foo is not an argument of normplug.experiment.models.resnet.",
    "experiment=cifar10_vit model=resnet18": "Leave it out (~model.hidden_dim), or use one of",
    "optimizer.weight_decay=-1": "torch.optim.SGD refuses its settings: Invalid weight_decay valu",
    "optimizer.momentum=0": "Nesterov momentum requires a momentum and zero dampening; got lr=0.1",
    "optimizer=adamw optimizer.betas=[2,2]": "torch.optim.AdamW refuses its settings: Invalid bet",
    "+optimizer.foo=1": "optimizer.foo is not an argument of torch.optim.SGD.",
    "+optimizer.params=[]": "optimizer.params comes from the model.",
    "optimizer._partial_=false": "torch.optim.SGD refuses its settings: SGD.__init__() missing 1",
    "optimizer._target_=torch.optim.LBFGS": "optimizer.momentum is not an argument of torch.opti",
    "+trainer.max_epoch=3": "trainer.max_epoch is not an argument of lightning.pytorch.Trainer. D",
    "+trainer.callbacks=[]": "trainer.callbacks comes from the group callbacks.",
    "+trainer.logger=false": "trainer.logger comes from the group logger.",
    "+trainer.sync_batchnorm=true": "which would drop mode=golden",
    "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms, foo: 1}]'": "trainer.plugins.foo",
    "trainer.precision=foo": "trainer.precision must be 64, 32, 16,",
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
        *(
            f"{path.parent.name}={path.stem}"
            for path in Path(train.CONFIGS).glob("*/*.yaml")
            if path.stem != "text"  # which model=gpt_tiny takes
        ),
        "experiment=null",
        "experiment=smoke callbacks=default",
        "logger=tensorboard +logger.tensorboard.flush_secs=1",
        "logger.csv.name=null",
        "experiment=smoke data=digits ~data.image_size ~data.num_images",
        "data=image_folder data.root=/tmp data.image_size=8",
        "data.augment=null",
        "data.seed=5",
        "mode=0.5 gamma0=0.786 tag=5",
        "mode=standard gamma0=inverse_depth",
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


def lines_of_the_study():
    """The sweeps over rates that the docs tell, without `python train.py -m`."""
    text = (ROOT / "docs" / "experiments.md").read_text().replace("\\\n", "")
    _, *found = text.split("\npython train.py -m 'experiment=[")
    return [f"'experiment=[{line.splitlines()[0]}" for line in found]


@pytest.mark.parametrize("line", lines_of_the_study())
def test_each_run_of_the_study_can_run(checked, line):
    options = [
        (o.key_or_group, list(o.sweep_string_iterator())) if o.is_sweep_override() else o.input_line
        for o in OverridesParser.create().parse_overrides(shlex.split(line))
    ]
    for number in range(7):  # the most values of an option: each is checked, in some combination
        one = [
            option
            if isinstance(option, str)
            else f"{option[0]}={option[1][number % len(option[1])]}"
            for option in options
        ]
        checked(shlex.join(one))


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trainer.devices=0", "the command gives trainer.max_epochs=1, trainer.devices=0. "),
        ("trainer.accelerator=foo", "trainer cannot be built: You selected an invalid accelerator"),
        ("trainer.fast_dev_run=-1", "fast_dev_run=-1 is not a valid configuration"),
        ("model.heads=3", "model.heads must divide model.hidden_dim=64; got 3."),
        ("model=resnet18 model.arch=vit_b_16", "model.arch must be one of resnet101"),
        ("+data.augment.foo=1", "data cannot be built: Augment.__init__() got an unexpected"),
        ("data.num_images=5", "both parts of a split need an image"),
        ("callbacks.variance.every_n_steps=0", "every_n_steps must be at least 1; got 0"),
        ("+callbacks.checkpoint.save_top_k=-5", "callbacks.checkpoint cannot be built: Invalid"),
        ("+callbacks.foo._target_=os.getcwd", "must make a Lightning callback or logger; got str"),
        ("mode=true", "Or mode=baseline, which swaps nothing."),
        ("mode=-1", "got -1. Or mode=baseline"),
        ("swap.autocast_output=half", "autocast_output must be one of"),
        ("swap.include=layer9", "include='layer9' matches no norm layer"),
        ("seed=${nowhere}", "hydra.run.dir has no value: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_only_the_object_itself_can_tell_is_one_sentence_too(
    refuses, tmp_path, line, sentence
):
    output = refuses(*SMALL, *line.split())
    (said,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert sentence in said
    assert '"running"' not in "".join(p.read_text() for p in tmp_path.rglob("result.json"))
    assert not list(tmp_path.rglob(f".*.{os.getpid()}"))  # half-written files


def test_a_choice_that_no_file_of_configs_has_is_refused(refuses):
    assert "Could not find 'model/resnet99'" in refuses("model=resnet99")


def test_an_image_folder_without_two_classes_is_refused(refuses, tmp_path):
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    for line, sentence in [
        ("", "root must name a directory of images, got None. Set data.root=/path/to/tree with"),
        ("data.root=photos", "image_size must be a number of pixels >= 1, got None. Set data.ima"),
        ("data.root=/no data.image_size=8", "root must be a directory, got /no. Check data.root"),
        ("data.root=photos data.image_size=8", "the data must have at least two classes; got 1"),
    ]:
        assert sentence in refuses("data=image_folder", *line.split())


def test_data_that_cannot_be_downloaded_are_one_sentence(refuses, tmp_path, monkeypatch):
    monkeypatch.setattr(Cifar10, "_open", Mock(side_effect=OSError("no network")))
    output = refuses("data=cifar10", "trainer.max_epochs=1")
    assert "CIFAR10 is not in data, and its download failed (no network). Check" in output


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("callbacks=minimal", {"metrics.csv"}),
        ("callbacks=null logger=null", set()),
        ("logger=null", {"checkpoints", "variance.csv", "variance.png"}),
    ],
)
def test_groups_can_be_switched_off(trains, tmp_path, line, others):
    trains(*SMALL, *line.split(), f"hydra.run.dir={tmp_path}/run", draws=True)
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
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    line = [train.__file__, *SMALL, "tag=../../x", "-m"]
    done = forked(code, *line, imported="train", directory=tmp_path)
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
