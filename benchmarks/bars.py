"""Bars of speeds over eager PyTorch, each with its value, in panels of a few bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from normplug._pictures import GREY, WIDTH, colours_of, styled, title_text

MOST = 12  # bars of a panel
FEW = (0.25, 0.5, 1, 2, 4, 8, 16, 32)  # numbers of an axis of speeds
MANY = (0.5, 0.7, 1, 1.5, 2, 3, 4, 5)
MANY_UP_TO = 8
HEIGHT = 0.19  # inches of a bar
LABEL = "speed over eager PyTorch (the line at 1), of medians; higher is better"


@styled
def draw_bars(
    panels: Mapping[str, pd.DataFrame], title: str, by: str, apart: bool = False
) -> Figure:
    """Draw each panel's speeds over eager, a row a case and a column an arm, sorted by one arm.

    Args:
        panels: caption -> speeds; a speed that is nan was not measured.
        title: lines of text.
        by: the arm by which the cases of a panel are sorted, the fastest first.
        apart: draw each arm in a column of its own, instead of side by side.

    Raises:
        ValueError: a panel would have more than `MOST` bars.
    """
    panels = {
        caption: speeds.sort_values(by, ascending=False)
        for caption, speeds in panels.items()
    }
    arms = list(dict.fromkeys(arm for speeds in panels.values() for arm in speeds))
    columns = [[arm] for arm in arms] if apart else [arms]
    counts = [len(speeds) * len(columns[0]) for speeds in panels.values()]
    if max(counts) > MOST:
        raise ValueError(f"a panel has {max(counts)} bars, more than {MOST}: {title!r}")
    height = sum(HEIGHT * count + 0.35 for count in counts) + 1.1
    figure = Figure((WIDTH, height), layout="constrained")
    figure.suptitle(title_text(title))
    grid = figure.subplots(
        len(panels),
        len(columns),
        sharex=True,
        sharey="row",
        squeeze=False,
        height_ratios=[count + 0.5 for count in counts],
    )
    for row, (caption, speeds) in zip(grid, panels.items(), strict=True):
        for axes, shown in zip(row, columns, strict=True):
            _draw_panel(axes, speeds.reindex(columns=shown))
        names = [str(name) for name in speeds.index]
        row[0].set_yticks(range(len(names)), names)
        row[0].set_ylim(len(names) - 0.4, -0.6)
        if apart:
            row[0].set_ylabel(caption)
        else:
            row[0].set_title(caption, loc="left")
    _scale(grid[0][0], panels, len(columns))
    if apart:
        figure.supxlabel(LABEL, fontsize="medium")
        figure.align_ylabels(grid[:, 0])
        for axes, arm in zip(grid[0], arms, strict=True):
            axes.set_title(
                textwrap.fill(arm, 60 // len(arms)), color=colours_of([arm])[arm]
            )
    else:
        grid[-1][0].set_xlabel(LABEL)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _draw_panel(axes: Axes, speeds: pd.DataFrame) -> None:
    """Draw the bars of a panel from eager's speed, each with its value at its end."""
    height = 0.8 / len(speeds.columns)
    colours = colours_of(speeds.columns)
    for number, (arm, values) in enumerate(speeds.items()):
        places = [row - 0.4 + (number + 0.5) * height for row in range(len(values))]
        lengths = (values - 1).fillna(0)
        axes.barh(places, lengths, height, left=1, color=colours[arm], label=arm)
        for place, value in zip(places, values, strict=True):
            text = "not measured" if math.isnan(value) else f"{value:.2f}"
            end = value if value > 1 else 1  # also of a slower arm, and of nan
            look = {"va": "center_baseline", "fontsize": "small"}
            axes.annotate(
                text, (end, place), xytext=(3, 0), textcoords="offset points", **look
            )
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _scale(axes: Axes, panels: Mapping[str, pd.DataFrame], columns: int) -> None:
    """Make the shared axis of speeds logarithmic, with room for the values at its ends."""
    lowest = min(1.0, *(speeds.min(axis=None) for speeds in panels.values()))
    highest = max(1.0, *(speeds.max(axis=None) for speeds in panels.values()))
    room = 0.07 * columns  # of a value at its end, as a share of the axis
    lowest *= 0.98
    highest *= math.exp(room / (1 - room) * math.log(highest / lowest))
    axes.set_xscale("log", base=2)
    ticks = FEW if columns > 1 or highest > MANY_UP_TO * lowest else MANY
    ticks = [tick for tick in ticks if lowest <= tick <= highest]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(lowest, highest)
