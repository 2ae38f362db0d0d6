"""The time to an accuracy, from results that are made up."""

import pytest

pytest.importorskip("normplug.experiment")

import json
import math
from pathlib import Path

import pandas as pd

import time_to_accuracy as tta
from normplug.compare.runs import find_runs
from training import SMALL, results

ARMS = {"baseline-eager": 2.0, "standard-fused-eager": 1.0}  # -> seconds of an epoch


def a_run(arm, seed, scores, **values):
    """A record of a run, whose first epoch takes 10 s more than the others."""
    seconds = [ARMS[arm] + 10 * (epoch == 0) for epoch in range(len(scores))]
    return {
        "run": f"{arm}/seed_{seed}",
        "arm": arm,
        "model": "resnet18",
        "data": "cifar10-jpeg",
        "seed": seed,
        "status": "finished",
        "accuracy_by_epoch": scores,
        "test_accuracy": 0.9,
        "train_seconds_by_epoch": seconds,
        "hardware": "1 x NVIDIA H200",
        "versions": {"torch": "2.11.0", "triton": "3.6.0", "normplug": "0.3.0"},
        "commit": "abc1234",
        "date": "2026-11-29T10:00:00+00:00",
        **values,
    }


RUNS = [
    # The second validation reaches 90%; a later one below it changes nothing.
    a_run("baseline-eager", 1, [0.5, 0.9, 0.8]),
    a_run("baseline-eager", 2, [0.5, 0.8, 0.91]),
    a_run("baseline-eager", 3, [0.5, 0.8, 0.89]),
    a_run("standard-fused-eager", 1, [0.5, 0.95, 0.95]),
    a_run("standard-fused-eager", 2, [0.5, 0.95, 0.95]),
    a_run("standard-fused-eager", 3, [0.5], status="diverged"),
    a_run("standard-fused-eager", 4, [0.5], status="failed"),
]


def file_of(directory, runs):
    path = directory / "runs.json"
    path.write_text(json.dumps(runs))
    return path


def found(directory, runs=RUNS):
    return find_runs([file_of(directory, runs)])[0]


def test_an_arm_has_the_medians_of_its_seeds(tmp_path):
    table = tta.summary_of(tta.times_of(found(tmp_path), 0.9)).set_index("arm")
    assert table.index.tolist() == [*ARMS]  # the slowest first
    stock, fused = (table.loc[arm] for arm in ARMS)
    assert (stock.runs, stock.reached) == (3, 2)
    assert (stock.epochs, stock.seconds) == (3, 16)
    assert (stock.seconds_least, stock.seconds_most) == (14, math.inf)
    assert (stock.start_up, stock.without_start_up, stock.over_stock) == (10, 6, 1)
    assert (fused.runs, fused.reached) == (3, 2)
    assert (fused.epochs, fused.seconds, fused.without_start_up) == (2, 12, 2)
    # By seed: 14 / 12, 16 / 12, and never both times.
    assert fused.over_stock == pytest.approx((14 / 12 + 16 / 12) / 2)
    assert (fused.over_stock_least, fused.over_stock_most) == (14 / 12, 16 / 12)


def test_an_arm_that_mostly_does_not_reach_the_accuracy_never_does(tmp_path):
    times = tta.times_of(found(tmp_path), 0.91)
    table = tta.summary_of(times)
    stock = table.set_index("arm").loc["baseline-eager"]
    assert (stock.reached, stock.epochs, stock.seconds) == (1, math.inf, math.inf)
    page = tta.report(table, 0.91, tta.origin_of(found(tmp_path)), 1)
    assert "| eager    |    1 of 3 |    never | never (16.0 to never) |" in page


def test_the_page_the_table_and_the_picture_are_written(tmp_path, capsys):
    tta.main([str(file_of(tmp_path, RUNS)), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out/time_to_accuracy.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    (line,) = (line for line in page.splitlines() if line.startswith("| normplug "))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    expected = ["2 of 3", "2", "12.0 (12.0 to never)", "10.0 (10.0 to 10.0)", "2.0"]
    expected += ["1.25 (1.17 to 1.33)"]
    assert cells == ["normplug", *expected]
    assert "Runs left out, since they did not finish: 1." in page
    origin = "1 x NVIDIA H200, torch 2.11.0, triton 3.6.0, normplug 0.3.0, 2026-11-29"
    assert f"{origin}, commit abc1234." in page
    table = pd.read_csv(tmp_path / "out/time_to_accuracy.csv")
    assert table.seconds.tolist() == [16, 12]
    assert table.commit.tolist() == ["abc1234"] * 2
    assert (tmp_path / "out/time_to_accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize("values", [{"train_seconds_by_epoch": [1.0]}, {}])
def test_a_run_without_the_seconds_of_each_epoch_is_refused(values, tmp_path):
    run = a_run("baseline-eager", 1, [0.5, 0.9], **values)
    if not values:
        del run["train_seconds_by_epoch"]
    with pytest.raises(
        ValueError, match=r"baseline-eager/seed_1 must have as many secon"
    ):
        tta.times_of(found(tmp_path, [run]), 0.9)


def test_a_sweep_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run has finished"):
        tta.times_of(found(tmp_path, RUNS[-1:]), 0.9)


def test_the_arms_of_a_sweep_get_their_times(trains, tmp_path, capsys):
    arms = "arm=stock_eager,fused_eager"
    trains(*SMALL, "callbacks=minimal", "trainer.max_epochs=3", arms, "-m")
    assert {result["arm"] for result in results(tmp_path)} == {*ARMS}
    sweep = str(tmp_path / "logs/sweeps/smoke")
    tta.main([sweep, "--goal", "0", "--out", str(tmp_path / "out")])
    table = pd.read_csv(tmp_path / "out/time_to_accuracy.csv")
    assert table.epochs.tolist() == [1, 1]
    assert (table.seconds > 0).all()


def test_the_published_table_is_what_its_runs_give(tmp_path):
    docs = Path(__file__).parents[2] / "docs"
    file = docs / "results/time_to_accuracy_h200.json"
    tta.main([str(file), "--out", str(tmp_path)])
    page = (tmp_path / "time_to_accuracy.md").read_text()
    assert page == (docs / "study/time/time_to_accuracy.md").read_text()
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    shown = (docs / "experiments.md").read_text()
    assert table in shown
    times = tta.times_of(find_runs([file])[0], tta.GOAL)
    by_seed = times.pivot_table("seconds", "seed", "arm")
    gains = by_seed["baseline-graph"] / by_seed["standard-fused-graph"]
    assert f"is {gains.median():.2f} times as fast with normplug" in shown
    assert {*times["epochs"]} == {36, 37, 38}
    readme = " ".join((docs.parent / "README.md").read_text().split())
    seconds = by_seed.median()
    ours, theirs = seconds["standard-fused-graph"], seconds["baseline-graph"]
    assert f"after {ours:.1f} s with normplug and {theirs:.1f} s without" in readme
