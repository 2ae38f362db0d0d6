"""Time checkouts of normplug in turns on one device, to see what a change costs.

    python benchmarks/turns.py old new --rows resnet50 layer_norm --json turns.json

Each checkout has a process of its own, which holds the model, swapped in mode golden. A step is a
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
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from itertools import product
from multiprocessing.connection import Connection
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


Ask = Callable[..., Any]  # sends a request to a process, and returns the answer


def _serve(connection: Connection, tree: Path, device: str) -> None:
    """Answer the parent's requests, with the normplug of `tree`; only its public names are used."""
    sys.path.insert(0, str(tree))
    normplug = importlib.import_module("normplug")
    if Path(str(normplug.__file__)).parents[1] != tree:
        raise ImportError(f"benchmarks/turns.py needs the normplug of {tree}")
    torch.zeros(1, device=device)  # initialise the device before the first step is timed
    step: Callable[[], Any] = object
    count = 1
    while (request := _received(connection)) is not None:
        match request:
            case "build", name, batch, arm, forward:
                step, count = object, 1
                gc.collect()
                step = _step(normplug, name, batch, arm, forward, device)
                first_ms, _ = _turn(step, 1)
                for _ in range(WARM_UPS):
                    step()
                ms, _ = _turn(step, 2)
                count = max(1, min(int(TURN_MS / ms), MOST))
                kernels = importlib.import_module("normplug.native").status().kernels
                connection.send({"first_step_s": first_ms / 1e3, "kernels": sum(kernels.values())})
            case ("time",):
                wall_ms, _ = _turn(step, count)
                _, host_ms = _turn(step, max(1, count // 4))  # they fit the queue of launches
                connection.send({"ms": wall_ms, "host_ms": host_ms})
            case ("profile",):
                with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                    _turn(step, STEPS)
                events = [e for e in profiler.events() or () if e.device_type == DeviceType.CUDA]
                us = sum(event.time_range.elapsed_us() for event in events)
                connection.send({"gpu_ms": us / 1e3 / STEPS})


def _received(connection: Connection) -> Any:
    """The next request, or None at the end."""
    try:
        return connection.recv()
    except EOFError:
        return None


def _step(
    normplug: Any, name: str, batch: int, arm: str, forward: bool, device: str
) -> Callable[[], Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, data, loss = NETS[name].make(batch=batch)
    model = model.to(device).train()
    data = tuple(each.detach().to(device).requires_grad_(each.requires_grad) for each in data)
    if "swap" in arm:
        model = normplug.swap(model, "golden")
    if "fuse" in arm:
        model = normplug.fuse(model)
    if "compile" in arm:
        model = torch.compile(model)

    def step() -> None:
        with torch.set_grad_enabled(not forward), torch.autocast(device, torch.bfloat16):
            value = loss(model, data)
        if not forward:
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


@contextmanager
def _worker(tree: str, device: str) -> Iterator[Ask]:
    """Start a process for a checkout, whose host path in C++ is built first.

    Raises:
        EOFError: the process has failed; its traceback is on stderr.
    """
    place = Path(tree).resolve()
    if device == "cuda":
        subprocess.run([sys.executable, "-m", "normplug.native", "build"], cwd=place)
    ours, its = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(its, place, device))
    process.start()
    its.close()

    def ask(*request: Any) -> Any:
        ours.send(request)
        return ours.recv()

    try:
        yield ask
    finally:
        ours.close()  # the process then ends, and with it the workers that compile kernels
        process.join()


Samples = dict[str, list[dict[str, float]]]  # checkout -> what was measured in each round


def _first_steps(a: argparse.Namespace, build: Sequence[Any]) -> Samples:
    """The seconds of first steps, each in a new process with empty caches of kernels."""
    found: Samples = {tree: [] for tree in a.trees}
    for _, tree in product(range(a.first_step), a.trees):
        with TemporaryDirectory() as folder:
            os.environ |= {cache: str(Path(folder, cache)) for cache in CACHES}
            with _worker(tree, a.device) as ask:
                found[tree].append(ask("build", *build))
    return found


def _rounds(a: argparse.Namespace, asks: Mapping[str, Ask], build: Sequence[Any]) -> Samples:
    for ask in asks.values():
        ask("build", *build)
    found: Samples = {tree: [] for tree in asks}
    whats = ["time"] * a.rounds + ["profile"] * (PROFILES if a.device == "cuda" else 0)
    for what, (tree, ask) in product(whats, asks.items()):
        found[tree].append(ask(what))
    return found


def measure(a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each network, arm and checkout: medians, and the median ratio to the first one."""
    origins = {tree: _origin(Path(tree), a.device) for tree in a.trees}
    with ExitStack() as stack:
        workers = () if a.first_step else a.trees
        asks = {tree: stack.enter_context(_worker(tree, a.device)) for tree in workers}
        for name, arm in product(a.rows, [*a.arms, *[COMPILED] * a.compile]):
            batch = a.batch or NETS[name].batches[0]
            build = (name, batch, arm, a.forward)
            found = _rounds(a, asks, build) if asks else _first_steps(a, build)
            frames = {tree: pandas.DataFrame(samples) for tree, samples in found.items()}
            for tree, frame in frames.items():
                ratios = (frame / frames[a.trees[0]]).median().add_prefix("ratio_")
                facts = {"model": name, "batch": batch, "arm": arm, "tree": tree}
                facts["direction"] = "F" if a.forward else "F+B"
                medians = {**frame.median(), **ratios}
                yield facts | {key: float(each) for key, each in medians.items()} | origins[tree]


def _origin(tree: Path, device: str) -> dict[str, str]:
    git = ["git", "-C", str(tree)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True)
    return {
        "commit": (head.stdout.strip() or "unknown") + ("-dirty" if changed.stdout else ""),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", nargs="+", metavar="TREE", help="a folder that holds `normplug`")
    parser.add_argument("--rows", nargs="+", choices=NETS, required=True, metavar="NAME")
    parser.add_argument("--batch", type=int, help="samples; default: the network's own")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["swap", "swap+fuse"])
    parser.add_argument("--compile", action="store_true", help=f"add {COMPILED}")
    parser.add_argument("--forward", action="store_true", help="time forwards without gradients")
    parser.add_argument("--rounds", type=int, default=40)
    told = "time first steps instead, each of N in a new process with empty caches of kernels"
    parser.add_argument("--first-step", type=int, nargs="?", const=1, metavar="N", help=told)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    a = parser.parse_args(argv)
    rows = json.loads(a.json.read_text()) if a.json and a.json.exists() else []
    for row in measure(a):
        print(*(f"{each:.4g}" if isinstance(each, float) else each for each in row.values()))
        rows.append(row)
        if a.json:
            a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
