"""The heat map of a run: what it shows, and what happens without matplotlib."""

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("matplotlib")

import csv
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import nn

import lightning_cases
from normplug._tools.heat_map import draw_heat_map
from normplug._tools.watching import LayerVariance
from normplug.lightning import VarianceLogger


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """A function that draws `values(step, depth)`, (input, output, affine); returns the figure."""
    made = []

    def save(figure, path, **options):
        made.append(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", save)

    def call(values, steps=(0, 10, 20)):
        path = tmp_path / "resnet18" / "digits" / "golden" / "seed_0" / "variance.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            LayerVariance(
                s, 0, f"net.{d}", d, "LayerNorm", 0.5, *values(s, d), 1.0, 0, 1, ""
            )
            for s in steps
            for d in (1, 0, 2)
        ]
        with path.open("w") as file:
            csv.writer(file).writerows([LayerVariance._fields, *rows])
        draw_heat_map(path, path.with_suffix(".png"), "Net")
        made[-1].draw_without_rendering()
        return made[-1]

    return call


def test_the_first_layer_is_at_the_top_and_steps_are_to_scale(draw):
    figure = draw(lambda step, depth: (1.0 + depth, 0.5, 1.0 + step))
    assert figure.get_suptitle().startswith("Net, run resnet18/digits/golden/seed_0\n")
    first, last, *_ = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "net.0",
        "net.1",
        "net.2",
    ]
    assert first.images[0].get_extent() == [-5, 25, 2.5, -0.5]
    np.testing.assert_array_equal(
        first.images[0].get_array(), [[1] * 3, [2] * 3, [3] * 3]
    )
    np.testing.assert_array_equal(last.images[0].get_array(), [[1, 11, 21]] * 3)


def test_values_that_differ_by_rounding_do_not_fill_the_colour_scale(draw):
    for axes in draw(
        lambda s, d: (2 + d / 1000, 0.5 * (1 + s / 1e5), 0.6 + s / 1e4)
    ).axes[:2]:
        low, high = axes.images[0].get_clim()
        assert high / low == pytest.approx(1.2)


def test_a_layer_that_never_ran_is_hatched(draw):
    figure = draw(
        lambda step, depth: (math.nan,) * 3 if depth == 1 else (1.0 + depth, 0.5, 0.5)
    )
    for axes in figure.axes[:2]:
        assert axes.images[0].get_array().mask[:, 0].tolist() == [False, True, False]
        assert axes.patch.get_hatch()
    draw(lambda step, depth: (math.nan,) * 3)
    draw(lambda step, depth: (0.0, math.inf, 1.0), steps=[0])


def test_without_matplotlib_it_warns_and_draws_nothing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "normplug._tools.heat_map")
    monkeypatch.setitem(sys.modules, "matplotlib.colors", None)
    logger = VarianceLogger()
    logger.path = tmp_path / "variance.csv"
    logger.path.touch()
    message = r'VarianceLogger: variance.png needs matplotlib.*: pip install "normplug\[train\]"'
    with pytest.warns(UserWarning, match=message):
        logger.on_fit_end(lightning_cases.trainer(tmp_path), nn.Linear(1, 1))
    assert list(tmp_path.iterdir()) == [logger.path]
