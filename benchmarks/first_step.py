"""Time the first training step, in a new process with empty kernel caches.

python benchmarks/first_step.py --rows resnet50 --arms eager swap+fuse --json first_step.json
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

import torch

import models
import nets
import script
from normplug._results import stamp
from normplug.bench.models import make_step
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import at_rest, attempt
from normplug.native import status

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ARMS = [name for name in models.ARMS if not name.endswith("graph")]  # a graph has the same step
OPTIONS = models.OPTIONS | {
    "--arms": {"nargs": "+", "choices": ARMS, "default": ("eager", "swap+fuse")},
}
COLUMNS = {key: (key, "{}") for key in ("model", "batch", "arm")}
COLUMNS |= {"first step, s": ("first_step_s", "{:.2f}"), "kernels": ("first_step_kernels", "{}")}


def measured(name: str, batch: int, arm: str, device: str) -> Row:
    """Time a first step in this process, and count its kernels by where they came from.

    The device is initialised before the clock starts.
    """
    torch.manual_seed(0)
    model, data, loss = nets.NETS[name].make(batch=batch)
    data = tuple(tensor.to(device) for tensor in data)
    step, _ = make_step(model.to(device), data, loss, torch.bfloat16, models.ARMS[arm])
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
        **stamp(device == "cuda"),
    }


def in_a_process(name: str, batch: int, arm: str, device: str) -> Row:
    """`measured` in a new process with empty caches."""
    with TemporaryDirectory() as folder:
        os.environ |= {cache: str(Path(folder, cache)) for cache in CACHES}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            return process.submit(measured, name, batch, arm, device).result()


def measure(a: Namespace) -> Iterator[Rows]:
    """A row for each network and arm."""
    for name, batch in models.selected(a.rows, a.batch):
        for arm in a.arms:
            what = f"{name}, batch {batch}: {arm}"
            row, _ = attempt(what, partial(in_a_process, name, batch, arm, str(a.device)))
            if row:
                yield Rows([row], COLUMNS)


main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
