"""Time single calls of layers back to back: on small inputs the GPU waits for the host.

    python benchmarks/host.py --json host.json

normplug-python is normplug without the host path in C++.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import script
from normplug import native
from normplug._results import stamp
from normplug.bench.op import EAGER, OURS, Case, Problem, cases, ours
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import back_to_back, in_turns, spread

MODE = "golden"
PYTHON = "normplug-python"
FLAT = ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "batch_norm", "batch_norm_relu"]
CASES = [
    *cases(FLAT, [(32, 128)], ["float32"]),
    *cases(FLAT, [(512, 768), (2048, 1024), (8192, 1280)], ["bfloat16"]),
    *cases([*FLAT[-2:], "group_norm_silu"], [(16, 384, 14, 14)], ["bfloat16"], ["NHWC"]),
]
COLUMNS = ("op", "layout", "shape", "dtype", "direction", "provider")
COLUMNS += ("wall_us", "wall_us_p20", "wall_us_p80", "over_eager")
WAYS = {EAGER: nullcontext, OURS: nullcontext, PYTHON: native.python_way}


def measure(case: Case, device: torch.device) -> Iterator[Row]:
    """A row for each direction (F is without gradients) and provider.

    Raises:
        AssertionError: a result is less accurate than torch's.
    """
    problem = Problem(case, device)
    layers = {EAGER: problem.layer}
    for name in (OURS, PYTHON):
        layers[name] = ours(deepcopy(problem.layer), MODE)
        with WAYS[name]():
            problem.check(name, layers[name], MODE)
    for direction in ("F", "F+B"):
        calls = {name: problem.calls(layer)[direction] for name, layer in layers.items()}
        turns = {name: partial(_turn, call, name, direction) for name, call in calls.items()}
        times = in_turns(turns)
        eager = statistics.median(times[EAGER])
        for name, samples in times.items():
            yield {
                **case.facts(),
                "direction": direction,
                "provider": name,
                "mode": MODE,
                **spread("wall_us", samples),
                "over_eager": eager / statistics.median(samples) if name != EAGER else None,
                "native": native.status().way,
                **stamp(device.type == "cuda"),
            }


def _turn(call: Callable[[], Any], name: str, direction: str) -> list[float]:
    with WAYS[name](), torch.set_grad_enabled(direction == "F+B"):
        return back_to_back(call)()


def _measure_all(a: Namespace) -> Iterator[Rows]:
    for case in [case for case in CASES if a.only in str(case)]:
        yield Rows(measure(case, a.device), COLUMNS)


OPTIONS = {"--only": {"default": "", "help": "cases whose name has this text"}}
main = partial(script.main, __doc__, _measure_all, OPTIONS)

if __name__ == "__main__":
    main()
