"""Draw the grid of E8: validation accuracy over the rate of the norms' biases and the rate of all.

python benchmarks/grid.py docs/results/e8_h200.json --out docs/study/grid.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from normplug.compare.plots import save
from normplug.compare.runs import find_runs

# A bias factor -> the target variance that has it, apart from its head (docs/mathematics.md).
TARGETS = {1.0: "standard", 2.0: "0.5", 4.0: "0.25", 8.0: "0.125", 16.0: "0.0625"}


def grid_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The mean validation accuracy in %: a row for each bias factor, a column for each rate.

    A cell with a run that is not finished is nan.

    Raises:
        ValueError: no arm is named like `standard-bias_4.0`.
    """
    factors = runs["arm"].str.extract(r"^standard-bias_([\d.]+)$")[0].astype(float)
    runs = runs.assign(factor=factors).dropna(subset="factor")
    if runs.empty:
        raise ValueError(
            "no run is of an arm like standard-bias_4.0: give the runs of E8."
        )
    scores = runs["validation_score"].where(runs["status"] == "finished")
    cells = runs.assign(score=100 * scores).groupby(["factor", "learning_rate"])["score"]
    return cells.agg(lambda cell: cell.mean(skipna=False)).unstack()


def draw(grid: pd.DataFrame) -> Figure:
    """A heat map of `grid_of`, with the value in each cell, and the target of each factor."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(grid, cmap="viridis", origin="lower", aspect="auto")
    middle = (image.norm.vmin + image.norm.vmax) / 2
    for row, values in enumerate(grid.to_numpy()):
        for column, value in enumerate(values):
            text = "diverged" if np.isnan(value) else f"{value:.1f}"
            colour = "white" if value < middle else "black"
            axes.text(column, row, text, ha="center", va="center", color=colour)
    names = [f"{each:g}\n({TARGETS.get(each, 'no target')})" for each in grid.index]
    axes.set_xticks(range(grid.shape[1]), [f"{rate:g}" for rate in grid.columns])
    axes.set_yticks(range(grid.shape[0]), names)
    axes.set_xlabel("learning rate")
    axes.set_ylabel(
        "rate of the norms' biases over it\n(the target variance with that factor)"
    )
    axes.set_title("Validation accuracy of a ResNet-18 in %, mean over seeds")
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
    grid = grid_of(find_runs([a.runs])[0])
    print(grid.to_string(float_format="{:.2f}".format))
    save(draw(grid), a.out)


if __name__ == "__main__":
    main()
