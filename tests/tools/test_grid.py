"""The grid of E8: what its table and its picture hold."""

import pytest

pytest.importorskip("normplug.compare")

import json
import math
from itertools import product
from pathlib import Path

import grid
from normplug.compare.runs import find_runs

FACTORS = (1.0, 4.0, 16.0)
RATES = (0.1, 0.8)
STUDY = Path(__file__).parents[2] / "docs/results/e8_h200.json"


def a_run(factor, rate, seed):
    """A record of a run; with the factor 16 and the rate 0.8, the last seed diverged."""
    diverged = (factor, rate, seed) == (16.0, 0.8, 2)
    return {
        "arm": f"standard-bias_{factor}",
        "model": "resnet18",
        "data": "cifar10-jpeg",
        "seed": seed,
        "status": "diverged" if diverged else "finished",
        "learning_rate": rate,
        "accuracy_by_epoch": [0.1, (50 + factor + 10 * rate + seed) / 100],
        "test_accuracy": 0.2,
    }


@pytest.fixture
def file(tmp_path):
    runs = [a_run(*cell) for cell in product(FACTORS, RATES, range(3))]
    path = tmp_path / "e8.json"
    path.write_text(json.dumps(runs))
    return path


def test_a_cell_is_the_mean_of_the_last_validation_over_seeds(file):
    found = grid.grid_of(find_runs([file])[0])
    assert (found.index.tolist(), found.columns.tolist()) == ([*FACTORS], [*RATES])
    assert found.loc[4.0, 0.8] == pytest.approx(50 + 4 + 8 + 1)
    assert math.isnan(found.loc[16.0, 0.8])
    assert found.isna().to_numpy().sum() == 1


def test_a_run_that_was_cut_off_is_not_in_the_mean(file):
    runs = json.loads(file.read_text())
    runs.append(a_run(1.0, 0.1, 3) | {"status": "running"})
    file.write_text(json.dumps(runs))
    found = grid.grid_of(find_runs([file])[0])
    assert found.loc[1.0, 0.1] == pytest.approx(50 + 1 + 1 + 1)


def test_in_the_study_the_highest_factor_is_best_at_each_rate():
    runs, _ = find_runs([STUDY])
    found = grid.grid_of(runs)
    assert found.shape == (5, 4)
    assert (found.idxmax() == 16.0).all()
    title = grid.draw(runs).get_suptitle()
    assert "1 x NVIDIA H200, torch 2.11.0" in title
    assert "commit 4608004 or c13dfd6" in title


def test_the_picture_has_each_value_and_says_what_diverged(file, tmp_path, capsys):
    (axes, _) = grid.draw(find_runs([file])[0]).axes
    assert [text.get_text() for text in axes.texts] == [
        *("53.0", "60.0"),
        *("56.0", "63.0"),
        *("68.0", "diverged"),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "4", "16"]
    out = tmp_path / "grid.png"
    grid.main([str(file), "--out", str(out)])
    assert "63.00" in capsys.readouterr().out
    assert out.stat().st_size > 10_000


def test_the_picture_marks_the_targets_at_their_factors(file):
    (axes, _) = grid.draw(find_runs([file])[0]).axes
    (targets,) = axes.child_axes
    names = [label.get_text() for label in targets.get_yticklabels()]
    places = dict(zip(names, targets.get_yticks(), strict=True))
    # The rows 0, 1 and 2 have the factors 1, 4 and 16.
    golden = math.log(1.618034, 4)
    expected = {"standard": 0, "golden": golden, "0.5": 0.5, "0.25": 1, "0.125": 1.5}
    assert places == pytest.approx(expected | {"0.0625": 2})
    (line,) = axes.lines
    assert line.get_ydata() == pytest.approx([golden, golden])


def test_other_runs_are_refused(tmp_path):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps([a_run(1.0, 0.1, 0) | {"arm": "golden"}]))
    with pytest.raises(ValueError, match="no run is of an arm like standard-bias_4"):
        grid.grid_of(find_runs([path])[0])
