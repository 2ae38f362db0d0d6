"""Time whole training steps: the tables of docs/speed.md.

    python benchmarks/models.py --rows resnet50 gpt2 --arms eager swap swap+fuse --json models.json

Models run under bfloat16 autocast, swapped in mode standard.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import normplug
import rivals
import script
from nets import NETS
from normplug.bench import models
from normplug.bench.rows import Rows
from normplug.bench.timing import attempt

MODE = "standard"


def without_norms(net: nn.Module) -> nn.Module:
    """Replace every norm layer by an `nn.Identity`."""
    for row in normplug.plan(net):
        for path in (row.path, *row.aliases):
            net.set_submodule(path, nn.Identity())
    return net


ARMS = models.usual_arms(MODE) | {
    "swap+fuse+recompute": lambda net: normplug.fuse(
        normplug.swap(net, MODE), recompute=True
    ),
    "no-norm": without_norms,
    "liger": rivals.liger_llama,
}


def measure(a: Namespace) -> Iterator[Rows]:
    """The rows of each network, with each of its batch sizes or with `a.batch`."""
    how = {"mode": MODE, "autocast": torch.bfloat16, "rounds": a.rounds}
    arms = {name: ARMS[name] for name in a.arms}
    for name in a.rows:
        for batch in NETS[name].batches if a.batch is None else (a.batch,):
            torch.manual_seed(0)
            made = attempt(name, partial(NETS[name].make, batch=batch))
            if made is None:  # its library is not installed
                continue
            model, data, loss = made
            rows = models.measure(model.to(a.device), data, loss, arms=arms, **how)
            named = [{"model": name, "batch": batch, **row} for row in rows]
            yield Rows(named, ("model", "batch", *models.COLUMNS), rows.notes)


OPTIONS: dict[str, Any] = {
    "--rows": {"nargs": "+", "choices": NETS, "default": list(NETS), "metavar": "NAME"},
    "--batch": {"type": int, "help": "samples a step; default: each model's own"},
    "--arms": {"nargs": "+", "choices": ARMS, "default": ["eager", "swap", "swap+fuse"]},
    "--rounds": {"type": int, "default": models.ROUNDS},
}
main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
