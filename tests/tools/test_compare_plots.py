"""The plots of a comparison: what each figure holds, not how it looks."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from normplug.experiment.compare.frame import QUANTITIES, Result
from normplug.experiment.compare.plots import (
    arm_styles,
    blocks_figure,
    curves_figure,
    seeds_figure,
    targets_figure,
    variance_by_depth_figure,
)
from normplug.experiment.compare.stats import group_runs
from normplug.experiment.measure import ACCURACY, Measure


def a_run(arm, seed, accuracy=0.9, curve=(0.5,), speed=np.nan, hardware="", **others):
    """A row of `find_runs`."""
    given = {"arm": arm, "seed": seed, "test_score": accuracy, "curve": list(curve)}
    given |= {"items_per_s": speed, "hardware": hardware, "learning_rate": 0.1}
    given |= {"run": "", "model": "resnet18", "data": "digits", "measure": ACCURACY}
    last = curve[-1] if curve else np.nan
    row = vars(Result(status="finished", **given))
    return row | {"validation_score": last, "block_drop": []} | others


def a_group(*runs):
    (group,) = group_runs(pd.DataFrame(runs))
    return group


def drawn(figure, *runs):
    """The axes of a figure of some runs."""
    group = a_group(*runs)
    return figure(group, arm_styles([group])).axes


def a_variance(steps, cells, target=1.0):
    """Variances as a collected run has them: those of quantity number i are i times `cells`."""
    parts = {name: (cells * i).tolist() for i, name in enumerate(QUANTITIES) if i}
    parts["target_variance"] = np.full(cells.shape, target).tolist()
    return {"steps": list(steps), "depths": list(range(cells.shape[1])), **parts}


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def dots(axes, marker):
    """The x of the dots of an arm."""
    (line,) = [line for line in axes.lines if line.get_marker() == marker]
    return list(line.get_xdata())


def test_accuracy_stops_where_a_seed_stops():
    whole, late = drawn(
        curves_figure,
        a_run("baseline", 0, curve=(0.5, 0.7, 0.8, 0.9)),
        a_run("golden", 0, curve=(0.4, 0.6, 0.8)),
        a_run("golden", 1, curve=(0.6, 0.8)),
        a_run("standard", 0, curve=()),
    )
    lines = {line.get_label(): line.get_xydata().tolist() for line in whole.lines}
    assert lines.keys() == {"baseline (1 seed)", "golden (2 seeds)"}
    assert lines["golden (2 seeds)"] == [[1.0, 50.0], [2.0, 70.0]]
    assert [line.get_xdata().tolist() for line in late.lines] == [[3, 4], [2]]
    band = whole.collections[1].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (45.0, 75.0)  # the quartiles of 40 and 60, and of 60 and 80


def test_seeds_shows_each_seed_and_each_pair():
    runs = [a_run(arm, seed) for arm in ("baseline", "standard") for seed in range(3)]
    golden = [a_run("golden", seed, 0.9 + 0.01 * seed) for seed in range(1, 4)]
    left, right = drawn(seeds_figure, *runs, *golden)
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == [f"{arm}\n3 of 4 seeds" for arm in ("baseline", "golden", "standard")]
    assert [len(dots(left, marker)) for marker in "soD"] == [3, 3, 3]
    np.testing.assert_allclose(dots(right, "D"), [1.0, 2.0])
    # Paired: t = 1.5 / 0.5, and p = 0.2048 with 1 degree; the other arm equals the reference.
    assert texts(right) == ["reference", "p: 0.410", "p: 1.000"]
    # Differences 1 and 2 points: mean 1.5, and t(0.975, 1) * 0.5 = 6.3531.
    bars = [line.get_xdata() for line in right.lines if line.get_marker() == "|"]
    np.testing.assert_allclose(bars[0], [1.5 - 6.3531, 1.5, 1.5 + 6.3531], 1e-5)


def test_a_diverged_seed_is_named_and_does_not_stretch_the_axis():
    runs = [
        a_run(arm, seed, 0.9 + seed / 1000) for arm in ("baseline", "golden") for seed in range(8)
    ]
    runs[-1]["test_score"] = 0.1
    stopped = a_run("golden", 8, np.nan, (), status="diverged")
    left, right = drawn(seeds_figure, *runs, stopped)
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["baseline\n8 of 9 seeds", "golden\n8 of 9 seeds, 1 diverged"]
    assert left.get_xlim()[0] > 89
    assert "\u25c2 10" in texts(left)
    assert right.get_xlim()[0] < 0


@pytest.mark.parametrize("other", ["0.5", "standard", "baseline"])
def test_seeds_says_when_there_is_no_pair(other):
    _, right = drawn(seeds_figure, a_run("golden", 0), a_run(other, 1))
    assert texts(right) == ["no seed to compare"]
    assert not right.axison


@pytest.mark.parametrize("accuracies", [(0.0, 0.02), (0.97, 1.0), (1.0, 1.0), (0.0, 1.0)])
def test_an_axis_of_accuracies_stays_within_0_and_100(accuracies):
    runs = [a_run("golden", seed, value, (0.5, value)) for seed, value in enumerate(accuracies)]
    left, _ = drawn(seeds_figure, *runs)
    heights = [axes.get_ylim() for axes in drawn(curves_figure, *runs)]
    for low, high in (left.get_xlim(), *heights):
        assert 0 <= low < high <= 100


def test_a_loss_is_drawn_as_it_is_with_its_unit():
    loss = {"measure": Measure("loss", "nats/byte", "lower", "tokens"), "hardware": "CPU"}
    runs = [
        a_run(arm, 0, value, (2.0, value), 9.0, **loss)
        for arm, value in {"baseline": 1.5, "golden": 1.25}.items()
    ]
    left, right = drawn(seeds_figure, *runs)
    assert left.get_xlabel() == "test loss (nats/byte)"
    assert right.get_xlabel() == "test loss minus baseline, same seed (nats/byte)"
    assert dots(right, "D") == [-0.25]
    assert drawn(curves_figure, *runs)[0].get_ylabel() == "validation loss (nats/byte)"


def test_no_text_of_a_plot_lies_on_another_or_outside():
    long = "a-tag-that-goes-on_and_on_without_a_place_to_break_it_at_all_until_somebody_stops"
    arms = ["standard", "golden", "0.5", *(f"{i}.5-{long}" for i in range(5))]
    cells = np.random.default_rng(0).uniform(0.5, 2.0, (6, 60))
    cells[:, 7] = np.nan
    others = {"block_drop": [0.5, 0.1], "variances": a_variance(range(0, 60, 10), cells)}
    group = a_group(
        *(
            a_run(arm, seed, 0.9 + seed / 100, (0.5, 1.0), 100.0 + i, f"GPU {seed % 2}", **others)
            for (i, arm), seed in product(enumerate(arms), range(3))
        )
    )
    lines = [curves_figure, blocks_figure, variance_by_depth_figure]
    for draw in (seeds_figure, *lines):
        figure = draw(group, arm_styles([group]))
        figure.draw_without_rendering()
        labels = [label for axes in figure.axes for label in axes.get_yticklabels()]
        named = [label for label in labels if "seed" in label.get_text()]
        items = [*named, *figure.texts, *figure.legends]
        for axes in figure.axes:
            items += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        items = [i for i in items if i.get_visible() and i.get_window_extent().width > 2]
        assert items[len(named) :]
        for i, item in enumerate(items):
            box = item.get_window_extent().padded(-1)
            assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, item
            assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, item
            assert not any(box.overlaps(other.get_window_extent()) for other in items[:i]), item


def test_variance_by_depth_shows_the_last_step_and_each_target():
    targets = {"baseline": 1.0, "standard": 1.0, "golden": 0.618, "0.5": 0.5}
    cells = np.random.default_rng(0).uniform(0.5, 2.0, (3, 20))
    panels = drawn(
        variance_by_depth_figure,
        *(
            a_run(arm, 0, variances=a_variance([0, 9, 18], cells, target))
            for arm, target in targets.items()
        ),
    )
    assert [len(axes.lines) for axes in panels] == [4, 8, 4]
    dotted = [line for line in panels[1].lines if line.get_linestyle() == ":"]
    assert sorted(line.get_ydata()[0] for line in dotted) == sorted(targets.values())
    for number, axes in enumerate(panels, start=1):
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), number * cells[-1])
        assert axes.get_yscale() == "log"


def test_targets_are_on_a_log_axis_and_other_arms_are_left_out():
    modes = {"standard": 0.0, "golden": 0.02, "0.5": 0.01, "standard-gamma0_0.786": 0.5}
    runs = [a_run(arm, seed, 0.9 + gain) for arm, gain in modes.items() for seed in range(2)]
    panels = drawn(targets_figure, *runs)
    titles = [axes.get_title("left") for axes in panels]
    assert titles == ["2 seeds", "minus standard, same seed"]
    assert {axes.get_xscale() for axes in panels} == {"log"}
    for axes, scores in zip(panels, ([91, 92, 90], [1, 2]), strict=True):
        (line,) = [container.lines[0] for container in axes.containers]
        targets = [0.5, 0.618034, 1][: len(scores)]
        np.testing.assert_allclose(line.get_xdata(orig=False), targets, rtol=1e-5)
        np.testing.assert_allclose(line.get_ydata(orig=False), scores)
    alone = drawn(targets_figure, *(a_run(arm, 0) for arm in ("golden", "0.5", "0.25")))
    assert [len(axes.containers[0].lines[0].get_xdata()) for axes in alone] == [3, 0]


def test_blocks_show_what_each_of_them_is_worth():
    drops = {"standard": [[0.5, 0.1], [0.3, 0.3]], "golden": [[0.2, 0.4]]}
    runs = [
        a_run(arm, seed, block_drop=losses)
        for arm in drops
        for seed, losses in enumerate(drops[arm])
    ]
    (axes,) = drawn(blocks_figure, *runs)
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    expected = {"standard (2 seeds)": [[1, 0.4], [2, 0.2]], "golden (1 seed)": [[1, 0.2], [2, 0.4]]}
    assert lines == expected


@pytest.mark.parametrize("value", [0.0, float("nan"), 1.0, float("inf")])
def test_degenerate_variances_are_drawn(value):
    run = a_run("golden", 0, variances=a_variance([0], np.full((1, 1), value)))
    drawn(variance_by_depth_figure, run)[0].figure.draw_without_rendering()


@pytest.mark.parametrize("others", [8, 30])
def test_no_two_arms_have_one_colour_and_arms_differ_without_colour(others):
    groups = [a_group(a_run(f"{i / 10}", 0), a_run("golden", 0)) for i in range(others)]
    styles = arm_styles(groups).values()
    assert len({style["color"] for style in styles}) == 3 + others
    looks = {(style["marker"], style.get("linestyle")) for style in styles}
    assert len(looks) == min(3 + others, 3 + 21)
