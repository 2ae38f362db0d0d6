"""The heat map of a run: what it shows, and what happens without matplotlib."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch import nn

from normplug.lightning import VarianceLogger
from normplug.lightning.heat_map import draw_heat_map
from normplug.lightning.variance_logger import LayerVariance


def rows_of(values, steps=(0, 10, 20), world_size=1):
    """A row for each step and layer; `values(step, depth)` gives (input, output, affine)."""
    of_rank = {"weight_rms": 1.0, "rank": 0, "world_size": world_size, "measure": "variance"}
    return [
        LayerVariance(
            step, 0, f"net.{depth}.norm", depth, "LayerNorm", 0.618, *values(step, depth), **of_rank
        )
        for step in steps
        for depth in (1, 0, 2)
    ]


@pytest.fixture
def draw(tmp_path, monkeypatch):
    """A function that draws rows and returns the figure."""
    made = []

    def save(figure, path, **options):
        made.append(figure)
        Path(path).touch()

    monkeypatch.setattr(Figure, "savefig", save)

    def call(rows):
        path = tmp_path / "resnet18" / "digits" / "golden" / "seed_0" / "variance.png"
        draw_heat_map(rows, path, "Net")
        made[-1].canvas.draw()
        return made[-1]

    return call


def test_the_title_says_which_model_run_and_steps(draw):
    rows = rows_of(lambda step, depth: (1.0, 0.618, 0.5), world_size=4)
    title = draw(rows).get_suptitle()
    for words in (
        "Net, run resnet18/digits/golden/seed_0",
        "target 0.618, steps 0 to 20",
        "rank 0 of 4's part of the batch",
        "hatched: no finite value",
    ):
        assert words in title.replace("\n", " ")
    assert "step 7;" in draw(rows_of(lambda step, depth: (1.0, 1.0, 1.0), steps=[7])).get_suptitle()


def test_the_first_layer_is_at_the_top_and_steps_are_to_scale(draw):
    figure = draw(rows_of(lambda step, depth: (1.0 + depth, 1.0, 1.0 + step), steps=[0, 10, 40]))
    first, _, last, *_ = figure.axes
    assert first.yaxis_inverted()
    names = [label.get_text() for label in first.get_yticklabels()]
    assert names == ["net.0.norm", "net.1.norm", "net.2.norm"]
    mesh = first.collections[0]
    np.testing.assert_array_equal(mesh.get_array(), [[1] * 3, [2] * 3, [3] * 3])
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-5, 5, 25, 55]
    np.testing.assert_array_equal(last.collections[0].get_array(), [[1, 11, 41]] * 3)


def test_values_within_a_percent_do_not_fill_the_colour_scale(draw):
    def close(step, depth):
        return 2 + depth / 1000, 0.618 * (1 + step / 1e5), 0.6 + step / 1e4

    figure = draw(rows_of(close))
    for axes in figure.axes[:3]:
        low, high = axes.collections[0].get_clim()
        assert high / low > 1.19
        assert "\nall within 0." in axes.get_title()
    far = draw(rows_of(lambda step, depth: (1.0 + depth, 0.618, 0.618)))
    assert "within" not in far.axes[0].get_title()
    assert far.axes[2].get_title().endswith("\nall 0.618")


def test_a_layer_that_never_ran_is_hatched(draw):
    def ran(step, depth):
        return (math.nan,) * 3 if depth == 1 else (1.0 + depth, 0.618, 0.5)

    figure = draw(rows_of(ran))
    for axes in figure.axes[:3]:
        assert axes.collections[0].get_array().mask[:, 0].tolist() == [False, True, False]
        assert axes.patch.get_hatch()
    draw(rows_of(lambda step, depth: (math.nan,) * 3))
    draw(rows_of(lambda step, depth: (0.0, math.inf, 1.0), steps=[0]))


def test_without_matplotlib_it_warns_and_draws_nothing(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "normplug.lightning.heat_map")
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    logger = VarianceLogger()
    logger.path = tmp_path / "variance.csv"
    logger._rows = rows_of(lambda step, depth: (1.0, 1.0, 1.0))
    message = r'VarianceLogger: variance.png needs matplotlib.*: pip install "normplug\[train\]"'
    with pytest.warns(UserWarning, match=message):
        logger.on_fit_end(None, nn.Linear(1, 1))
    assert list(tmp_path.iterdir()) == []
