"""Measure whole training steps: a model as it is, compiled, swapped, fused, and without its norms.

All arms of a model start from the same weights, are resident at once, and take turns.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import normplug
from normplug.bench.groups import profiled
from normplug.bench.results import Results, Row
from normplug.bench.timing import StepStopwatch

MODE = "golden"
DTYPE = torch.bfloat16  # of autocast
MOMENTUM = 0.9
# The work of a step is the same at any rate. At this one the weights stay what they are, where
# without norms they would soon be infinite, and infinities take the GPU less power and time.
LEARNING_RATE = 0.0
WARM_UPS = 10  # steps, compilation among them
ROUNDS, TURN = 8, 5  # rounds of turns, measured steps in each
SEED = 0  # of weights, of images and of the order of turns
PACKAGES = ("torchvision",)
SETTINGS = {
    "mode": MODE,
    "autocast": str(DTYPE).removeprefix("torch."),
    "optimizer": f"SGD, momentum {MOMENTUM}, foreach",
    "warm_ups": WARM_UPS,
    "rounds": ROUNDS,
    "steps_a_turn": TURN,
}

T = TypeVar("T")
Change = Callable[[nn.Module], Any]
Step = Callable[..., Tensor]  # takes what to call between its parts, or nothing


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        build: takes classes and image_size; the network with random weights.
        batches: images a step, in the order of measuring.
        image_size: height and width, in pixels.
        classes: outputs.
        channels_last: how images and weights lie in memory.
    """

    build: Callable[..., nn.Module]
    batches: tuple[int, ...]
    image_size: int
    classes: int
    channels_last: bool


class Case(NamedTuple):
    """A model and a number of images a step."""

    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


# torchvision is imported where it is used: the command line names the models without it.
def _resnet(arch: str, *, classes: int, image_size: int) -> nn.Module:
    from normplug.experiment.models import resnet

    return resnet(arch, num_classes=classes, image_size=image_size)


def _vit_b_16(*, classes: int, image_size: int) -> nn.Module:
    from normplug.experiment.models import vit

    return vit(
        num_classes=classes,
        image_size=image_size,
        patch_size=16,
        hidden_dim=768,
        depth=12,
        heads=12,
        mlp_ratio=4,
    )


def _convnext_tiny(*, classes: int, image_size: int) -> nn.Module:
    from torchvision.models import convnext_tiny

    return convnext_tiny(num_classes=classes)


MODELS = {
    "resnet50": Model(partial(_resnet, "resnet50"), (256,), 224, 1000, channels_last=True),
    "resnet18-cifar": Model(partial(_resnet, "resnet18"), (512, 128), 32, 10, channels_last=True),
    "vit_b_16": Model(_vit_b_16, (128,), 224, 1000, channels_last=False),
    "convnext_tiny": Model(_convnext_tiny, (128,), 224, 1000, channels_last=True),
}


def _swap(net: nn.Module) -> nn.Module:
    return normplug.swap(net, MODE)


def _fuse(net: nn.Module) -> nn.Module:
    return normplug.fuse(net)


def _fuse_and_recompute(net: nn.Module) -> nn.Module:
    return normplug.fuse(net, recompute=True)


def without_norms(net: nn.Module) -> nn.Module:
    """Put an `nn.Identity` in the place of every norm layer, subclasses included."""
    for row in normplug.plan(net):
        for path in (row.path, *row.aliases):
            net.set_submodule(path, nn.Identity())
    return net


# name -> what is done to the stock model, in this order.
ARMS: dict[str, tuple[Change, ...]] = {
    "eager": (),
    "compile": (torch.compile,),
    "swap": (_swap,),
    "swap+fuse": (_swap, _fuse),
    "swap+fuse+recompute": (_swap, _fuse_and_recompute),
    "swap+fuse+compile": (_swap, _fuse, torch.compile),
    "eager+graph": (),
    "swap+fuse+graph": (_swap, _fuse),
    "no-norm": (without_norms,),
}
# Their whole step, optimizer included, is one CUDA graph: what the GPU takes without the host.
GRAPHED = ("eager+graph", "swap+fuse+graph")


def select(models: Sequence[str] | None, batch: int | None) -> list[Case]:
    """The cases of the models named, in the order of `MODELS`.

    Args:
        models: names in `MODELS`; None for all.
        batch: images a step; None for each model's own.
    """
    return [
        Case(name, size)
        for name, model in MODELS.items()
        if models is None or name in models
        for size in (model.batches if batch is None else (batch,))
    ]


def run(
    cases: Sequence[Case], arms: Sequence[str], json: Path | None, profile: Path | None
) -> Results:
    """Measure and print every case on the GPU.

    Args:
        cases: what to measure.
        arms: names in `ARMS`.
        json: where to keep the rows; None for nowhere.
        profile: where to keep the GPU's time by groups of kernels; None to do without.
    """
    stopwatch = StepStopwatch()
    results = Results(json, PACKAGES, settings=SETTINGS)
    profiles = Results(profile, PACKAGES, settings=SETTINGS) if profile else None
    print(f"{results.content['device']}, {results.content['versions']}")
    for case in cases:
        attempt(str(case), partial(measure, case, arms, stopwatch, "cuda", results, profiles))
        gc.collect()
        torch.cuda.empty_cache()
    return results


def measure(
    case: Case,
    arms: Sequence[str],
    stopwatch: StepStopwatch,
    device: str,
    results: Results,
    profiles: Results | None,
) -> None:
    """Add a row for each arm that works; of the others, what is wrong is printed."""
    steps, facts = warmed(case, arms, stopwatch, device)
    times, host = in_turns(case, steps, stopwatch)
    rows = [
        {**case._asdict(), "arm": arm, **figures(case.batch, ms), **facts[arm]}
        | {"host_ms": statistics.median(host[arm])}
        for arm, ms in times.items()
    ]
    for row in rows:
        results.add(row)
    print(line(case, rows) if rows else f"{case}: no arm", flush=True)
    if profiles is not None:
        for arm in times:
            found = attempt(f"{case}: the profile of {arm}", partial(profiled, steps[arm]))
            if found is not None:
                profiles.add({**case._asdict(), "arm": arm, **found})


def warmed(
    case: Case, arms: Sequence[str], stopwatch: StepStopwatch, device: str
) -> tuple[dict[str, Step], dict[str, Row]]:
    """Arm -> its training step, ready to be measured; and arm -> its peak memory and loss."""
    torch.compiler.reset()  # earlier cases would count towards its limit of recompilations
    model = MODELS[case.model]
    torch.manual_seed(SEED)
    stock = model.build(classes=model.classes, image_size=model.image_size)
    nothing = stopwatch.held_bytes()
    batch = make_batch(case, device)
    batch_bytes = stopwatch.held_bytes() - nothing
    # The libraries' workspaces stay: they are there before the first arm, so none is charged.
    attempt(
        f"{case}: the first step",
        lambda: make_step(build(stock, "eager", model, device), *batch)(),
    )

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
    stock: nn.Module,
    arm: str,
    model: Model,
    batch: tuple[Tensor, Tensor],
    stopwatch: StepStopwatch,
) -> tuple[Step, int, float]:
    """An arm's step after the warm-up, the bytes at its peak, the other arms' too, and its loss.

    Raises:
        ArithmeticError: the loss is no finite number.
    """
    step = make_step(build(stock, arm, model, batch[0].device.type), *batch)
    for _ in range(WARM_UPS):
        loss = step()
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss.item()}, which would make the step faster")
    peak = stopwatch.peak_bytes(step)  # before capture: a graph's memory is its own, and not seen
    return Captured(step) if arm in GRAPHED else step, peak, loss.item()


def build(stock: nn.Module, arm: str, model: Model, device: str) -> nn.Module:
    """A copy of `stock`, changed as the arm says, on the device."""
    net = copy.deepcopy(stock).to(device).to(memory_format=_memory_format(model)).train()
    for change in ARMS[arm]:
        net = change(net)
    return net


def make_batch(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    model = MODELS[case.model]
    images = torch.randn(case.batch, 3, model.image_size, model.image_size, device=device)
    labels = torch.randint(model.classes, (case.batch,), device=device)
    return images.contiguous(memory_format=_memory_format(model)), labels


def make_step(net: nn.Module, images: Tensor, labels: Tensor) -> Step:
    """A whole training step, which returns its loss and does not wait for the GPU."""
    optimizer = SGD(net.parameters(), LEARNING_RATE, momentum=MOMENTUM, foreach=True)

    def step(between: Callable[[], None] = _nothing) -> Tensor:
        with torch.autocast(images.device.type, DTYPE):
            loss = F.cross_entropy(net(images), labels)
        between()
        loss.backward()
        between()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Captured:
    """A step as one CUDA graph, replayed at each call; the loss is overwritten each time.

    It holds on to the step, whose weights and whose optimizer's state lie outside the graph's own
    memory, and which nothing else may hold.
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
        """Replay; there are no parts to call anything between."""
        self._graph.replay()
        return self._loss


def in_turns(
    case: Case, steps: Mapping[str, Step], stopwatch: StepStopwatch
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Arm -> milliseconds of each step, and of the host in each round; in shuffled order."""
    times: dict[str, list[float]] = {arm: [] for arm in steps}
    host: dict[str, list[float]] = {arm: [] for arm in steps}

    def turn(arm: str) -> bool:
        times[arm] += stopwatch.turn_ms(steps[arm], TURN)
        host[arm].append(stopwatch.host_ms(steps[arm]))
        return True

    shuffled = random.Random(SEED)
    for _ in range(ROUNDS):
        for arm in shuffled.sample(list(times), len(times)):
            if not attempt(f"{case}: {arm}", partial(turn, arm)):
                del times[arm], host[arm]
    return times, host


def attempt(what: str, call: Callable[[], T]) -> T | None:
    """What `call` returns; where it fails, None, and why is printed."""
    try:
        return call()
    except Exception as error:  # of whatever kind: the others go on
        print(f"{what} is left out: {error!r}", file=sys.stderr, flush=True)
    # Only here, where the traceback that held the tensors is gone.
    gc.collect()
    torch.cuda.empty_cache()
    return None


def figures(batch: int, samples_ms: list[float]) -> Row:
    """What the measured steps say."""
    ms = statistics.median(samples_ms)
    quintiles = statistics.quantiles(samples_ms, n=5, method="inclusive")
    return {
        "ms": ms,
        "ms_p20": quintiles[0],
        "ms_p80": quintiles[-1],
        "steps": len(samples_ms),
        "images_per_s": 1e3 * batch / ms,
    }


def line(case: Case, rows: list[Row]) -> str:
    """The rows of a case as they are printed."""
    cells = [
        f"{row['arm']} {row['ms']:.2f} ms {row['images_per_s']:.0f} images/s "
        f"{row['peak_gib']:.2f} GiB host {row['host_ms']:.1f} ms"
        for row in rows
    ]
    return f"{case} | {' | '.join(cells)}"


def _memory_format(model: Model) -> torch.memory_format:
    return torch.channels_last if model.channels_last else torch.contiguous_format
