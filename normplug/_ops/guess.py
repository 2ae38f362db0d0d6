"""Guess the calls that follow a model's first call of a norm.

`swap` and `fuse` record the layers, but do not know the sizes and dtypes of their inputs. When the
first layer of a family runs, the others' sizes are guessed, so that worker processes can compile
their kernels in the meantime. Most sizes share a kernel. A wrong guess costs only its compilation.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from normplug._activations import ActivationLike
from normplug._ops.call import key_of
from normplug._ops.spec import Tensors
from normplug.reference import accumulator_dtype

if TYPE_CHECKING:
    from normplug._kernels.ahead import Job

# Size of a layer's input, relative to the first layer's. Halving leaves an eighth of a volume.
_SMALLEST, _SMALLEST_VOLUME, _LARGEST = 1 / 16, 1 / 4096, 4


@dataclass(frozen=True)
class Fusion:
    """What `fuse` runs in one call with a norm.

    label: the operations, for a report. adds: whether the call adds a residual, before the norm or
    after it. adds_bias: whether it adds the bias of a convolution before the norm. residual_norm:
    whether the residual has a norm, which runs in the same call. for_residual: whether the norm is
    such a norm of a residual. note: on the gradients of the convolution before the norm, for a
    report.
    """

    label: str = ""
    adds: bool = False
    adds_bias: bool = False
    residual_norm: bool = False
    for_residual: bool = False
    activation: ActivationLike = None
    note: str = ""


# Layer -> what it is fused with, and the first calls after which it was guessed.
_layers: WeakKeyDictionary[Any, tuple[Fusion, set[Any]]] = WeakKeyDictionary()
_ALONE = Fusion()


def record(layer: Any, fusion: Fusion = _ALONE) -> None:
    """Record a layer that may be called, and what it is fused with."""
    _layers[layer] = (fusion, set())


def jobs_after(plan: Any, t: Tensors, keep: bool) -> list[Job]:
    """The kernels of the calls that are likely to follow a call, which has this plan.

    keep: whether calls save tensors for a backward. Without it there are no backwards.
    """
    forwards: list[Job] = []
    backwards: list[Job] = []
    known: set[Any] = set()
    dtype = t.x.dtype
    if t.residual is not None:
        dtype = torch.promote_types(dtype, t.residual.dtype)
    # An attention may return another memory layout, which has kernels of its own.
    kind = (type(plan.spec), dtype, keep, t.x.is_contiguous())
    for reference in _layers.keyrefs():
        layer = reference()
        if layer is None or kind in _layers[layer][1]:
            continue
        fusion, guessed = _layers[layer]
        guessed.add(kind)
        # A layer of another family may refuse the input. No guess may fail the first call.
        with contextlib.suppress(Exception):
            for other, spec in _calls(layer, fusion, t, plan.spec):
                key = key_of(other, spec, None)
                if key in known:
                    continue
                known.add(key)
                other_plan = spec.plan(other)
                other_plan._machine = plan._machine
                forward, backward = other_plan.jobs(other, keep)
                forwards += forward
                backwards += backward
    jobs = [*forwards, *reversed(backwards)]
    # Kernels that only one guess needs come last, since most of these guesses are wrong.
    times = Counter(job.key for job in jobs)
    return sorted(jobs, key=lambda job: times[job.key] == 1)


def _calls(
    layer: Any, fusion: Fusion, t: Tensors, spec: Any
) -> Iterator[tuple[Tensors, Any]]:
    """The likely calls of a layer after a first call of `spec` with t; none for another norm.

    Under autocast the branches of a model have autocast's dtype. The stream to which they are added
    keeps the dtype of x, or takes the branches' dtype at the first norm. If the first norm follows
    a sum, all sums have the branches' dtype.
    """
    row = layer._affine_shape()
    shared = {
        name: getattr(spec, name) for name in ("autocast", "join") if hasattr(spec, name)
    }
    statistics = {
        name: getattr(t, name) for name in ("running_mean", "running_var", "tracked")
    }
    branch = shared.get("autocast") or t.x.dtype
    only_branch = fusion.adds_bias or t.residual is not None
    dtypes = [branch] if only_branch else list(dict.fromkeys((t.x.dtype, branch)))
    pairs: list[tuple[Any, Any]] = [(dtype, None) for dtype in dtypes]
    if fusion.adds:
        pairs = [(a, b) for a in dtypes for b in dtypes if branch in (a, b)]
    for like in _inputs(t.x, row, getattr(spec, "normalized_shape", ())):
        for pair in pairs:
            arguments: list[Any] = [_input(like, dtype) for dtype in pair]
            dtype = (t.x if t.weight is None else t.weight).dtype
            # In evaluation, the norm of a residual runs by itself.
            if fusion.residual_norm and spec.training:
                joined = bool(shared.get("join"))
                arguments.append(_of_residual_norm(like.shape[1], dtype, joined))
            elif fusion.adds_bias:
                bias = torch.empty(row, dtype=dtype, device="meta", requires_grad=True)
                arguments.append(bias)
            else:
                arguments.append(None)
            if fusion.activation is not None:
                arguments.append(fusion.activation)
            if fusion.for_residual and spec.training:
                arguments += [None, None, False, False, 0, True]
            call, call_spec = layer._call(*arguments)
            if type(call_spec) is type(spec):
                yield call._replace(**statistics), call_spec._replace(**shared)


def _input(like: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """An x or a residual; None without a dtype.

    It requires gradients, as the layers before it have parameters that do.
    """
    if dtype is None:
        return None
    return torch.empty_like(like, dtype=dtype, requires_grad=True)


def _of_residual_norm(channels: int, dtype: torch.dtype, joined: bool) -> Tensor:
    """The `input_bias` of the norm that adds another norm's result."""
    acc = accumulator_dtype(dtype)
    size = 6 * channels + joined
    return torch.empty(size, dtype=acc, device="meta", requires_grad=True)


def _inputs(x: Tensor, row: Sequence[int], first_row: Sequence[int]) -> Iterator[Tensor]:
    """Inputs with rows or channels of the shape `row`, on the meta device.

    They have the batch size, layout and spatial size of x. Images and volumes may also be half as
    large along each axis, any number of times.

    first_row: the shape of the rows of x; () if x has channels at dimension 1.
    """
    outer = x.shape[: x.dim() - len(first_row)]
    if not first_row:
        outer = x.shape[:1] + x.shape[2:]
    batch = outer[:1]
    space = list(outer[1:])
    smallest = _SMALLEST_VOLUME if len(space) == 3 else _SMALLEST
    while min(space, default=1) > 0:
        shape = (*batch, *space, *row)
        if smallest <= math.prod(shape) / x.numel() <= _LARGEST:
            if not first_row and x.is_contiguous():
                yield torch.empty((*batch, *row, *space), device="meta")
            else:
                rows = torch.empty(shape, device="meta")
                yield rows if first_row else rows.movedim(-1, 1)
        space = [size // 2 for size in space] if len(space) > 1 else [0]
