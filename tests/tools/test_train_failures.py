"""Runs of train.py that cannot go on: wrong checkpoints, and losses that are not finite."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import normplug
from forks import forked
from normplug.compare import compare
from normplug.experiment.callbacks import Diverged, FiniteLoss
from normplug.experiment.learner import Classifier
from normplug.experiment.resume import LAST
from training import PLAIN, SWEEP, TWO_PROCESSES, result_of, results

TINY = [*SWEEP, "trainer.max_epochs=1", PLAIN]
HAS = "the checkpoint has"
ANOTHER_SHAPE = "tensors differ in name or shape; the first is"


def test_a_wrong_checkpoint_ends_in_one_sentence_before_anything_starts(refuses, sweep, tmp_path):
    good, run = sweep.golden / LAST, tmp_path / "run"
    content = torch.load(good, weights_only=True)
    text, cut, weights, module, split = (tmp_path / f"{i}.ckpt" for i in range(5))
    unreadable = "cannot be read: it is truncated, or was not written by train.py"
    text.write_text("not a checkpoint")
    cut.write_bytes(good.read_bytes()[:-1000])
    torch.save(content["state_dict"], weights)
    torch.save(nn.Linear(2, 2), module)
    del content["run"]["split"]  # as before there was one
    torch.save(content, split)
    for path, sentence in [
        (tmp_path / "none.ckpt", "must be a checkpoint file"),
        (tmp_path, "A run's checkpoint is checkpoints/last.ckpt in its directory"),
        (sweep.golden, f"A run's checkpoint is {good}"),
        *((path, unreadable) for path in (text, cut, module)),
        (weights, "not from weights alone"),
        (split, "the checkpoint has split None, this run has"),
    ]:
        output = refuses(*SWEEP, f"ckpt_path='{path}'", f"hydra.run.dir={run}")
        assert sentence in output
        assert "weights_only" not in output
        assert not (run / "result.json").exists()


def spoilt(content, change):
    content["run"]  # a checkpoint of train.py
    exec(change, {"content": content, "state": content["optimizer_states"][0]["state"]})
    return content


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("content['epoch'] = 'x'", "has no epoch as train.py writes them"),
        ("content['loops'] = [1]", "has no loops as train.py writes them"),
        ("content['loops']['fit_loop'] = {}", "the checkpoint's loops are damaged"),
        ("content['loops']['fit_loop']['state_dict'] = 5", "the checkpoint cannot be restored"),
        ("content['optimizer_states'] = []", "lacks part of the optimizer's state"),
        ("state.clear()", "lacks part of the optimizer's state"),
        ("state[0].pop('exp_avg')", "lacks part of the optimizer's state"),
        ("state[1]['exp_avg'] = 'x'", "lacks part of the optimizer's state"),
    ],
)
def test_a_checkpoint_with_wrong_types_inside_is_one_sentence(
    refuses, sweep, tmp_path, change, sentence
):
    path = tmp_path / "spoilt.ckpt"
    torch.save(spoilt(torch.load(sweep.golden / LAST, weights_only=True), change), path)
    more = [f"ckpt_path='{path}'", "trainer.max_epochs=4", f"hydra.run.dir={tmp_path}/run"]
    assert sentence in refuses(*SWEEP, PLAIN, *more)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([*SWEEP, "mode=0.5"], f"{HAS} arm 'golden', this run has '0.5'"),
        ([*SWEEP, "tag=other"], f"{HAS} arm 'golden', this run has 'golden-other'"),
        ([*SWEEP, "seed=1"], f"{HAS} seed 0, this run has 1"),
        ([*SWEEP, "optimizer=sgd"], f"{HAS} optimizer 'torch.optim.AdamW', this run has"),
        ([*SWEEP, "model.depth=3"], f"{ANOTHER_SHAPE} net.encoder.layers."),
        ([*SWEEP, "model.hidden_dim=32"], f"{ANOTHER_SHAPE} net.class_"),
        (
            [*SWEEP, "data.batch_size=6"],
            "an epoch of the checkpoint has 5 steps, an epoch of this run has 11",
        ),
        (["model=vit_tiny", "data=digits"], f"{HAS} data 'fake', this run has 'digits'"),
        (["experiment=smoke"], f"{HAS} model 'vit_tiny', this run has 'resnet18'"),
    ],
)
def test_another_runs_checkpoint_is_refused(refuses, sweep, tmp_path, options, sentence):
    path = sweep.golden / LAST
    assert sentence in refuses(*options, f"ckpt_path={path}", f"hydra.run.dir={tmp_path}/run")


def test_a_loss_that_is_not_finite_stops_the_run_and_is_recorded(refuses, tmp_path):
    run = tmp_path / "run"
    output = refuses(*TINY, "optimizer.lr=1e10", "warmup=0", f"hydra.run.dir={run}")
    result = result_of(run)
    assert result["status"] == "diverged"
    assert result["step"] == 1
    assert "the training loss is nan at step 1 (epoch 1)" in result["error"]
    assert "The first norm whose input is not finite is net.encoder.layers." in result["error"]
    assert result["error"] in output
    assert not (run / "checkpoints/last.ckpt").exists()


@pytest.fixture
def spoil(monkeypatch):
    """Make the outputs of a Classifier nan where `when(classifier)`."""
    forward = Classifier.forward

    def patch(when):
        def spoilt(self, images):
            return forward(self, images) * (float("nan") if when(self) else 1)

        monkeypatch.setattr(Classifier, "forward", spoilt)

    return patch


def test_a_sweep_with_a_diverged_arm_goes_on_and_leaves_it_out(refuses, tmp_path, spoil):
    spoil(lambda model: model.identity["arm"] == "0.5")
    output = refuses(*TINY, "mode=0.5,golden", "-m")
    table = compare(tmp_path / "logs").table
    assert dict(zip(table.arm, table.n_finished, strict=True)) == {"0.5": 0, "golden": 1}
    found = {result["arm"]: result["status"] for result in results(tmp_path)}
    assert found == {"0.5": "diverged", "golden": "finished"}
    assert "target 0.5, seed 0: diverged: normplug.experiment: the training loss is nan" in output


class Net(nn.Module):
    """Three norms; from training step `step` on, a division by zero follows the first."""

    def __init__(self, step):
        super().__init__()
        self.first, self.second, self.third = (nn.BatchNorm2d(3) for _ in range(3))
        self.head = nn.Linear(3, 2)
        self.step, self.count = step, 0

    def forward(self, x):
        x = self.first(x)
        if self.training and self.count >= self.step:
            x = x / torch.zeros_like(x)
        self.count += int(self.training)
        return self.head(self.third(self.second(x)).mean((2, 3)))


class Module(LightningModule):
    def __init__(self, net, scale=1.0):
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        return loss * self.scale if self.global_step == 3 else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def diverge(module, images=None):
    images = torch.randn(64, 3, 4, 4) if images is None else images
    data = [(images[i : i + 8], torch.randint(2, (8,))) for i in range(0, 64, 8)]
    without = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = dict.fromkeys(without, False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=[FiniteLoss()], **options)
    with pytest.raises(Diverged) as caught:
        trainer.fit(module, DataLoader(data, batch_size=None))
    return caught.value


@pytest.mark.parametrize("kind", ["stock", "swapped", "fused", "compiled"])
def test_the_first_norm_whose_input_is_not_finite_is_named_at_that_step(kind):
    net = Net(step=11)
    if kind != "stock":
        normplug.swap(net)
    if kind == "fused":
        net.second = nn.Sequential(net.second, nn.ReLU())
        normplug.fuse(net)
    if kind == "compiled":
        net.compile(backend="eager")
    error = diverge(Module(net))
    path = "net.second.0" if kind == "fused" else "net.second"
    assert error.step == 11
    assert "at step 11 (epoch 2)" in str(error)
    assert f"The first norm whose input is not finite is {path} (BatchNorm2d)." in str(error)
    assert "Parameters" not in str(error)
    assert torch.isfinite(net.head.weight).all()  # no update on the failing loss


def test_parameters_that_an_update_spoilt_are_named():
    class Spoilt(Module):
        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 5:
                self.net.second.weight.data.fill_(float("inf"))

    error = diverge(Spoilt(Net(step=99)))
    assert error.step == 5
    assert "not finite before this forward (1, first net.second.weight)" in str(error)
    assert "The first norm whose input is not finite is net.third" in str(error)


def test_where_every_norm_is_fine_that_is_said():
    error = diverge(Module(Net(step=99), scale=float("inf")))
    assert error.step == 3
    assert str(error).endswith("The input of every norm is finite.")


def test_a_batch_that_is_not_finite_is_named():
    images = torch.randn(64, 3, 4, 4)
    images[20, 0, 0, 0] = float("nan")
    error = diverge(Module(Net(step=99)), images)
    assert error.step == 2
    assert "The images of the batch are not finite." in str(error)
    assert "The first norm whose input is not finite is net.first" in str(error)


@pytest.mark.parametrize("stage", ["validation", "test"])
def test_an_evaluation_whose_loss_is_not_finite_is_no_result(refuses, tmp_path, spoil, stage):
    doing = {"validation": "validating", "test": "testing"}[stage]
    spoil(lambda model: getattr(model.trainer, doing))
    run = tmp_path / "run"
    refuses(*TINY, f"hydra.run.dir={run}")
    result = result_of(run)
    assert result["status"] == "diverged"
    assert result["error"].endswith(f"the {stage} loss is nan at step 5 (epoch 1).")
    assert (run / "checkpoints/last.ckpt").exists() == (stage == "test")


SPOILT = """
import train
from normplug.experiment.learner import Classifier

forward = Classifier.forward
def spoilt(self, images):
    bad = self.trainer.global_step == self.trainer.global_rank == 1
    return forward(self, images * float("nan") if bad else images)
Classifier.forward = spoilt
train.main()
"""


def test_all_processes_stop_where_one_diverges(tmp_path):
    script = tmp_path / "spoilt.py"
    script.write_text(SPOILT)
    code = "import runpy, sys; runpy.run_path(sys.argv[0])"
    # The first process starts the second by running the script again.
    done = forked(code, script, *TINY, *TWO_PROCESSES, imported="train", directory=tmp_path)
    assert done.returncode == 1, done.stderr
    (result,) = results(tmp_path)
    assert result["status"] == "diverged"
    assert result["step"] == 1
    assert "(epoch 1)" in result["error"]
    assert "The loss of this process is finite; look at the others." in result["error"]
    assert "Traceback" not in done.stderr
