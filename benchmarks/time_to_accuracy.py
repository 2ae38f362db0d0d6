"""Compare the seconds and epochs of training until a validation accuracy is first reached.

    python train.py -m experiment=time_to_accuracy
    python benchmarks/time_to_accuracy.py logs/sweeps/time_to_accuracy --out docs/study/time

It reads the `result.json` of each run, or a file that `normplug.compare --collect` wrote. It writes
`time_to_accuracy.md`, `.csv` and `.png`. The plan is docs/study/plan_time.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from normplug._files import write_file
from normplug._pictures import GREY, WIDTH, save, styled, title_text
from normplug.compare.plots import arm_styles, origin_of_runs
from normplug.compare.report import NOTHING, table_text
from normplug.compare.runs import find_runs, label

NAME = "time_to_accuracy"
GOAL = 0.9
STOCK = "baseline-eager"
COUNTED = ("finished", "diverged")
NAMES = {
    "baseline-eager": "eager",
    "baseline-compiled": "torch.compile",
    "baseline-graph": "CUDA graphs",
    "standard-fused-eager": "normplug",
    "standard-fused-compiled": "normplug and torch.compile",
    "standard-fused-graph": "normplug and CUDA graphs",
}


def time_of(record: dict[str, Any], goal: float) -> dict[str, float]:
    """When a run first reaches a validation accuracy.

    Args:
        record: the content of a `result.json`, with a validation after each epoch.
        goal: the accuracy, a fraction.

    Returns:
        `epochs` and `seconds` of training, without validations; infinite if the run diverged or
        never reaches the goal. `start_up` is by how many seconds the first epoch is longer than the
        median of the others: compilation, and the capture of CUDA graphs.

    Raises:
        ValueError: the run lacks the seconds of an epoch, or its validation.
    """
    never = {"epochs": math.inf, "seconds": math.inf, "start_up": math.nan}
    if record["status"] == "diverged":
        return never
    scores = record["accuracy_by_epoch"]
    seconds = record.get("train_seconds_by_epoch", [])
    if not scores or len(scores) != len(seconds):
        raise ValueError(
            f"time_to_accuracy: {record['run']} must have as many seconds of epochs as "
            f"validations; got {len(seconds)} and {len(scores)}. Train it in one go, with "
            "trainer.check_val_every_n_epoch=1."
        )
    start_up = seconds[0] - median(seconds[1:] or seconds)
    totals = accumulate(seconds)
    for epoch, (total, score) in enumerate(zip(totals, scores, strict=True), start=1):
        if score >= goal:
            return {"epochs": epoch, "seconds": total, "start_up": start_up}
    return never | {"start_up": start_up}


def times_of(runs: pd.DataFrame, goal: float) -> pd.DataFrame:
    """A row for each run of `find_runs` that finished or diverged: its arm, seed and `time_of`."""
    counted = runs[runs["status"].isin(COUNTED)]
    rows = [
        {"arm": record["arm"], "seed": record["seed"], **time_of(record, goal)}
        for record in counted["record"]
    ]
    if not rows:
        raise ValueError("time_to_accuracy: no run has finished. Give a sweep that has.")
    return pd.DataFrame(rows)


def summary_of(times: pd.DataFrame) -> pd.DataFrame:
    """A row for each arm, the slowest first.

    The columns `epochs`, `seconds`, `start_up`, `without_start_up` and `over_stock` are medians
    over seeds, in which a run that never reaches the goal is infinite. `over_stock` is the time of
    stock PyTorch without compilation divided by that of the arm with the same seed. `seconds`,
    `start_up` and `over_stock` also have their range, as in `seconds_least` and `seconds_most`.
    """
    # A run that diverged has no start-up, and stays infinite.
    start_up = times["start_up"].fillna(0.0)
    stock = times[times["arm"] == STOCK].set_index("seed")["seconds"]
    times = times.assign(
        without_start_up=times["seconds"] - start_up,
        over_stock=times["seed"].map(stock) / times["seconds"],
    )
    by_arm = times.groupby("arm")
    medians = ["epochs", "seconds", "start_up", "without_start_up", "over_stock"]
    table = by_arm[medians].median()
    table.insert(0, "runs", by_arm.size())
    table.insert(
        1, "reached", by_arm["seconds"].agg(lambda each: np.isfinite(each).sum())
    )
    for name in ("seconds", "start_up", "over_stock"):
        table[f"{name}_least"] = by_arm[name].min()
        table[f"{name}_most"] = by_arm[name].max()
    return table.sort_values("seconds", ascending=False, kind="stable").reset_index()


def origin_of(runs: pd.DataFrame) -> dict[str, str]:
    """The GPUs, versions, commits and first and last date of the runs."""
    records = runs["record"]
    versions = [record.get("versions", {}) for record in records]
    found = {
        "device": [record.get("hardware", "unknown") for record in records],
        "torch": [each.get("torch", "unknown") for each in versions],
        "triton": [each.get("triton", "unknown") for each in versions],
        "normplug": [each.get("normplug", "unknown") for each in versions],
        "commit": [record.get("commit", "unknown") for record in records],
    }
    origin = {name: ", ".join(sorted({*values})) for name, values in found.items()}
    dates = sorted(record["date"][:10] for record in records if record.get("date"))
    ends = [dates[0], dates[-1]] if dates else ["unknown"]
    return origin | {"date": " to ".join(dict.fromkeys(ends))}


def report(
    table: pd.DataFrame, goal: float, origin: dict[str, str], left_out: int
) -> str:
    """The page: the table, how it is to be read, and where its numbers come from."""
    cells = {
        "arm": table["arm"].map(name_of),
        "reached": table["reached"].astype(str) + " of " + table["runs"].astype(str),
        "epochs": table["epochs"].map(count),
        "seconds": with_range(table, "seconds", seconds),
        "start-up, s": with_range(table, "start_up", seconds),
        "without start-up, s": table["without_start_up"].map(seconds),
        "speed over eager": with_range(table, "over_stock", ratio),
    }
    lines = [
        f"# Time to a validation accuracy of {100 * goal:g}%",
        "",
        table_text(pd.DataFrame(cells)),
        "Medians over seeds, with the least and the most in brackets. Seconds are of training,",
        "without validations. A run that never reaches the accuracy counts as longer than all",
        "others. The start-up is by how much the first epoch is longer than the median of the",
        "others: compilation, and the capture of CUDA graphs. Compilers keep their kernels on",
        "disk, so it is longest in the first run. The speed is that of runs with the same seed.",
        "normplug is swap and fuse, in mode standard.",
        "",
    ]
    if left_out:
        lines += [f"Runs left out, since they did not finish: {left_out}.", ""]
    text = "{device}, torch {torch}, triton {triton}, normplug {normplug}, {date}, commit {commit}."
    lines += [text.format(**origin), "", f"![Accuracy over time]({NAME}.png)", ""]
    return "\n".join(lines)


def with_range(
    table: pd.DataFrame, name: str, text_of: Callable[[float], str]
) -> list[str]:
    """A column with its range: "12.3 (10.1 to 14.5)"."""
    columns = [table[name], table[f"{name}_least"], table[f"{name}_most"]]
    return [
        f"{text_of(middle)} ({text_of(least)} to {text_of(most)})"
        for middle, least, most in zip(*columns, strict=True)
    ]


def name_of(arm: str) -> str:
    """An arm's name in the table and the picture: stock PyTorch is "eager"."""
    return NAMES.get(arm, label(arm))


def seconds(value: float) -> str:
    """Seconds in a table: "12.3", "never" for infinity."""
    if math.isnan(value):
        return NOTHING
    shown = round(value, 1) + 0.0  # never "-0.0"
    return "never" if math.isinf(value) else f"{shown:.1f}"


def count(value: float) -> str:
    """Epochs in a table: "12", "12.5" for a median of two, "never" for infinity."""
    return "never" if math.isinf(value) else f"{value:g}"


def ratio(value: float) -> str:
    """A ratio in a table; nothing if a time is infinite or missing."""
    return f"{value:.2f}" if math.isfinite(value) and value > 0 else NOTHING


@styled
def draw(runs: pd.DataFrame, table: pd.DataFrame, goal: float) -> Figure:
    """Validation accuracy over the seconds of training: medians over the seeds of each arm."""
    figure = Figure(figsize=(WIDTH, 4.5), layout="constrained")
    axes = figure.subplots()
    styles = arm_styles(table["arm"])
    finished = runs[runs["status"] == "finished"]
    for row in table.itertuples():
        records = finished.loc[finished["arm"] == row.arm, "record"]
        if records.empty:
            continue
        times = pd.DataFrame([record["train_seconds_by_epoch"] for record in records])
        scores = pd.DataFrame([record["accuracy_by_epoch"] for record in records])
        axes.plot(
            times.cumsum(axis=1).median(),
            100 * scores.median(),
            label=f"{name_of(row.arm)}: {seconds(row.seconds)} s",
            **styles[row.arm] | {"markersize": 3},
        )
    axes.axhline(100 * goal, color=GREY, linewidth=0.8, linestyle="dotted")
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation accuracy (%)")
    title = f"Time to {100 * goal:g}%, medians over seeds"
    figure.suptitle(title_text(f"{title}\n{origin_of_runs(runs)}"))
    axes.grid()
    figure.legend(loc="outside right center")
    return figure


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "runs", type=Path, help="a sweep's directory, or a collected file"
    )
    parser.add_argument("--goal", type=float, default=GOAL, help="a fraction")
    parser.add_argument("--out", type=Path, default=Path(), help="a directory")
    a = parser.parse_args(words)
    runs, _ = find_runs([a.runs])
    counted = runs[runs["status"].isin(COUNTED)]
    table = summary_of(times_of(runs, a.goal))
    origin = origin_of(counted)
    page = report(table, a.goal, origin, len(runs) - len(counted))
    write_file(a.out / f"{NAME}.md", page)
    write_file(a.out / f"{NAME}.csv", table.assign(**origin).to_csv(index=False))
    save(draw(runs, table, a.goal), a.out / f"{NAME}.png")
    print(page)


if __name__ == "__main__":
    main()
