"""What train.py refuses before it trains, in one sentence each, and what simply works."""

import pytest

pytest.importorskip("normplug.experiment")

import os
import re
import shlex
from pathlib import Path
from unittest.mock import Mock

import torchvision
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from PIL import Image

import train
from normplug.experiment.config import check
from normplug.experiment.errors import CONFIGS, UserError, user_sentence
from programs import ROOT, program
from training import SMALL, SMOKE, composed


@pytest.fixture
def checked(tmp_path):
    """Check the configuration of a command line, which leaves it as it is."""
    singleton = HydraConfig.instance()

    def call(line, builds=False):
        cfg = composed(*shlex.split(line), return_hydra_config=True)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = str(tmp_path)
            singleton.set_config(cfg)
            del cfg["hydra"]
        before = OmegaConf.to_yaml(cfg)
        check(cfg, fuses=False)
        assert OmegaConf.to_yaml(cfg) == before
        if builds:
            data = instantiate(cfg.data, _convert_="all")
            instantiate(cfg.model, **data.sizes, _convert_="all")

    yield call
    singleton.cfg = None


def lines_of(keys, values):
    """Command lines, each with its key and its value; choices may stand before a key."""
    for line in keys.split(", "):
        for value in values.split():
            yield f"{line}={value}", line.split()[-1].lstrip("+"), value


FOLDER = "data=image_folder data.root=x data.image_size=8"
# Keys, the rule for their values, and values that it refuses.
WRONG = [
    ("seed", "greater than or equal to 0", "-1"),
    ("seed", "a valid integer", "true null 1.5 'x'"),
    ("gamma0", "a valid number", "true 'golden'"),
    ("graph, recompute, channels_last, train", "a valid boolean", "null"),
    ("compile", "False, True, 'reduce-overhead', 'max-autotune' or", "'fast'"),
    ("fuse, data.augment.flip", "a valid boolean", "1 'maybe'"),
    ("schedule", "'one_cycle', 'cosine' or 'constant'", "'maybe' null"),
    ("ckpt_path, data=image_folder data.image_size=8 data.root", "a valid string", "5"),
    ("warmup, model.dropout", "less than 1", "1"),
    ("label_smoothing", "less than or equal to 1", "5"),
    ("data.batch_size, data.num_images, data.image_size", "greater than 0", "0"),
    ("data.image_size", "a valid integer", "null 1.5"),
    ("+data.val_fraction", "less than 1", "1"),
    ("model.hidden_dim, model.depth, model.patch_size", "greater than 0", "0"),
    (
        "data=text data.block_size, data=text data.megabytes",
        "greater than 0",
        "0 -1",
    ),
    ("gamma0", "greater than 0", "0 -1"),
    ("data=text model.norm", "'layer' or 'rms'", "'batch'"),
    (f"data.augment.pad, {FOLDER} data.memory_gib", "greater than or equal to 0", "-1"),
    ("data.device", "'auto', 'cpu' or 'cuda'", "'gpu'"),
]
MISTAKES = {
    line: (f"{key} should be {kind}", f"; got {value}.")
    for keys, kind, values in WRONG
    for line, key, value in lines_of(keys, values)
}
MISTAKES |= {
    "data=[]": "the configuration: field required: data.",
    "+foo=1": "the configuration: extra inputs are not permitted: foo. `python train.py --help`",
    "~warmup": "the configuration: field required: warmup.",
    "warmup=???": "Missing mandatory value: warmup",
    "+swap.foo=1": "swap got an unexpected keyword argument 'foo'.",
    "+trainer.callbacks=[]": "trainer.callbacks comes from a group of its own.",
    "+trainer.sync_batchnorm=true": "which would drop mode=standard",
    "data=text model=resnet18": "unexpected keyword argument: block_size. Choose data and a",
    "model=gpt_tiny data=digits": "missing required keyword only argument: vocabulary; ",
    "data._target_=nowhere.Data": "data cannot be built: Error loading 'nowhere.Data'",
    "+model.foo=1": "model: unexpected keyword argument: foo.",
    "trainer.max_epochs=abc": "trainer.max_epochs should be a valid integer; got 'abc'.",
    "trainer.limit_val_batches=true": "should be a valid integer or a valid number; got True.",
    "trainer.limit_test_batches=0": "leaves a run without its test score, by which arms are",
    "optimizer.lr=fast": "optimizer.lr should be a valid number; got 'fast'.",
    "extras.enforce_tags=true": "extras.enforce_tags=true needs tags; got none. Set 'tags=",
    "+extras.print=true": "should be 'print_config', 'enforce_tags' or 'ignore_warnings'",
    "optimizer.lr=-1": "optimizer cannot be built: Invalid learning rate: -1",
    "+optimizer.foo=1": "optimizer cannot be built: SGD.__init__() got an unexpected",
    "+callbacks.foo=1": "callbacks.foo should be a valid dictionary",
    "+factors.norm_bias.start=2": "factors.norm_bias.start should be 'lr' or 'decay'; got 'start'.",
    "+factors.bias.lr=2": "the configuration: extra inputs are not permitted: factors.bias.",
    "train=false": "train=false only tests a checkpoint. Set ckpt_path=FILE.",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_the_key_and_the_rule(checked, line):
    ruled = isinstance(MISTAKES[line], tuple) and "text" not in line
    with pytest.raises(
        (UserError, InstantiationException, OmegaConfBaseException)
    ) as caught:
        checked(f"{' '.join(SMOKE)} {line}" if ruled else line, builds=True)
    sentence = user_sentence(caught.value)
    for words in [MISTAKES[line]] if isinstance(MISTAKES[line], str) else MISTAKES[line]:
        assert words in sentence
    assert sentence.startswith("normplug.experiment: ")
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"{path.parent.name}={path.stem}"
            for path in Path(CONFIGS).glob("*/*.yaml")
            # These need a package, a directory.
            if path.stem not in ("optuna", "image_folder")
        ),
        "experiment=[]",
        "experiment=smoke data=digits ~data.image_size ~data.num_images",
        FOLDER,
        "data.augment=null",
        "mode=0.5 gamma0=0.786 tag=5",
        "mode=standard gamma0=inverse_depth",
        "'tag=\"a b=c\"'",
        "study=2026",
        "swap.include=[layer4.*,layer3.*]",
        "+swap.sync=true",
        "trainer.max_epochs=null +trainer.max_steps=4",
        "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'",
        "optimizer._target_=torch.optim.RMSprop ~optimizer.nesterov",
    ],
)
def test_what_can_run_passes(checked, line):
    checked(line)


def runs_of(overrides):
    """The command lines of a sweep's runs."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    (runs,) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
    return runs


# The sweeps over rates in the docs.
STUDY = (ROOT / "docs/reproduce.md").read_text().replace("\\\n", "")
STUDY = re.findall(r"^python train.py -m ('experiment=\[.*)", STUDY, re.MULTILINE)


@pytest.mark.parametrize("line", STUDY)
def test_each_run_of_the_study_can_run(checked, line):
    words = shlex.split(line)
    assert len(runs_of(words)) >= 3
    # One seed is enough.
    for run in runs_of(
        [word.split(",")[0] if "seed=" in word else word for word in words]
    ):
        checked(shlex.join(run))


def runs_of_experiment(name):
    """The command lines of an experiment's sweep, in order."""
    cfg = composed(f"experiment={name}", return_hydra_config=True)
    params = cfg.hydra.sweeper.params
    return runs_of([f"{key}={value}" for key, value in params.items()])


def seed_of(run):
    (seed,) = (word for word in run if word.startswith("seed="))
    return seed


RUNS = {"e1": 60, "e2": 90, "e3": 32, "e4": 80, "e5": 36, "e6": 80, "e7": 16, "e8": 60}
RUNS |= {"time_to_accuracy": 30}
PLANS = {"time_to_accuracy": "time"}


@pytest.mark.parametrize(("name", "number"), RUNS.items())
def test_each_run_of_a_planned_experiment_can_run(checked, name, number):
    runs = runs_of_experiment(name)
    assert len(runs) == number
    first = seed_of(runs[0])
    for run in (run for run in runs if seed_of(run) == first):
        checked(shlex.join([f"experiment={name}", *run]))
    plan = (ROOT / f"docs/study/plan_{PLANS.get(name, name)}.md").read_text()
    assert f"python train.py -m experiment={name}" in plan


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("e6", range(101, 121)),
        ("e7", range(121, 129)),
        ("e8", range(131, 134)),
        ("time_to_accuracy", range(141, 146)),
    ],
)
def test_an_experiment_finishes_one_seed_after_another(name, seeds):
    runs = runs_of_experiment(name)
    arms = len(runs) // len(seeds)
    in_order = [f"seed={seed}" for seed in seeds for _ in range(arms)]
    assert [seed_of(run) for run in runs] == in_order


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("trainer.devices=0", "Change the keys of trainer."),
        (
            "trainer.accelerator=foo",
            "trainer cannot be built: You selected an invalid accelerator",
        ),
        (
            "model.heads=3",
            "embed_dim must be divisible by num_heads. Change the keys of model.",
        ),
        (
            "model=resnet18 model.arch=resnet99",
            "model cannot be built: Unknown model resnet99",
        ),
        ("data.num_images=5", "Use more images of each class."),
        ("callbacks.variance.every_n_steps=0", "every_n_steps must be at least 1; got 0"),
        (
            "model.dept=2",
            "model.dept is not a key of the configuration. Did you mean model.depth",
        ),
        (
            "modle=resnet18",
            "modle is not a key of the configuration. Did you mean mode or model?",
        ),
        (
            "data.block_size=8",
            "data.block_size is not a key of the configuration. Another",
        ),
        ("trainer.max_epoch=1", "Did you mean trainer.max_epochs"),
        (
            "qqq=1",
            "qqq is not a key of the configuration. `python train.py --help` lists",
        ),
        (
            "mod=golden",
            "mod is not a key of the configuration. Did you mean mode or model?",
        ),
        ("+logger.csv.foo=1", "logger.csv cannot be built: "),
        ("optimizer=null", "only callbacks and logger can be null."),
        ("seed=0,1", "seed=0,1 has several values. Add -m for one run per value, or"),
        ("golden", "golden must be KEY=VALUE, such as mode=golden."),
        ("lr=1", "lr is not a key of the configuration. Did you mean optimizer.lr?"),
        (
            "trainer.max_epochs=-1",
            "the schedule needs a last step; got trainer.max_epochs",
        ),
        (
            "optimizer._target_=torch.optim.SGDD",
            "optimizer cannot be built: Error loading",
        ),
        ("trainer.precision=bf17", "trainer.precision should be 64, 32 or 16 or"),
        ("mode=true", "Or mode=baseline, which swaps nothing."),
        ("swap.autocast_output=half", "autocast_output must be one of"),
        ("swap.include=layer9", "include='layer9' matches no norm layer"),
        ("seed=${nowhere}", "Interpolation key 'nowhere' not found"),
    ],
)
def test_what_only_the_object_itself_can_tell_is_one_sentence_too(
    refuses, tmp_path, line, sentence
):
    output = refuses(*SMALL, *line.split())
    (said,) = [line for line in output.splitlines() if line.startswith("normplug")]
    assert sentence in said
    assert '"running"' not in "".join(
        p.read_text() for p in tmp_path.rglob("result.json")
    )
    assert not list(tmp_path.rglob(f".*.{os.getpid()}"))  # half-written files


@pytest.mark.parametrize("model", ["resnet99", "../x"])
def test_a_choice_that_no_file_of_configs_has_is_one_line_and_writes_nothing(
    refuses, tmp_path, model
):
    output = refuses(f"model={model}", "-m")
    assert f"model={model} is not a choice." in output
    assert ("Did you mean resnet50 or resnet18?" in output) == (model == "resnet99")
    assert "Choose from gpt_24x256, gpt_tiny, hf_causal_lm, resnet18" in output
    assert len(output.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_image_folder_without_two_classes_is_refused(refuses, tmp_path):
    (tmp_path / "photos/train/cat").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "photos/train/cat/a.png")
    for line, sentence in [
        ("", "Missing mandatory value: root (data.root). "),
        (
            "data.root=/no data.image_size=8",
            "data cannot be built: [Errno 2] No such file or",
        ),
        (
            "data.root=photos data.image_size=8",
            f"{tmp_path}/photos must have a directory for each",
        ),
    ]:
        output = refuses("data=image_folder", *line.split())
        assert f"\nnormplug.experiment: {sentence}" in f"\n{output}"


def test_a_run_says_which_directory_is_the_test(trains, tmp_path):
    for part in ("train", "valid"):
        for name in ("cat", "dog"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(10):
                Image.new("L", (8, 8)).save(
                    tmp_path / f"photos/{part}/{name}/{number}.png"
                )
    images = [
        "data=image_folder",
        "data.root=photos",
        "data.image_size=8",
        "data.batch_size=9",
    ]
    output = trains(
        *images, "model=vit_tiny", "trainer.max_epochs=1", "callbacks=minimal"
    )
    said = "data: training train/ (20 images), test valid/ (20 images), validation 10% of the train"
    assert f"\n{said}" in output


def test_data_that_cannot_be_downloaded_are_one_sentence(refuses, monkeypatch):
    monkeypatch.setattr(
        torchvision.datasets, "CIFAR10", Mock(side_effect=OSError("no network"))
    )
    output = refuses("data=cifar10", "trainer.max_epochs=1")
    assert "CIFAR10 is not in data, and its download failed (no network). Check" in output


@pytest.mark.parametrize(
    ("line", "others"),
    [
        ("callbacks=minimal trainer.enable_progress_bar=false", {"metrics.csv"}),
        ("callbacks=null logger=null", set()),
        ("~logger", {"checkpoints", "variance.csv", "variance.png"}),
    ],
)
def test_groups_can_be_switched_off(trains, tmp_path, line, others):
    trains(*SMALL, *line.split(), f"hydra.run.dir={tmp_path}/run", draws=True)
    files = {path.name for path in (tmp_path / "run").iterdir() if path.name[0] != "."}
    assert files == {"result.json", "config.yaml", "train.log"} | others


def test_a_sweep_that_would_start_itself_again_is_refused(refuses):
    output = refuses(*SMALL, "trainer.accelerator=cpu", "trainer.devices='2'", "-m")
    assert (
        "2 devices with DDPStrategy start each process by running the command again"
        in output
    )


def test_the_command_itself_prints_one_line(tmp_path):
    code = "import runpy, sys; runpy.run_path(sys.argv[0], run_name='__main__')"
    line = [train.__file__, *SMALL, "mode=gold", "-m"]
    done = program(code, *line, directory=tmp_path)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert "mode must be 'golden'" in line
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


@pytest.mark.parametrize(
    ("line", "extra"),
    [("hydra/launcher=joblib", "sweep"), ("hparams_search=optuna", "optuna")],
)
def test_a_plugin_that_is_missing_names_its_extra(refuses, monkeypatch, line, extra):
    def load(self, config_path):
        is_plugin = config_path in ("hydra/launcher/joblib", "hydra/sweeper/optuna")
        return None if is_plugin else load_config(self, config_path)

    load_config = ConfigRepository.load_config
    monkeypatch.setattr(ConfigRepository, "load_config", load)
    output = refuses(*line.split(), "-m")
    assert output.endswith(f'needs a plugin: pip install "normplug[{extra}]"\n')
