"""The plots of a comparison: what each figure holds, not how it looks."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from normplug.compare.canvas import arm_styles
from normplug.compare.gather import Group, Run, group_runs
from normplug.compare.plots import accuracy_figure, draw, seeds_figure
from normplug.compare.variance import COLUMNS, Variance
from normplug.compare.variance_plots import variance_by_depth_figure, variance_by_step_figure


def a_run(arm: str, seed: int, accuracy: float = 0.9, curve: tuple[float, ...] = (0.5,)) -> Run:
    return Run(
        path=Path("result.json"),
        error="",
        model="resnet18",
        data="digits",
        arm=arm,
        seed=seed,
        status="finished",
        test_accuracy=accuracy,
        accuracy_by_epoch=curve,
        step_ms=None,
        images_per_s=None,
        loader_wait_ms=None,
        peak_memory_bytes=None,
        norms_swapped=None,
        versions={},
        hardware="",
        date="",
    )


def a_group(*runs: Run) -> Group:
    (group,) = group_runs(runs)
    return group


def a_variance(steps: list[int], cells: np.ndarray, target: float = 1.0) -> Variance:
    values = {name: cells * (index + 1) for index, name in enumerate(COLUMNS)}
    values["target_variance"] = np.full_like(cells, target)
    depths = np.arange(cells.shape[1])
    return Variance(np.array(steps), depths, Counter(BatchNorm2d=len(depths)), values)


def test_accuracy_stops_where_a_seed_stops() -> None:
    group = a_group(
        a_run("baseline", 0, curve=(0.5, 0.7, 0.8, 0.9)),
        a_run("golden", 0, curve=(0.4, 0.6, 0.8)),
        a_run("golden", 1, curve=(0.6, 0.8)),
        a_run("standard", 0, curve=()),
    )
    whole, late = accuracy_figure(group, arm_styles([group])).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in whole.lines}
    assert lines.keys() == {"baseline (1 seed)", "golden (2 seeds)"}
    assert lines["golden (2 seeds)"] == [[1.0, 50.0], [2.0, 70.0]]
    assert [line.get_xdata().tolist() for line in late.lines] == [[3, 4], [2]]
    band = whole.collections[1].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (40.0, 80.0)


def test_seeds_shows_each_seed_and_each_pair() -> None:
    runs = [a_run(arm, seed) for arm in ("baseline", "standard") for seed in range(3)]
    golden = [a_run("golden", seed, 0.9 + 0.01 * seed) for seed in range(1, 4)]
    group = a_group(*runs, *golden)
    left, right = seeds_figure(group, arm_styles([group])).axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names[2] == "golden\n3 of 4 seeds"
    dots = [line for line in left.lines if line.get_linestyle() == "None" and len(line.get_xdata())]
    assert [len(line.get_xdata()) for line in dots if line.get_marker() in "soD"] == [3, 3, 3]
    (pairs,) = [line for line in right.lines if line.get_marker() == "D"]
    np.testing.assert_allclose(pairs.get_xdata(), [1.0, 2.0])
    # Differences 1 and 2 points: mean 1.5, and t(0.975, 1) * 0.5 = 6.3531.
    (interval,) = right.containers[-1].lines[2]
    np.testing.assert_allclose(interval.get_segments()[0][:, 0], [1.5 - 6.3531, 1.5 + 6.3531], 1e-5)


@pytest.mark.parametrize("other", ["standard", "baseline"])
def test_seeds_says_when_there_is_no_pair(other: str) -> None:
    group = a_group(a_run("golden", 0), a_run(other, 1))
    _, right = seeds_figure(group, arm_styles([group])).axes
    assert [text.get_text() for text in right.texts] == ["no seed to compare with baseline"]
    assert not right.axison


def test_variance_by_depth_shows_the_last_step_and_each_target() -> None:
    targets = {"baseline": 1.0, "standard": 1.0, "golden": 0.618, "0.5": 0.5}
    group = a_group(*(a_run(arm, 0) for arm in targets))
    cells = np.random.default_rng(0).uniform(0.5, 2.0, (3, 20))
    variances = {arm: a_variance([0, 9, 18], cells, target) for arm, target in targets.items()}
    figure = variance_by_depth_figure(group.title, variances, arm_styles([group]))
    assert [len(axes.lines) for axes in figure.axes] == [4, 8, 4]
    dotted = [line for line in figure.axes[1].lines if line.get_linestyle() == ":"]
    assert [line.get_ydata()[0] for line in dotted] == list(targets.values())
    for index, axes in enumerate(figure.axes, start=2):
        np.testing.assert_array_equal(axes.lines[0].get_ydata(), index * cells[-1])
        assert axes.get_yscale() == "log"


def test_variance_by_step_has_one_scale_for_all_arms() -> None:
    cells = np.random.default_rng(0).uniform(0.5, 2.0, (6, 20))
    steps = [0, 10, 20, 40, 80, 160]
    arms = ("baseline", "standard", "golden", "0.5")
    variances = {arm: a_variance(steps, cells * scale) for scale, arm in enumerate(arms, start=1)}
    *panels, bar = variance_by_step_figure("resnet18", variances).axes
    meshes = [axes.collections[0] for axes in panels]
    assert [axes.get_title() for axes in panels] == [f"{arm} (1 seed)" for arm in arms]
    assert len({mesh.get_clim() for mesh in meshes}) == 1
    np.testing.assert_array_equal(meshes[0].get_array(), 4 * cells.T)
    # Cells are centred on their steps: the border between 80 and 160 is at 120.
    assert meshes[0].get_coordinates()[0, :, 0].tolist() == [-5, 5, 15, 30, 60, 120, 200]
    assert bar.get_ylabel() == "variance"


@pytest.mark.parametrize("value", [0.0, float("nan"), 1.0, float("inf")])
def test_degenerate_variances_are_drawn(tmp_path: Path, value: float) -> None:
    group = a_group(a_run("golden", 0))
    variances = {"golden": a_variance([0], np.full((1, 1), value))}
    assert len(draw(group, variances, arm_styles([group]), tmp_path, "stem")) == 4


def test_no_two_arms_look_alike() -> None:
    groups = [a_group(a_run(f"{i / 10}", 0), a_run("golden", 0)) for i in range(15)]
    assert len(set(arm_styles(groups).values())) == 3 + 15
