"""Time the first training step, in a new process with empty kernel caches.

Run as a module, this file is that process: it prints the seconds and the origins of the kernels.
Usage: `python -m normplug.bench.first_step MODEL BATCH ARM DEVICE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory

import torch

from normplug.bench import native
from normplug.bench.models import GRAPHED, SEED, attempt, build, make_step
from normplug.bench.nets import MODELS, Case
from normplug.bench.results import STEP, Results, Row
from normplug.bench.timing import at_rest
from normplug.native import status

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def run(cases: Sequence[Case], arms: Sequence[str], results: Results) -> bool:
    """Measure and print every case and arm, one after the other; return whether any worked."""
    for arm in [arm for arm in arms if arm in GRAPHED]:
        message = "is left out: its first step is that of the same arm without a graph"
        print(f"{arm} {message}", file=sys.stderr, flush=True)
    native.build()
    done = False
    for case in cases:
        for arm in [arm for arm in arms if arm not in GRAPHED]:
            what = f"{case}: the first step of {arm}"
            found = attempt(what, partial(in_a_process, case, arm, "cuda"))
            if found is not None:
                done = True
                kernels = ", ".join(f"{v} {k}" for k, v in found["first_step_kernels"].items())
                print(f"{what} {found['first_step_s']:.2f} s; kernels: {kernels}", flush=True)
                results.update({**case._asdict(), "arm": arm, **found}, STEP)
    return done


def in_a_process(case: Case, arm: str, device: str) -> Row:
    """Run `measured` in a new process with empty kernel caches.

    Raises:
        RuntimeError: the process failed; the message is the last line that it wrote.
    """
    command = [sys.executable, "-m", __name__, case.model, str(case.batch), arm, device]
    with TemporaryDirectory() as directory:
        caches = {name: os.path.join(directory, name) for name in CACHES}
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measured(model: str, batch: str, arm: str, device: str) -> Row:
    """Time a first step in this process, and count its kernels by origin.

    The device is initialised before the clock starts. `normplug.native.status()` has the counts.
    """
    torch.manual_seed(SEED)
    entry = MODELS[model]
    net = build(entry.build(), arm, entry, device)
    step = make_step(net, entry, entry.random_batch(int(batch), device))
    start = at_rest()
    step()
    seconds = at_rest() - start
    came = status().kernels
    kernels = {"distinct": sum(came.values()), **came}
    return {"first_step_s": seconds, "first_step_kernels": kernels}


if __name__ == "__main__":
    print(json.dumps(measured(*sys.argv[1:])))
