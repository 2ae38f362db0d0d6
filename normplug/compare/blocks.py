"""Draw how much each block of a language model matters: the loss added by dropping it."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from normplug._report.figures import Style, draw_line, legend_below, new_figure, whole_numbers
from normplug.compare.canvas import log_scale, seed_count
from normplug.compare.gather import Group


def dropped(group: Group, arm: str) -> list[tuple[float, ...]]:
    """Return what dropping each block adds to the loss, for each finished run that measured it."""
    found = [run.block_drop for run in group.finished(arm).values() if run.block_drop]
    return [losses for losses in found if len(losses) == len(found[0])]


def blocks_figure(group: Group, styles: Mapping[str, Style]) -> Figure:
    """Draw what dropping each block adds to the test loss, by depth."""
    measure = group.measure
    what = (
        f"test {measure.name} without one block minus that of the whole model, mean over seeds "
        "(the log axis leaves out what is not above 0)"
    )
    figure = new_figure(group.title, what, 9, 5)
    axes = figure.subplots()
    for arm in group.arms:
        if losses := dropped(group, arm):
            blocks = np.arange(1, len(losses[0]) + 1)
            label = f"{arm} ({seed_count(len(losses))})"
            draw_line(axes, blocks, np.mean(losses, axis=0), styles[arm], label)
    axes.set_xlabel("block without which the loss is measured, 1 = first")
    axes.set_ylabel(f"added {measure.name} ({measure.difference_unit})")
    axes.xaxis.set_major_locator(whole_numbers(15))
    log_scale(axes)
    legend_below(figure)
    return figure
