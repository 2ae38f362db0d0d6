"""How long the first training step takes, in a process of its own that finds no compiled kernel.

Run as a module, it is that process, and prints the seconds:
`python -m normplug.bench.first_step MODEL BATCH ARM DEVICE`.
"""

from __future__ import annotations

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
from normplug.bench.results import STEP, Results
from normplug.bench.timing import at_rest

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def run(cases: Sequence[Case], arms: Sequence[str], results: Results) -> bool:
    """Measure and print every case and arm, one after the other; return whether any worked.

    An arm that is a graph is left out: its first step is that of the arm without one.
    """
    native.build()
    done = False
    for case in cases:
        for arm in [arm for arm in arms if arm not in GRAPHED]:
            what = f"{case}: the first step of {arm}"
            seconds = attempt(what, partial(in_a_process, case, arm, "cuda"))
            if seconds is not None:
                done = True
                print(f"{what} {seconds:.2f} s", flush=True)
                results.update({**case._asdict(), "arm": arm, "first_step_s": seconds}, STEP)
    return done


def in_a_process(case: Case, arm: str, device: str) -> float:
    """Seconds of the first step, with empty caches of kernels.

    Raises:
        RuntimeError: the process failed; the message is the last line that it wrote.
    """
    command = [sys.executable, "-m", __name__, case.model, str(case.batch), arm, device]
    with TemporaryDirectory() as directory:
        caches = {name: os.path.join(directory, name) for name in CACHES}
        done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])
    return float(done.stdout.split()[-1])


def seconds(model: str, batch: str, arm: str, device: str) -> float:
    """Seconds of a first step in this process; the device is in use before."""
    torch.manual_seed(SEED)
    made = MODELS[model]
    step = make_step(
        build(made.build(), arm, made, device), made, made.random_batch(int(batch), device)
    )
    start = at_rest()
    step()
    return at_rest() - start


if __name__ == "__main__":
    print(seconds(*sys.argv[1:]))
