"""Time training steps of a network over several processes, for each way to join its norms.

    python -m torch.distributed.run --nproc_per_node 2 benchmarks/sync.py --json sync.json

All arms start from the same weights, are in memory together, and take turns.
"""

from __future__ import annotations

import argparse
import os
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import nets
import normplug
from models import shortcuts_apart
from normplug._files import stamp
from normplug.bench.models import Change, make_step
from normplug.bench.rows import Row, Rows, report
from normplug.bench.timing import Call, Turn, at_rest, in_turns, ready

COLUMNS = ("model", "batch", "arm", "ms", "ms_p20", "ms_p80")
_joined = partial(normplug.swap, sync=True)
# arm -> the changes to the stock model; arms with "local" in their name do not synchronise
ARMS: dict[str, tuple[Change, ...]] = {
    "local": (),
    "torch": (nn.SyncBatchNorm.convert_sync_batchnorm,),
    "normplug": (_joined,),
    "normplug+fuse": (_joined, normplug.fuse),
    "normplug+fuse-shortcuts": (_joined, normplug.fuse, shortcuts_apart),
    "normplug-local": (normplug.swap,),
    "normplug-local+fuse": (normplug.swap, normplug.fuse),
}
COMPILED: dict[str, tuple[Change, ...]] = {
    f"{name}+compile": (*ARMS[name], torch.compile)
    for name in ("local", "torch", "normplug+fuse", "normplug-local+fuse")
}


def measure(a: Namespace, batch: int, device: torch.device) -> Iterator[Row]:
    """A row for each arm: milliseconds a step, over its turns."""
    torch.compiler.reset()  # earlier models count towards the recompilation limit
    torch.manual_seed(0)
    stock, _, loss = nets.NETS[a.model].make(batch=1)
    torch.manual_seed(dist.get_rank())
    _, data, _ = nets.NETS[a.model].make(batch=batch, size=a.size)
    data = tuple(tensor.to(device) for tensor in data)
    turns: dict[str, Turn] = {}
    for name, changes in (ARMS | COMPILED if a.compile else ARMS).items():
        if name.startswith("torch") and device.type == "cpu":  # it needs CUDA
            continue
        change = partial(_parallel, changes)
        step, _ = make_step(stock.to(device), data, loss, torch.bfloat16, change)
        for _ in range(a.warm_ups):
            step()
        turns[name] = partial(_turn_ms, step, a.turn)
    # Each round starts with another arm, which is the same in all processes.
    for name, timed in in_turns("ms", turns, a.rounds).items():
        yield {
            **{
                "model": a.model,
                "batch": batch,
                "arm": name,
                "mode": "standard",
                "size": a.size,
            },
            **timed,
            "steps": a.rounds * a.turn,
            "processes": dist.get_world_size(),
            "native": normplug.status().way,
            **stamp(device.type == "cuda", gpus=dist.get_world_size()),
        }


def _parallel(changes: Sequence[Change], net: nn.Module) -> nn.Module:
    """Change a model in DistributedDataParallel, which on a CPU refuses to wrap a SyncBatchNorm."""
    device = next(net.parameters()).device
    parallel = nn.parallel.DistributedDataParallel(
        net, [device] if device.type == "cuda" else None
    )
    for change in changes:
        parallel.module = change(parallel.module)
    return parallel


def _turn_ms(step: Call, count: int) -> list[float]:
    """Mean milliseconds a step of `count` steps back to back, after one that is not timed."""
    step()
    at_rest()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    return [(at_rest() - start) / count * 1e3]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="resnet50", choices=sorted(nets.NETS))
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[128, 32], help="a process"
    )
    for name, default in (("size", 224), ("warm-ups", 10), ("rounds", 10), ("turn", 10)):
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"default: {default}"
        )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="append the rows to this file"
    )
    parser.add_argument("--compile", action="store_true", help="add compiled arms")
    a = parser.parse_args(argv)
    if "RANK" not in os.environ:
        raise SystemExit(
            "benchmarks/sync.py runs in several processes; got one. Start it with "
            "python -m torch.distributed.run --nproc_per_node 2 benchmarks/sync.py."
        )
    local = int(os.environ["LOCAL_RANK"])
    device = (
        torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        if local == 0:
            ready(device.type)
        dist.barrier()  # the other processes of a host load the same file
        for batch in a.batch:
            rows = list(measure(a, batch, device))
            if dist.get_rank() == 0:
                report([Rows(rows, COLUMNS, [str(normplug.status())])], a.json)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
