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
from nets import LAYOUTS, NETS, has_layouts, laid_out
from normplug._ops import convolutions
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


class PlainConvolutions(nn.Module):
    """A fused model that leaves the gradients of all convolutions to PyTorch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        devices = convolutions.DEVICES
        convolutions.DEVICES = ()
        try:
            return self.net(*args, **kwargs)
        finally:
            convolutions.DEVICES = devices


def plain_convolutions(net: nn.Module) -> nn.Module:
    """Swap and fuse a model, but for the gradients of its convolutions."""
    return PlainConvolutions(normplug.fuse(normplug.swap(net, MODE)))


def plain_convolutions_compiled(net: nn.Module) -> nn.Module:
    """The same, compiled."""
    fused = normplug.fuse(normplug.swap(net, MODE))
    return PlainConvolutions(torch.compile(fused))


def shortcuts_apart(net: nn.Module) -> nn.Module:
    """Let the norms of a fused model's shortcuts run by themselves."""
    for module in net.modules():
        if hasattr(module, "_may_add"):
            module._may_add = lambda x: False
    return net


_USUAL = models.usual_arms(MODE)
ARMS = _USUAL | {
    "eager+graph": _USUAL["eager"],
    "swap+fuse+graph": _USUAL["swap+fuse"],
    "plain-convolutions": plain_convolutions,
    "plain-convolutions+compile": plain_convolutions_compiled,
    "swap+fuse+recompute": lambda net: normplug.fuse(
        normplug.swap(net, MODE), recompute=True
    ),
    "swap+fuse-shortcuts": lambda net: shortcuts_apart(
        normplug.fuse(normplug.swap(net, MODE))
    ),
    "no-norm": without_norms,
    "liger": rivals.liger_llama,
}


def measure(a: Namespace) -> Iterator[Rows]:
    """The rows of each network: of each batch size, or `a.batch`, in each layout."""
    how = {"mode": MODE, "autocast": torch.bfloat16, "rounds": a.rounds}
    arms = {name: ARMS[name] for name in a.arms}
    for name in a.rows:
        for batch in NETS[name].batches if a.batch is None else (a.batch,):
            torch.manual_seed(0)
            made = attempt(name, partial(NETS[name].make, batch=batch))
            if made is None:  # its library is not installed
                continue
            model, data, loss = made
            model.to(a.device)
            layouts = a.layout if has_layouts(data) else [None]
            for layout in layouts:
                facts = {"model": name, "batch": batch}
                if layout is not None:
                    facts["layout"] = layout
                    model, data = laid_out(model, data, layout)
                rows = models.measure(model, data, loss, arms=arms, **how)
                named = [{**facts, **row} for row in rows]
                columns = ("model", "batch", "layout", *models.COLUMNS)
                yield Rows(named, columns, rows.notes)


OPTIONS: dict[str, Any] = {
    "--rows": {"nargs": "+", "choices": NETS, "default": list(NETS), "metavar": "NAME"},
    "--batch": {"type": int, "help": "samples a step; default: each model's own"},
    "--arms": {"nargs": "+", "choices": ARMS, "default": ["eager", "swap", "swap+fuse"]},
    "--layout": {
        "nargs": "+",
        "choices": LAYOUTS,
        "default": [None],
        "help": "of images; default: the network's own",
    },
    "--rounds": {"type": int, "default": models.ROUNDS},
}
main = partial(script.main, __doc__, measure, OPTIONS)

if __name__ == "__main__":
    main()
