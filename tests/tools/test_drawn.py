"""The pictures of measurements: what their bars and lines show, and how the pages' ones look."""

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
pytest.importorskip("omegaconf")

import re
from functools import partial

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.colors import to_hex
from matplotlib.image import imread
from matplotlib.text import Text

import bars
import ddp
import tables
from normplug._pictures import COLOURS, DPI, GREY, STYLE, WIDTH
from normplug.bench import rows
from normplug.bench.rows import read_file

STEPS = tables.steps_rows()
DRAWN = {
    **{
        name: partial(tables.draw_picture, picture)
        for name, picture in tables.PICTURES.items()
    },
    tables.DOOR: partial(tables.draw_door, tables.rows_of(tables.STEPS_PAGE)),
    tables.STEPS_PAGE: partial(tables.draw_models, STEPS),
}
FIRST = {tables.STEPS_PAGE: "swap + fuse"}


def bars_of(axes):
    """Arm -> its speeds, from the top of the panel."""
    return {
        bars.get_label(): [round(1 + bar.get_width(), 4) for bar in bars]
        for bars in axes.containers
    }


@pytest.mark.parametrize("name", DRAWN)
def test_speeds_are_a_few_sorted_bars_with_their_values(name):
    figure = DRAWN[name]()
    figure.draw_without_rendering()
    colours = {GREY}
    for axes in figure.axes:
        found = bars_of(axes)
        assert 0 < sum(map(len, found.values())) <= bars.MOST
        speeds = [speed for of_arm in found.values() for speed in of_arm]
        for text, speed in zip(axes.texts, speeds, strict=True):
            assert text.get_text() in (f"{speed:.2f}", "not measured")
        for of_arm in axes.containers:
            colour = COLOURS[of_arm.get_label().replace(" + ", "+")]
            assert {to_hex(bar.get_facecolor()) for bar in of_arm} == {colour}
            colours.add(colour)
        first = found.get(FIRST.get(name, "normplug"), [])
        assert first == sorted(first, reverse=True)
    assert COLOURS["normplug"] in colours
    for text in figure.findobj(Text):
        assert "nan" not in text.get_text()
        assert not re.search(r"\b[0-9a-f]{8,}\b", text.get_text()), text
        assert not text.get_text() or to_hex(text.get_color()) in colours, text
    commit = "1b7e81c" if name in (tables.DOOR, tables.STEPS_PAGE) else "b149bb7"
    assert f"commit {commit}" in figure.get_suptitle()


def test_a_picture_of_speeds_shows_those_of_the_results():
    figure = tables.draw_door(STEPS)
    faster = tables.speeds(STEPS)
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert sorted(names) == sorted(tables.DOOR_MODELS.values())
    cases = {model: case for case, model in tables.DOOR_MODELS.items()}
    for axes, arm in zip(figure.axes, tables.DOOR_ARMS, strict=True):
        (found,) = bars_of(axes).values()
        expected = [faster[arm][cases[name]] for name in names]
        np.testing.assert_allclose(found, expected, atol=1e-4)


def test_every_model_of_the_results_is_in_the_picture_of_models():
    figure = tables.draw_models(STEPS)
    labels = [
        label.get_text() for axes in figure.axes[::4] for label in axes.get_yticklabels()
    ]
    assert len(labels) == len(set(labels)) == len(tables.speeds(STEPS))
    others = [label.get_text() for label in figure.axes[-4].get_yticklabels()]
    assert len(others) == 5  # models of RMSNorm, GroupNorm and InstanceNorm


def test_what_was_not_measured_has_no_value_and_a_slower_arm_has_one():
    speeds = pd.DataFrame({"normplug": [0.8, 1.25], "compile": [np.nan, 2.0]}, ["a", "b"])
    (axes,) = bars.draw_bars({"panel": speeds}, "title", by="normplug").axes
    assert [text.get_text() for text in axes.texts] == [
        *("1.25", "0.80"),
        *("2.00", "not measured"),
    ]
    assert axes.get_xlim()[0] < 0.8
    assert axes.get_xlim()[1] > 2.0


def test_a_panel_of_too_many_bars_is_refused():
    speeds = pd.DataFrame({"normplug": [1.5] * 7, "compile": [1.5] * 7})
    with pytest.raises(ValueError, match=r"^a panel has 14 bars, more than 12: 'many'$"):
        bars.draw_bars({"": speeds}, "many", by="normplug")
    assert bars.draw_bars({"": speeds}, "many", by="normplug", apart=True)


def test_one_and_two_gpus_have_their_medians_as_values():
    figure = ddp.draw(read_file(tables.DOCS / "results" / "ddp_h100.json"))
    (axes,) = figure.axes
    values = [text.get_text() for text in axes.texts]
    assert values == ["48,665", "81,707", "71,505", "125,034"]
    lines = {line.get_label(): line.get_color() for line in axes.lines}
    for name in ddp.ARMS.values():
        assert lines[name] == COLOURS[name]
    assert figure.get_suptitle().endswith("commit d626288 or ec8e09a, 2026-11-25")


def test_a_provider_has_its_colour_in_plots_over_the_width():
    found = read_file(tables.DOCS / "results" / "layer_norm_h100.json")
    with rc_context(STYLE):
        figure = rows._figure(found, None)
    for axes in figure.axes:
        lines = {line.get_label(): line.get_color() for line in axes.lines}
        assert lines.pop("a copy") == GREY
        assert {"normplug", "eager", "compile"} <= lines.keys()
        assert lines == {name: COLOURS[name] for name in lines}


def test_a_cell_of_a_table_is_never_nan():
    assert rows.cell(float("nan")) == rows.cell(None) == "-"


@pytest.mark.parametrize(
    "path", sorted(tables.DOCS.rglob("*.png")), ids=lambda path: path.stem
)
def test_a_committed_picture_is_as_wide_as_a_page_and_has_no_background(path):
    pixels = imread(path)
    assert pixels.shape[1] == WIDTH * DPI
    assert pixels.shape[2] == 4
    assert pixels[0, 0, 3] == pixels[-1, -1, 3] == 0
    # A page 700 pixels wide shows it without much scrolling.
    assert pixels.shape[0] < 1.7 * pixels.shape[1]


@pytest.mark.parametrize("path", sorted(tables.DOCS.glob("*.svg")), ids=lambda p: p.stem)
def test_a_drawing_has_no_background_and_grey_text(path):
    text = path.read_text()
    width = re.search(r'viewBox="0 0 (\d+)', text)[1]
    assert f'<rect width="{width}"' not in text
    assert f'font-size="13" fill="{GREY}"' in text
    assert "#222" not in text
