"""A tool: gather the runs of a sweep into one honest table and its plots (needs the `train` extra).

It imports `_report`; train.py calls it at the end of a sweep.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from normplug._extras import needs
from normplug._report.files import write_file
from normplug.compare.gather import find_runs, group_runs

if TYPE_CHECKING:
    from normplug.compare.stats import Row

__all__ = ["Comparison", "compare"]


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        rows: one for each (model, data, arm).
        markdown: the report.
        paths: the files written.
        complete: whether every arm has a finished run of every seed that any arm has.
    """

    rows: list[Row]
    markdown: str
    paths: list[Path]
    complete: bool


def compare(
    directory: str | os.PathLike[str], out: str | os.PathLike[str] | None = None
) -> Comparison:
    """Compare all runs found under `directory`, arm by arm and seed by seed.

    Runs are grouped by (model, data). Only finished runs are averaged; every other run, and
    every seed that one arm has and another lacks, is listed under the table with its reason.

    Args:
        directory: searched at any depth for `result.json`; each is one run.
        out: where `summary.md`, `summary.csv`, `runs.csv` and the plots go; made if absent.
            None for `directory` itself.

    Raises:
        FileNotFoundError: `directory` is no directory.
        ValueError: it holds no `result.json`.
        ModuleNotFoundError: a package of the `train` extra is missing.
    """
    with needs("normplug.compare", "train"):
        from normplug.compare.canvas import arm_styles
        from normplug.compare.plots import draw, file_stems
        from normplug.compare.report import render
        from normplug.compare.sheets import write_runs, write_summary
        from normplug.compare.stats import summarise
        from normplug.compare.variance import gather_variance

    root = Path(directory)
    runs, unreadable = find_runs(root)
    groups = group_runs(runs)
    variances = [gather_variance(group) for group in groups]
    notes = [variance.notes for variance in variances]
    markdown = render(groups, notes, unreadable, root)
    rows = [row for group in groups for row in summarise(group)]

    target = root if out is None else Path(out)
    paths = [target / name for name in ("summary.md", "summary.csv", "runs.csv")]
    write_file(paths[0], markdown)
    write_summary(paths[1], rows)
    write_runs(paths[2], groups, unreadable, root)
    styles = arm_styles(groups)
    for group, variance, stem in zip(groups, variances, file_stems(groups), strict=True):
        paths += draw(group, variance.by_arm, styles, target, stem)
    complete = not unreadable and all(row.n_finished == row.n_expected for row in rows)
    return Comparison(rows, markdown, paths, complete)
