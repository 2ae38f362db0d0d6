"""What the losses of `normplug.bench.autocast` say: a summary, its table, its figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from normplug._report.figures import new_figure
from normplug.bench.autocast import BASELINE, SMOOTHED
from normplug.compare.canvas import Style, draw_line, legend_below, seed_count
from normplug.compare.stats import t_interval

Floats = NDArray[np.float64]
BySeed = Mapping[int, Mapping[str, Any]]  # the rows of an arm

LOSSES = ("train_loss", "validation_loss")
# Each says what changes from the second arm to the first.
PAIRS = (
    ("standard/low", "standard/float32"),
    ("golden/low", "golden/float32"),
    ("standard/float32", BASELINE),
)
# Okabe and Ito's palette. Where an arm equals another the narrow line lies on the wide one.
STYLES = {
    BASELINE: Style("#B0B0B0", "s", 7.0),
    "standard/float32": Style("#56B4E9", "o", 4.0),
    "standard/low": Style("#000000", "", 1.2),
    "golden/float32": Style("#F0B52E", "D", 4.0),
    "golden/low": Style("#D55E00", "", 1.2),
}


def summarise(content: Mapping[str, Any]) -> dict[str, Any]:
    """Task -> its arms and pairs of arms: means over seeds with 95% t-intervals, and gaps.

    Of an arm, `seeds_apart` is the largest distance between the curves of two seeds. Of a pair,
    differences are those of equal seeds; `curves_apart` is the largest distance between their
    curves, and `part_at` the step where the first two differ in the digits that are kept, or None.
    Distances are between moving means.

    Args:
        content: as `autocast.train_all` returns it.
    """
    return {task: _summary(arms, content) for task, arms in _by_task(content).items()}


def render(content: Mapping[str, Any]) -> str:
    """The summary as Markdown.

    Args:
        content: with its summary.
    """
    settings = content["settings"]
    seeds = ", ".join(map(str, settings["seeds"]))
    torch = content["versions"]["torch"]
    parts = [
        f"{content['device']}, torch {torch}, {content['date'][:10]}: {settings['autocast']} "
        f"autocast, seeds {seeds}. Means over seeds ± half a 95% t-interval; curves are moving "
        f"means over {_window(content)} steps.\n"
    ]
    for task, summary in content["summary"].items():
        parts.append(f"{task}, {settings['tasks'][task]['steps']} steps\n")
        parts.append(
            _table(
                ("arm", "training loss", "validation loss", "two seeds apart, at most"),
                (
                    (f"`{arm}`", *(_shown(row[loss]) for loss in LOSSES), _gap(row["seeds_apart"]))
                    for arm, row in summary["arms"].items()
                ),
            )
        )
        if summary["pairs"]:
            parts.append(
                _table(
                    ("same seed", *(f"{loss} loss" for loss in ("training", "validation")))
                    + ("curves apart, at most", "they part at step"),
                    (
                        (
                            f"`{pair['arm']}` - `{pair['reference']}`",
                            *(_shown(pair[loss], sign="+") for loss in LOSSES),
                            _gap(pair["curves_apart"]),
                            "never" if pair["part_at"] is None else str(pair["part_at"]),
                        )
                        for pair in summary["pairs"]
                    ),
                )
            )
    return "\n".join(parts)


def loss_figure(content: Mapping[str, Any]) -> Figure:
    """A column a task: its curves, and below them the differences within each pair.

    Args:
        content: as `autocast.train_all` returns it.
    """
    tasks = _by_task(content)
    paired = any(_pairs(arms) for arms in tasks.values())
    what = f"{_window(content)}-step means; line and band: mean and range over seeds"
    title = f"Training under {content['settings']['autocast']} autocast, {content['device']}"
    figure = new_figure(title, what, 1.5 + 5 * len(tasks), 7.5 if paired else 5)
    heights = (3, 2) if paired else (1,)
    panels = figure.subplots(
        len(heights), len(tasks), sharex="col", squeeze=False, height_ratios=heights
    )
    for column, (task, arms) in zip(panels.T, tasks.items(), strict=True):
        _draw_curves(column[0], task, arms, content)
        if paired:
            _draw_differences(column[1], arms, content)
        for axes in column:
            axes.grid(alpha=0.3)
        column[-1].set_xlabel("step")
    legend_below(figure)
    return figure


def _by_task(content: Mapping[str, Any]) -> dict[str, dict[str, dict[int, Any]]]:
    """Task -> arm -> seed -> row."""
    tasks: dict[str, dict[str, dict[int, Any]]] = {}
    for row in content["runs"]:
        tasks.setdefault(row["task"], {}).setdefault(row["arm"], {})[row["seed"]] = row
    return tasks


def _summary(arms: Mapping[str, BySeed], content: Mapping[str, Any]) -> dict[str, Any]:
    by_arm = {}
    for arm, rows in arms.items():
        curves = _smoothed(rows, rows)
        apart = float(np.ptp(curves, axis=0).max()) if len(rows) > 1 else None
        losses = {loss: _interval(row[loss] for row in rows.values()) for loss in LOSSES}
        by_arm[arm] = losses | {"seeds_apart": apart}
    pairs = []
    for arm, reference in _pairs(arms):
        a, b = arms[arm], arms[reference]
        seeds = a.keys() & b.keys()
        differ = np.any([np.not_equal(a[seed]["curve"], b[seed]["curve"]) for seed in seeds], 0)
        point = content["settings"]["steps_per_point"]
        pairs.append(
            {"arm": arm, "reference": reference}
            | {loss: _interval(a[s][loss] - b[s][loss] for s in seeds) for loss in LOSSES}
            | {
                "curves_apart": float(np.abs(_smoothed(a, seeds) - _smoothed(b, seeds)).max()),
                "part_at": int(differ.argmax()) * point if differ.any() else None,
            }
        )
    return {"arms": by_arm, "pairs": pairs}


def _pairs(arms: Mapping[str, BySeed]) -> list[tuple[str, str]]:
    """The pairs of which both arms share a seed."""
    return [(a, b) for a, b in PAIRS if arms.get(a, {}).keys() & arms.get(b, {}).keys()]


def _smoothed(rows: BySeed, seeds: Iterable[int]) -> Floats:
    """(seeds, points): moving means of the curves, by rising seed."""
    curves = np.array([rows[seed]["curve"] for seed in sorted(seeds)])
    return sliding_window_view(curves, SMOOTHED, axis=1).mean(axis=-1)


def _window(content: Mapping[str, Any]) -> int:
    return SMOOTHED * content["settings"]["steps_per_point"]


def _interval(values: Iterable[float]) -> dict[str, Any]:
    interval = t_interval(list(values))
    assert interval is not None
    return asdict(interval)


def _draw_curves(
    axes: Axes, task: str, arms: Mapping[str, BySeed], content: Mapping[str, Any]
) -> None:
    for arm in (name for name in STYLES if name in arms):
        curves = _smoothed(arms[arm], arms[arm])
        _draw(axes, curves, STYLES[arm], f"{arm} ({seed_count(len(curves))})", content)
    axes.set_title(task, loc="left", fontsize="medium")
    axes.set_ylabel("training loss")


def _draw_differences(axes: Axes, arms: Mapping[str, BySeed], content: Mapping[str, Any]) -> None:
    """`low` minus `float32` of a seed, over what tells seeds apart in the first arm there is."""
    yardstick = next(name for name in STYLES if name in arms)
    curves = _smoothed(arms[yardstick], arms[yardstick])
    note = ""
    if len(curves) > 1:
        around = curves - curves.mean(axis=0)
        x = _steps(curves, content)
        axes.fill_between(x, around.min(axis=0), around.max(axis=0), color="#D8D8D8", lw=0)
        note = f"; grey: seeds of {yardstick} about their mean"
    widths = iter((3.6, 1.2))  # the second lies on the first where both are zero
    for arm, reference in _pairs(arms):
        if arm.endswith("/low"):
            seeds = arms[arm].keys() & arms[reference].keys()
            apart = _smoothed(arms[arm], seeds) - _smoothed(arms[reference], seeds)
            _draw(axes, apart, STYLES[arm]._replace(width=next(widths)), "", content)
    axes.set_title(f"low minus float32, same seed{note}", loc="left", fontsize="small")
    axes.set_ylabel("difference")


def _draw(axes: Axes, curves: Floats, style: Style, label: str, content: Mapping[str, Any]) -> None:
    x = _steps(curves, content)
    axes.fill_between(
        x, curves.min(axis=0), curves.max(axis=0), color=style.colour, alpha=0.15, lw=0
    )
    draw_line(axes, x, curves.mean(axis=0), style, label)


def _steps(curves: Floats, content: Mapping[str, Any]) -> NDArray[np.int64]:
    """The last step under each moving mean."""
    point = content["settings"]["steps_per_point"]
    return (np.arange(curves.shape[1]) + SMOOTHED) * point


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ("---", *("---:" for _ in head[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _shown(interval: Mapping[str, Any], sign: str = "") -> str:
    mean = f"{interval['mean']:{sign}.4f}"
    half = interval["half_width"]
    return mean if half is None else f"{mean} ± {half:.4f}"


def _gap(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
