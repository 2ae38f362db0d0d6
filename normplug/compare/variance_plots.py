"""Draw the variance of a group's norms: by depth, and by training step."""

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from normplug._report.figures import (
    Style,
    colour_bar,
    colour_scale,
    draw_line,
    heat_map,
    legend_below,
    new_figure,
    whole_numbers,
    wrapped,
)
from normplug.compare.canvas import log_scale, seed_count
from normplug.compare.variance import Variance

PANELS = {
    "input_variance": "input",
    "output_variance": "output, before weight and bias (dotted: target)",
    "affine_variance": "output, after weight and bias",
}


def variance_by_depth_figure(
    title: str, variances: Mapping[str, Variance], styles: Mapping[str, Style]
) -> Figure:
    """Draw the variance by depth, at the last step that all seeds of an arm logged."""
    last_steps = sorted({int(variance.steps[-1]) for variance in variances.values()})
    when = " and ".join(f"{step}" for step in last_steps)
    what = f"variance at each norm at the last step logged ({when}), mean over seeds"
    figure = new_figure(title, what, 9, 9)
    panels = dict(zip(PANELS, figure.subplots(len(PANELS), 1, sharex=True), strict=True))
    for arm, variance in variances.items():
        label = f"{arm} ({seed_count(variance.runs)})"
        for column, axes in panels.items():
            last = variance.values[column][-1]
            draw_line(axes, variance.depths, last, styles[arm], label)
        target = variance.values["target_variance"][-1]
        panels["output_variance"].plot(variance.depths, target, "k:", zorder=3)
    for column, axes in panels.items():
        axes.set_title(PANELS[column], loc="left", fontsize="medium")
        axes.set_ylabel("variance")
        log_scale(axes)
    axes.set_xlabel(_depth_label(variances))
    axes.xaxis.set_major_locator(whole_numbers(15))
    legend_below(figure)
    return figure


def variance_by_step_figure(title: str, variances: Mapping[str, Variance]) -> Figure:
    """Draw the variance after weight and bias: for each arm, a heat map of depth (down) by step."""
    columns = len(variances) if len(variances) <= 3 else math.ceil(math.sqrt(len(variances)))
    rows = math.ceil(len(variances) / columns)
    names = [wrapped(f"{arm} ({seed_count(v.runs)})", 34) for arm, v in variances.items()]
    lines = max(name.count("\n") for name in names)
    what = "variance after weight and bias, mean over seeds (hatched: no finite value)"
    figure = new_figure(title, what, 2.4 + 3.3 * columns, 1.4 + (3.2 + 0.17 * lines) * rows)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    tables = [variance.values["affine_variance"] for variance in variances.values()]
    norm = colour_scale(tables)
    for axes, name, variance in zip(panels, names, variances.values(), strict=False):
        table = variance.values["affine_variance"].T
        mesh = heat_map(axes, variance.steps, variance.depths, table, norm)
        axes.set_title(name, fontsize="medium")
    for axes in panels[len(variances) :]:
        axes.remove()
    for axes in panels[len(variances) - columns : len(variances)]:
        axes.tick_params(labelbottom=True)
    panels[0].xaxis.set_major_locator(whole_numbers(4))
    panels[0].yaxis.set_major_locator(whole_numbers(12))
    colour_bar(figure, mesh, tables, figure.axes, aspect=20 * rows, pad=0.02, label="variance")
    figure.supxlabel("training step", fontsize="medium")
    figure.supylabel(_depth_label(variances), fontsize="medium")
    return figure


def _depth_label(variances: Mapping[str, Variance]) -> str:
    """Return the label of the axis, with the number of norms of each class."""
    kinds = next(iter(variances.values())).kinds
    return f"norm by depth, 0 = first ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
