"""One table and one picture of the modes of a sweep."""

import json

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from torch import nn

pytest.importorskip("torchvision")

import modes
from normplug.compare.plots import speeds_figure
from normplug.compare.runs import find_runs, group_runs
from normplug.experiment.speed import compare_modes, report
from training import TINY_IMAGES, composed

ARMS = {"baseline": 0.8, "standard": 0.8, "golden": 0.9}
# The keys that a training step depends on.
KEYS = ["mode", "gamma0", "factors", "swap", "seed", "compile", "fuse", "recompute"]
KEYS += ["channels_last", "label_smoothing", "data", "model", "optimizer", "graph"]
TEXT = ["data=text", "model=gpt_tiny", "model.width=16", "data.megabytes=0.1"]


def write_runs(root, *overrides, seeds=1, arms=ARMS, **changes):
    """Write what train.py leaves of a run for each arm and seed."""
    for arm, score in arms.items():
        for seed in range(seeds):
            cfg = composed(f"mode={arm}", f"seed={seed}", *overrides)
            config = OmegaConf.to_container(
                OmegaConf.masked_copy(cfg, KEYS), resolve=True
            )
            record = {
                "config": config | {"trainer": {"accelerator": "auto"}},
                "precision": "32-true",
                "arm": arm,
                "seed": seed,
                "model": "vit_tiny",
                "data": "fake",
                "test_accuracy": score + seed / 100,
                "status": "finished",
                **changes,
            }
            run = root / record["model"] / arm / str(seed)
            run.mkdir(parents=True)
            (run / "result.json").write_text(json.dumps(record))


IMAGES = ["model=vit_tiny", "data=fake", *TINY_IMAGES, "data.batch_size=16"]


@pytest.fixture
def printed(tmp_path, quick, capsys):
    """Compare the modes of the runs; return the table, and the lines printed."""

    def compared(**how):
        table = compare_modes(tmp_path, rounds=2, **how)
        return table.set_index("arm"), capsys.readouterr().out.splitlines()

    return compared


def test_modes_are_one_table_of_scores_and_speeds_and_one_picture(tmp_path, printed):
    write_runs(tmp_path, *IMAGES, seeds=2)
    table, lines = printed()
    assert list(table.index) == ["baseline", "golden", "standard"]
    assert table.test_mean["golden"] == pytest.approx(0.905)
    assert table.difference_to_reference_mean["golden"] == pytest.approx(0.1)
    for arm in ARMS:
        row = table.loc[arm]
        assert 0 < row.ms_p20 <= row.ms <= row.ms_p80
        assert row.items_per_s == pytest.approx(16e3 / row.ms)
        assert row.speed_ratio == pytest.approx(table.ms["baseline"] / row.ms)
    assert max(map(len, lines[:5])) <= 80
    assert lines[0].split("  ")[0] == "model"
    (golden,) = [line for line in lines if " golden " in line]
    assert " 90.50 ± 6.35 " in golden
    names = {path.name for path in tmp_path.glob("summary.*")}
    assert names == {"summary.md", "summary.csv", "summary.png"}
    page = (tmp_path / "summary.md").read_text()
    assert "| 90.50 ± 6.35 |" in " ".join(page.split())
    found = pd.read_csv(tmp_path / "summary.csv")
    assert found.arm.tolist() == list(table.index)
    assert report(found) == page
    marks = "a\n<!-- modes: start -->\nOUTDATED\n<!-- modes: end -->\nb\n"
    filled = modes.filled(marks, found)
    assert page in filled
    assert "OUTDATED" not in filled
    assert filled.startswith("a\n<!--")
    assert filled.endswith("-->\nb\n")


def test_the_committed_table_of_modes_is_that_of_its_results():
    page = modes.PAGE.read_text()
    assert modes.BLOCK.search(page)
    if modes.RESULTS.exists():
        assert modes.filled(page, pd.read_csv(modes.RESULTS)) == page


def test_one_seed_has_no_interval_and_a_warning(tmp_path, printed):
    write_runs(tmp_path, *IMAGES, arms={"standard": 0.8, "golden": 0.9})
    failed = tmp_path / "vit_tiny" / "golden" / "0" / "result.json"
    record = json.loads(failed.read_text())
    other = tmp_path / "failed"
    other.mkdir()
    changes = {"seed": 1, "status": "failed", "error": "out of memory"}
    (other / "result.json").write_text(json.dumps(record | changes))
    table, lines = printed()
    assert set(table.reference) == {"standard"}
    text = " ".join(lines)
    assert "Warning: one seed has no interval." in text
    assert "±" not in text
    assert "- vit_tiny, golden, seed 1: failed: out of memory (" in text


def test_a_loss_is_compared_in_tokens_a_second(tmp_path, printed):
    measure = {"name": "loss", "unit": "nats/byte", "better": "lower", "items": "tokens"}
    arms = {"baseline": 2.0}
    changes = {"measure": measure, "test_loss": 2.0, "model": "gpt_tiny", "data": "text"}
    write_runs(tmp_path, *TEXT, "data.batch_size=2", arms=arms, **changes)
    table, lines = printed()
    assert table.items_per_s["baseline"] == pytest.approx(256e3 / table.ms["baseline"])
    assert "loss, nats/byte" in lines[0]
    assert "tokens/s" in lines[0]
    assert not (tmp_path / "summary.png").exists()  # one arm


class OwnModule(LightningModule):
    """A LightningModule of a user, with a loss and an optimizer of its own."""

    rates = []

    def __init__(self, *, num_classes, image_size):
        super().__init__()
        size = 3 * image_size**2
        self.net = nn.Sequential(nn.Flatten(), nn.LayerNorm(size), nn.Linear(size, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.Adagrad(self.parameters(), lr=3.0)
        self.rates.append(optimizer.param_groups[0])
        return {"optimizer": optimizer}


def test_a_lightning_module_is_timed_by_its_own_step_and_optimizer(tmp_path, printed):
    write_runs(tmp_path, "data=fake", *TINY_IMAGES, "data.batch_size=16")
    for path in tmp_path.rglob("result.json"):
        record = json.loads(path.read_text())
        record["config"]["model"] = {"_target_": f"{__name__}.OwnModule"}
        path.write_text(json.dumps(record))
    table, _ = printed()
    assert table.ms.notna().all()
    assert [group["lr"] for group in OwnModule.rates] == 3 * [0.0]


def test_a_mode_that_cannot_be_built_keeps_its_score(tmp_path, printed, capsys):
    write_runs(tmp_path, *IMAGES, arms={"baseline": 0.8})
    write_runs(tmp_path, *IMAGES, "model.hidden_dim=63", arms={"golden": 0.9})
    table, _ = printed()
    assert table.test_mean["golden"] == 0.9
    assert table.ms.notna().to_dict() == {"baseline": True, "golden": False}


@pytest.mark.parametrize("spread", [0.0, 0.9])
def test_an_axis_of_accuracies_ends_at_0_and_100_and_each_axis_has_two_ticks(
    tmp_path, spread
):
    arms = {"baseline": 0.97, "golden": 0.98}
    write_runs(tmp_path, *IMAGES, arms=arms)
    (group,) = group_runs(find_runs([tmp_path])[0], "baseline", None, False)
    table = group.table.assign(test_t95_half_width=spread)
    table = table.assign(items_per_s=[10.0, 12.0], items_per_s_p20=9.0)
    table = table.assign(items_per_s_p80=13.0)
    (axes,) = speeds_figure(table).axes
    low, high = axes.get_ylim()
    assert 0 <= low < high <= 100
    for axis, (first, last) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, (low, high))):
        assert sum(first <= tick <= last for tick in axis.get_ticklocs()) >= 2
