"""Time whole training steps of a model: eager, compiled, swapped and fused, in turns."""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import normplug
from normplug import _torch
from normplug._batches import Reader
from normplug._files import stamp
from normplug._swap.layer_modes import ModesLike
from normplug._table import counts
from normplug.bench import timing
from normplug.bench.rows import ORIGIN, Row, Rows
from normplug.bench.timing import Change

Loss = Callable[[nn.Module, Any], Tensor]
Target = tuple[nn.Module, Any, Loss | None]

IMAGE = 224  # pixels, unless the model says otherwise
WARM_UPS = 4  # steps after the first
ROUNDS = 10
GRAPH = "+graph"  # ends the name of an arm whose step is one CUDA graph
COLUMNS = (
    *("arm", "ms", "ms_p20", "ms_p80", "over_eager", "over_compile"),
    *("gpu_ms", "peak_gib", "first_step_s"),
)


def usual_arms(mode: Any) -> dict[str, Change]:
    """Arm -> what it does to a copy of the model; swapped in a mode."""
    swap = partial(normplug.swap, mode=mode)
    return {
        "eager": lambda model: model,
        "compile": torch.compile,
        "swap": swap,
        "swap+fuse": lambda model: normplug.fuse(swap(model)),
        "swap+fuse+compile": lambda model: torch.compile(normplug.fuse(swap(model))),
    }


def measure(
    model: nn.Module,
    batch: Any,
    step: Loss | None = None,
    *,
    mode: ModesLike = "standard",
    autocast: torch.dtype | None = None,
    rounds: int = ROUNDS,
    arms: Mapping[str, Change] | None = None,
    verbose: bool = False,
) -> Rows:
    """Time training steps of a model: eager, compiled, swapped, fused, and fused and compiled.

    A step is a forward, a backward and an SGD step with a learning rate of 0. `print` the result
    for a table and a sentence, or call its `to_pandas()`. The model itself is not changed.

    Args:
        model: a model with stock norms, on the device to measure.
        batch: a batch, or a loader, whose first batch is used. It is moved to the model's device as
            a whole. docs/doctor.md says how a batch is read.
        step: returns the loss of a model for the batch, with the labels in it; by default the
            `loss` of the model's output if it has one, and otherwise the mean square of all
            floating-point outputs.
        mode: the mode to swap in, as for `normplug.swap`.
        autocast: the dtype of autocast in the forward; None for no autocast.
        rounds: how many turns each arm gets; 10 by default.
        arms: arm -> what it does to a copy of the model; None for the usual arms. The whole step
            of an arm whose name ends in `+graph` is captured once and replayed, as one CUDA graph.
        verbose: say on stderr which arm is being prepared, and how long its first step took.

    Returns:
        A row for each arm: the median `ms` of a step, `gpu_ms` in which the GPU is busy, the peak
        memory, and the seconds of the first step. An arm that fails is left out. The arms of CUDA
        graphs have no peak memory: a graph keeps the memory of its step.

    Raises:
        RuntimeError: the model does not take the batch.
        ValueError: the loss is not finite or has no gradient, or a loader yields no batch.
    """
    gpu = next(model.parameters()).is_cuda
    reader = Reader("bench.measure", model)
    batch = reader.prepared(reader.first(batch))
    step = step or default_step(model, batch, autocast)
    make = partial(make_step, model, batch, step, autocast)
    torch.compiler.reset()  # earlier models count towards the recompilation limit
    # Libraries allocate workspaces in the first step and keep them: charge no arm for them.
    loss = make(lambda net: net)[0]()
    if not loss.isfinite():
        raise ValueError(
            f"normplug.bench.measure: the loss is {loss.item()}, which would make the step faster. "
            "Pass other data, or a `step` with another loss."
        )
    origin = stamp(gpu, "transformers", "timm", "diffusers", "liger-kernel")
    facts = {
        "mode": str(mode),
        "autocast": str(autocast).removeprefix("torch."),
        **origin,
    }
    steps: dict[str, timing.Call] = {}
    rows: dict[str, Row] = {}
    say = timing.say if verbose else lambda text: None
    for name, change in (usual_arms(mode) if arms is None else arms).items():
        say(f"{name}: first steps")
        make_arm = partial(make, change)
        warmed = timing.attempt(name, partial(_warmed, name, make_arm, batch))
        if warmed is not None:
            steps[name], first = warmed
            rows[name] = {"arm": name, **facts, **first}
            say(f"{name}: the first took {first['first_step_s']:.3g} s")
    say(f"{rounds} rounds of {', '.join(steps)}")
    turns = {name: timing.back_to_back(step, 1e3) for name, step in steps.items()}
    for name, timed in timing.in_turns("ms", turns, rounds).items():
        rows[name] |= timed
        if gpu:
            rows[name]["gpu_ms"] = timing.gpu_ms(steps[name])
    return Rows(rows.values(), COLUMNS, _notes(model, rows, ORIGIN.format(**origin)))


def default_step(
    model: nn.Module, batch: Any, autocast: torch.dtype | None = None
) -> Loss:
    """The default of `measure`'s `step`: it calls a model as `model` takes the batch."""
    reader = Reader("bench.measure", copy.deepcopy(model).train())
    with _autocast(model, autocast):
        call = reader.call(batch)
        reader.apply(reader.model, call)
    return lambda net, _: _loss(net(*call.args, **call.keywords))


def _loss(output: Any) -> Tensor:
    """The loss of a model's output."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in _torch.tree_leaves(output) if isinstance(leaf, Tensor)]
    squares = [leaf.float().square().mean() for leaf in leaves if leaf.requires_grad]
    if not squares:
        raise ValueError(
            "normplug.bench.measure: the model's output has no tensor with a gradient. Pass a "
            "`step` that takes the model and the batch, and returns a loss."
        )
    return torch.stack(squares).sum()


def make_step(
    model: nn.Module, batch: Any, loss: Loss, autocast: torch.dtype | None, change: Change
) -> tuple[timing.Call, nn.Module]:
    """A training step of a changed copy of the model, and that copy."""
    net = change(copy.deepcopy(model).train())
    # A step's work does not depend on the rate. At 0 the weights stay finite: with infinities, a
    # GPU draws less power, and so runs faster.
    optimizer = SGD(
        [p for p in net.parameters() if p.requires_grad], lr=0.0, momentum=0.9
    )

    def step() -> Tensor:
        with _autocast(model, autocast):
            value = loss(net, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step, net


def captured(step: timing.Call) -> timing.Call:
    """A training step that replays one CUDA graph of `step`: the GPU does not wait for the host.

    As in `torch.cuda.graph`'s documentation, some steps run on a stream of their own first.

    Raises:
        RuntimeError: there is no GPU, or the step waits for a result of the GPU, which cannot be
            captured.
    """
    if not torch.cuda.is_initialized():
        raise RuntimeError(
            f"normplug.bench.measure: an arm whose name ends in {GRAPH} needs a model on a CUDA "
            "device."
        )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = step()
    return partial(_replay, graph, value, step)


def _replay(graph: torch.cuda.CUDAGraph, value: Tensor, step: timing.Call) -> Tensor:
    """Replay a graph of `step`, whose model and optimizer must live as long as the graph."""
    graph.replay()
    return value


def _autocast(model: nn.Module, dtype: torch.dtype | None) -> Any:
    """Autocast to a dtype on the model's device; None for no autocast."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, dtype)


def _warmed(
    name: str, make: Callable[[], tuple[timing.Call, nn.Module]], batch: Any
) -> tuple[timing.Call, Row]:
    """An arm's step after the warm-up, and the first fields of its row."""
    gpu = torch.cuda.is_initialized()
    gc.collect()
    timing.at_rest()
    others = torch.cuda.memory_allocated() if gpu else 0  # of other arms, and the batch
    step, net = make()
    start = timing.at_rest()
    step()
    facts: Row = {"first_step_s": timing.at_rest() - start}
    for _ in range(WARM_UPS):
        value = step()
    if name.endswith(GRAPH):
        step = captured(step)
        value = step()
    elif gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        parts = dict(batch) if isinstance(batch, Mapping) else batch
        tensors = (each for each in _torch.tree_leaves(parts) if isinstance(each, Tensor))
        others -= sum(each.nbytes for each in tensors)
        facts["peak_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30
    if "fuse" in name:
        facts["fused"] = normplug.fusions(getattr(net, "_orig_mod", net)).summary()
    return step, facts | {"loss": value.item()}


def _notes(model: nn.Module, rows: Mapping[str, Row], origin: str) -> list[str]:
    """What was swapped and fused, how much faster that is, and where it was measured."""
    plan = normplug.plan(model)
    swapped = counts(Counter(row.kind for row in plan if row.becomes))
    notes = [f"swapped: {swapped}, of {len(plan)} norm layers"]
    fused = rows.get("swap+fuse", {}).get("fused")
    if fused:
        notes.append(f"fused: {fused}")
    faster = []
    over_eager = rows.get("swap+fuse", {}).get("over_eager")
    if over_eager is not None:
        faster.append(f"fuse: {over_eager:.2f} times eager")
    over_compile = rows.get("swap+fuse+compile", {}).get("over_compile")
    if over_compile is not None:
        faster.append(f"with torch.compile: {over_compile:.2f} times compile alone")
    return [*notes, "; ".join(faster), origin]


def load(target: str, batch: int | None, options: dict[str, Any]) -> Target:
    """A model, a batch, and a function that returns the loss (None for the default).

    `target` is `file.py:function`, `name` or `library:name`; docs/measure.md says of what.
    """
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        if batch:
            options = {**options, "batch": batch}
        return _from_file(Path(place), name, options)
    for library, (names, make) in _LIBRARIES.items():
        if place not in ("", library) or not importlib.util.find_spec(library):
            continue
        if name in names():
            return make(name, batch or 8, **options)
    text = f"no model {target!r} in torchvision, timm or transformers."
    if target.endswith(".py"):
        text += f" For a function of a file, give {target}:NAME."
    missing = [name for name in _LIBRARIES if not importlib.util.find_spec(name)]
    if missing:
        text += f" Not installed: {', '.join(missing)} (pip install {' '.join(missing)})."
    raise ValueError(text)


def _from_file(path: Path, name: str, options: dict[str, Any]) -> Target:
    spec: Any = importlib.util.spec_from_file_location(
        f"normplug_target_{path.stem}", path
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{path} has no function {name!r}.")
    made = getattr(module, name)(**options)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(
            f"{path}:{name} must return (model, batch) or (model, batch, step)."
        )
    model, data, *step = made
    return model, data, step[0] if step else None


def _images(model: nn.Module, batch: int, size: int, classes: int) -> Target:
    data = torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))
    return model, data, lambda model, data: F.cross_entropy(model(data[0]), data[1])


def _torchvision(name: str, batch: int, size: int = IMAGE, **options: Any) -> Target:
    if name in ("googlenet", "inception_v3"):  # otherwise they have several outputs
        options = {"init_weights": False, "aux_logits": False, **options}
    model = import_module("torchvision.models").get_model(name, weights=None, **options)
    return _images(model, batch, size, options.get("num_classes", 1000))


def _timm(name: str, batch: int, size: int | None = None, **options: Any) -> Target:
    model = import_module("timm").create_model(name, **options)
    size = size or model.default_cfg.get("input_size", (IMAGE,))[-1]
    return _images(model, batch, size, model.num_classes)


# Kinds of models in transformers, the first that a model has.
_KINDS = ("SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "MASKED_LM", "CAUSAL_LM")


def _transformers(name: str, batch: int, length: int = 512, **options: Any) -> Target:
    auto = import_module("transformers.models.auto.modeling_auto")
    config = import_module("transformers").AutoConfig.for_model(name, **options)
    for kind in _KINDS:
        mapping = getattr(auto, f"MODEL_FOR_{kind}_MAPPING")
        if type(config) in mapping:
            break
    else:
        raise ValueError(
            f"{name!r} of transformers is not a language model or an image classifier."
        )
    model = mapping[type(config)](config)
    if kind == "IMAGE_CLASSIFICATION":
        size = getattr(config, "image_size", IMAGE)
        images = torch.randn(batch, getattr(config, "num_channels", 3), size, size)
        labels = torch.randint(config.num_labels, (batch,))
        return model, {"pixel_values": images, "labels": labels}, None
    length = min(length, getattr(config, "max_position_embeddings", length))
    tokens = torch.randint(config.vocab_size, (batch, length))
    data = {"input_ids": tokens, "labels": tokens.clone()}
    if kind.startswith("SEQ"):
        data["decoder_input_ids"] = tokens
    return model, data, None


def _torchvision_names() -> Iterable[str]:
    return import_module("torchvision.models").list_models()


def _timm_names() -> Iterable[str]:
    return import_module("timm").list_models()


def _transformers_names() -> Iterable[str]:
    return import_module("transformers").CONFIG_MAPPING


# library -> the names of its models, and what makes one
_LIBRARIES: dict[str, tuple[Callable[[], Iterable[str]], Callable[..., Target]]] = {
    "torchvision": (_torchvision_names, _torchvision),
    "timm": (_timm_names, _timm),
    "transformers": (_transformers_names, _transformers),
}
