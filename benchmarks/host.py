"""Time single calls of layers back to back, where the GPU waits for the host, or without a GPU.

    python benchmarks/host.py --json host.json
    OMP_NUM_THREADS=1 python benchmarks/host.py --device cpu --only float32 --rounds 100

`golden` has that target variance, `watched` also running statistics of LayerNorm, RMSNorm and
GroupNorm. `normplug-python` runs without the C++ launcher.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch

import script
from normplug import native
from normplug._files import stamp
from normplug.bench.op import EAGER, OURS, PROVIDERS, Case, Change, Problem, cases, ours
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import back_to_back, in_turns

PYTHON = "normplug-python"
FLAT = [
    "layer_norm",
    "add_layer_norm",
    "rms_norm",
    "add_rms_norm",
    "batch_norm",
    "batch_norm_relu",
]
CASES = [
    *cases(FLAT, [(32, 128)], ["float32"]),
    *cases(["group_norm", "instance_norm"], [(8, 32, 8, 8)], ["float32"]),
    *cases(FLAT, [(512, 768), (2048, 1024), (8192, 1280)], ["bfloat16"]),
    *cases([*FLAT[-2:], "group_norm_silu"], [(16, 384, 14, 14)], ["bfloat16"]),
]
COLUMNS = ("op", "layout", "shape", "dtype", "direction", "provider")
COLUMNS += ("wall_us", "wall_us_p20", "wall_us_p80", "over_eager")
WAYS: dict[str, Change] = {
    EAGER: PROVIDERS[EAGER],
    OURS: ours,
    "golden": partial(ours, mode="golden"),
    "watched": partial(ours, watched=True),
    PYTHON: ours,
}


def measure(case: Case, device: torch.device, rounds: int | None = None) -> Iterator[Row]:
    """A row for each direction (F is without gradients) and provider.

    Raises:
        AssertionError: a result is less accurate than torch's.
    """
    problem = Problem(case, device)
    layers = {name: way(deepcopy(problem.layer)) for name, way in WAYS.items()}
    for name, layer in layers.items():
        if name != "golden":
            with _way(name):
                problem.check(name, layer)
    for direction in ("F", "F+B"):
        calls = {name: problem.calls(layer)[direction] for name, layer in layers.items()}
        turns = {
            name: partial(_turn, call, name, direction) for name, call in calls.items()
        }
        for name, timed in in_turns("wall_us", turns, rounds).items():
            facts = {
                "direction": direction,
                "provider": name,
                "native": native.host_path().way,
            }
            yield {**case.facts(), **facts, **timed, **stamp(device.type == "cuda")}


def _way(name: str) -> Any:
    return native.python_way() if name == PYTHON else nullcontext()


def _turn(call: Callable[[], Any], name: str, direction: str) -> list[float]:
    with _way(name), torch.set_grad_enabled(direction == "F+B"):
        return back_to_back(call)()


def _measure_all(a: Namespace) -> Iterator[Rows]:
    for case in [case for case in CASES if a.only in str(case)]:
        yield Rows(measure(case, a.device, a.rounds), COLUMNS)


OPTIONS: dict[str, Any] = {
    "--only": {"default": "", "help": "cases whose name has this text"},
    "--rounds": {"type": int, "help": "turns of each layer"},
}
main = partial(script.main, __doc__, _measure_all, OPTIONS)

if __name__ == "__main__":
    main()
