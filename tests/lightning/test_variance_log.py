"""The heat map of a run: what it shows, and what happens without matplotlib."""

import pytest

pytest.importorskip("lightning.pytorch")
pytest.importorskip("matplotlib")

import csv
import math
import sys
from pathlib import Path

import numpy as np
from lightning.pytorch import LightningModule
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

import lightning_cases
from normplug._pictures import GREY
from normplug._tools.heat_map import draw_heat_map
from normplug._tools.watching import LayerVariance
from normplug.lightning import VarianceLogger
from normplug.lightning.variance_logger import _model_name


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
    title, run, _ = figure.get_suptitle().split("\n")
    panels = [axes.get_title() for axes in figure.axes[:2]]
    assert panels == ["input", "output, after weight and bias"]
    assert title == "Net: variance at each norm, divided by its target"
    assert run == "run resnet18/digits/golden/seed_0"
    first, last, *_ = figure.axes
    assert [label.get_text() for label in first.get_yticklabels()] == [
        "net.0",
        "net.1",
        "net.2",
    ]
    assert first.images[0].get_extent() == [-5, 25, 2.5, -0.5]
    # The target is 0.5.
    np.testing.assert_array_equal(
        first.images[0].get_array(), [[2] * 3, [4] * 3, [6] * 3]
    )
    np.testing.assert_array_equal(last.images[0].get_array(), [[2, 22, 42]] * 3)


@pytest.mark.parametrize("value", [0.5, 0.25, 3.0])
def test_the_middle_of_the_colour_scale_is_the_target(draw, value):
    for axes in draw(lambda step, depth: (value, 0.5, value)).axes[:2]:
        (image,) = axes.images
        assert image.norm(1.0) == pytest.approx(0.5)
        assert image.norm.vmax == pytest.approx(max(1.1, value / 0.5, 0.5 / value))
        below, middle, above = image.cmap([0.0, 0.5, 1.0])
        assert min(middle[:3]) > 0.9  # nearly white
        assert below[2] > below[0]  # blue
        assert above[0] > above[2]  # red


def test_values_that_differ_by_rounding_do_not_fill_the_colour_scale(draw):
    for axes in draw(lambda s, d: (0.5 + d / 1e4, 0.5, 0.5 * (1 + s / 1e5))).axes[:2]:
        assert axes.images[0].get_clim() == pytest.approx((1 / 1.1, 1.1))


def test_the_title_names_the_model_within_a_lightning_module():
    module = LightningModule()
    module.net = nn.Sequential(nn.Linear(1, 1))
    module.loss = nn.MSELoss()
    assert _model_name(module) == "Sequential in LightningModule"
    module.other = nn.Linear(1, 1)
    assert _model_name(module) == "LightningModule"


def test_the_heat_map_has_no_background_and_its_text_reads_on_any_page(draw):
    figure = draw(lambda step, depth: (1.0, 0.5, 2.0))
    assert figure.patch.get_facecolor()[3] == 0
    for text in figure.findobj(Text):
        assert to_hex(text.get_color()) == GREY, text


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
