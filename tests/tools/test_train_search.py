"""Searches of train.py with Optuna: which way they go, and what a trial without a score counts."""

import pytest

pytest.importorskip("normplug.experiment")

import math

import yaml

from normplug.experiment.config import direction_of
from normplug.experiment.errors import UserError
from training import PLAIN, SMALL, results

pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="needs normplug[optuna]")

# Of Optuna 2, the last that the sweeper takes.
pytestmark = pytest.mark.filterwarnings("ignore:.*declarative_base")
SEARCH = ["hparams_search=optuna", "hydra/sweeper/sampler=grid", PLAIN]
IMAGES = [*SMALL, "model.depth=1", *SEARCH]
TEXT = ["data=text", "data.megabytes=0.01", "data.block_size=16", "model.width=16"]
TEXT = [*TEXT, "model.depth=1", "trainer.max_epochs=1", *SEARCH]


def over(rates, *overrides):
    """The options of a search that tries each combination of rates and other choices once."""
    params = f"optimizer.lr: 'choice({rates})', optimizer.weight_decay: 'choice(0.0)'"
    return [f"hydra.sweeper.params={{{params}}}", *overrides, "-m"]


def best_of(tmp_path):
    found = yaml.safe_load(
        (tmp_path / "logs/sweeps/optuna/optimization_results.yaml").read_text()
    )
    return found["best_params"], found["best_value"]


def test_a_search_minimises_a_loss(trains, tmp_path):
    output = trains(*TEXT, *over("1e-6, 1e-2"))
    losses = {
        result["learning_rate"]: result["loss_by_epoch"][-1]
        for result in results(tmp_path)
    }
    assert losses[1e-2] < losses[1e-6]
    params, value = best_of(tmp_path)
    assert (params["optimizer.lr"], value) == (1e-2, losses[1e-2])
    assert output.endswith("logs/sweeps/optuna: 2 finished\n")


def test_a_search_maximises_an_accuracy_and_goes_on_after_a_trial_that_diverges(
    trains, tmp_path
):
    output = trains(*IMAGES, "warmup=0", *over("1e10, 1e-2"))
    found = results(tmp_path)
    ended = {result["learning_rate"]: result["status"] for result in found}
    assert ended == {1e10: "diverged", 1e-2: "finished"}
    (score,) = {
        result["accuracy_by_epoch"][-1] for result in found if "test_accuracy" in result
    }
    params, value = best_of(tmp_path)
    assert (params["optimizer.lr"], value) == (1e-2, score)
    assert ": 1 diverged, 1 finished\n" in output


@pytest.mark.parametrize(("options", "worst"), [(IMAGES, -math.inf), (TEXT, math.inf)])
def test_a_search_in_which_no_trial_finishes_says_so(trains, tmp_path, options, worst):
    output = trains(*options, "warmup=0", *over("1e10, 1e11"))
    assert {result["status"] for result in results(tmp_path)} == {"diverged"}
    assert best_of(tmp_path)[1] == worst
    assert (
        "2 diverged\nnormplug.experiment: no trial has a validation score, so" in output
    )


def test_a_trial_that_fails_does_not_end_a_search_but_its_exit_status_is_1(
    refuses, tmp_path
):
    output = refuses(*IMAGES, *over("0.01", "mode=choice(gold,golden)"))
    assert {result["status"] for result in results(tmp_path)} == {"failed", "finished"}
    assert best_of(tmp_path)[0]["mode"] == "golden"
    assert "failed: " in output


def test_data_without_a_measure_leave_the_direction_to_the_user():
    with pytest.raises(
        UserError, match="must be a class with a measure; got math.sqrt. Or set"
    ):
        direction_of("math.sqrt")
