"""Measure whole training steps: a model as it is, compiled, swapped, fused, and without its norms.

All arms of a model start from the same weights, are in memory together, and take turns.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import SGD

import normplug
from normplug.bench import native, rivals
from normplug.bench.groups import profiled
from normplug.bench.nets import EXTRAS, MODELS, Batch, Case, Model
from normplug.bench.results import STEP, Results, Row, spread
from normplug.bench.timing import StepStopwatch

MODE = "golden"
DTYPE = torch.bfloat16  # of autocast
MOMENTUM = 0.9
# A step's work does not depend on the learning rate. A rate of 0 keeps the weights finite: without
# norms they would soon overflow, and infinities take a GPU less power, so it would run faster.
LEARNING_RATE = 0.0
WARM_UPS = 5  # steps, including compilation
ROUNDS, TURN = 6, 2  # rounds of turns; measured steps per turn
SEED = 0  # for weights, samples and the order of turns
PACKAGES = tuple(EXTRAS)
SETTINGS = {
    "mode": MODE,
    "autocast": str(DTYPE).removeprefix("torch."),
    "optimizer": f"SGD, momentum {MOMENTUM}, foreach",
    "warm_ups": WARM_UPS,
    "steps_a_turn": TURN,
}

T = TypeVar("T")
Change = Callable[[nn.Module], Any]
Step = Callable[..., Tensor]  # calls its optional argument between forward, backward and optimizer


def _nothing() -> None:
    pass


def _swap(net: nn.Module) -> nn.Module:
    return normplug.swap(net, MODE)


def _fuse(net: nn.Module, recompute: bool = False) -> nn.Module:
    return normplug.fuse(net, recompute=recompute)


def without_norms(net: nn.Module) -> nn.Module:
    """Replace every norm layer, subclasses too, by an `nn.Identity`."""
    for row in normplug.plan(net):
        for path in (row.path, *row.aliases):
            net.set_submodule(path, nn.Identity())
    return net


# name -> the changes made to the stock model, in this order
ARMS: dict[str, tuple[Change, ...]] = {
    "eager": (),
    "compile": (torch.compile,),
    "swap": (_swap,),
    "swap+fuse": (_swap, _fuse),
    "swap+fuse+recompute": (_swap, partial(_fuse, recompute=True)),
    "swap+fuse+compile": (_swap, _fuse, torch.compile),
    "eager+graph": (),
    "swap+fuse+graph": (_swap, _fuse),
    "no-norm": (without_norms,),
    "liger": (rivals.liger_llama,),
}
# Arms whose whole step, optimizer included, is one CUDA graph: the GPU never waits for the host.
GRAPHED = ("eager+graph", "swap+fuse+graph")
USUAL = ("eager", "swap", "swap+fuse")  # the arms that are measured unless others are named


def run(
    cases: Sequence[Case],
    arms: Sequence[str],
    rounds: int,
    results: Results,
    profiles: Results | None,
) -> bool:
    """Measure and print every case on the GPU; return whether any arm worked.

    The rows go to `results`, and the GPU's time by groups of kernels to `profiles`.
    """
    stopwatch = StepStopwatch()
    print(f"{results.content['device']}, {results.content['versions']}")
    native.build()
    done = []
    for case in cases:
        task = partial(measure, case, arms, rounds, stopwatch, "cuda", results, profiles)
        done.append(attempt(str(case), task))
        gc.collect()
        torch.cuda.empty_cache()
    return any(done)


def measure(
    case: Case,
    arms: Sequence[str],
    rounds: int,
    stopwatch: StepStopwatch,
    device: str,
    results: Results,
    profiles: Results | None,
) -> bool:
    """Add a row for each arm that works; print why the others do not. Return whether any does."""
    steps, facts = warmed(case, arms, stopwatch, device)
    times, host = in_turns(case, steps, rounds, stopwatch)
    rows = []
    for arm, ms in times.items():
        name = {**case._asdict(), "arm": arm}
        found = attempt(f"{case}: the profile of {arm}", partial(profiled, steps[arm])) or {}
        row = {
            **name,
            **figures(case.batch, ms, host[arm]),
            "gpu_ms": found.pop("gpu_ms", None),
            **facts[arm],
        }
        rows.append(row)
        results.update({**row, "native": native.status()}, STEP)
        if found and profiles is not None:
            profiles.update({**name, **found}, STEP)
    print(line(case, rows) if rows else f"{case}: no arm", flush=True)
    return bool(rows)


def warmed(
    case: Case, arms: Sequence[str], stopwatch: StepStopwatch, device: str
) -> tuple[dict[str, Step], dict[str, Row]]:
    """Arm -> its step after the warm-up, and arm -> its peak memory and loss."""
    torch.compiler.reset()  # earlier cases count towards the recompilation limit
    model = MODELS[case.model]
    torch.manual_seed(SEED)
    stock = model.build()
    before = stopwatch.held_bytes()
    batch = model.random_batch(case.batch, device)
    batch_bytes = stopwatch.held_bytes() - before
    # Libraries allocate workspaces in the first step and keep them: charge no arm for them.
    eager = partial(build, stock, "eager", model, device)
    attempt(f"{case}: the first step", lambda: make_step(eager(), model, batch)())

    steps: dict[str, Step] = {}
    facts: dict[str, Row] = {}
    for arm in arms:
        others = stopwatch.held_bytes() - batch_bytes
        made = attempt(f"{case}: {arm}", partial(warm, stock, arm, model, batch, stopwatch))
        if made is not None:
            steps[arm], peak, loss = made
            facts[arm] = {"peak_gib": (peak - others) / 2**30, "loss": loss}
    return steps, facts


def warm(
    stock: nn.Module, arm: str, model: Model, batch: Batch, stopwatch: StepStopwatch
) -> tuple[Step, int, float]:
    """An arm's step after the warm-up, the bytes held at its peak (by all arms), and its loss.

    Raises:
        ArithmeticError: the loss is not finite.
    """
    step = make_step(build(stock, arm, model, batch.target.device.type), model, batch)
    for _ in range(WARM_UPS):
        loss = step()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss.item()}, which would make the step faster")
    peak = stopwatch.peak_bytes(step)  # before capture: a graph's own memory is not counted
    return Captured(step) if arm in GRAPHED else step, peak, loss.item()


def build(stock: nn.Module, arm: str, model: Model, device: str) -> nn.Module:
    """A copy of `stock` on the device, with the changes of the arm."""
    net = copy.deepcopy(stock).to(device).to(memory_format=model.memory_format).train()
    for change in ARMS[arm]:
        net = change(net)
    return net


def make_step(net: nn.Module, model: Model, batch: Batch) -> Step:
    """Make a whole training step, which returns the loss and does not wait for the GPU."""
    optimizer = SGD(net.parameters(), LEARNING_RATE, momentum=MOMENTUM, foreach=True)

    def step(between: Callable[[], None] = _nothing) -> Tensor:
        with torch.autocast(batch.target.device.type, DTYPE):
            loss = model.loss(net(*batch.inputs), batch.target)
        between()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Captured:
    """A step as one CUDA graph, which each call replays; a replay overwrites the loss.

    It keeps the step alive: the graph reads weights and optimizer state that it does not own.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            self._loss = step()

    def __call__(self, between: Callable[[], None] = _nothing) -> Tensor:
        """Replay the graph; `between` is not called, as the replay has no parts."""
        self._graph.replay()
        return self._loss


def in_turns(
    case: Case, steps: Mapping[str, Step], rounds: int, stopwatch: StepStopwatch
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Arm -> milliseconds of each step, and of the host in each round; turns are shuffled."""
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    host: dict[str, list[float]] = {arm: [] for arm in steps}

    def turn(arm: str) -> bool:
        times[arm] += stopwatch.turn_ms(steps[arm], TURN)
        host[arm].append(stopwatch.host_ms(steps[arm]))
        return True

    shuffled = random.Random(SEED)
    for _ in range(rounds):
        for arm in shuffled.sample(list(times), len(times)):
            if not attempt(f"{case}: {arm}", partial(turn, arm)):
                del times[arm], host[arm]
    return times, host


def attempt(what: str, call: Callable[[], T]) -> T | None:
    """Return `call()`; if it raises, print why and return None."""
    try:
        return call()
    except Exception as error:  # of any kind: measure the other arms anyway
        print(f"{what} is left out: {error!r}", file=sys.stderr, flush=True)
    # Not in the except block: the traceback there keeps tensors alive.
    gc.collect()
    torch.cuda.empty_cache()
    return None


def figures(batch: int, samples_ms: list[float], host_ms: list[float]) -> Row:
    """The best and the median of the measured steps, their spread and the speed of the median."""
    times = spread("ms", samples_ms)
    median = times.pop("ms")
    return {
        "ms": min(samples_ms),
        "median_ms": median,
        **times,
        "steps": len(samples_ms),
        "images_per_s": 1e3 * batch / median,
        "host_ms": min(host_ms),
        "median_host_ms": statistics.median(host_ms),
    }


def line(case: Case, rows: list[Row]) -> str:
    """The rows of a case as one line of text, with the best times."""
    cells = [
        f"{row['arm']} {row['ms']:.2f} ms, GPU {row['gpu_ms'] or math.nan:.2f}, "
        f"host {row['host_ms']:.2f}, {row['peak_gib']:.2f} GiB"
        for row in rows
    ]
    return f"{case} | {' | '.join(cells)}"
