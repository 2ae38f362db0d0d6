"""Time layers and training steps on one core of the CPU, where PyTorch's own kernels run.

    python benchmarks/cpu.py --json cpu.json

A call is a forward, the loss and a backward. Stock and swapped layers take turns.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

import script
from nets import LAYERS, Net, encoder, images
from normplug import swap
from normplug._results import stamp
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import back_to_back, in_turns, spread

COLUMNS = ("what", "provider", "wall_us", "wall_us_p20", "wall_us_p80", "over_stock")
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "stock": lambda net: net,
    "standard": swap,
    "golden": partial(swap, mode="golden"),
    "standard, not watched": partial(swap, track_running_stats=False),
    "golden, not watched": partial(swap, mode="golden", track_running_stats=False),
    "standard, watched": partial(swap, track_running_stats=True),
}


def _small(name: str, size: int, batch: int, **sizes: Any) -> Any:
    net = getattr(import_module("torchvision.models"), name)(num_classes=10, **sizes)
    return images("", batch, size, channels_last=False, model=net)


_VIT = {"num_layers": 6, "num_heads": 4, "hidden_dim": 64, "mlp_dim": 128}
CASES = LAYERS | {
    "encoder, 4 layers of 64": Net(partial(encoder, length=16, width=64, layers=4), (4,)),
    "ViT, 6 layers of 64": Net(
        partial(_small, "VisionTransformer", 32, image_size=32, patch_size=8, **_VIT), (4,)
    ),
    "ResNet-18": Net(partial(_small, "resnet18", 32), (16,)),
}


def measure(what: str, turns: int) -> Iterator[Row]:
    """A row for the stock network, and for each way to swap it."""
    torch.manual_seed(0)
    net, data, loss = CASES[what].make(batch=CASES[what].batches[0])

    def call(module: nn.Module) -> None:
        loss(module, data).backward()
        module.zero_grad()
        for tensor in data:
            tensor.grad = None

    modules = {name: way(deepcopy(net).train()) for name, way in WAYS.items()}
    stopwatches = {name: back_to_back(partial(call, each)) for name, each in modules.items()}
    times = in_turns(stopwatches, turns)
    origin = stamp(gpu=False)
    for name, samples in times.items():
        ratios = [ours / theirs for ours, theirs in zip(samples, times["stock"], strict=True)]
        facts: Row = {"what": what, "provider": name, "over_stock": statistics.median(ratios)}
        yield facts | spread("wall_us", samples) | origin


def _measure_all(a: Namespace) -> Iterator[Rows]:
    torch.set_num_threads(1)
    for what in [what for what in CASES if a.only in what]:
        yield Rows(measure(what, a.turns), COLUMNS)


OPTIONS: dict[str, Any] = {
    "--only": {"default": "", "help": "cases whose name has this text"},
    "--turns": {"type": int, "default": 100},
}
main = partial(script.main, __doc__, _measure_all, OPTIONS)

if __name__ == "__main__":
    main()
