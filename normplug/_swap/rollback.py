"""Restore layers when a conversion fails halfway."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy

from normplug._swap.fold import writing_to

# The containers among a layer's attributes that a conversion mutates in place.
_TABLES = ("_parameters", "_buffers", "_non_persistent_buffers_set")


@contextmanager
def all_or_nothing(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Restore every layer if the block raises."""
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
