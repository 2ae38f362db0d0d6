"""Training under autocast: arms that differ in what they are named for, and what is reported."""

import json
import sys
from dataclasses import asdict
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn

from normplug.bench import autocast, curves, tasks
from normplug.bench.__main__ import main
from normplug.bench.autocast import ARMS, build, comparable, train, train_all
from normplug.bench.gpt import GPT
from normplug.bench.tasks import DigitsTask, Recipe, Size, TextTask, make_tasks

CPU = torch.device("cpu")
TINY = Size(context=8, layers=2, heads=2, width=16)
STANDARD, GOLDEN = (
    ("baseline", "standard/float32", "standard/low"),
    ("golden/float32", "golden/low"),
)


def a_recipe(steps=50, batch=4):
    return Recipe(steps, batch, learning_rate=1e-2, weight_decay=0.1)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("one two, one two; and through and through " * 30, encoding="utf-8")
    return path


@pytest.fixture
def make_task(text):
    """A function: the name of a task -> a tiny one of so many steps."""

    def make(name, steps):
        if name == "digits":
            return DigitsTask(a_recipe(steps), CPU)
        return TextTask(text, TINY, a_recipe(steps), CPU)

    return make


@pytest.fixture
def tiny_commands(monkeypatch):
    """Let the command line train models that take milliseconds."""
    monkeypatch.setattr(tasks, "VIT_RECIPE", a_recipe())
    monkeypatch.setattr(tasks, "vit", partial(tasks.vit, hidden_dim=16, depth=1, heads=2))
    monkeypatch.setitem(tasks.GPT_RECIPES, "small", a_recipe())
    monkeypatch.setitem(tasks.GPT_SIZES, "small", TINY)


def test_gpt_sees_no_later_token():
    torch.manual_seed(0)
    net = GPT(vocabulary=7, context=6, layers=2, heads=2, width=8)
    tokens = torch.randint(7, (3, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 7
    before, after = net(tokens), net(changed)
    assert before.shape == (3, 6, 7)
    assert torch.equal(before[:, :4], after[:, :4])
    for place in (4, 5):  # the token itself, and what attends to it
        assert not torch.allclose(before[:, place], after[:, place])


def test_gpt_starts_at_the_loss_of_a_guess():
    torch.manual_seed(0)
    net = GPT(vocabulary=50, context=32, layers=4, heads=4, width=64)
    tokens = torch.randint(50, (8, 32))
    loss = nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
    assert loss.item() == pytest.approx(np.log(50), abs=0.1)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_a_seed_gives_every_arm_the_same_start(make_task, name):
    task = make_task(name, steps=1)
    nets = {arm: build(task, arm, seed=3) for arm in ARMS}
    weights = nets["baseline"].state_dict()
    for net in nets.values():
        assert all(torch.equal(net.state_dict()[key], value) for key, value in weights.items())
    other = build(task, "baseline", seed=4).state_dict()
    assert not all(torch.equal(other[key], value) for key, value in weights.items())

    losses = {arm: train(task, arm, seed=3)["curve"][0] for arm in ARMS}
    assert len({losses[arm] for arm in STANDARD}) == 1
    assert len({losses[arm] for arm in GOLDEN}) == 1
    assert losses["golden/low"] != losses["standard/low"]


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("name", ["digits", "text"])
def test_norms_return_the_dtype_of_their_arm(make_task, name, arm):
    task = make_task(name, steps=1)
    net = build(task, arm, seed=0)
    norms = [module for module in net.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == (9 if name == "digits" else 5)
    dtypes = []
    for norm in norms:
        norm.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    inputs, _ = next(task.batches(0))
    with torch.autocast("cpu", autocast.DTYPE):
        net(inputs)
    expected = torch.bfloat16 if arm.endswith("/low") else torch.float32
    assert dtypes == [expected] * len(norms)


def test_standard_trains_as_the_untouched_model_does(make_task):
    task = make_task("text", steps=30)
    curve = {arm: np.array(train(task, arm, seed=0)["curve"]) for arm in ARMS}
    for arm in STANDARD:
        np.testing.assert_allclose(curve[arm], curve["baseline"], atol=1e-3)
    np.testing.assert_allclose(curve["golden/low"], curve["golden/float32"], atol=1e-3)
    assert np.abs(curve["golden/low"] - curve["baseline"]).max() > 1e-3


def test_training_lowers_both_losses(make_task):
    start = train(make_task("text", steps=1), "standard/low", seed=0)
    row = train(make_task("text", steps=60), "standard/low", seed=0)
    assert len(row["curve"]) == 6
    assert row["curve"][-1] < row["curve"][0] - 0.3
    assert row["validation_loss"] < start["validation_loss"] - 0.3
    assert row["train_loss"] == pytest.approx(np.mean(row["curve"]), abs=1e-5)  # 60 < LAST


def test_equal_runs_are_equal_and_seeds_are_not(make_task):
    task = make_task("digits", steps=4)
    assert train(task, "golden/low", seed=0) == train(task, "golden/low", seed=0)
    other = train(task, "golden/low", seed=1)
    assert other["curve"] != train(task, "golden/low", seed=0)["curve"]


def test_every_forward_is_in_its_mode_under_autocast_and_without_old_gradients(
    make_task, monkeypatch
):
    task = make_task("text", steps=2)
    seen = []

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, tokens):
            assert self.weight.grad is None
            logits = self.weight + torch.zeros(*tokens.shape, 30)
            seen.append((self.training, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
            return logits

    monkeypatch.setattr(task, "build", Spy)
    row = train(task, "baseline", seed=0)
    assert seen[:2] == [(True, True, True)] * 2
    assert set(seen[2:]) == {(False, True, False)}
    assert row["validation_loss"] == pytest.approx(np.log(30), abs=1e-5)


def test_windows_of_text_stay_in_their_part(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefgh" * 45 + "xyz!" * 10, encoding="utf-8")
    task = TextTask(path, TINY, a_recipe(batch=3), CPU)
    new = {9, 10, 11, 0}  # places of x, y, z and ! among the characters, which are sorted
    for inputs, labels in islice(task.batches(0), 50):
        assert inputs.shape == labels.shape == (3, 8)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        assert not new & {*inputs.unique().tolist(), *labels.unique().tolist()}
    inputs, labels = map(torch.cat, zip(*task.validation(), strict=True))
    assert inputs.shape == (4, 8)  # 39 labels make 4 whole windows of 8
    assert torch.equal(inputs.flatten()[1:], labels.flatten()[:-1])
    assert set(labels.unique().tolist()) == new


def test_digits_are_dealt_out_whole_epochs_at_a_time():
    task = DigitsTask(a_recipe(batch=64), CPU)
    images, labels = task._images, task._labels
    validation, _ = next(task.validation())
    assert len(images) + len(validation) + len(task._data.test_images) == 1797
    assert images.mean().item() == pytest.approx(0, abs=1e-4)
    per_epoch = len(labels) // 64
    drawn = [labels for _, labels in islice(task.batches(0), 2 * per_epoch)]
    assert {len(labels) for labels in drawn} == {64}
    first, second = torch.cat(drawn[:per_epoch]), torch.cat(drawn[per_epoch:])
    assert not torch.equal(first, second)
    assert (first.bincount() <= labels.bincount()).all()
    assert (second.bincount() <= labels.bincount()).all()
    again = next(task.batches(0))
    assert torch.equal(again[1], drawn[0])
    assert not torch.equal(next(task.batches(1))[1], drawn[0])


def test_settings_of_torch_are_put_back():
    def state():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.mha.get_fastpath_enabled(),
        )

    before = state()
    inside = []

    def fail():
        with comparable():
            inside.append(state())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert inside == [(True, False, False)]
    assert state() == before


def test_a_run_cut_off_leaves_the_runs_before_it(make_task, tmp_path, monkeypatch):
    path = tmp_path / "runs.json"

    def cut_off(task, arm, seed):
        if seed == 1:
            raise KeyboardInterrupt
        return train(task, arm, seed)

    monkeypatch.setattr(autocast, "train", cut_off)
    with pytest.raises(KeyboardInterrupt):
        train_all([make_task("text", 1)], ["baseline", "golden/low"], [0, 1], path)
    runs = json.loads(path.read_text())["runs"]
    assert [(run["arm"], run["seed"]) for run in runs] == [("baseline", 0), ("golden/low", 0)]


def contents(**arms):
    """What `train_all` returns for one task; arms as lists of (loss, curve), one a seed."""
    runs = [
        {
            "task": "GPT, text",
            "arm": arm.replace("_", "/"),
            "seed": seed,
            "train_loss": loss,
            "validation_loss": 2 * loss,
            "curve": curve,
        }
        for arm, rows in arms.items()
        for seed, (loss, curve) in enumerate(rows)
    ]
    settings = {
        "autocast": "bfloat16",
        "seeds": [0, 1],
        "steps_per_point": 10,
        "tasks": {"GPT, text": {"steps": 60}},
    }
    return {
        "device": "CPU",
        "versions": {"torch": "2.11.0"},
        "date": "2026-11-21T00:00:00+00:00",
        "settings": settings,
        "runs": runs,
    }


FLAT = [1.0] * 6
TWO_SEEDS = contents(
    baseline=[(1.0, FLAT), (1.2, FLAT)],
    standard_float32=[(1.0, FLAT), (1.2, [1.0] * 5 + [2.0])],
    standard_low=[(1.1, FLAT), (1.4, [1.0, 1.0, 1.0, 1.5, 1.0, 2.0])],
)


def test_summary():
    summary = curves.summarise(TWO_SEEDS)["GPT, text"]
    assert summary["arms"]["baseline"]["train_loss"]["mean"] == pytest.approx(1.1)
    assert summary["arms"]["baseline"]["seeds_apart"] == 0.0
    # One of five points is 1 higher.
    assert summary["arms"]["standard/float32"]["seeds_apart"] == pytest.approx(0.2)
    low, same = summary["pairs"]
    assert (low["arm"], low["reference"]) == ("standard/low", "standard/float32")
    # Differences 0.1 and 0.2: s / sqrt(2) = 0.05, and t(0.975, 1) = 12.706.
    assert low["train_loss"] == {
        "n": 2,
        "mean": pytest.approx(0.15),
        "half_width": pytest.approx(12.706 * 0.05, rel=1e-4),
    }
    assert low["validation_loss"]["mean"] == pytest.approx(0.3)
    assert low["curves_apart"] == pytest.approx(0.1)
    assert low["part_at"] == 30
    assert (same["arm"], same["reference"]) == ("standard/float32", "baseline")
    assert same["part_at"] == 50


def test_summary_of_one_seed_and_equal_arms():
    content = contents(golden_float32=[(1.0, FLAT)], golden_low=[(1.0, FLAT)])
    summary = curves.summarise(content)["GPT, text"]
    assert summary["arms"]["golden/low"]["seeds_apart"] is None
    (pair,) = summary["pairs"]
    assert (pair["curves_apart"], pair["part_at"]) == (0.0, None)
    assert pair["train_loss"]["half_width"] is None
    table = curves.render(content | {"summary": curves.summarise(content)})
    assert "| `golden/low` | 1.0000 | 2.0000 | - |" in table
    assert "| `golden/low` - `golden/float32` | +0.0000 | +0.0000 | 0.0000 | never |" in table


def test_table():
    table = curves.render(TWO_SEEDS | {"summary": curves.summarise(TWO_SEEDS)})
    assert "CPU, torch 2.11.0, 2026-11-21: bfloat16 autocast, seeds 0, 1" in table
    assert "| `baseline` | 1.1000 ± 1.2706 | 2.2000 ± 2.5412 | 0.0000 |" in table
    assert "| `standard/low` - `standard/float32` | +0.1500 ± 0.6353 |" in table
    rows = [line for line in table.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [5] * 5 + [6] * 4


def test_figure():
    above, below = curves.loss_figure(TWO_SEEDS).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in above.lines}
    assert lines.keys() == {
        "baseline (2 seeds)",
        "standard/float32 (2 seeds)",
        "standard/low (2 seeds)",
    }
    assert lines["standard/float32 (2 seeds)"] == [[50.0, 1.0], [60.0, pytest.approx(1.1)]]
    assert len(above.collections) == 3  # a band an arm
    (difference,) = below.lines  # the pair of the baseline has none
    assert difference.get_xydata().tolist() == [
        [50, pytest.approx(0.05)],
        [60, pytest.approx(0.05)],
    ]
    assert len(below.collections) == 2  # the seeds of the baseline, and the pair's band
    assert "seeds of baseline" in below.get_title(loc="left")


def test_figure_without_a_pair_has_no_lower_panel():
    (panel,) = curves.loss_figure(contents(baseline=[(1.0, FLAT)])).axes
    assert panel.get_title(loc="left") == "GPT, text"


def test_command(text, tmp_path, capsys, tiny_commands):
    out, plot = tmp_path / "out" / "autocast.json", tmp_path / "plots" / "autocast.png"
    arms = ["standard/low", "standard/float32"]
    main(
        f"autocast --text {text} --device cpu --seeds 2 --steps 50 --json {out} --plot {plot} "
        f"--arm {arms[0]} --arm {arms[1]}".split()
    )
    content = json.loads(out.read_text())
    assert content.keys() == {"device", "versions", "date", "settings", "runs", "summary"}
    assert content["device"] == "CPU"
    assert content["settings"]["autocast"] == "bfloat16"
    gpt = content["settings"]["tasks"]["GPT, text"]
    assert (
        gpt.items()
        >= ({"text": "text.txt", "characters": 1260, "steps": 50} | asdict(TINY)).items()
    )
    found = [(run["task"], run["seed"], run["arm"]) for run in content["runs"]]
    assert found == [
        (task, seed, arm)
        for task in ("ViT, digits", "GPT, text")
        for seed in (0, 1)
        for arm in reversed(arms)  # in the order of ARMS
    ]
    assert all(len(run["curve"]) == 5 for run in content["runs"])
    assert content["summary"].keys() == {"ViT, digits", "GPT, text"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "GPT, text, standard/low, seed 1: train" in printed
    assert printed.count("| `standard/low` - `standard/float32` |") == 2


def test_command_without_a_text_trains_the_vit_and_says_so(capsys, tiny_commands):
    main(["autocast", "--device", "cpu", "--seeds", "1", "--steps", "50", "--arm", "baseline"])
    printed = capsys.readouterr().out
    assert "the ViT is trained, the GPT is not" in printed
    assert "ViT, digits, baseline, seed 0" in printed
    assert "GPT, text," not in printed


def test_the_size_suits_the_device(text):
    small, full = (make_tasks(CPU, text=text, size=size, steps=7)[1] for size in (None, "small"))
    assert small.settings() == full.settings()
    assert small.recipe.steps == 7
    assert tasks.GPT_SIZES["full"] == Size(context=128, layers=6, heads=6, width=384)


@pytest.mark.parametrize("package", ["sklearn.datasets", "matplotlib.figure"])
def test_command_names_the_package_that_is_missing(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "normplug.bench.curves")
    monkeypatch.delattr("normplug.bench.curves")
    with pytest.raises(
        SystemExit, match=rf'autocast needs {package}: pip install "normplug\[bench'
    ):
        main(["autocast", "--device", "cpu"])


def test_command_refuses_what_it_cannot_train_on(tmp_path, text):
    missing = tmp_path / "none.txt"
    with pytest.raises(SystemExit, match="No such file"):
        main(["autocast", "--device", "cpu", "--text", str(missing)])
    text.write_text("a" * 640, encoding="utf-8")
    expected = r"text.txt must have 650 characters or more, .* context of 64; it has 640\."
    with pytest.raises(SystemExit, match=expected):
        main(["autocast", "--device", "cpu", "--text", str(text)])
    text.write_bytes(b"\xff" * 700)
    with pytest.raises(SystemExit, match="utf-8"):
        main(["autocast", "--device", "cpu", "--text", str(text)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "49"], "must be at least 50; got 49"),
        (["--seeds", "0"], "must be at least 1; got 0"),
        (["--arm", "golden"], "invalid choice: 'golden'"),
    ],
)
def test_command_refuses_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(["autocast", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_command_needs_the_device_that_it_is_given():
    with pytest.raises(SystemExit, match="give --device cpu"):
        main(["autocast", "--device", "cuda"])


@pytest.mark.gpu
def test_arms_train_alike_on_a_gpu(text):
    task = TextTask(text, Size(32, 2, 2, 64), a_recipe(steps=50, batch=16), torch.device("cuda"))
    content = train_all([task], list(ARMS), [0], None)
    for pair in curves.summarise(content)["GPT, text"]["pairs"]:
        assert pair["curves_apart"] < 0.02, pair
