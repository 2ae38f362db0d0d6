"""The look that all pictures share: colours by name, and text that reads on any page."""

import pytest

pytest.importorskip("matplotlib")

import colorsys

import numpy as np
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from normplug._pictures import (
    COLOURS,
    DPI,
    GREY,
    SPARE,
    STYLE,
    colours_of,
    origin_text,
    save,
    short_commit,
    styled,
)

PAGES = {"white": "#ffffff", "GitHub's dark": "#0d1117", "Material's slate": "#1e2029"}
ONE_ARM = (
    {"eager", "baseline", "baseline-eager"},
    {"normplug", "swap+fuse", "standard", "standard-fused-eager"},
    {"compile", "torch.compile", "baseline-compiled"},
    {"swap+fuse+compile", "normplug and torch.compile", "standard-fused-compiled"},
    {"normplug, CUDA graphs", "standard-fused-graph"},
    {"swap", "normplug-python", "normplug, through Python"},
    {"liger", "Liger-Kernel"},
    {"quack", "QuACK"},
    {"flaggems", "FlagGems"},
)


def luminance(colour):
    """Relative luminance as in WCAG 2.2."""
    parts = np.array(to_rgb(colour))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_normplug_is_orange_compile_blue_and_eager_grey():
    hues = {
        name: colorsys.rgb_to_hsv(*to_rgb(COLOURS[name]))
        for name in ("normplug", "torch.compile", "eager")
    }
    assert 20 < 360 * hues["normplug"][0] < 40
    assert 200 < 360 * hues["torch.compile"][0] < 220
    assert hues["eager"][1] == 0


def test_the_names_of_one_arm_have_one_colour_and_no_two_arms_do():
    for names in ONE_ARM:
        assert len({COLOURS[name] for name in names}) == 1, names
    several = sum(map(len, ONE_ARM)) - len(ONE_ARM)
    assert len(set(COLOURS.values())) == len(COLOURS) - several
    assert not set(COLOURS.values()) & set(SPARE)
    assert colours_of(["swap + fuse"])["swap + fuse"] == COLOURS["normplug"]
    assert colours_of(["2"])["2"] == COLOURS["2.0"]


def test_an_arm_keeps_its_colour_whatever_is_drawn_with_it():
    alone = {
        name: colours_of([name])[name] for name in ("golden", "0.25", "mine", "yours")
    }
    assert colours_of(["yours", "baseline", "mine", "0.25", "golden"]) == {
        **alone,
        "baseline": COLOURS["baseline"],
    }
    assert alone["mine"] in SPARE


@pytest.mark.parametrize("others", [8, 30])
def test_arms_without_a_colour_of_their_own_differ(others):
    names = [f"arm {i}" for i in range(others)]
    assert len(set(colours_of(names).values())) == others


@pytest.mark.parametrize("page", PAGES)
def test_text_and_colours_read_on_white_and_on_dark(page):
    assert contrast(GREY, PAGES[page]) > 3.9
    for name, colour in COLOURS.items():
        assert contrast(colour, PAGES[page]) > 1.8, name


def test_a_picture_has_no_background_whatever_matplotlib_is_set_to(tmp_path):
    @styled
    def draw():
        figure = Figure((1, 1))
        figure.subplots().set_title("a")
        return figure

    text = rcParams["text.color"]
    pixels = imread(save(draw(), tmp_path / "a.png"))
    assert pixels.shape[:2] == (DPI, DPI)
    assert pixels[0, 0, 3] == 0
    grey = to_rgb(GREY)
    opaque = pixels[pixels[..., 3] == 1]
    assert len(opaque)
    np.testing.assert_allclose(opaque[:, :3], [grey] * len(opaque), atol=0.01)
    assert rcParams["text.color"] == text != STYLE["text.color"]


def test_a_commit_has_seven_digits():
    commit = "b149bb73f32a6c88e8c67fac1f90951f0361d710"
    assert short_commit(commit) == "b149bb7"
    assert short_commit(f"{commit}-dirty") == "b149bb7-dirty"
    assert short_commit("ef394f15") == "ef394f1"
    assert short_commit("unknown") == "unknown"


def test_the_origin_names_a_device_once_however_fully_rows_name_it():
    rows = [
        {"device": "1 x NVIDIA H100", "torch": "2.11.0", "commit": "0123456789"},
        {"device": "1 x NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"},
        {"device": "1 x NVIDIA H200", "torch": "2.11.0"},
    ]
    text = origin_text(rows).replace("\N{NO-BREAK SPACE}", " ")
    assert text == "1 x NVIDIA H100 or 1 x NVIDIA H200, torch 2.11.0, commit 0123456"
