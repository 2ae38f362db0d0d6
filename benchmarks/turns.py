"""Time checkouts of normplug in turns on one device, to see what a change costs.

    python benchmarks/turns.py old new --rows resnet50 layer_norm --json turns.json

Each checkout has a process of its own, which holds the model, swapped in mode standard. A step is a
forward and a backward under bfloat16 autocast; the optimizer is left out, as it does not depend on
normplug. `--first-step` times first steps instead, also of a single checkout.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import nets

ARMS = ("eager", "swap", "swap+fuse")
COMPILED = "swap+fuse+compile"
WARM_UPS, TURN_MS, MOST = 4, 50, 400
PROFILES, STEPS = 5, 3  # profiles of an arm, and steps in each
NETS = nets.NETS | nets.LAYERS
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

Sample = dict[str, float]
Samples = dict[str, list[Sample]]  # checkout -> what was measured in each round
held: dict[
    str, Any
] = {}  # in the process of a checkout: its step, and how many make a turn


def _process(tree: str, device: str) -> ProcessPoolExecutor:
    """Start a process for a checkout, whose host path in C++ is built first."""
    place = Path(tree).resolve()
    if device == "cuda":
        subprocess.run([sys.executable, "-m", "normplug.native", "build"], cwd=place)
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(place, device))


def _start(tree: Path, device: str) -> None:
    """Import the normplug of `tree`, of which only public names are used."""
    sys.path.insert(0, str(tree))
    normplug = importlib.import_module("normplug")
    if Path(str(normplug.__file__)).parents[1] != tree:
        raise ImportError(f"benchmarks/turns.py needs the normplug of {tree}")
    torch.zeros(1, device=device)  # initialise the device before the first step is timed


def _build(name: str, batch: int, arm: str, device: str) -> Sample:
    """Hold the step of a model, and time the first one."""
    held.clear()
    gc.collect()
    step = _step(name, batch, arm, device)
    first_ms, _ = _turn(step, 1)
    for _ in range(WARM_UPS):
        step()
    ms, _ = _turn(step, 2)
    held.update(step=step, count=max(1, min(int(TURN_MS / ms), MOST)))
    normplug = importlib.import_module("normplug")
    # Until version 0.3, the status belonged to the host path.
    owner = normplug if hasattr(normplug, "status") else normplug.native
    kernels = owner.status().kernels
    return {"first_step_s": first_ms / 1e3, "kernels": sum(kernels.values())}


def _time() -> Sample:
    step, count = held["step"], held["count"]
    ms, _ = _turn(step, count)
    _, host_ms = _turn(step, max(1, count // 4))  # they fit the queue of launches
    return {"ms": ms, "host_ms": host_ms}


def _profile() -> Sample:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _turn(held["step"], STEPS)
    events = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
    return {"gpu_ms": sum(e.time_range.elapsed_us() for e in events) / 1e3 / STEPS}


def _step(name: str, batch: int, arm: str, device: str) -> Callable[[], Any]:
    normplug = importlib.import_module("normplug")
    torch.compiler.reset()
    torch.manual_seed(0)
    model, data, loss = NETS[name].make(batch=batch)
    model = model.to(device).train()
    data = tuple(
        each.detach().to(device).requires_grad_(each.requires_grad) for each in data
    )
    if "swap" in arm:
        model = normplug.swap(model, "standard")
    if "fuse" in arm:
        model = normplug.fuse(model)
    if "compile" in arm:
        model = torch.compile(model)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16):
            value = loss(model, data)
        value.backward()
        model.zero_grad()

    return step


def _turn(step: Callable[[], Any], count: int) -> tuple[float, float]:
    """Milliseconds a step of steps back to back: until all is done, and until the host is free."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else int
    wait()
    start = time.perf_counter()
    for _ in range(count):
        step()
    queued = time.perf_counter()
    wait()
    return (time.perf_counter() - start) * 1e3 / count, (queued - start) * 1e3 / count


def _first_steps(a: argparse.Namespace, build: Sequence[Any]) -> Samples:
    """The seconds of first steps, each in a new process with empty caches of kernels."""
    found: Samples = {tree: [] for tree in a.trees}
    for _, tree in product(range(a.first_step), a.trees):
        with TemporaryDirectory() as folder:
            os.environ |= {cache: str(Path(folder, cache)) for cache in CACHES}
            with _process(tree, a.device) as process:
                found[tree].append(process.submit(_build, *build).result())
    return found


def _rounds(
    a: argparse.Namespace,
    processes: Mapping[str, ProcessPoolExecutor],
    build: Sequence[Any],
) -> Samples:
    for built in [process.submit(_build, *build) for process in processes.values()]:
        built.result()
    found: Samples = {tree: [] for tree in processes}
    works = [_time] * a.rounds + [_profile] * (PROFILES if a.device == "cuda" else 0)
    for work, (tree, process) in product(works, processes.items()):
        found[tree].append(process.submit(work).result())
    return found


def measure(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each network, arm and checkout: medians, and the median ratio to the first one."""
    origins = {tree: _origin(Path(tree), a.device) for tree in a.trees}
    with ExitStack() as stack:
        trees = () if a.first_step else a.trees
        processes = {
            tree: stack.enter_context(_process(tree, a.device)) for tree in trees
        }
        for name, arm in product(a.rows, [*a.arms, *[COMPILED] * a.compile]):
            batch = a.batch or NETS[name].batches[0]
            build = (name, batch, arm, a.device)
            found = _rounds(a, processes, build) if processes else _first_steps(a, build)
            frames = {tree: pandas.DataFrame(samples) for tree, samples in found.items()}
            for tree, frame in frames.items():
                ratios = (frame / frames[a.trees[0]]).median().add_prefix("ratio_")
                facts = {"model": name, "batch": batch, "arm": arm, "tree": tree}
                medians = {**frame.median(), **ratios}
                yield (
                    facts
                    | {key: float(each) for key, each in medians.items()}
                    | origins[tree]
                )


def _origin(tree: Path, device: str) -> dict[str, str]:
    git = ["git", "-C", str(tree)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    return {
        "commit": (head.stdout.strip() or "unknown")
        + ("-dirty" if changed.stdout else ""),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "trees", nargs="+", metavar="TREE", help="a folder that holds `normplug`"
    )
    parser.add_argument("--rows", nargs="+", choices=NETS, required=True, metavar="NAME")
    parser.add_argument("--batch", type=int, help="samples; default: the network's own")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["swap", "swap+fuse"])
    parser.add_argument("--compile", action="store_true", help=f"add {COMPILED}")
    parser.add_argument("--rounds", type=int, default=40)
    told = "time first steps instead, each of N in a new process with empty caches of kernels"
    parser.add_argument(
        "--first-step", type=int, nargs="?", const=1, metavar="N", help=told
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file"
    )
    a = parser.parse_args(argv)
    rows = json.loads(a.json.read_text()) if a.json and a.json.exists() else []
    for row in measure(a):
        print(
            *(f"{each:.4g}" if isinstance(each, float) else each for each in row.values())
        )
        rows.append(row)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
