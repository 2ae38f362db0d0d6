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

from normplug._files import replace_file

PANELS = {"input_variance": "input", "affine_variance": "output"}


def draw_heat_map(log: Any, picture: Path, model: str) -> None:
    """Draw the variances of every layer (first at the top) at every logged step.

    What is constant by construction, such as the output before weight and bias, is not drawn. The
    log is a CSV file or its path. The title names the model and the picture's directory, the run.
    """
    rows = pd.read_csv(log, dtype={"layer": str})
    values = rows.pivot(index=["depth", "layer"], columns="step", values=list(PANELS))
    layers = values.index.get_level_values("layer")
    steps = sorted(set(rows.step))
    width = 12 + 0.065 * max(map(len, layers))
    height = min(max(0.17 * len(layers), 2), 40)
    figure = Figure(figsize=(width, height + 1.5), layout="constrained")
    title = f"{model}, run {'/'.join(picture.resolve().parent.parts[1:][-4:])}"
    title = f"{textwrap.fill(title, int(11 * width))}\nvariance at each norm"
    figure.suptitle(f"{title} (hatched: no value above 0)", fontsize="medium")
    half = (steps[-1] - steps[0]) / (len(steps) - 1) / 2 if len(steps) > 1 else 0.5
    extent = steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5
    drawn = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (name, what) in zip(drawn, PANELS.items(), strict=True):
        panel = values[name].to_numpy()
        shown = panel[np.isfinite(panel) & (panel > 0)]
        low, high = (shown.min(), shown.max()) if shown.size else (1.0, 1.0)
        # So that rounding does not fill the scale.
        widen = max(1, 1.2 * low / high) ** 0.5
        axes.patch.set(edgecolor="0.5", hatch="////")
        image = axes.imshow(
            np.where(np.isfinite(panel), panel, np.nan),
            norm=LogNorm(low / widen, high * widen),
            aspect="auto",
            interpolation="nearest",
            extent=extent,
        )
        ticks = MaxNLocator(5) if high < 3 * low else LogLocator(subs=(1, 2, 5))
        figure.colorbar(image, ax=axes, ticks=ticks, format="{x:g}").minorticks_off()
        axes.set_title(what, fontsize="medium")
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    few = -(-len(layers) // int(8 * height))  # as many names as there is room for
    drawn[0].set_yticks(range(0, len(layers), few), layers[::few], fontsize=7)
    with replace_file(picture) as part:
        figure.savefig(part, format="png", dpi=120)
