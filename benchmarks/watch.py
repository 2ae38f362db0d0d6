"""What `normplug.watch` costs a training loop, with and without in turns.

python benchmarks/watch.py --rows resnet18-cifar vit_b_16 --json watch.json
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import normplug
import script
from nets import NETS
from normplug._files import stamp
from normplug.bench import models
from normplug.bench.rows import Rows
from normplug.bench.timing import at_rest

COLUMNS = ("model", "batch", "every", "ms", "watched_ms", "cost")


def measure(a: Namespace) -> Iterator[Rows]:
    """For each network: the median cost of watching, over rounds of `a.steps` steps each."""
    for name in a.rows:
        batch = NETS[name].batches[0]
        torch.manual_seed(0)
        model, data, loss = NETS[name].make(batch=batch)
        data = tuple(tensor.to(a.device) for tensor in data)
        step, net = models.make_step(
            model.to(a.device), data, loss, torch.bfloat16, _fused
        )
        ms: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * (a.rounds + 1)):  # the first round warms up
            watched = turn % 2 == 1
            with normplug.watch(net, every=a.every) if watched else nullcontext():
                start = at_rest()
                for _ in range(a.steps):
                    step()
                ms[watched].append((at_rest() - start) / a.steps * 1e3)
        pairs = list(zip(ms[False], ms[True], strict=True))[1:]
        costs = torch.tensor([watched / plain - 1 for plain, watched in pairs])
        plain, watched_ms = (
            torch.tensor(each).median().item() for each in zip(*pairs, strict=True)
        )
        row: dict[str, Any] = {
            **{"model": name, "batch": batch, "every": a.every, "steps": a.steps},
            **{"ms": plain, "watched_ms": watched_ms, "cost": costs.mean().item()},
            **{"costs": costs.tolist(), **stamp(a.device.type == "cuda")},
        }
        yield Rows([row], COLUMNS, [])


def _fused(net: torch.nn.Module) -> torch.nn.Module:
    return normplug.fuse(normplug.swap(net))


OPTIONS: dict[str, Any] = {
    "--rows": {"nargs": "+", "choices": NETS, "default": ["resnet18-cifar", "vit_b_16"]},
    "--every": {"type": int, "default": 50, "help": "steps between measurements"},
    "--steps": {"type": int, "default": 200, "help": "a turn"},
    "--rounds": {"type": int, "default": 4},
}
main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
