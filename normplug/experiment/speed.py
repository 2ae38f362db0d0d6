"""Compare the modes of a sweep: their scores over seeds, and the speed of their training steps.

    python -m normplug.experiment.speed logs/sweeps/modes

Runs record their speeds at different times, on a machine that others may use. Here the steps of all
modes take turns in one process, so that drift and load affect all of them.
"""

from __future__ import annotations

import gc
import os
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from hydra.utils import instantiate
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.optim import Optimizer

from normplug._files import stamp, write_file
from normplug._measure import BASELINE, Measure
from normplug._pictures import save
from normplug.bench import timing
from normplug.compare.plots import speeds_figure
from normplug.compare.report import (
    NOTHING,
    bullets,
    interval_texts,
    not_averaged,
    table_text,
)
from normplug.compare.runs import Group, find_runs, group_runs, label
from normplug.experiment.config import uses_gpu
from normplug.experiment.learner import Learner, make_optimizer
from normplug.experiment.run import configures_optimizers, make_module

ROUNDS = 10
WARM_UPS = 3  # steps
WIDTH = 80  # columns of the table in a terminal
WIDEST = 16  # columns of a model's or a mode's name there
ORIGIN = "{device}, torch {torch}, normplug {normplug}, {date:.10}"
MEASURE = ["measure", "unit", "better", "items"]
# Of the comparison of runs; `compare_modes` adds the speeds.
COLUMNS = [
    "model",
    "data",
    "arm",
    "n_finished",
    "n_expected",
    *MEASURE,
    "test_n",
    "test_mean",
    "test_t95_half_width",
    "reference",
    "difference_to_reference_n",
    "difference_to_reference_mean",
    "difference_to_reference_t95_half_width",
    "peak_memory_mib_median",
]


def compare_modes(
    directory: str | os.PathLike[str], rounds: int = ROUNDS
) -> pd.DataFrame:
    """Print one table of a sweep's models and modes, and write it with one picture.

    Each mode is built again from the configuration in its `result.json`: the model, its optimizer
    and a batch of its data, which all modes of a model share. A training step is a forward, a
    backward and an optimizer step with a learning rate of 0, as one process does them on the
    device of the runs, without the CUDA graphs of `graph=true`. A LightningModule of the user has
    its own `training_step` and its first optimizer. After a warm-up, each mode takes turns of some
    steps.

    Args:
        directory: searched at any depth for `result.json`. It gets `summary.md`, `summary.csv`
            and `summary.png`, which shows the score of each mode over its speed.
        rounds: the turns of each mode.

    Returns:
        The rows of `summary.csv`, one for each model, data and mode. `test_mean` is the mean score
        over seeds (an accuracy is a fraction) and `test_t95_half_width` half of its 95% t-interval;
        `ms` is the median time of a step in milliseconds, `ms_p20` and `ms_p80` are its 20th and
        80th percentile; `items_per_s` counts images or tokens; `speed_ratio` is the speed divided
        by that of `reference`: the stock model ("baseline"), or mode standard without one.

    Raises:
        ValueError: the directory holds no run.
    """
    directory = Path(directory)
    runs, unusable = find_runs([directory])
    groups = group_runs(runs, BASELINE, margin=None, over_rates=False)
    table = pd.concat([_measured(group, rounds) for group in groups], ignore_index=True)
    table = table.assign(turns=rounds, **stamp(torch.cuda.is_available()))
    missing = [
        f"{group.model}, {line}" for group in groups for line in not_averaged(group)
    ]
    missing += [f"{name}: {why}" for name, why in unusable.items()]
    note = f"\nNot in the table:\n\n{bullets(missing)}" if missing else ""

    write_file(directory / "summary.csv", table.to_csv(index=False))
    write_file(directory / "summary.md", report(table) + note)
    written = ["summary.csv", "summary.md"]
    figure = speeds_figure(table)
    if figure is not None:
        written.append(save(figure, directory / "summary.png").name)
    print(report(table, "simple") + note)
    print(f"written to {directory}: {', '.join(written)}")
    return table


def _measured(group: Group, rounds: int) -> pd.DataFrame:
    """The rows of a model: its scores, and the times of its steps."""
    print(f"timing the training steps of {group.model} in turns ...", file=sys.stderr)
    table = group.table[COLUMNS].set_index("arm", drop=False)
    finished = group.finished.sort_values("seed").drop_duplicates("arm")
    records = finished.set_index("arm").record
    turns: dict[str, timing.Turn] = {}
    items: dict[str, int] = {}
    for arm in table.arm:
        if arm not in records:
            continue
        what = f"{group.model}, {label(arm)}"
        made = timing.attempt(what, partial(_training_step, records[arm]))
        if made is not None:
            step, items[arm] = made
            turns[arm] = timing.back_to_back(step, per_second=1e3)
    rows = timing.in_turns("ms", turns, rounds)
    timed = pd.DataFrame.from_dict(rows, orient="index")
    timed = timed.reindex(columns=["ms", "ms_p20", "ms_p80"])
    table = table.join(timed)
    per_step = 1e3 * pd.Series(items, dtype=float)
    table["items_per_s"] = per_step / table.ms
    table["items_per_s_p20"] = per_step / table.ms_p80
    table["items_per_s_p80"] = per_step / table.ms_p20
    table["speed_ratio"] = table.ms.get(group.reference) / table.ms
    gc.collect()  # the models, before those of another group
    return table


def _training_step(record: dict[str, Any]) -> tuple[Callable[[], None], int]:
    """A warmed-up training step of a run, and the number of images or tokens in its batch."""
    cfg: Any = OmegaConf.create(record["config"])
    accelerator = "cuda" if uses_gpu(cfg) else "cpu"
    precision = record["precision"]
    fabric = Fabric(accelerator=accelerator, devices=1, precision=precision)
    torch.manual_seed(cfg.seed)

    data_cfg = OmegaConf.merge(cfg.data, {"seed": 0})  # the same batch for all seeds
    data = instantiate(data_cfg, _convert_="all")
    data.prepare_data()
    data.setup("fit")
    batch = fabric.to_device(next(iter(data.train_dataloader())))
    inputs, targets = data.on_after_batch_transfer(batch, 0)

    module = make_module(cfg, data)
    optimizer = _optimizer_of(module, cfg)
    for parameters in optimizer.param_groups:
        parameters["lr"] = 0.0  # the weights stay finite: infinities would be faster
    wrapped, optimizer = fabric.setup(module.train(), optimizer)
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)
    largest_norm = cfg.trainer.get("gradient_clip_val")

    def step() -> None:
        with fabric.autocast():
            loss = _loss(module, inputs, targets)
        fabric.backward(loss)
        if largest_norm:
            fabric.clip_gradients(wrapped, optimizer, max_norm=largest_norm)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UPS):
        step()
    timing.at_rest()
    return step, targets.numel()


def _optimizer_of(module: LightningModule, cfg: DictConfig) -> Optimizer:
    """The optimizer of a LightningModule that configures one, or else that of `cfg`."""
    if isinstance(module, Learner) or not configures_optimizers(module):
        return make_optimizer(module, cfg)
    configured: Any = module.configure_optimizers()
    if isinstance(configured, Optimizer):
        return configured
    if isinstance(configured, dict):
        return configured["optimizer"]
    optimizers, _ = configured
    return optimizers[0]


def _loss(module: LightningModule, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of a training step."""
    if isinstance(module, Learner):  # its step reads the state of a Trainer
        return module.training_loss(inputs, targets)
    outputs: Any = module.training_step((inputs, targets), 0)
    return outputs["loss"] if isinstance(outputs, dict) else outputs


def report(table: pd.DataFrame, style: str = "pipe") -> str:
    """The table of `summary.csv` in words: as Markdown ("pipe"), or for a terminal ("simple")."""
    widths = [WIDEST, WIDEST] if style == "simple" else None
    by_measure = table.groupby(MEASURE, sort=False)
    parts = [
        table_text(_cells(Measure(*fields), rows), left=2, style=style, widths=widths)
        for fields, rows in by_measure
    ]
    parts += [
        textwrap.fill(note, WIDTH, break_on_hyphens=False) for note in _notes(table)
    ]
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _cells(measure: Measure, rows: pd.DataFrame) -> pd.DataFrame:
    """The texts of the table, for the models that have one measure."""
    models = rows.model
    if rows.data.nunique() > 1:
        models = rows.model + " on " + rows.data
    times = rows[["ms", "ms_p20", "ms_p80"]].map(_milliseconds)
    spread = times.ms + " (" + times.ms_p20 + "-" + times.ms_p80 + ")"
    cells = {
        "model": models,
        "mode": rows.arm.map(label),
        f"{measure.name}, {measure.unit}": interval_texts(measure, rows, "test"),
        f"{measure.items}/s": rows.items_per_s.map("{:,.0f}".format),
        "ms per step": spread.where(rows.ms.notna(), NOTHING),
        "MiB": rows.peak_memory_mib_median.map("{:,.0f}".format),
        "speed": rows.speed_ratio.map("{:.2f}".format),
    }
    return pd.DataFrame(cells).replace("nan", NOTHING)


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _notes(table: pd.DataFrame) -> list[str]:
    """How to read the table."""
    seeds = table.test_n.max()
    if seeds > 1:
        score = f"± is half of a 95% t-interval over seeds (at most {seeds:.0f})."
    else:
        score = (
            "Warning: one seed has no interval. Another seed may change each score by more than "
            "the modes differ."
        )
    references = " or ".join(map(label, table.reference.dropna().unique()))
    origin = table.iloc[0]
    speed = (
        f"Speeds are medians of {origin.turns} turns of each mode, with the 20th and 80th "
        f"percentile; the last column is the speed divided by that of {references or 'none'}."
    )
    if table.peak_memory_mib_median.notna().any():
        speed += " MiB is the peak memory of a training on a GPU."
    timed = f"Timed on: {ORIGIN.format(**origin)}."
    return [score, speed, timed]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m normplug.experiment.speed DIRECTORY")
    compare_modes(sys.argv[1])
