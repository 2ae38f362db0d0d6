"""Time the first training step, in a new process with empty kernel caches.

python benchmarks/first_step.py --rows resnet50 --arms eager swap+fuse --json first_step.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import models
import nets
from normplug._results import stamp
from normplug.bench.models import make_step
from normplug.bench.rows import Row, add_to_file
from normplug.bench.timing import at_rest, ready
from normplug.native import status

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
ARMS = [name for name in models.ARMS if not name.endswith("graph")]  # a graph has the same step


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


def in_a_process(name: str, batch: int, arm: str, device: str) -> Row | None:
    """`measured` in a new process with empty caches; None, and a printed line, if it fails."""
    command = [sys.executable, __file__, "--alone", name, str(batch), arm, device]
    with TemporaryDirectory() as folder:
        caches = {cache: os.path.join(folder, cache) for cache in CACHES}
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        print(f"{name}, batch {batch}: {arm} is left out: {why}", file=sys.stderr, flush=True)
        return None
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", choices=("all", *nets.NETS), default=["all"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=("eager", "swap+fuse"))
    parser.add_argument("--batch", type=int, help="samples a step; default: each model's own")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    a = parser.parse_args(argv)
    if a.alone:
        name, batch, arm, device = a.alone
        print(json.dumps(measured(name, int(batch), arm, device)))
        return
    ready(a.device)
    for name, batch in models.selected(a.rows, a.batch):
        for arm in a.arms:
            row = in_a_process(name, batch, arm, a.device)
            if row is None:
                continue
            kernels = ", ".join(f"{n} {kind}" for kind, n in row["first_step_kernels"].items())
            seconds = row["first_step_s"]
            print(f"{name}, batch {batch}: {arm} {seconds:.2f} s; kernels: {kernels}", flush=True)
            add_to_file(a.json, [row])


if __name__ == "__main__":
    main()
