"""Train under bfloat16 autocast with either dtype of LayerNorm's output, arms paired by seed.

torch's layer_norm returns float32 there, which the next linear layer casts down. normplug's returns
the low dtype at once, unless told otherwise. What this does to training is to be seen here.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import normplug
from normplug._report.files import write_file
from normplug.bench.results import Row, provenance

if TYPE_CHECKING:
    from normplug.bench.tasks import Recipe, Task

BASELINE = "baseline"
# name -> the arguments of `normplug.swap`; the baseline is left alone.
ARMS: dict[str, dict[str, Any] | None] = {BASELINE: None} | {
    f"{mode}/{output}": {"mode": mode, "autocast_output": output}
    for mode in ("standard", "golden")
    for output in ("float32", "low")
}
DTYPE = torch.bfloat16
BIN = 10  # steps that make a point of a curve
SMOOTHED = 5  # points under the moving mean that curves are compared and drawn by
FEWEST = BIN * SMOOTHED  # steps that make one such mean
LAST = 100  # steps whose mean is the final training loss
DIGITS = 6  # of a loss, after the point: float32 has no more


def train_all(
    tasks: Sequence[Task], arms: Sequence[str], seeds: Sequence[int], path: Path | None
) -> dict[str, Any]:
    """Train every task in every arm with every seed, and print a line for each run.

    Args:
        tasks: on one device.
        arms: names in `ARMS`.
        seeds: of weights and batches; the same in every arm.
        path: JSON file that is rewritten after each run; None for none.

    Returns:
        What is in the file: device, versions, date, settings and a row a run.
    """
    content = provenance() | {
        "settings": {
            "autocast": str(DTYPE).removeprefix("torch."),
            "seeds": list(seeds),
            "steps_per_point": BIN,
            "tasks": {task.name: task.settings() for task in tasks},
        },
        "runs": [],
    }
    if tasks[0].device.type == "cpu":
        content["device"] = "CPU"
    with comparable():
        for task in tasks:
            for seed in seeds:
                for arm in arms:
                    start = time.perf_counter()
                    content["runs"].append(row := train(task, arm, seed))
                    print(_line(row, time.perf_counter() - start), flush=True)
                    if path is not None:
                        save(content, path)
    return content


def save(content: dict[str, Any], path: Path) -> None:
    """Write the JSON file."""
    write_file(path, json.dumps(content, indent=1) + "\n")


def train(task: Task, arm: str, seed: int) -> Row:
    """One run: its losses, rounded.

    Args:
        task: what to train.
        arm: a name in `ARMS`.
        seed: of weights and batches.
    """
    net = build(task, arm, seed)
    losses = _fit(net, task, seed)
    return {
        "task": task.name,
        "arm": arm,
        "seed": seed,
        "train_loss": round(losses[-LAST:].mean().item(), DIGITS),
        "validation_loss": round(_validate(net, task), DIGITS),
        "curve": [round(points.mean().item(), DIGITS) for points in losses.split(BIN)],
    }


def build(task: Task, arm: str, seed: int) -> nn.Module:
    """The model of a run on its device: the weights are drawn, then the norms are swapped."""
    torch.manual_seed(seed)
    net = task.build()
    if (options := ARMS[arm]) is not None:
        normplug.swap(net, **options)
    return net.to(task.device)


@contextmanager
def comparable() -> Iterator[None]:
    """Let equal runs give equal bits where torch can, so that arms differ by their norms alone."""
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    fill: Any = torch.utils.deterministic  # a module whose setting is a property
    attention = torch.backends.mha
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        fill.fill_uninitialized_memory,
        attention.get_fastpath_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    fill.fill_uninitialized_memory = False  # a launch for every torch.empty, to find bugs
    attention.set_fastpath_enabled(False)  # in eval it would follow its input, not autocast
    try:
        with sdpa_kernel(SDPBackend.MATH):  # the others' gradients add up in any order
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        fill.fill_uninitialized_memory = before[2]
        attention.set_fastpath_enabled(before[3])


def _fit(net: nn.Module, task: Task, seed: int) -> Tensor:
    """Train; return the loss of every step, on the CPU."""
    recipe = task.recipe
    optimizer, schedule = _optimizer(net, recipe)
    losses = torch.zeros(recipe.steps, device=task.device)
    net.train()
    for step, (inputs, labels) in enumerate(islice(task.batches(seed), recipe.steps)):
        with torch.autocast(task.device.type, DTYPE):
            logits = net(inputs)
            loss = _cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses[step] = loss.detach()
    return losses.cpu()


@torch.no_grad()
def _validate(net: nn.Module, task: Task) -> float:
    """The mean loss over the validation part."""
    net.eval()
    total, labels_seen = torch.zeros((), device=task.device), 0
    for inputs, labels in task.validation():
        with torch.autocast(task.device.type, DTYPE):
            total += _cross_entropy(net(inputs), labels, reduction="sum")
        labels_seen += labels.numel()
    return total.item() / labels_seen


def _cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def _optimizer(net: nn.Module, recipe: Recipe) -> tuple[AdamW, LambdaLR]:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        groups,
        lr=recipe.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    rising = max(1, round(recipe.warmup * recipe.steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, recipe.steps - rising)))

    return optimizer, LambdaLR(optimizer, factor)


def _line(row: Row, seconds: float) -> str:
    return (
        f"{row['task']}, {row['arm']}, seed {row['seed']}: train {row['train_loss']:.4f}, "
        f"validation {row['validation_loss']:.4f}, {seconds:.0f} s"
    )
