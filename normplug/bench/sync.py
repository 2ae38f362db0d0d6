"""Time training steps of a ResNet-50 over several processes, for each way to synchronise its norms.

Start it by `python -m torch.distributed.run --nproc_per_node 2 -m normplug.bench sync`.
All arms start from the same weights, are in memory together, and take turns.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import normplug
from normplug._extras import needs
from normplug.bench import native
from normplug.bench.models import MODE, PACKAGES, SEED, SETTINGS, make_step
from normplug.bench.nets import MODELS, Images
from normplug.bench.results import SYNC, Results

MODEL = "resnet50"
BATCHES = (128, 32)  # images per process and step
SIZE = 224  # height and width of an image, in pixels
WARM_UPS = 10  # steps, including compilation
ROUNDS, TURN = 10, 10  # rounds of turns; measured steps per turn


def _stock(net: nn.Module) -> nn.Module:
    return net


def _joined(net: nn.Module) -> nn.Module:
    return normplug.swap(net, MODE, sync=True)


def _fused(net: nn.Module) -> nn.Module:
    return normplug.fuse(_joined(net))


# name -> the change made to the stock model; "local" does not synchronise
ARMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "local": _stock,
    "torch": nn.SyncBatchNorm.convert_sync_batchnorm,
    "normplug": _joined,
    "normplug+fuse": _fused,
}


def add_command(commands: Any, number: Callable[[str], int]) -> None:
    """Add `sync` to the command line; `number` reads a positive integer."""
    command = commands.add_parser("sync", help="time training steps over several processes")
    command.set_defaults(command=_run)
    command.add_argument(
        "--batch",
        metavar="N",
        type=number,
        action="append",
        help=f"images per process; may be repeated; default: {', '.join(map(str, BATCHES))}",
    )
    for name, default, what in (
        ("size", SIZE, "height and width of an image, in pixels"),
        ("warm-ups", WARM_UPS, "steps before the first round"),
        ("rounds", ROUNDS, "rounds, with a turn of every arm in each"),
        ("turn", TURN, "steps that are timed together"),
    ):
        help_text = f"{what}; default: {default}"
        command.add_argument(f"--{name}", metavar="N", type=number, default=default, help=help_text)
    command.add_argument(
        "-o", "--out", metavar="FILE.json", type=Path, help="all rows, rewritten after each one"
    )


def _run(arguments: argparse.Namespace) -> None:
    with needs("normplug.bench sync", "bench", SystemExit):
        import torchvision  # noqa: F401
    a = arguments
    run(a.batch or BATCHES, a.size, a.warm_ups, a.rounds, a.turn, a.out)


def run(
    batches: Sequence[int], size: int, warm_ups: int, rounds: int, turn: int, out: Path | None
) -> None:
    """Measure and print every arm of every batch; process 0 writes the rows to `out`.

    Raises:
        SystemExit: the process was not started by `torch.distributed.run`.
    """
    if "RANK" not in os.environ:
        raise SystemExit(
            "normplug.bench sync runs in several processes; got one. Start it with "
            "python -m torch.distributed.run --nproc_per_node 2 -m normplug.bench sync."
        )
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    try:
        first = dist.get_rank() == 0
        if os.environ["LOCAL_RANK"] == "0":
            native.build()
        dist.barrier()  # the other processes of a host load the same file
        settings = {
            **SETTINGS,
            "model": MODEL,
            "image_size": size,
            "processes": dist.get_world_size(),
            "warm_ups": warm_ups,
            "rounds": rounds,
            "steps_a_turn": turn,
        }
        results = Results(out if first else None, SYNC, PACKAGES, settings=settings)
        for batch in batches:
            measured = measure(batch, size, warm_ups, rounds, turn, device)
            results.content["native"] = native.status()  # known only after the first step
            for arm, times in measured.items():
                ms = min(times)
                results.add(
                    {"batch": batch, "arm": arm, "ms": ms, "median_ms": statistics.median(times)}
                )
                if first:
                    print(f"batch {batch} per process | {arm} {ms:.2f} ms", flush=True)
    finally:
        dist.destroy_process_group()


def measure(
    batch: int, size: int, warm_ups: int, rounds: int, turn: int, device: torch.device
) -> dict[str, list[float]]:
    """Arm -> milliseconds per step, for each turn."""
    stated = MODELS[MODEL]
    assert isinstance(stated, Images)
    model = replace(stated, image_size=size)
    torch.manual_seed(SEED)
    stock = model.build()
    torch.manual_seed(SEED + dist.get_rank())
    data = model.random_batch(batch, str(device))
    steps: dict[str, Callable[[], Any]] = {}
    for arm, change in ARMS.items():
        if arm == "torch" and device.type == "cpu":  # it needs CUDA
            continue
        net = copy.deepcopy(stock).to(device).to(memory_format=model.memory_format).train()
        steps[arm] = make_step(_parallel(net, change, device), model, data)
        for _ in range(warm_ups):
            steps[arm]()
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for done in range(rounds):
        # Each round starts with another arm, which is the same in all processes.
        order = list(steps)
        for arm in order[done % len(order) :] + order[: done % len(order)]:
            times[arm].append(_turn_ms(steps[arm], turn, device))
    return times


def _parallel(
    net: nn.Module, change: Callable[[nn.Module], nn.Module], device: torch.device
) -> nn.Module:
    if device.type == "cuda":
        return nn.parallel.DistributedDataParallel(change(net), device_ids=[device])
    # On the CPU, DistributedDataParallel refuses to wrap a SyncBatchNorm.
    parallel = nn.parallel.DistributedDataParallel(net)
    parallel.module = change(net)
    return parallel


def _turn_ms(step: Callable[[], Any], count: int, device: torch.device) -> float:
    """Mean milliseconds per step of `count` steps back to back, after one that is not timed."""
    step()
    _wait(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    _wait(device)
    return (time.perf_counter() - start) / count * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
