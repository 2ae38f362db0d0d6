"""The heat map of a variance log."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from normplug._pictures import save, styled

PANELS = {"input_variance": "input", "affine_variance": "output, after weight and bias"}
COLOURS = "RdBu_r"  # blue below the target, white at it, red above it
LEAST = 1.1  # the end of a colour scale, so that rounding does not fill it


@styled
def draw_heat_map(log: Any, picture: Path, model: str) -> None:
    """Draw the variances of every layer (first at the top) at every logged step.

    A colour is a variance divided by the layer's target variance; the middle of the scale is 1.
    What is constant by construction, such as the output before weight and bias, is not drawn. The
    log is a CSV file or its path. The title names the model and the picture's directory, the run.
    """
    rows = pd.read_csv(log, dtype={"layer": str})
    rows[list(PANELS)] = rows[list(PANELS)].div(rows.target_variance, axis=0)
    values = rows.pivot(index=["depth", "layer"], columns="step", values=list(PANELS))
    layers = values.index.get_level_values("layer")
    steps = sorted(set(rows.step))
    width = 8 + 0.065 * max(map(len, layers))
    height = min(max(0.17 * len(layers), 2), 40)
    figure = Figure(figsize=(width, height + 1.5), layout="constrained")
    title = f"{model}: variance at each norm, divided by its target"
    run = f"run {'/'.join(picture.resolve().parent.parts[1:][-4:])}"
    lines = [
        part
        for line in (title, run, "hatched: no value above 0")
        for part in textwrap.wrap(line, int(11 * width))
    ]
    figure.suptitle("\n".join(lines))
    half = (steps[-1] - steps[0]) / (len(steps) - 1) / 2 if len(steps) > 1 else 0.5
    extent = steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5
    drawn = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, what) in zip(drawn, PANELS.items(), strict=True):
        panel = values[name].to_numpy()
        panel = np.where(np.isfinite(panel) & (panel > 0), panel, np.nan)
        shown = panel[np.isfinite(panel)]
        most = max(LEAST, shown.max(), 1 / shown.min()) if shown.size else LEAST
        axes.patch.set(hatch="//")
        image = axes.imshow(
            panel,
            cmap=COLOURS,
            norm=LogNorm(1 / most, most),
            aspect="auto",
            interpolation="nearest",
            extent=extent,
        )
        subs = (1, 2, 5) if most < 100 else (1,)
        ticks = MaxNLocator(5) if most < 3 else LogLocator(subs=subs)
        bar = figure.colorbar(image, ax=axes, ticks=ticks, format="{x:g}")
        bar.minorticks_off()
        axes.set_title(what)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    bar.set_label("variance / target")
    few = -(-len(layers) // int(8 * height))  # as many names as there is room for
    drawn[0].set_yticks(range(0, len(layers), few), layers[::few], fontsize=7)
    save(figure, picture)
