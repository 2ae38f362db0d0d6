"""Draw the grid of E8: validation accuracy over the rate of the norms' biases and the rate of all.

python benchmarks/grid.py docs/results/e8_h200.json --out docs/study/grid.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import normplug
from normplug._pictures import GREY, WIDTH, save, styled, title_text
from normplug.compare.plots import origin_of_runs
from normplug.compare.runs import find_runs

# The target variances, whose bias factor is 1 / target, apart from the head (docs/mathematics.md).
TARGETS = {
    "standard": 1.0,
    "golden": normplug.NormMode("golden").target_variance,
    "0.5": 0.5,
    "0.25": 0.25,
    "0.125": 0.125,
    "0.0625": 0.0625,
}


def grid_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The mean validation accuracy in %: a row for each bias factor, a column for each rate.

    The mean is over the finished runs of a cell. A cell with a diverged run is nan.

    Raises:
        ValueError: no arm is named like `standard-bias_4.0`.
    """
    factors = runs["arm"].str.extract(r"^standard-bias_([\d.]+)$")[0].astype(float)
    runs = runs.assign(factor=factors).dropna(subset="factor")
    if runs.empty:
        raise ValueError(
            "no run is of an arm like standard-bias_4.0: give the runs of E8."
        )
    ended = runs[runs["status"].isin(["finished", "diverged"])]
    scores = ended["validation_score"].where(ended["status"] == "finished")
    cells = ended.assign(score=100 * scores).groupby(["factor", "learning_rate"])["score"]
    return cells.agg(lambda cell: cell.mean(skipna=False)).unstack()


def places_of_targets(factors: pd.Index) -> dict[str, float]:
    """The place of each target variance among the rows of these rising factors."""
    rows = np.log2(factors.to_numpy())
    places = {}
    for name, target in TARGETS.items():
        place = -np.log2(target)
        if rows[0] <= place <= rows[-1]:
            places[name] = float(np.interp(place, rows, range(len(rows))))
    return places


@styled
def draw(runs: pd.DataFrame) -> Figure:
    """A heat map of `grid_of(runs)`, with the value in each cell.

    The axis on the right names the target variances at the places of their factors; between two
    rows a place is interpolated on a log scale. A dashed line marks golden.
    """
    grid = grid_of(runs)
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="viridis", origin="lower", aspect="auto")
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for row, values in enumerate(grid.to_numpy()):
        for column, value in enumerate(values):
            text = "diverged" if np.isnan(value) else f"{value:.1f}"
            colour = "white" if value < middle else "black"
            if np.isnan(value):  # a cell without a colour
                colour = GREY
            axes.text(column, row, text, ha="center", va="center", color=colour)
    axes.set_xticks(range(grid.shape[1]), [f"{rate:g}" for rate in grid.columns])
    axes.set_yticks(range(grid.shape[0]), [f"{each:g}" for each in grid.index])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("rate of the norms' biases / learning rate")
    title = "ResNet-18 on CIFAR-10 (JPEG): validation accuracy (%), mean over seeds"
    figure.suptitle(title_text(f"{title}\n{origin_of_runs(runs)}"))
    places = places_of_targets(grid.index)
    if "golden" in places:
        axes.axhline(places["golden"], color="white", linestyle="dashed")
    targets = axes.secondary_yaxis("right")
    targets.set_yticks([*places.values()], [*places])
    targets.set_ylabel("target variance with that factor")
    figure.colorbar(image, label="validation accuracy (%)")
    return figure


def main(words: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "runs", type=Path, help="a sweep's directory, or a collected file"
    )
    parser.add_argument("--out", type=Path, default=Path("grid.png"))
    a = parser.parse_args(words)
    runs, _ = find_runs([a.runs])
    print(grid_of(runs).to_string(float_format="{:.2f}".format))
    save(draw(runs), a.out)


if __name__ == "__main__":
    main()
