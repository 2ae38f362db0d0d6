"""The plots of a comparison: what each figure holds, not how it looks."""

import pytest

pytest.importorskip("normplug.compare")

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.colors import to_hex
from matplotlib.text import Text

from normplug._measure import ACCURACY, Measure
from normplug._pictures import COLOURS, GREY
from normplug.compare.plots import VARIANCES, arm_styles, figures
from normplug.compare.runs import Result, group_runs


def a_run(arm, seed, accuracy=0.9, curve=(0.5,), **others):
    """A row of `find_runs`."""
    names = {"run": "", "model": "resnet18", "data": "digits", "arm": arm, "seed": seed}
    given = {"test_score": accuracy, "curve": list(curve), "measure": ACCURACY}
    row = vars(Result(status="finished", **names, **given))
    return row | {"validation_score": np.nan, "block_drop": []} | others


def drawn(*runs, over_rates=False):
    """The figures of some runs, by name."""
    (group,) = group_runs(pd.DataFrame(runs), None, None, over_rates)
    arms = [*group.every.plain_arm, *group.arms]
    return dict(figures(group, arm_styles(arms)))


def a_variance(cells):
    """The variances of each norm: quantity number i has i times `cells`."""
    return {name: (cells * i).tolist() for i, name in enumerate(VARIANCES, start=1)}


def lines(axes):
    """Label -> the points of a line. A line without a label is none of an arm."""
    named = [line for line in axes.lines if not line.get_label().startswith("_")]
    return {line.get_label(): line.get_xydata().tolist() for line in named}


def ticks(axis):
    """The ticks that are drawn."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_ticklocs() if low <= tick <= high]


def means(axes):
    """The points with an interval."""
    return [container.lines[0].get_xydata()[0] for container in axes.containers]


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def heading(figure):
    return " ".join(figure.get_suptitle().split())


def dots(axes, marker):
    """The x of the dots of an arm."""
    (line,) = [line for line in axes.lines if line.get_marker() == marker]
    return list(line.get_xdata())


def test_lines_over_epochs_and_blocks_are_medians_up_to_where_a_seed_stops():
    found = drawn(
        a_run("standard", 0, curve=(0.5, 0.7, 0.8, 0.9)),
        a_run("golden", 0, curve=(0.4, 0.6, 0.8), block_drop=[0.5, 0.1]),
        a_run("golden", 1, curve=(0.6, 0.8), block_drop=[0.3, 0.3]),
        a_run("baseline", 0, curve=(0.5,), block_drop=[0.2, 0.4]),
    )
    (gaps,) = found["gap"].axes
    assert lines(gaps).keys() == {"golden (1 seed)"}
    np.testing.assert_allclose(lines(gaps)["golden (1 seed)"], [[1, -10], [2, -10]])
    assert found["gap"].get_supylabel() == "points, higher is better"
    assert "validation accuracy minus standard, same seed" in heading(found["gap"])
    (blocks,) = found["blocks"].axes
    expected = {
        "golden (2 seeds)": [[1, 0.4], [2, 0.2]],
        "baseline (1 seed)": [[1, 0.2], [2, 0.4]],
    }
    assert lines(blocks) == expected


def test_seeds_shows_each_seed_and_each_pair():
    runs = [a_run(arm, seed) for arm in ("standard", "baseline") for seed in range(3)]
    golden = [a_run("golden", seed, 0.9 + 0.01 * seed) for seed in range(1, 4)]
    left, right = drawn(*runs, *golden)["seeds"].axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [f"{arm}\n3 of 4 seeds" for arm in ("standard", "golden", "baseline")]
    assert [len(dots(left, marker)) for marker in "soD"] == [3, 3, 3]
    np.testing.assert_allclose(dots(right, "D"), [1.0, 2.0])
    # Paired: t = 1.5 / 0.5, and p = 0.2048 with 1 degree; the other arm equals the reference.
    assert texts(right) == ["reference", "p: 0.410", "p: 1.000"]
    # Differences 1 and 2 points: mean 1.5, and t(0.975, 1) * 0.5 = 6.3531.
    bars = [line.get_xdata() for line in right.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(bars[0], [1.5 - 6.3531, 1.5, 1.5 + 6.3531], 1e-5)
    for other in ("0.5", "standard", "baseline"):  # no seed to compare
        assert not drawn(a_run("golden", 0), a_run(other, 1))["seeds"].axes[1].axison


def test_a_diverged_seed_is_named_and_does_not_stretch_the_axis():
    arms = ("standard", "golden")
    runs = [a_run(arm, seed, 0.9 + seed / 1000) for arm in arms for seed in range(8)]
    runs[-1]["test_score"] = 0.1
    stopped = a_run("golden", 8, np.nan, (), status="diverged")
    left, right = drawn(*runs, stopped)["seeds"].axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["standard\n8 of 9 seeds", "golden\n8 of 9 seeds, 1 diverged"]
    assert left.get_xlim()[0] > 89
    assert "\u25c2 10" in texts(left)
    assert right.get_xlim()[0] < 0


def test_a_loss_is_drawn_as_it_is_with_its_unit():
    loss = Measure("loss", "nats/byte", "lower", "tokens")
    arms = {"standard": 1.5, "golden": 1.25}
    found = drawn(
        *(a_run(arm, 0, at, (2.0, at), measure=loss) for arm, at in arms.items())
    )
    left, right = found["seeds"].axes
    assert left.get_xlabel() == "test loss (nats/byte), lower is better"
    minus = "test loss minus standard, same seed (nats/byte)"
    assert right.get_xlabel().replace("\n", " ") == minus
    assert dots(right, "D") == [-0.25]
    assert found["gap"].get_supylabel() == "nats/byte, lower is better"


def test_no_text_of_a_plot_lies_on_another_or_outside():
    long = "a-tag-that-goes-on_and_on_without_a_place_to_break_it_at_all_until_somebody_stops"
    arms = ["standard", "golden", "0.5", "0.25", *(f"{i}.5-{long}" for i in range(5))]
    cells = np.random.default_rng(0).uniform(0.5, 2.0, 60)
    others = {"block_drop": [0.5, 0.1], "items_per_s": 10.0, **a_variance(cells)}
    each = product(arms, range(3))
    found = drawn(
        *(a_run(arm, i, 0.9 + i / 100, (0.5, 1.0), **others) for arm, i in each)
    )
    named = {
        "seeds",
        "targets",
        "speed",
        "gap",
        "blocks",
        "variance_by_depth",
    }
    assert found.keys() == named
    for figure in found.values():
        figure.draw_without_rendering()
        labels = [label for axes in figure.axes for label in axes.get_yticklabels()]
        items = [label for label in labels if "seed" in label.get_text()]
        items += [*figure.texts, *figure.legends]
        for axes in figure.axes:
            items += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        items = [i for i in items if i.get_visible() and i.get_window_extent().width > 2]
        for i, item in enumerate(items):
            box = item.get_window_extent().padded(-1)
            assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, item
            assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, item
            assert not any(
                box.overlaps(other.get_window_extent()) for other in items[:i]
            ), item


@pytest.mark.parametrize("high", [1.1, 2.0, 200.0])
def test_variance_by_depth_has_a_panel_for_each_quantity_and_the_targets(high):
    cells = np.random.default_rng(0).uniform(1.0, high, 20)
    targets = {"target_variance": [0.618] * 20}
    runs = [a_run(arm, 0, **a_variance(cells), **targets) for arm in ("0.5", "golden")]
    panels = drawn(*runs)["variance_by_depth"].axes
    for number, axes in enumerate(panels, start=1):
        measured = [line for line in axes.lines if line.get_linestyle() != ":"]
        dotted = [line for line in axes.lines if line.get_linestyle() == ":"]
        for line in measured:
            np.testing.assert_array_equal(line.get_ydata(), number * cells)
        assert [set(line.get_ydata()) for line in dotted] == 2 * [{0.618}] * (number == 2)
        assert len(ticks(axes.yaxis)) >= 2
        assert len(ticks(axes.xaxis)) >= 2


def test_no_panel_has_a_single_point():
    one = a_variance(np.array([1.0]))
    found = drawn(a_run("standard", 0, **one), a_run("golden", 0, **one))
    assert found.keys() == {"seeds"}


def test_an_axis_of_accuracies_ends_at_0_and_100():
    runs = [
        a_run(arm, seed, accuracy, items_per_s=len(arm))
        for arm in ("standard", "golden")
        for seed, accuracy in enumerate((0.2, 0.95))
    ]
    found = drawn(*runs)
    assert found["seeds"].axes[0].get_xlim() == (0, 100)
    assert found["speed"].axes[0].get_ylim() == (0, 100)


def test_targets_are_on_a_log_axis_and_other_arms_are_left_out():
    modes = {
        "standard": 0.0,
        "golden": 0.02,
        "0.5": 0.01,
        "2": -0.01,
        "standard-gamma0_0.7": 0.5,
    }
    runs = [
        a_run(arm, seed, 0.9 + gain) for arm, gain in modes.items() for seed in range(2)
    ]
    (axes,) = drawn(*runs)["targets"].axes
    assert axes.get_xscale() == "log"
    assert axes.get_ylabel() == "minus standard, points, higher is better"
    np.testing.assert_allclose(means(axes), [[0.618034, 2], [0.5, 1], [2, -1]], rtol=1e-5)


def test_a_seed_far_off_does_not_move_the_mean_of_its_target():
    runs = [a_run(arm, seed, 0.9 + seed / 1000) for arm in "1234" for seed in range(8)]
    runs[-1]["test_score"] = 0.1
    (axes,) = drawn(*runs, *(a_run("standard", seed, 0.9) for seed in range(8)))[
        "targets"
    ].axes
    np.testing.assert_allclose(means(axes), [[1, 0.35], [2, 0.35], [3, 0.35], [4, 0.3]])
    assert axes.containers[-1].get_label() == "target 4, without 1 far off"


def test_the_score_is_drawn_over_the_speed_and_the_learning_rate():
    speeds = {"baseline": 10.0, "golden": 20.0}
    runs = [
        a_run(
            arm,
            seed,
            0.9 + rate,
            items_per_s=speed,
            learning_rate=rate,
            validation_score=rate,
        )
        for (arm, speed), rate, seed in product(speeds.items(), (0.01, 0.02), range(2))
    ]
    found = drawn(*runs, over_rates=True)
    (axes,) = found["speed"].axes
    np.testing.assert_allclose(means(axes), [[10, 91.5], [20, 91.5]])
    assert axes.get_xlabel() == "median images/s, higher is better"
    (axes,) = found["rates"].axes
    assert axes.get_xscale() == "log"
    both = {f"{arm} (2 seeds)": [[0.01, 1], [0.02, 2]] for arm in speeds}
    assert lines(axes) == both


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_degenerate_variances_are_drawn(value):
    run = a_run("golden", 0, **a_variance(np.array([1.0, value, 2.0])))
    drawn(run)["variance_by_depth"].draw_without_rendering()


@pytest.mark.parametrize("others", [8, 30])
def test_no_two_arms_have_one_colour_and_arms_differ_without_colour(others):
    runs = [a_run(f"{i / 10}", 0) for i in range(others)]
    styles = arm_styles(run["arm"] for run in runs).values()
    assert len({style["color"] for style in styles}) == 3 + others
    looks = {(style["marker"], style.get("linestyle")) for style in styles}
    assert len(looks) == min(3 + others, 3 + 21)


def test_a_gap_is_a_mean_with_the_band_of_its_interval():
    curves = {
        "standard": ((0.5, 0.6), (0.5, 0.6), (0.5, 0.6)),
        "golden": ((0.51, 0.62), (0.52, 0.62), (0.53, 0.62)),
    }
    found = drawn(
        *(
            a_run(arm, seed, curve=curve)
            for arm, of_seeds in curves.items()
            for seed, curve in enumerate(of_seeds)
        )
    )
    (axes,) = found["gap"].axes
    np.testing.assert_allclose(lines(axes)["golden (3 seeds)"], [[1, 2], [2, 2]])
    (band,) = axes.collections
    box = band.get_datalim(axes.transData)
    # Differences of 1, 2 and 3 points: t(0.975, 2) / sqrt(3) = 2.4841.
    np.testing.assert_allclose([box.y0, box.y1], [2 - 2.4841, 2 + 2.4841], rtol=1e-4)
    assert found["gap"].legends


def test_many_gaps_have_a_panel_each_and_their_own_colour():
    arms = ("0.25", "0.5", "golden", "baseline", "mine")
    curves = [
        a_run(arm, seed, curve=(0.5, 0.6 + seed / 100))
        for arm in ("standard", *arms)
        for seed in range(2)
    ]
    figure = drawn(*curves)["gap"]
    panels = [axes for axes in figure.axes if axes.axison]
    assert {axes.get_title() for axes in panels} == {
        f"{name} (2 seeds)" for name in ("target 0.25", "target 0.5", *arms[2:])
    }
    styles = arm_styles(arms)
    for axes in panels:
        (arm,) = [arm for arm in arms if f"{arm} (" in axes.get_title()]
        (line,) = [line for line in axes.lines if not line.get_label().startswith("_")]
        assert line.get_color() == styles[arm]["color"]
        assert len(axes.collections) == 1
    assert not figure.legends


def test_the_axes_of_speed_end_just_outside_the_points_and_their_intervals():
    runs = [
        a_run(arm, seed, 0.8 + seed / 10, items_per_s=speed)
        for arm, speed in (("standard", 50_000.0), ("golden", 52_000.0))
        for seed in range(3)
    ]
    (axes,) = drawn(*runs)["speed"].axes
    assert 49_800 < axes.get_xlim()[0] < 50_000
    assert 52_000 < axes.get_xlim()[1] < 52_200


def test_an_arm_has_one_colour_in_all_plots_of_all_groups():
    few, many = ("standard", "golden"), ("standard", "golden", "0.25", "mine", "a")
    for arm in few:
        assert arm_styles(few)[arm] == arm_styles(many)[arm]
        assert arm_styles(few)[arm]["color"] == COLOURS[arm]
    assert arm_styles(["mine"])["mine"] == arm_styles(many)["mine"]


def test_a_title_has_plain_names_and_seven_digits_of_each_commit():
    commits = ("b149bb73f32a6c88e8c67fac1f90951f0361d710", "", "unknown")
    run = {"model": "resnet18", "data": "cifar10-jpeg", "date": "2026-11-28T01:00:00"}
    run |= {"hardware": "NVIDIA H100", "versions": {"torch": "2.11.0"}}
    runs = [
        a_run(arm, seed, commit=commit, **run)
        for arm in ("standard", "golden")
        for seed, commit in enumerate(commits)
    ]
    title = drawn(*runs)["seeds"].get_suptitle()
    assert title.startswith("ResNet-18 on CIFAR-10 (JPEG)\n")
    last = "NVIDIA H100, torch 2.11.0, commit b149bb7, 2026-11-28"
    assert title.endswith(f"\n{last}")


def test_no_text_is_nan_and_all_text_is_grey():
    arms = ("standard", "golden", "0.5")
    cells = np.array([1.0, float("nan"), 2.0])
    others = {"block_drop": [0.5, 0.1], **a_variance(cells)}
    runs = [a_run(arm, 0, curve=(0.5, 0.6), **others) for arm in arms]
    runs += [a_run("lost", 0, float("nan"), ())]
    runs += [a_run(arm, 1, items_per_s=10.0) for arm in ("0.25", "1.5")]
    figures_drawn = drawn(*runs)
    assert {
        "seeds",
        "gap",
        "blocks",
        "speed",
        "variance_by_depth",
    } <= figures_drawn.keys()
    for name, figure in figures_drawn.items():
        assert figure.patch.get_facecolor()[3] == 0
        for text in figure.findobj(Text):
            assert "nan" not in text.get_text(), name
            if text.get_text():
                assert to_hex(text.get_color()) == GREY, (name, text)
