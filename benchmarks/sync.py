"""Time training steps of networks on several GPUs, for each way to synchronise their BatchNorms.

    python -m torch.distributed.run --nproc_per_node 2 benchmarks/sync.py --out sync.json

All arms start from the same weights, are in memory together, and take turns. The figure of an arm
is the median of its turns. Every network trains in bfloat16 and channels_last under
`DistributedDataParallel`.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import normplug
from normplug import _results, native

ARMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "local": lambda net: net,
    "torch": nn.SyncBatchNorm.convert_sync_batchnorm,
    "normplug": lambda net: normplug.swap(net, "standard", sync=True),
    "normplug+fuse": lambda net: normplug.fuse(normplug.swap(net, "standard", sync=True)),
    "normplug-local": lambda net: normplug.swap(net, "standard"),
    "normplug-local+fuse": lambda net: normplug.fuse(normplug.swap(net, "standard")),
}
CASES = ("resnet50:128", "resnet50:32", "efficientnet_b0:128")  # model, images a GPU


def make_step(net: nn.Module, batch: int, size: int, device: torch.device) -> Callable[[], Any]:
    """Return a function that trains the network by one step on random images."""
    images = torch.randn(batch, 3, size, size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()

    return step


def turn_ms(step: Callable[[], Any], count: int) -> float:
    """Mean milliseconds per step of `count` steps back to back, after one that is not timed."""
    step()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def measure(name: str, batch: int, options: argparse.Namespace) -> dict[str, float]:
    """Arm -> the median milliseconds per step."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    stock = torchvision.models.get_model(name)
    steps = {}
    for arm in options.arms:
        net = ARMS[arm](copy.deepcopy(stock).to(device, memory_format=torch.channels_last).train())
        parallel = DistributedDataParallel(net, device_ids=[device.index])
        steps[arm] = make_step(parallel, batch, options.size, device)
        for _ in range(options.warm_ups):
            steps[arm]()
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    for done in range(options.rounds):
        order = list(steps)  # each round starts with another arm, the same in all processes
        for arm in order[done % len(order) :] + order[: done % len(order)]:
            times[arm].append(turn_ms(steps[arm], options.turn))
    return {arm: statistics.median(each) for arm, each in times.items()}


def main() -> None:
    """Measure all cases; process 0 writes a row for each arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", metavar="MODEL:BATCH", dest="cases")
    parser.add_argument("--arm", action="append", choices=ARMS, dest="arms")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--warm-ups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turn", type=int, default=10)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.arms = options.arms or list(ARMS)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    first = dist.get_rank() == 0
    if os.environ["LOCAL_RANK"] == "0":
        native.build()
    dist.barrier()  # the other processes of a host load the same file
    rows = []
    for case in options.cases or CASES:
        name, batch = case.split(":")
        for arm, ms in measure(name, int(batch), options).items():
            row = {"model": name, "batch": int(batch), "arm": arm, "ms": round(ms, 3)}
            rows.append(row | _results.stamp(True, gpus=dist.get_world_size()))
            if first:
                print(f"{name} {batch} | {arm} {ms:.2f} ms", flush=True)
        if first and options.out:
            lines = ",\n".join(json.dumps(row) for row in rows)
            _results.write_file(options.out, f"[\n{lines}\n]\n")
    if first:
        print(native.status(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
