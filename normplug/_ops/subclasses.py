"""Inputs that are made of other tensors: DTensors, and nested tensors of the older layout.

Each process normalises its own shard of a DTensor, by the same routes as any tensor. This is exact
where x is sharded along dimensions that no statistic reduces, such as the rows of a LayerNorm.
Along all other dimensions, x is gathered first, as PyTorch's layer_norm does. The rows of all
components of a nested tensor are normalised as one dense tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from normplug import _checks
from normplug._ops.spec import Tensors

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    Placements: TypeAlias = list[Placement]


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor. The name is compared, so that DTensor need not be imported."""
    return type(x).__name__ == "DTensor"


def run_sharded(
    caller: str, t: Tensors, free: tuple[int, ...], call: Callable[[Tensors], Any]
) -> Any:
    """Run a call whose x is a DTensor; the result is sharded like x along the `free` dimensions.

    Weights that are not DTensors count as replicated. Gradients of weights are summed over all
    shards. Each process updates the running statistics from its own shard.

    call: runs the call on plain tensors.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    x: Any = t.x
    mesh = x.device_mesh
    placements: Placements = [
        p if isinstance(p, Shard) and p.dim in free else Replicate() for p in x.placements
    ]
    whole: Placements = [Replicate() for _ in placements]
    summed: Placements = [Partial() if isinstance(p, Shard) else p for p in placements]

    def local(value: Any, at: Placements, gradient: Placements) -> Any:
        if value is None:
            return None
        if not is_sharded(value):
            value = DTensor.from_local(value, mesh, whole, run_check=False)
        # Only if needed: a redistribution reduces a weight's gradient at once, not when it is read.
        if value.device_mesh != mesh or list(value.placements) != at:
            value = value.redistribute(mesh, at)
        return _waited(value.to_local(grad_placements=gradient))

    own, residual = (local(value, placements, placements) for value in (x, t.residual))
    vectors = [local(value, whole, summed) for value in (t.weight, t.bias, t.input_bias)]
    names = ("running_mean", "running_var", "num_batches_tracked")
    given = zip(names, (t.running_mean, t.running_var, t.tracked), strict=True)
    statistics = [_statistic(caller, name, value) for name, value in given]
    result = call(Tensors(own, residual, *vectors, *statistics))
    if isinstance(result, tuple):
        return tuple(_joined(y, x, placements) for y in result)
    return _joined(result, x, placements)


def own_part(x: Any) -> Tensor:
    """The process's own shard of a DTensor, detached; any other tensor unchanged."""
    if not is_sharded(x):
        return x
    with torch.no_grad():
        return _arrived(x.to_local())


def _statistic(caller: str, name: str, value: Any) -> Tensor | None:
    """A running statistic to update in place; of a DTensor, the process's own copy."""
    if is_sharded(value) and not all(p.is_replicate() for p in value.placements):
        way_out = "Use redistribute(placements=[Replicate()])."
        got = f"a DTensor {value.placements}"
        raise ValueError(_checks.must(caller, name, "replicated", got, way_out))
    return own_part(value)


def _joined(y: Tensor, x: Any, placements: Placements) -> Tensor:
    """The DTensor of all processes' y. Its shape is passed, since shards may be uneven."""
    from torch.distributed.tensor import DTensor, Shard

    sharded = {p.dim for p in placements if isinstance(p, Shard)}
    shape = [x.shape[d] if d in sharded else size for d, size in enumerate(y.shape)]
    stride, step = [0] * len(shape), 1
    for d in sorted(range(len(shape)), key=lambda d: (y.stride(d), -d)):  # in y's order
        stride[d], step = step, step * max(shape[d], 1)
    layout: Any = {"shape": torch.Size(shape), "stride": tuple(stride)}
    return DTensor.from_local(
        _waited(y), x.device_mesh, placements, run_check=False, **layout
    )


class _Waited(torch.autograd.Function):
    """The identity, which waits for pending collectives in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _arrived(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return _arrived(dy)


def _waited(x: Tensor) -> Tensor:
    # Compiled code waits by itself.
    return x if torch.compiler.is_compiling() else _Waited.apply(x)


def _arrived(x: Any) -> Tensor:
    """Wait for the result of an asynchronous collective, which no kernel can read."""
    return x.wait() if type(x).__name__ == "AsyncCollectiveTensor" else x


def is_nested(x: Tensor) -> bool:
    """Whether x is a nested tensor of the older layout, which has no shape."""
    return x.is_nested and x.layout == torch.strided


def rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """All rows of a nested tensor, (n, *shape), component by component; a dense x itself."""
    if not x.is_nested:
        return x
    if x.layout == torch.jagged and x.lengths() is None:  # type: ignore[attr-defined]
        return x.values()
    return torch.cat([component.reshape(-1, *shape) for component in x.unbind()])


def run_nested(
    t: Tensors, shape: Sequence[int], call: Callable[[Tensors], Tensor]
) -> Any:
    """Run a call whose x is a nested tensor of the older layout, as one call on all its rows."""
    total = t.x if t.residual is None else t.x + t.residual
    all_rows = call(t.reading(rows(total, shape), None))
    components, width = total.unbind(), math.prod(shape)
    parts = all_rows.split([component.numel() // width for component in components])
    pairs = zip(parts, components, strict=True)
    y = torch.nested.as_nested_tensor([p.reshape(c.shape) for p, c in pairs])
    return y if t.residual is None else (y, total)
