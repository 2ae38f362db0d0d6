"""train.py as its user meets it: commands in, files and sentences out."""

import pytest

pytest.importorskip("normplug.experiment")

import copy
import gc
import math
import re
import shlex
import sys
import time
import weakref
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import torch
from hydra.utils import instantiate
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import normplug
import train
from normplug._ops import recompute
from normplug.compare.__main__ import main as compare_arms
from normplug.experiment import callbacks
from normplug.experiment.callbacks import StepTimer
from normplug.experiment.config import BY_DEPTH, mode_of
from normplug.experiment.errors import CONFIGS, UserError
from normplug.experiment.learner import make_optimizer, make_scheduler
from normplug.experiment.models import GPT, apply_arm, hf_causal_lm, resnet, vit
from normplug.experiment.run import make_module
from normplug.experiment.task import print_config
from programs import program
from statistics_cases import rows_of
from training import (
    PLAIN,
    SMALL,
    SWEEP,
    TINY_IMAGES,
    TWO_PROCESSES,
    composed,
    logged,
    result_of,
    results,
    run_train,
)

TINY = [*SMALL, "data.num_images=400", "trainer.max_epochs=2"]
MODELS = {path.stem for path in Path(CONFIGS, "model").glob("*.yaml")} - {
    "timm",
    "hf_causal_lm",
}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_every_model_trains_a_step(model):
    cfg = composed(f"model={model}")
    sizes, x = {"num_classes": 7, "image_size": 16}, torch.randn(2, 3, 16, 16)
    if "gpt" in model:
        sizes = {"vocabulary": 7, "block_size": 9, "depth": 2, "width": 32}
        x = torch.randint(7, (2, 5))
    net = instantiate(cfg.model, **sizes)
    before = [p.clone() for p in net.parameters()]
    y = net(x)
    assert y.shape == ((2, 5, 7) if "gpt" in model else (2, 7))
    y.square().sum().backward()
    instantiate(cfg.optimizer)(net.parameters()).step()
    assert all(
        not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)
    )


def test_models_of_timm_and_transformers_train_from_their_names(trains, tmp_path):
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    small = ["trainer.max_epochs=1", "callbacks=minimal", "mode=golden"]
    images = [
        "data=fake",
        "data.image_size=8",
        "data.num_images=100",
        "data.batch_size=36",
    ]
    trains("model=timm", "model.name=test_convnext", *images, *small)
    text = [
        "data=text",
        "data.block_size=8",
        "data.megabytes=0.004",
        "model.width=16",
        "model.depth=1",
    ]
    trains("model=hf_causal_lm", "model.name=llama", *text, *small)
    swapped = {r["model"]: list(r["target_variances"]) for r in results(tmp_path)}
    assert len(swapped["test_convnext"]) > 4
    assert "net.model.layers.0.input_layernorm" in swapped["llama"]


TINY_LM = {"vocabulary": 16, "block_size": 16, "width": 16, "depth": 2, "heads": 2}


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "electra", "bart", "qwen2_moe"]
)
def test_a_language_model_of_transformers_sees_no_later_token(name):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = hf_causal_lm(name, **TINY_LM, options={"moe_intermediate_size": 8})
    assert net.training
    for p in net.eval().parameters():
        p.data *= 10  # as weights after some training
    tokens = torch.arange(16)[None]
    other = tokens.flip(1).clone()
    other[:, :-1] = tokens[:, :-1]
    change = (net(other).logits - net(tokens).logits).abs().amax(-1)[0]
    assert change[:-1].max() <= 1e-5 * change[-1]


def test_the_check_for_later_tokens_draws_no_random_number_and_takes_one_attempt():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    net = hf_causal_lm("gpt2", **TINY_LM)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    stock = transformers.AutoModelForCausalLM.from_config(net.config)
    assert all(map(torch.equal, net.parameters(), stock.parameters()))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "t5",
            {},
            "got 't5', which is unknown or another kind, such as an encoder-decoder",
        ),
        ("gpt3", {}, "got 'gpt3', which is unknown or .* Choose another, such as gpt2"),
        ("bert", {"is_decoder": False}, "its output for a token depends on later tokens"),
        ("gpt2", {"vocab_size": 20}, "must have logits for 16 tokens; got 20"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(name, options, sentence):
    pytest.importorskip("transformers")
    with pytest.raises(UserError, match=sentence):
        hf_causal_lm(name, **TINY_LM, options=options)


def test_an_encoder_decoder_gets_the_size_of_its_decoder_from_the_command():
    pytest.importorskip("transformers")
    config = hf_causal_lm("bart", **TINY_LM).config
    assert (config.decoder_layers, config.decoder_ffn_dim, config.d_model) == (2, 64, 16)


def test_the_command_line_wins_over_what_a_model_or_an_experiment_chooses():
    assert composed("model=vit_tiny").optimizer._target_ == "torch.optim.AdamW"
    cfg = composed("model=vit_tiny", "optimizer=sgd", "trainer.max_epochs=3")
    assert cfg.optimizer._target_ == "torch.optim.SGD"
    assert cfg.trainer.max_epochs == 3
    assert composed("experiment=cifar10_vit").model.depth == 9


def test_one_run_reports_and_writes_all_that_it_promises(trains, tmp_path):
    output = trains(*TINY, "mode=golden", "seed=0", "logger=tensorboard", draws=True)
    (result,) = results(tmp_path)
    assert result.keys() >= {
        "hardware",
        "date",
        "commit",
        "norms_fused",
        "recompute",
        "graph",
    }
    named = {
        "arm": "golden",
        "seed": 0,
        "model": "vit_tiny",
        "data": "fake",
        "status": "finished",
    }
    assert result.items() >= (named | {"norms_swapped": 9}).items()
    assert result["input_variances"].keys() == result["target_variances"].keys()
    assert all(variance > 0 for variance in result["input_variances"].values())
    assert len(result["accuracy_by_epoch"]) == 2
    assert result["config"]["trainer"]["max_epochs"] == 2
    assert result["config"]["factors"]["head"] == {"lr": 1, "decay": 1, "start": 1}
    assert result["images_per_s"] == pytest.approx(16e3 / result["step_ms"])
    seconds = result["train_seconds_by_epoch"]
    assert len(seconds) == 2
    assert min(seconds) > 0
    assert result["versions"]["torch"] == torch.__version__
    assert result["versions"]["normplug"] == normplug.__version__
    directory = next(tmp_path.rglob("result.json")).parent
    logs = ("metrics.csv", "variance.csv", "variance.png", "tensorboard")
    for name in ("config.yaml", "checkpoints/last.ckpt", *logs):
        assert (directory / name).stat().st_size > 0, name
    events = EventAccumulator(
        str(next(directory.rglob("events.out.tfevents.*")).parent)
    ).Reload()
    assert events.Scalars("test/accuracy")[-1].value == pytest.approx(
        result["test_accuracy"]
    )
    assert events.Scalars("hp/test_accuracy")[-1].value == pytest.approx(
        result["test_accuracy"]
    )
    rows = rows_of(directory / "variance.csv")
    assert len({row["layer"] for row in rows}) == 9
    inner = [float(row["output_variance"]) for row in rows if row["depth"] != "8"]
    assert inner == pytest.approx(len(inner) * [0.618], abs=0.002)
    accuracy = f"{100 * result['test_accuracy']:.2f} %"
    variances = (
        "norms' inputs",
        "of their targets; all variances in",
        f"{directory}/variance.csv",
    )
    for words in (
        accuracy,
        "images/s",
        "9 swapped",
        "train.log, variance.csv",
        *variances,
    ):
        assert words in output
    assert output.startswith("config\n├── mode: golden\n")
    assert "dirpath: ${paths.output_dir}/checkpoints" in output
    for epoch in (0, 1):  # one line each, in 80 columns
        shown = r"0:\d\d:\d\d train/loss: \S+ val/loss: \S+ val/acc: \S+"
        assert re.search(rf"^Epoch {epoch}/1 +(\d+)/\1 {shown} *$", output, re.MULTILINE)
    assert accuracy in (directory / "train.log").read_text()


def test_the_configuration_is_printed_as_yaml_in_full(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    long = ".".join(["module"] * 10)
    print_config(
        OmegaConf.create({"a": None, "b": False, "c": {"d": {"_target_": long}}})
    )
    output = capsys.readouterr().out
    assert output.startswith("config\n├── a: null\n├── b: false\n└── c\n")
    assert long in output


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (0.504, "all within 1% of their targets"),
        (0.506, "farthest from its target: 0.506 for 0.5 (head)"),
        (math.nan, "farthest from its target: nan for 0.5 (head)"),
    ],
)
def test_a_summary_names_an_output_only_if_it_is_off_its_target(
    monkeypatch, output, text
):
    row = SimpleNamespace(
        layer="head",
        input_variance=2.0,
        output_variance=output,
        target_variance=0.5,
        measure="variance",
        step=3,
    )
    logger = SimpleNamespace(last=[row], path="variance.csv")
    monkeypatch.setattr(callbacks, "variance_loggers", lambda _: [logger])
    lines = callbacks.variance_lines(None)
    outputs = f"before weight and bias: {text}; all variances in variance.csv"
    assert lines["norms' outputs"] == outputs


losses = partial(logged, name="train/loss")


def test_a_sweep_pairs_its_arms_and_compares_them(sweep):
    root = sweep.directory / "logs/sweeps/smoke"
    runs = [root / f"vit_tiny/fake/{arm}/seed_0" for arm in ("baseline", "standard")]
    baseline, golden, standard = results(root)
    assert [r["arm"] for r in (baseline, golden, standard)] == [
        "baseline",
        "golden",
        "standard",
    ]
    # The same weights, the same order, the same function: the same numbers.
    assert losses(runs[0]) == pytest.approx(losses(runs[1]))
    assert baseline["accuracy_by_epoch"] == standard["accuracy_by_epoch"]
    assert baseline["test_accuracy"] == standard["test_accuracy"]
    assert (baseline["norms_swapped"], standard["norms_swapped"]) == (0, 9)
    assert "| standard |" in sweep.output
    for name in ("summary.md", "summary.csv"):
        assert (root / name).exists()
    assert all((run / "variance.csv").exists() for run in runs)


def test_a_sweep_skips_what_is_done_and_refuses_what_has_changed(sweep):
    times = {
        path: path.stat().st_mtime_ns for path in sweep.directory.rglob("result.json")
    }
    again = partial(run_train, sweep.directory, *SWEEP, "mode=baseline,golden")
    code, output = again("-m")
    assert code == 0
    assert output.count("skipped: ") == 2
    code, output = again("warmup=0.3", "-m")
    assert code == 1
    assert "skipped: " not in output
    assert (
        "seed_0 holds a finished run with another config.yaml. Name this one: study="
        in output
    )
    assert {path: path.stat().st_mtime_ns for path in times} == times


def test_a_run_of_a_sweep_frees_the_model_of_the_former_run(trains, monkeypatch):
    models, alive = [], []

    def build(config, **sizes):
        model = instantiate(config, **sizes)
        if isinstance(model, nn.Module):
            alive.append(sum(ref() is not None for ref in models))
            models.append(weakref.ref(model))
        return model

    monkeypatch.setattr("normplug.experiment.run.instantiate", build)
    gc.disable()  # so that only the run collects garbage
    try:
        trains(*TINY, PLAIN, "mode=baseline", "seed=0,1", "-m")
    finally:
        gc.enable()
    assert alive == [0, 0]


def test_a_sweep_over_schedules_by_depth_records_the_target_of_each_layer(
    trains, tmp_path
):
    output = trains(
        *SMALL, PLAIN, "mode=inverse_depth,reversed_depth,mean_inverse_depth", "-m"
    )
    falling = [1, 1 / 2, 1 / 3, 1 / 4]
    arms = {
        "inverse_depth": falling,
        "mean_inverse_depth": [sum(falling) / 4] * 4,
        "reversed_depth": falling[::-1],
    }
    for result, (arm, blocks) in zip(results(tmp_path), arms.items(), strict=True):
        assert result["arm"] == arm
        assert f"| {arm} " in output
        targets = result["target_variances"]
        assert list(targets.values()) == [*(tv for tv in blocks for _ in range(2)), 1.0]
        assert list(targets)[-1] == "net.encoder.ln"
        assert len(list(tmp_path.rglob(f"{arm}/seed_0/result.json"))) == 1


def test_a_study_goes_from_a_sweep_over_rates_to_its_page(trains, tmp_path):
    options = [
        "experiment=[smoke,rates]",
        "model=vit_tiny",
        *SMALL[2:],
        "callbacks=minimal",
    ]
    rates = ["optimizer.lr=1e-3,4e-3", "study=rates", "seed=1", "tag=t"]
    trains(*options, *rates, "mode=standard,golden", "-m")
    sweeps, lines, runs = (
        tmp_path / "logs/sweeps",
        tmp_path / "best.txt",
        tmp_path / "chosen.json",
    )
    places = {path.parts[-3] for path in sweeps.rglob("result.json")}
    assert places == {"lr_0.001", "lr_0.004"}
    found = results(sweeps)
    assert compare_arms([str(sweeps / "rates"), "--best", str(lines)]) == 0
    for arm, line in zip(
        ("golden", "standard"), lines.read_text().splitlines(), strict=True
    ):
        of_arm = [result for result in found if result["arm"] == f"{arm}-t"]
        best = max(of_arm, key=lambda result: result["accuracy_by_epoch"][-1])
        given = [
            *options,
            "tag=t",
            f"mode={arm}",
            f"optimizer.lr={best['learning_rate']}",
        ]
        assert sorted(shlex.split(line)) == sorted(given)
        trains("-m", "study=chosen", "seed=2,3", *shlex.split(line))
        (one, two) = (r for r in results(sweeps / "chosen") if r["arm"] == f"{arm}-t")
        assert (one["seed"], two["seed"]) == (2, 3)
        assert one["learning_rate"] == two["learning_rate"] == best["learning_rate"]

    assert compare_arms([str(sweeps / "chosen"), "--collect", str(runs)]) == 0
    page = ["--out", str(tmp_path / "page"), "--reference", "standard-t", "--plots"]
    assert compare_arms([str(runs), *page]) == 0
    table = (tmp_path / "page/summary.md").read_text()
    assert "| golden t   | 2 of 2 |" in table
    assert "minus standard t, points |" in table
    assert (tmp_path / "page/seeds_vit_tiny_fake.png").is_file()


def test_the_sweep_over_modes_is_compared_once_at_its_end(
    trains, refuses, tmp_path, monkeypatch
):
    counts = pd.DataFrame({"n_finished": [1, 1], "n_expected": [1, 1]})
    speed = Mock(**{"compare_modes.return_value": counts})
    monkeypatch.setitem(sys.modules, "normplug.experiment.speed", speed)
    small = ["data=fake", *TINY_IMAGES, "data.batch_size=16", "trainer.max_epochs=1"]
    modes = ["-m", "experiment=modes", *small, "mode=golden"]
    trains(*modes)
    assert {result["model"] for result in results(tmp_path)} == {"resnet18", "vit_tiny"}
    speed.compare_modes.assert_called_once_with("logs/sweeps/modes")
    counts.n_expected += 1
    refuses(*modes)  # nothing is left to train, but a run is missing


def test_an_experiment_of_the_study_is_one_command(trains, tmp_path):
    images = [
        "data=fake",
        "~data.root",
        "~data.cache",
        "data.image_size=8",
        "data.num_images=100",
    ]
    fast = [
        "data.batch_size=16",
        "graph=false",
        "optimizer.fused=false",
        "trainer.max_epochs=1",
    ]
    output = trains(
        "experiment=e1", *images, *fast, "arm=golden,golden_start", "seed=1", "-m"
    )
    found = {(result["arm"], result["learning_rate"]) for result in results(tmp_path)}
    assert found == set(product(("golden", "standard-gamma0_0.786"), (0.4, 0.8)))
    assert "| golden lr=0.4 " in output


def test_a_text_takes_a_language_model_and_a_sweep_compares_losses(trains, tmp_path):
    tiny = ["data=text", "model.width=16", "model.depth=1", "data.block_size=16"]
    short = ["data.megabytes=0.01", "trainer.max_epochs=2", "fuse=true", PLAIN]
    output = trains("-m", *tiny, *short, "mode=baseline,standard,golden", draws=True)
    baseline, golden, standard = results(tmp_path)
    assert standard["loss_by_epoch"] == baseline["loss_by_epoch"]
    assert standard["test_loss"] == baseline["test_loss"] != golden["test_loss"]
    assert len(golden["text_sha256"]) == 64
    measure = {"name": "loss", "unit": "nats/byte", "better": "lower", "items": "tokens"}
    assert golden["measure"] == measure
    drop = golden["block_drop"]
    assert drop["tokens"] == 992  # the 62 whole blocks of a tenth of the text
    assert drop["loss"] == pytest.approx(golden["test_loss"], rel=1e-3)
    assert len(drop["loss_without"]) == 1
    assert drop["loss_without"][0] != drop["loss"]
    bits = golden["test_bits_per_character"]
    # Nearly all ASCII.
    assert bits == pytest.approx(golden["test_loss"] / math.log(2), rel=0.01)
    assert golden["tokens_per_s"] == pytest.approx(16 * 16e3 / golden["step_ms"])
    assert (golden["norms_swapped"], golden["norms_fused"]) == (3, 2)
    shown = f"{golden['test_loss']:.4f} nats/byte"
    for words in (shown, "tokens/s", " test loss, nats/byte |"):
        assert words in output


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_gpt_sees_no_later_token_and_fuses_its_additions(norm):
    torch.manual_seed(0)
    net = GPT(vocabulary=5, block_size=8, depth=2, width=16, norm=norm).eval()
    tokens = torch.randint(5, (2, 8))
    before = net(tokens)
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 5
    assert torch.equal(net(other)[:, :5], before[:, :5])
    assert not torch.equal(net(other)[:, 5:], before[:, 5:])
    normplug.fuse(normplug.swap(net, "standard"))
    # All but the first.
    assert sum(row.label is not None for row in normplug.fusions(net)) == 4
    torch.testing.assert_close(net(tokens), before)


def test_a_dropped_block_is_the_identity_and_comes_back():
    torch.manual_seed(0)
    net = GPT(vocabulary=5, block_size=8, depth=3, width=16).eval()
    bypassed = copy.deepcopy(net)
    bypassed.blocks[1] = torch.nn.Identity()
    normplug.fuse(normplug.swap(net, "standard"))
    tokens = torch.randint(5, (2, 8))
    before = net(tokens)
    with net.blocks[1].dropped():
        torch.testing.assert_close(net(tokens), bypassed(tokens))
    assert torch.equal(net(tokens), before)


def test_a_scaled_start_is_of_the_layers_that_write_to_the_residual_stream():
    torch.manual_seed(0)
    plain, scaled = (
        GPT(vocabulary=50, block_size=8, depth=8, width=64, scaled_init=scaled).blocks[0]
        for scaled in (False, True)
    )
    for path, ratio in {"attention.out": 4, "mlp.2": 4, "mlp.0": 1}.items():
        stds = [
            block.get_submodule(path).weight.std().item() for block in (plain, scaled)
        ]
        assert stds[0] / stds[1] == pytest.approx(ratio, rel=0.05)


def test_a_model_is_compiled_in_the_mode_that_the_command_names(monkeypatch):
    modes = []
    monkeypatch.setattr(nn.Module, "compile", lambda net, mode: modes.append(mode))
    for value in ("false", "true", "reduce-overhead"):
        cfg = composed("model=vit_tiny", "data=fake", f"compile={value}")
        make_module(cfg, instantiate(cfg.data, _convert_="all"))
    assert modes == [None, "reduce-overhead"]


def test_every_arm_of_a_sweep_is_compiled(trains, monkeypatch):
    graphs = []  # of each arm
    compiler = torch.compile

    def count(forward, mode):
        of_arm = []
        graphs.append(of_arm)

        def backend(graph, inputs):
            of_arm.append(graph)
            return graph.forward

        return compiler(forward, backend=backend)

    monkeypatch.setattr(torch, "compile", count)
    trains(*SMALL, PLAIN, "compile=true", "mode=0.25,0.5,golden,standard", "-m")
    counts = [len(of_arm) for of_arm in graphs]
    assert len(counts) == 4
    assert counts == [counts[0]] * 4
    assert counts[0] > 0
    torch.compiler.reset()


def test_a_debug_run_takes_five_steps_an_epoch_of_any_model(trains, tmp_path):
    debug = ["trainer=debug", "data=fake", "data.image_size=8", "trainer.max_epochs=2"]
    trains(*debug, "model=vit_tiny", PLAIN, f"hydra.run.dir={tmp_path}")
    assert len(losses(tmp_path)) == 10


class HingeModule(LightningModule):
    """A LightningModule of a user, with a loss of its own."""

    def __init__(self, *, num_classes, image_size):
        super().__init__()
        linear = nn.Linear(3 * image_size**2, num_classes)
        self.net = nn.Sequential(nn.Flatten(), nn.LayerNorm(3 * image_size**2), linear)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.multi_margin_loss(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        self.log_scores("val", *batch)

    def test_step(self, batch, batch_idx):
        self.log_scores("test", *batch)

    def log_scores(self, stage, images, labels):
        scores = self.net(images)
        loss = nn.functional.multi_margin_loss(scores, labels)
        accuracy = (scores.argmax(-1) == labels).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/accuracy": accuracy})


class SilentModule(HingeModule):
    def log_scores(self, stage, images, labels):
        pass


OWN = ["data=fake", *TINY_IMAGES, "data.batch_size=16", "trainer.max_epochs=2"]
OWN += ["model=resnet18", "~model.arch"]


def test_a_lightning_module_of_ones_own_trains_in_a_mode(trains, tmp_path):
    target = f"model._target_={__name__}.HingeModule"
    trains(*OWN, target, "mode=golden", f"hydra.run.dir={tmp_path}")
    result = result_of(tmp_path)
    assert result["target_variances"] == {"net.1": pytest.approx(0.618, abs=1e-3)}
    assert len(result["accuracy_by_epoch"]) == 2
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert len(state["optimizer_states"][0]["param_groups"]) > 1  # of the configuration
    assert len(state["accuracy_by_epoch"]) == 2


def test_a_lightning_module_must_log_what_judges_a_run(refuses):
    output = refuses(*OWN, f"model._target_={__name__}.SilentModule")
    assert "the LightningModule must log val/loss; it logged" in output


BOTH = """
import os, train
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from normplug.experiment.task import rank_zero_only

os.environ["MASTER_PORT"] = str(find_free_network_port())
first = os.fork()
rank_zero_only.rank = 0 if first else 1
os.environ["LOCAL_RANK"] = str(rank_zero_only.rank)
train.main()
assert not first or os.waitpid(first, 0)[1] == 0
"""


def test_two_processes_train_the_model_that_one_trains(trains, tmp_path):
    options = [*TINY, "trainer.max_epochs=1", "data.augment=null", "optimizer=sgd"]
    # An odd number for validation.
    options += [
        "data.num_classes=9",
        "data.num_images=405",
    ]
    halves = [
        *options,
        *TWO_PROCESSES,
        "data.batch_size=8",
        f"hydra.run.dir={tmp_path}/two",
    ]
    done = program(BOTH, train.__file__, *halves, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = results(tmp_path / "two")
    trains(*options, PLAIN, f"hydra.run.dir={tmp_path}/one")
    one, two = (logged(tmp_path / name, "val/loss")[-1] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
    assert result["hardware"].startswith("CPU")
    rows = rows_of(tmp_path / "two/variance.csv")
    assert {(row["rank"], row["world_size"]) for row in rows} == {("0", "2")}
    assert len(rows) == 9 * len({row["step"] for row in rows})


def optimizer_of(net, *overrides):
    """The optimizer of a command line, and id of a parameter -> (learning rate, weight decay)."""
    optimizer = make_optimizer(net, composed("optimizer.lr=0.5", *overrides))
    groups = [
        (g["lr"], g["weight_decay"], p)
        for g in optimizer.param_groups
        for p in g["params"]
    ]
    return optimizer, {id(p): (rate, decay) for rate, decay, p in groups}


def test_norms_and_biases_do_not_decay_and_what_is_frozen_is_left_out():
    linear, norm, head = (
        torch.nn.Linear(4, 4),
        torch.nn.LayerNorm(4),
        torch.nn.Linear(4, 2),
    )
    net = torch.nn.Sequential(linear, norm, head)
    linear.bias.requires_grad_(False)
    _, found = optimizer_of(net, "optimizer.weight_decay=0.1")
    decays = {id(linear.weight): (0.5, 0.1), id(head.weight): (0.5, 0.1)}
    others = (norm.weight, norm.bias, head.bias)
    assert found == {**decays, **{id(parameter): (0.5, 0) for parameter in others}}


@pytest.mark.parametrize("mode", ["baseline", "golden"])
def test_norms_and_the_head_have_factors_of_their_own(mode):
    options = [f"mode={mode}", "factors.norm_bias.lr=4", "factors.norm_bias.decay=0.5"]
    options += ["arm=head", "factors.norm_weight.lr=0.01", "optimizer.weight_decay=0.1"]
    torch.manual_seed(0)
    net = resnet("resnet18", num_classes=5, image_size=8)
    start = net.fc.weight.clone()
    apply_arm(net, composed(*options), fuses=False)
    torch.testing.assert_close(net.fc.weight, start / 2)
    _, found = optimizer_of(net, *options)
    norm = net.layer1[0].bn1
    tensors = [net.conv1.weight, norm.weight, norm.bias, net.fc.weight, net.fc.bias]
    rates, decays = zip(*(found[id(tensor)] for tensor in tensors), strict=True)
    assert rates == pytest.approx((0.5, 0.005, 2, 0.125, 0.5))
    assert decays == pytest.approx((0.1, 0, 0.05, 0.4, 0))
    assert len(found) == len(list(net.parameters()))


@pytest.mark.parametrize(
    ("target", "equal"), [("quarter", "bias_and_head"), ("golden", "golden_equal")]
)
def test_a_target_is_its_arm_of_biases_and_head(target, equal):
    torch.manual_seed(0)
    stock = resnet("resnet18", num_classes=5, image_size=8).double()
    for norm in (
        module for module in stock.modules() if isinstance(module, nn.BatchNorm2d)
    ):
        norm.eps = 1e-12
    images, labels = torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(5, (8,))
    logits = {}
    for arm in (target, equal, "head"):
        net, cfg = copy.deepcopy(stock), composed(f"arm={arm}")
        apply_arm(net, cfg, fuses=False)
        optimizer = make_optimizer(net, cfg)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
        logits[arm] = net(images)
    torch.testing.assert_close(logits[target], logits[equal])
    assert (logits[target] - logits["head"]).abs().max() > 1e-3


def over_steps(name, steps, *schedule):
    """A number of the optimizer in each step of a schedule."""
    optimizer = torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), 0.5, momentum=0.8)
    scheduler = make_scheduler(optimizer, steps, *schedule)
    for _ in range(steps):
        yield optimizer.param_groups[0][name]
        optimizer.step()
        scheduler.step()


def test_the_momentum_of_the_optimizer_is_that_of_every_step():
    for cycles, momenta in ((False, [0.8, 0.8]), (True, [0.85, 0.95])):
        found = [*over_steps("momentum", 8, "one_cycle", 0.5, cycles)]
        assert [min(found), max(found)] == pytest.approx(momenta)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "constant"])
@pytest.mark.parametrize("warmup", [0, 0.2])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 100])
def test_the_learning_rate_rises_to_its_value_and_falls(schedule, warmup, steps):
    whole = [*over_steps("lr", steps, schedule, warmup)]
    assert max(whole) == pytest.approx(0.5, rel=0.01)
    if steps == 100:
        rising = max(2, 100 * warmup) if schedule == "one_cycle" else 100 * warmup
        assert whole.index(max(whole)) == pytest.approx(rising, abs=1)
        assert (whole[0] < 0.05) == (rising > 0)
        assert (whole[-1] < 0.01) == (schedule != "constant")


def test_the_time_between_two_epochs_is_no_step():
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    timer = StepTimer()
    timer.on_fit_start(trainer)
    for _ in range(2):
        timer.on_train_epoch_start()
        timer.on_train_batch_start(trainer)  # the only one of its epoch
    assert timer.median_ms() is None
    timer.on_train_batch_start(trainer)
    assert timer.median_ms() >= 0


def test_the_time_of_an_epoch_is_without_its_validations(monkeypatch):
    clock = iter(range(100, 200))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    timer = StepTimer()
    assert timer.seconds_by_epoch() == []
    timer.on_fit_start(trainer)
    timer.on_validation_start()  # the sanity check
    for _ in range(2):
        timer.on_train_epoch_start()
        timer.on_train_batch_start(trainer)
        timer.on_train_batch_start(trainer)
        timer.on_validation_start()  # 3 readings after the start
        next(clock)
        timer.on_train_batch_start(trainer)
        timer.on_validation_start()  # 1 reading after the batch
        next(clock)
        timer.on_train_epoch_end()
    timer.on_train_epoch_start()  # an epoch that is cut off
    assert timer.seconds_by_epoch() == [4.0, 4.0]


@pytest.mark.parametrize("mode", ["golden", *BY_DEPTH])
@pytest.mark.parametrize(
    "filters", [{}, {"include": "blocks.*", "exclude": ["*.norm_2"]}]
)
def test_gamma0_starts_as_the_mode_whose_root_it_is(mode, filters):
    torch.manual_seed(0)
    swapped = GPT(vocabulary=5, block_size=8, depth=3, width=16)
    scaled = copy.deepcopy(swapped)
    normplug.swap(swapped, mode_of(mode), **filters)
    gamma0 = normplug.target_variance(mode) ** 0.5 if mode == "golden" else mode
    cfg = composed("mode=baseline", f"gamma0={gamma0}")
    cfg.swap.update(filters)
    apply_arm(scaled, cfg, fuses=False)
    tokens = torch.randint(5, (2, 8))
    torch.testing.assert_close(scaled(tokens), swapped(tokens))
    assert type(scaled.norm) is torch.nn.LayerNorm


def test_stems_and_patches_suit_the_image():
    assert resnet("resnet18", num_classes=2, image_size=32).conv1.stride == (1, 1)
    assert resnet("resnet18", num_classes=2, image_size=224).conv1.stride == (2, 2)
    sizes = {
        size: vit(num_classes=2, image_size=size).patch_size for size in (8, 28, 32, 224)
    }
    assert sizes == {8: 2, 28: 4, 32: 4, 224: 28}
    with pytest.raises(AssertionError, match="indivisible by patch size"):
        vit(num_classes=2, image_size=8, patch_size=3)
    with pytest.raises(ValueError, match="model.heads must divide model.width=16; got 3"):
        GPT(vocabulary=5, block_size=8, width=16, heads=3)


@pytest.mark.parametrize(("model", "fused"), [("resnet18", 20), ("vit_tiny", 8)])
def test_a_fused_run_in_channels_last_gives_the_same_accuracy(
    trains, tmp_path, model, fused
):
    tiny = [*SMALL, f"model={model}", "channels_last=true", "callbacks=minimal"]
    curves = []
    for fuse in (True, False):
        output = trains(*tiny, f"fuse={fuse}", f"hydra.run.dir={tmp_path}/{fuse}")
        assert f"swapped, {fused if fuse else 0} fused" in output
        curves.append(result_of(tmp_path / str(fuse))["accuracy_by_epoch"])
    assert curves[0] == curves[1]


def test_outputs_are_recomputed_of_fused_norms_only(trains, refuses, tmp_path):
    recomputed = [*SMALL, "recompute=true"]
    for wrong in (["fuse=false"], ["fuse=true", "compile=true"]):
        assert "recompute=true is for fused norms" in refuses(*recomputed, *wrong)
    if not recompute.AVAILABLE:
        assert "recompute needs torch 2.8" in refuses(*recomputed, "fuse=true")
        return
    trains(*recomputed, "fuse=true", "mode=baseline,golden", PLAIN, "-m")
    found = [
        (result["norms_fused"] > 0, result["recompute"]) for result in results(tmp_path)
    ]
    assert found == [(False, False), (True, True)]


def test_runs_of_a_sweep_side_by_side_are_compared_as_one_after_another(trains, tmp_path):
    pytest.importorskip(
        "hydra_plugins.hydra_joblib_launcher", reason="needs normplug[sweep]"
    )
    both = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    output = trains(*SMALL, PLAIN, "mode=baseline,standard", *both, "-m")
    baseline, standard = results(tmp_path)
    assert baseline["status"] == standard["status"] == "finished"
    assert baseline["accuracy_by_epoch"] == standard["accuracy_by_epoch"]
    assert "Reference: standard" in output
