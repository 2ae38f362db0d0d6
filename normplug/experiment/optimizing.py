"""Parameter groups for weight decay, and learning-rate schedules."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

SCHEDULES = ("one_cycle", "cosine", "constant")


def decay_groups(parameters: Iterable[Parameter]) -> list[dict[str, Any]]:
    """Split parameters into groups for an optimizer: weight decay is for matrices only.

    Norm weights and biases have one dimension and no decay. Frozen parameters are skipped.
    """
    trainable = [p for p in parameters if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.dim() > 1]},
        {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: Optimizer, name: str, warmup: float, steps: int) -> LRScheduler:
    """Return a learning-rate schedule, to be stepped after every optimizer step.

    Args:
        optimizer: its learning rates are the peaks of the schedule.
        name: one of `SCHEDULES`: "one_cycle" (Smith 2018, arXiv:1803.09820), or a linear warm-up
            followed by "cosine" annealing to 0 or a "constant" rate.
        warmup: fraction of all steps, 0 to 1, in which the learning rate rises.
        steps: of the whole training. Below 4 steps, "one_cycle" falls back to "cosine".
    """
    if name == "one_cycle" and steps >= 4:
        rates = [group["lr"] for group in optimizer.param_groups]
        # At least 2 steps rise, since OneCycleLR divides by their number minus 1.
        return lr_scheduler.OneCycleLR(optimizer, rates, steps, pct_start=max(warmup, 2 / steps))
    rising = round(warmup * steps)
    after: LRScheduler = lr_scheduler.ConstantLR(optimizer, 1.0)
    if name != "constant":
        after = lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - rising))
    if rising == 0:
        return after
    rise = lr_scheduler.LinearLR(optimizer, 1 / rising, total_iters=max(1, rising - 1))
    return lr_scheduler.SequentialLR(optimizer, [rise, after], [rising])


def move_to_step(scheduler: LRScheduler, step: int) -> None:
    """Fast-forward a new scheduler to `step`; this takes 2 us per step."""
    with warnings.catch_warnings():
        # torch cannot see that the optimizer took these steps, in the run that is resumed.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step")
        for _ in range(step):
            scheduler.step()
