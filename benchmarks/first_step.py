"""Time the first training step, in a new process with empty kernel caches.

python benchmarks/first_step.py --rows resnet50 --arms eager swap+fuse --json first_step.json

With --warm-up, `normplug.warm_up` runs before the step, and is timed by itself.
"""

from __future__ import annotations

import multiprocessing
import os
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import models
import nets
import script
from normplug import warm_up
from normplug._results import stamp
from normplug.bench.models import make_step
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import at_rest, attempt
from normplug.native import status

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ARMS = [name for name in models.ARMS if not name.endswith("graph")]  # a graph has the same step
OPTIONS = models.OPTIONS | {
    "--arms": {"nargs": "+", "choices": ARMS, "default": ("eager", "swap+fuse")},
    "--warm-up": {"action": "store_true", "help": "compile the kernels before the step"},
}
COLUMNS = {key: (key, "{}") for key in ("model", "batch", "arm")}
COLUMNS |= {"first step, s": ("first_step_s", "{:.2f}"), "kernels": ("first_step_kernels", "{}")}


class _Loss(nn.Module):
    """The loss of a network, as a module."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, *batch: Tensor) -> Tensor:
        loss: Tensor = self.loss(self.net, batch)
        return loss


def measured(name: str, batch: int, arm: str, device: str, warm: bool) -> Row:
    """Time a first step in this process, and count its kernels by where they came from.

    The device is initialised before the clock starts.
    """
    torch.manual_seed(0)
    model, data, loss = nets.NETS[name].make(batch=batch)
    data = tuple(tensor.to(device) for tensor in data)
    step, net = make_step(model.to(device), data, loss, torch.bfloat16, models.ARMS[arm])
    at_rest()
    more = {}
    if warm:
        with torch.autocast(device, torch.bfloat16):
            found = warm_up(_Loss(net, loss), *data)
        more = {"warm_up_s": found.seconds, "warm_up_why": found.why}
    start = at_rest()
    step()
    seconds = at_rest() - start
    came = status().kernels
    return {
        "model": name,
        "batch": batch,
        "arm": arm,
        "mode": models.MODE,
        "autocast": "bfloat16",
        "first_step_s": seconds,
        "first_step_kernels": {"distinct": sum(came.values()), **came},
        **more,
        **stamp(device == "cuda"),
    }


def in_a_process(name: str, batch: int, arm: str, device: str, warm: bool) -> Row:
    """`measured` in a new process with empty caches."""
    with TemporaryDirectory() as folder:
        os.environ |= {cache: str(Path(folder, cache)) for cache in CACHES}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(measured, name, batch, arm, device, warm).result()


def measure(a: Namespace) -> Iterator[Rows]:
    """A row for each network and arm."""
    for name, batch in models.selected(a.rows, a.batch):
        for arm in a.arms:
            what = f"{name}, batch {batch}: {arm}"
            step = partial(in_a_process, name, batch, arm, str(a.device), a.warm_up)
            row, _ = attempt(what, step)
            if row:
                yield Rows([row], COLUMNS)


main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
