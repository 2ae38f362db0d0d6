"""Run a model on data without leaving a trace in it; find layers with running statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normplug._checks import must
from normplug._ops.peers import group_to_join
from normplug._swap.check import arguments, generators_kept
from normplug._swap.fold import write
from normplug._torch import BatchNormBase, InstanceNormBase, tree_map_only


def running_layers(model: nn.Module) -> dict[str, Any]:
    """Path -> layer of each BatchNorm and InstanceNorm with running statistics."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (BatchNormBase, InstanceNormBase))
        and getattr(module, "running_mean", None) is not None
    }


def is_frozen(module: nn.Module) -> bool:
    """Whether `normplug.freeze` has frozen the layer."""
    return "train" in vars(module)  # see `freezing`


def run(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch, moved to the model's device."""
    device = next((t.device for t in itertools.chain(model.parameters(), model.buffers())), None)
    if device is not None:
        batch = tree_map_only(Tensor, lambda t: t.to(device), batch)
    args, keywords = arguments(model, batch)
    return model(*args, **keywords)


def batches(caller: str, data: Any, most: int | None) -> Iterator[Any]:
    """Yield the first `most` batches of a loader; an error if there is none."""
    if isinstance(data, (Tensor, Mapping, str)) or not hasattr(data, "__iter__"):
        rule = "an iterable of batches, such as a DataLoader"
        got, way_out = type(data).__name__, "Put a single batch in a list."
        raise TypeError(must(caller, "loader", rule, got, way_out))
    count = 0
    for batch in itertools.islice(data, most):
        count += 1
        yield batch
    if count == 0:
        raise ValueError(f"normplug.{caller}: the loader gave no batch.")


def gathered(own: Tensor) -> list[Tensor]:
    """The tensors of all processes, of equal shapes, in the order of the ranks."""
    if (group := group_to_join(None)) is None:
        return [own]
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return every


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module, all buffers, and the random number generators.

    Inside, nothing is compiled: a compiled model would run without the hooks that measure.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_meta]
    try:
        with generators_kept(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for buffer, value in buffers:
            write(buffer, value)
