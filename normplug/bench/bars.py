"""Panels of grouped horizontal bars, for `plot`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normplug._report.figures import Style, legend_below

INCH_A_BAR, BETWEEN_CASES = 0.17, 0.8  # inches per bar; the gap between cases, in bars


class Bar(NamedTuple):
    """A length, and the range of the middle 60% of its samples if known."""

    length: float
    spread: tuple[float, float] | None = None


Bars = Mapping[str, Mapping[str, Bar]]  # case -> series -> bar


def draw_panels(
    figure: Figure,
    panels: Sequence[Sequence[Bars]],
    titles: Sequence[Sequence[str]],
    looks: Mapping[str, Style],
    unit: str,
    form: str,
) -> list[Axes]:
    """Draw rows of panels of bars, and set the figure's height to fit them.

    Args:
        figure: a figure without panels.
        panels: the bars of each panel; panels in a row show the same cases at the same heights.
        titles: the titles of the panels.
        looks: series -> its style, in order from top to bottom.
        unit: the unit of the lengths.
        form: the format of the length beside each bar.
    """
    rows = [_places(row, looks) for row in panels]
    heights = [INCH_A_BAR * (1 + max(at for _, _, at in places)) + 0.1 for places in rows]
    figure.set_figheight(1.7 + sum(heights) + 0.75 * len(heights))
    grid = figure.subplots(
        len(panels),
        len(panels[0]),
        sharex="col",
        sharey="row",
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )
    for axes_of_row, places, bars_of_row, titles_of_row in zip(
        grid, rows, panels, titles, strict=True
    ):
        for axes, bars, title in zip(axes_of_row, bars_of_row, titles_of_row, strict=True):
            _draw_bars(axes, bars, places, looks, form)
            axes.set_title(title, loc="left", fontsize="medium")
            axes.set_xlabel(unit)
            axes.label_outer()
    legend_below(figure, columns=len(looks))
    return list(grid.flat)


def _places(panels: Iterable[Bars], looks: Collection[str]) -> list[tuple[str, str, float]]:
    """(case, series, y) of each bar in any of the panels, from top to bottom."""
    present: dict[str, set[str]] = {}
    for bars in panels:
        for case, found in bars.items():
            present.setdefault(case, set()).update(found)
    places, y = [], 0.0
    for case, series in present.items():
        for name in [name for name in looks if name in series]:
            places.append((case, name, y))
            y += 1
        y += BETWEEN_CASES
    return places


def _draw_bars(
    axes: Axes,
    bars: Bars,
    places: Sequence[tuple[str, str, float]],
    looks: Mapping[str, Style],
    form: str,
) -> None:
    """Draw the bars of a panel, each with its length beside it."""
    for name, look in looks.items():
        found = [
            (at, bars[case][name])
            for case, series, at in places
            if series == name and name in bars.get(case, {})
        ]
        lengths = np.array([bar.length for _, bar in found])
        more: dict[str, Any] = {}
        if spreads := [bar.spread for _, bar in found if bar.spread]:
            low, high = np.array(spreads).T
            more["xerr"] = np.maximum((lengths - low, high - lengths), 0)
            more["error_kw"] = {"ecolor": "black", "elinewidth": 1, "capsize": 2}
        drawn = axes.barh(
            [at for at, _ in found],
            lengths,
            0.9,
            color=look.colour,
            hatch=look.hatch,
            edgecolor="0.15",
            linewidth=0.4,
            label=name,
            **more,
        )
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides lines behind it
        axes.bar_label(drawn, fmt=form, padding=3, fontsize="x-small", bbox=box)
    middles: dict[str, list[float]] = {}
    for case, _, at in places:
        middles.setdefault(case, []).append(at)
    ticks = [(at[0] + at[-1]) / 2 for at in middles.values()]
    axes.set_yticks(ticks, list(middles), fontsize="small")
    axes.set_ylim(places[-1][2] + 0.8, -0.8)
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
