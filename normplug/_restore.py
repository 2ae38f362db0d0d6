"""Run a model without side effects: copy it, and restore the random number generators."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normplug._torch import tree_leaves


def duplicate(thing: Any) -> Any:
    """A deep copy of a model or a batch, even with computed tensors, such as `weight_norm`'s.

    Gradients and the hooks on tensors are not copied.
    """
    inside = thing
    if isinstance(thing, nn.Module):
        inside = [vars(module) for module in thing.modules()]
    tensors = [leaf for leaf in tree_leaves(inside) if isinstance(leaf, Tensor)]
    computed = {id(t): t.clone() for t in tensors if not t.is_leaf}
    return copy.deepcopy(thing, computed)


@contextmanager
def generators_kept() -> Iterator[Any]:
    """Restore the generators of torch, numpy and random; yields numpy if it is in use."""
    devices: list[int] = []
    if torch.cuda.is_initialized():
        devices = list(range(torch.cuda.device_count()))
    numpy: Any = sys.modules.get("numpy")
    state = random.getstate()
    numpy_state = numpy and numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices):
            yield numpy
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(numpy_state)


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the generators of torch, numpy and random with 0, and restore them afterwards."""
    with generators_kept() as numpy:
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        random.seed(0)
        if numpy:
            numpy.random.seed(0)
        yield
