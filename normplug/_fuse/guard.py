"""What a traced forward depends on, checked at each call.

The check takes 1.5 us for each fused module of a ResNet-50. The loops are plain for speed: a
generator would take longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from normplug._torch import has_hooks

# The fused class of each class that has one; `fused_class` fills it.
FUSED_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True)
class Guard:
    """What a traced forward depends on in one module that it reached.

    It holds no reference to the module that holds it: a cycle would delay freeing the module.

    Attributes:
        cls: the module's class, without `Fused`.
        names: the names of its children.
        children: the children themselves.
        methods: the methods that ran, besides the forward, by name.
        values: the attributes that were read, and their values.
        tensors: the parameters and buffers that were read, and whether they were not None.
        called: whether the module was called, and not only read as a container.
        asks_training: whether the training flag was read.
    """

    cls: type[nn.Module]
    names: tuple[str, ...]
    children: tuple[nn.Module | None, ...]
    methods: tuple[str, ...] = ()
    values: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[tuple[str, bool], ...] = ()
    called: bool = False
    asks_training: bool = False

    def holds(self, module: nn.Module) -> bool:
        """Whether the module is unchanged."""
        children = module._modules
        if (*children,) != self.names or not all(map(is_, children.values(), self.children)):
            return False
        state = module.__dict__
        for name in self.methods:
            if name in state:
                return False
        for name, value in self.values:
            if name not in state or not _same(state[name], value):
                return False
        for name, present in self.tensors:
            if (getattr(module, name, None) is not None) != present:
                return False
        return True

    def holds_inside(self, module: nn.Module, training: bool) -> bool:
        """`holds`, for a module that is part of another's forward."""
        if type(module) is not self.cls and type(module) is not FUSED_CLASSES.get(self.cls):
            return False
        if self.called and has_hooks(module):
            return False
        if self.asks_training and module.training != training:
            return False
        return self.holds(module)


def _same(now: Any, then: Any) -> bool:
    """Whether two values of an attribute mean the same; 1, 1.0 and True do not."""
    if now is then:
        return True
    if type(now) is not type(then) or now != then:
        return False
    return type(now) is not tuple or all(map(_same, now, then))
