"""Run a model on data without changing it; find layers with running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from normplug._ops import subclasses
from normplug._ops.exchange import group_to_join
from normplug._restore import generators_kept
from normplug._swap.fold import write
from normplug._torch import NormBase
from normplug.modules.frozen import is_frozen as is_frozen

# An integer dtype for each size of an element, to compare bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def running_layers(model: nn.Module) -> dict[str, Any]:
    """Path -> layer of each BatchNorm and InstanceNorm with running statistics."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, NormBase)
        and getattr(module, "running_mean", None) is not None
    }


def gathered(tensor: Tensor) -> list[Tensor]:
    """The tensors of all processes, of equal shapes, in the order of the ranks."""
    group = group_to_join(None)
    if group is None:
        return [tensor]
    tensors = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, tensor, group=group)
    return tensors


@contextmanager
def uncompiled() -> Iterator[None]:
    """Restore the random number generators; inside, nothing is compiled.

    A compiled model would run without the hooks that measure.
    """
    with generators_kept(), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore modes, parameters, buffers, gradients, and the random number generators.

    Tensors are restored by name: an object that a forward has replaced or made is removed. Inside,
    no hook on a tensor or on a backward runs, since an optimizer may step in it, and nothing is
    compiled. The parameters of FSDP are left alone: it replaces them itself in every forward.
    """
    is_sharded = any(_is_fsdp(module) for module in model.modules())
    states = [_State(module, parameters=not is_sharded) for module in model.modules()]
    try:
        with uncompiled():
            yield
    finally:
        for state in states:
            state.restore()


class _State:
    """The state of one module, without the modules inside it."""

    def __init__(self, module: nn.Module, parameters: bool) -> None:
        """parameters: whether to restore parameters, too."""
        self.module = module
        # In the dictionary, a frozen layer may have the mode that it would have without.
        self.training = vars(module).get("training", module.training)
        self.tensors = [_Tensors(module._buffers)]
        if parameters:
            self.tensors.append(_Tensors(module._parameters))
        self.gradients = [(p, p.grad) for p in _parameters(module)]
        self.unsaved = set(module._non_persistent_buffers_set)
        self.hooks = [(hooks, dict(hooks)) for hooks in backward_hooks(module)]
        for hooks, _ in self.hooks:
            hooks.clear()

    def restore(self) -> None:
        self.module.training = self.training
        for tensors in self.tensors:
            tensors.restore()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.module._non_persistent_buffers_set = self.unsaved
        for hooks, before in self.hooks:
            hooks.update(before)


def _is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP manages a module: by names, so that it need not be imported."""
    names = ("FSDPModule", "FullyShardedDataParallel")
    return any(cls.__name__ in names for cls in type(module).__mro__)


def backward_hooks(module: nn.Module) -> list[Any]:
    """The hooks on the backward of a module, and of its parameters."""
    tables: list[Any] = [module._backward_hooks, module._backward_pre_hooks]
    for parameter in _parameters(module):
        tables.append(parameter._backward_hooks)
        tables.append(getattr(parameter, "_post_accumulate_grad_hooks", None))
    return [table for table in tables if table is not None]


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module without those inside it, also if it overrides `parameters`."""
    return [p for p in module._parameters.values() if p is not None]


class _Tensors:
    """The tensors of a module by name, and their values."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors = tensors
        self.before = dict(tensors.items())
        present = [t for t in tensors.values() if t is not None and _has_values(t)]
        self.values = [(t, subclasses.own_part(t.detach()).clone()) for t in present]

    def restore(self) -> None:
        if _identities(self.tensors) != _identities(self.before):
            self.tensors.clear()
            self.tensors.update(self.before)
        for tensor, value in self.values:
            now = subclasses.own_part(tensor.detach())
            if now.shape == value.shape and not _has_same_bits(now, value):
                write(subclasses.own_part(tensor), value)


def _identities(tensors: dict[str, Any]) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in tensors.items()}


def _has_values(tensor: Tensor) -> bool:
    return not (tensor.is_meta or is_lazy(tensor))


def _has_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal, also where they are nan."""
    bits = _BITS.get(a.element_size())
    if bits is None or a.layout != torch.strided or a.is_quantized:
        return False
    return torch.equal(a.view(bits), b.view(bits))
