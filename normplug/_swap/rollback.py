"""Put layers back as they were when a conversion fails halfway."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

from normplug._swap.fold import writing_to

# What a layer holds in containers of its own, which a conversion changes in place.
_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


@contextmanager
def all_or_nothing(layers: list[nn.Module]) -> Iterator[None]:
    """Put every layer back as it was if anything in the block fails."""
    before = [
        (m, m.__class__, {k: copy.copy(v) if k in _TABLES else v for k, v in vars(m).items()})
        for m in layers
    ]
    weights = (layer._parameters.get("weight") for layer in layers)
    values = [(w, w.detach().clone()) for w in weights if w is not None and not is_lazy(w)]
    try:
        yield
    except BaseException:
        for module, cls, state in before:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(state)
        for weight, value in values:
            with writing_to(weight):
                weight.copy_(value)
        raise
