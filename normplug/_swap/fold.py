"""Scale norms' weights, so that a model computes the same before and after a conversion."""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from normplug import _convert
from normplug._ops import subclasses
from normplug._swap.inventory import Inventory
from normplug._table import shown

# Layer -> the factor of its weight, which is not 1. A missing weight counts as all ones.
Factors: TypeAlias = dict[nn.Module, float]


def is_trained(module: nn.Module) -> bool:
    """Whether a norm has counted batches, or has a parameter whose values differ."""
    buffers = (module._buffers.get(name) for name in ("num_batches_tracked", "weight"))
    for t in (*buffers, *module.parameters()):
        own = None if t is None else subclasses.own_part(t.detach())
        if type(own) is not Tensor or own.is_meta or not own.numel():
            continue  # it has no values
        start = own.flatten()[0] if own.is_floating_point() else 0
        if (own != start).any():
            return True
    return False


def refuse_unscalable(caller: str, inventory: Inventory, factors: Factors) -> None:
    """Refuse to scale a weight that is computed, or is shared with other factors."""
    owners = defaultdict[int, list[tuple[str, float]]](list)
    for path, module in inventory.model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append((shown(path), factors.get(module, 1.0)))
    for module, factor in factors.items():
        where = f"normplug.{caller}: the weight of {shown(inventory.names[module][0])}"
        name = _convert.weight_name(module)
        if parametrize.is_parametrized(module, name):
            raise ValueError(
                f"{where} is parametrized; use remove_parametrizations first."
            )
        weight = getattr(module, name)
        if weight is None:
            continue
        if name not in {**module._parameters, **module._buffers}:
            raise ValueError(
                f"{where} is not a parameter but computed from one, by a hook (weight_norm, prune) "
                "or FSDP. Remove the hook first, or work inside FSDP.summon_full_params."
            )
        others = [path for path, other in owners[id(weight)] if other != factor]
        if others:
            raise ValueError(
                f"{where} is shared with {', '.join(others)}, which would change. Untie them "
                "first, or exclude both."
            )


def scale(inventory: Inventory, factors: Factors) -> None:
    """Multiply each weight + offset in place, once even if the weight is shared.

    A layer without a weight gets a frozen one; scaling by the inverse factor removes it.
    """
    done: set[int] = set()
    with torch.inference_mode(False), torch.no_grad():
        for module, factor in factors.items():
            name = _convert.weight_name(module)
            weight: Tensor | None = getattr(module, name)
            if id(weight) in done:
                continue
            declared = _convert.declared(module)
            offset = declared._weight_offset
            if weight is None:
                dtype, device = kind_of_data(inventory, module)
                shape = declared._affine_shape(module)
                made = torch.full(shape, factor - offset, dtype=dtype, device=device)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
            elif _was_made(module, weight, 1.0 / factor - offset):
                setattr(module, name, None)
            else:
                if offset == 0.0:
                    scaled = weight * factor
                else:  # in half precision, weight + offset would round away low bits
                    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
                    scaled = (wide + offset) * factor - offset
                write(weight, scaled)
                done.add(id(weight))


def _was_made(module: nn.Module, weight: Tensor, value: float) -> bool:
    """Whether `scale` made a weight for a layer that had none, and it is unchanged."""
    had_one = getattr(module, "affine", True) and getattr(
        module, "elementwise_affine", True
    )
    if had_one or weight.is_meta:
        return False
    rounding = 2 * torch.finfo(weight.dtype).eps  # of a few scalings
    return torch.allclose(weight, torch.full_like(weight, value), rtol=rounding, atol=0.0)


def write(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a weight or a buffer, which may have been made in inference mode."""
    # `inference_mode` sets the grad mode too, so `no_grad` comes after it.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(value)


def kind_of_data(
    inventory: Inventory, layer: nn.Module
) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of the data that reach a layer, for new tensors of the layer.

    The nearest parameter or buffer tells them; a scalar only if there is nothing else. Without any,
    they are torch's defaults.
    """
    modules = list(inventory.names)
    place = modules.index(layer)
    # Modules before the layer come first, since they produce its input; then the modules after it.
    others = [*reversed(modules[:place]), *modules[place + 1 :]]
    parameters = [p for m in others for p in m.parameters(recurse=False)]
    buffers = [b for m in others for b in m.buffers(recurse=False)]
    for t in chain(layer.parameters(), layer.buffers(), parameters, buffers):
        if _is_like_data(t) and (is_lazy(t) or t.dim() > 0):
            return t.dtype, t.device
    for t in parameters:
        if _is_like_data(t):
            return t.dtype, t.device
    default = torch.empty(0)
    for t in layer.buffers():
        if _is_like_data(t):
            # A watched statistic starts as float32, whatever the data.
            return default.dtype if t.dtype == torch.float32 else t.dtype, t.device
    return default.dtype, default.device


def _is_like_data(t: Tensor) -> bool:
    """Whether a tensor may have the dtype of a norm's input: no index, and no 8-bit code."""
    return t.is_floating_point() and t.dtype.itemsize > 1
