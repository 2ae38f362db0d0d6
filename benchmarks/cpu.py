"""Time layers and training steps on one core of the CPU, where PyTorch's own kernels run.

    python benchmarks/cpu.py --json cpu.json

A call is a forward, the loss mean(y^2) and a backward. Stock and swapped layers take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

import normplug
from nets import encoder
from normplug._results import stamp
from normplug.bench.rows import Row, Rows, add_to_file
from normplug.bench.timing import back_to_back, in_turns, spread

COLUMNS = {
    "what": ("what", "{}"),
    "provider": ("provider", "{}"),
    "median us": ("wall_us", "{:.1f}"),
    "20%": ("wall_us_p20", "{:.1f}"),
    "80%": ("wall_us_p80", "{:.1f}"),
    "over stock": ("over_stock", "{:.3f}"),
}


def _resnet18() -> nn.Module:
    return import_module("torchvision.models").resnet18(num_classes=10)


def _vit() -> nn.Module:
    make = import_module("torchvision.models").VisionTransformer
    return make(32, 8, 6, 4, hidden_dim=64, mlp_dim=128, num_classes=10)


# Name -> what to build, and the shape of its input.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LayerNorm 32x128": (partial(nn.LayerNorm, 128), (32, 128)),
    "RMSNorm 32x128": (partial(nn.RMSNorm, 128), (32, 128)),
    "BatchNorm1d 32x128": (partial(nn.BatchNorm1d, 128), (32, 128)),
    "GroupNorm 8x32x8x8": (partial(nn.GroupNorm, 8, 32), (8, 32, 8, 8)),
    "InstanceNorm2d 8x32x8x8": (partial(nn.InstanceNorm2d, 32, affine=True), (8, 32, 8, 8)),
    "encoder, 4 layers of 64": (lambda: encoder(1, width=64, layers=4)[0], (4, 16, 64)),
    "ViT, 6 layers of 64": (_vit, (4, 3, 32, 32)),
    "ResNet-18": (_resnet18, (4, 3, 64, 64)),
}


def measure(what: str, turns: int) -> Iterator[Row]:
    """A row for the stock module, and for each way to swap it."""
    make, shape = CASES[what]
    torch.manual_seed(0)
    stock = make().train()
    x = torch.randn(shape, requires_grad=True)
    watched, unwatched = {"track_running_stats": True}, {"track_running_stats": False}
    modules = {
        "stock": stock,
        "standard": normplug.swap(copy.deepcopy(stock)),
        "golden": normplug.swap(copy.deepcopy(stock), "golden"),
        "standard, not watched": normplug.swap(copy.deepcopy(stock), **unwatched),
        "golden, not watched": normplug.swap(copy.deepcopy(stock), "golden", **unwatched),
        "standard, watched": normplug.swap(copy.deepcopy(stock), **watched),
    }
    calls = {name: partial(_step, module, x) for name, module in modules.items()}
    times = in_turns({name: back_to_back(call) for name, call in calls.items()}, turns)
    origin = stamp(gpu=False)
    for name, samples in times.items():
        ratios = [ours / theirs for ours, theirs in zip(samples, times["stock"], strict=True)]
        yield {
            "what": what,
            "provider": name,
            **spread("wall_us", samples),
            "over_stock": statistics.median(ratios),
            **origin,
        }


def _step(module: nn.Module, x: Tensor) -> None:
    x.grad = None
    module.zero_grad()
    module(x).square().mean().backward()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose name has this text")
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    a = parser.parse_args(argv)
    torch.set_num_threads(1)
    for what in [what for what in CASES if a.only in what]:
        rows = list(measure(what, a.turns))
        print(Rows(rows, COLUMNS), flush=True)
        add_to_file(a.json, rows)


if __name__ == "__main__":
    main()
