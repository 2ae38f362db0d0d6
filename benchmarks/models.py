"""Time whole training steps: the tables of docs/speed.md.

    python benchmarks/models.py --rows resnet50 gpt2 --arms eager swap swap+fuse --json models.json

Models run under bfloat16 autocast, swapped in mode golden.
"""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import nets
import normplug
import rivals
import script
from normplug.bench import models
from normplug.bench.rows import Row, Rows
from normplug.bench.timing import Call

MODE = "golden"
USUAL = ("eager", "swap", "swap+fuse")
ALL = "all"
OTHER = "other"
# Groups of kernels, by name: the first rule that matches wins. Attention counts as gemm.
LIBRARIES = {
    "optimizer": r"multi_tensor_apply",
    "norm": r"norm(?!al)|\bbn_|GammaBeta|RowwiseMoments",
    "copy": r"copy|memcpy|memset|transpose|convertTensor|nchwToNhwc|nhwcToNchw",
    "conv/gemm": (
        r"conv(?!ert)|gemm|gemv|cutlass|xmma|nvjet|wgrad|dgrad|fprop|splitK|fmha|flash|sdpa"
    ),
    "elementwise": r"elementwise",
}
# Inductor names a kernel after all the ops in it: a kernel with a norm counts wholly as `norm`.
INDUCTOR = {
    "conv/gemm": r"^triton_tem_",
    "norm": r"norm|var_mean",
    "copy": r"_fused(_(_to_copy|clone|copy|cat|permute|transpose|view|t|convolution))+_\d+$",
    "elementwise": r"^triton_poi_",
}
GROUPS = ("norm", "conv/gemm", "elementwise", "copy", "optimizer", OTHER)


def group(kernel: str) -> str:
    """The group of `GROUPS` that a kernel belongs to, by its name."""
    rules = INDUCTOR if kernel.startswith("triton_") else LIBRARIES
    found = (name for name, rule in rules.items() if re.search(rule, kernel, re.IGNORECASE))
    return next(found, OTHER)


def groups_ms(spent: Mapping[str, float]) -> Row:
    """The GPU's milliseconds a step, by groups of kernels, as a field of a row."""
    ms = Counter(dict.fromkeys(GROUPS, 0.0))
    for kernel, us in spent.items():
        ms[group(kernel)] += us / 1e3
    return {"groups_ms": dict(ms)}


def without_norms(net: nn.Module) -> nn.Module:
    """Replace every norm layer by an `nn.Identity`."""
    for row in normplug.plan(net):
        for path in (row.path, *row.aliases):
            net.set_submodule(path, nn.Identity())
    return net


class Captured:
    """A step, optimizer included, as one CUDA graph, which each call replays.

    It keeps the step alive: the graph reads weights and optimizer state that it does not own.
    """

    def __init__(self, step: Call) -> None:
        self._step = step
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            step()

    def __call__(self) -> None:
        """Replay the graph."""
        self._graph.replay()


def captured(arm: str, step: Call) -> Call:
    """The step, or its CUDA graph if the arm is one."""
    return Captured(step) if arm.endswith("+graph") else step


def _fused(net: nn.Module, **how: bool) -> nn.Module:
    return normplug.fuse(normplug.swap(net, MODE), **how)


ARMS = models.usual_arms(MODE) | {
    "swap+fuse+recompute": partial(_fused, recompute=True),
    "eager+graph": lambda net: net,
    "swap+fuse+graph": _fused,
    "no-norm": without_norms,
    "liger": rivals.liger_llama,
}


def selected(names: Sequence[str], batch: int | None) -> Iterator[tuple[str, int]]:
    """Each network whose library is installed, with each of its batch sizes, or with `batch`."""
    for name in nets.NETS if ALL in names else names:
        library = nets.NETS[name].library
        if library and find_spec(library) is None:
            print(f"{name} is left out: it needs {library}", file=sys.stderr, flush=True)
            continue
        for size in nets.NETS[name].batches if batch is None else (batch,):
            yield name, size


def measure(name: str, batch: int, names: Sequence[str], rounds: int, device: Any) -> Rows:
    """A row for each arm, with the GPU's time by groups of kernels."""
    torch.manual_seed(0)
    model, data, loss = nets.NETS[name].make(batch=batch)
    rows = models.measure(
        model.to(device),
        data,
        loss,
        mode=MODE,
        autocast=torch.bfloat16,
        rounds=rounds,
        arms={arm: ARMS[arm] for arm in names},
        wrap=captured,
    )
    columns = ("model", "batch", *models.COLUMNS)
    for row in rows:
        if spent := row.pop("kernels_us", None):  # on a GPU
            row |= groups_ms(spent)
    return Rows([{"model": name, "batch": batch, **row} for row in rows], columns)


def _measure_all(a: Namespace) -> Iterator[Rows]:
    for name, batch in selected(a.rows, a.batch):
        yield measure(name, batch, list(ARMS) if ALL in a.arms else a.arms, a.rounds, a.device)


OPTIONS: dict[str, Any] = {
    "--rows": {"nargs": "+", "choices": (ALL, *nets.NETS), "default": [ALL], "metavar": "NAME"},
    "--batch": {"type": int, "help": "samples a step; default: each model's own"},
    "--arms": {"nargs": "+", "choices": (ALL, *ARMS), "default": USUAL, "metavar": "NAME"},
    "--rounds": {"type": int, "default": models.ROUNDS},
}
main = partial(script.main, __doc__, _measure_all, OPTIONS)

if __name__ == "__main__":
    main()
