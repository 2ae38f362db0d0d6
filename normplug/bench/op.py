"""What is measured: the tensors of a case, and an operation with its rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from normplug.bench.accuracy import Piece
from normplug.bench.suites import Case, Shape
from normplug.bench.timing import Call

CHUNK_ELEMENTS = 2**25  # of the truth at a time: 256 MiB per float64 tensor

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return x in the memory format of a `Case.layout`."""
    if layout != "NHWC":
        return x
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    return x.contiguous(memory_format=last)


@dataclass(frozen=True)
class Problem:
    """The tensors of one case.

    Attributes:
        leaves: arguments that get a gradient.
        state: arguments that a call updates in place.
        gradients: output -> the gradient that the backward starts from, in the outputs' order.
    """

    leaves: dict[str, Tensor]
    state: dict[str, Tensor]
    gradients: dict[str, Tensor]

    def calls(self, function: Function) -> dict[str, Call]:
        """Direction ("F", "F+B") -> a call of `function` as in a training step."""
        forward = partial(function, **self.leaves, **self.state)
        return {"F": forward, "F+B": lambda: self._backward(forward())}

    def outputs(self, function: Function) -> dict[str, Tensor]:
        """Outputs, gradients and the updated state of `function`; `self.state` stays as it is."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        made = function(**self.leaves, **state)
        outputs = [made] if isinstance(made, Tensor) else made
        names = [*self.gradients, *(f"d{name}" for name in self.leaves)]
        tensors = [*(output.detach() for output in outputs), *self._backward(made)]
        return {**dict(zip(names, tensors, strict=True)), **state}

    def _backward(self, made: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs, gradients = tuple(self.leaves.values()), tuple(self.gradients.values())
        return torch.autograd.grad(made, inputs, gradients)


@dataclass(frozen=True)
class Op:
    """An operation to measure.

    Attributes:
        name: as in `Case.op`.
        passes: direction -> the fewest passes over the input's bytes.
        make: creates the tensors of a case on a device.
        normplug: normplug's function, in mode golden unless `mode` is given; it takes a problem's
            tensors by name, and `backend`.
        eager: the stock norm in separate torch calls; takes a problem's tensors by name.
        truth: yields a problem's exact outputs for a target variance.
        refusal: why the operation does not take a shape; None if it does.
        eager_facts: extra fields for the rows of `eager`.
        rivals: provider -> a function that loads its stock norm, which is called like `eager`.
    """

    name: str
    passes: Mapping[str, int]
    make: Callable[[Case, str], Problem]
    normplug: Function
    eager: Function
    truth: Callable[[Problem, float], Iterator[Piece]]
    refusal: Callable[[Shape], str | None]
    eager_facts: Callable[[Problem], dict[str, str]] = lambda problem: {}
    rivals: Mapping[str, Callable[[], Function]] = field(default_factory=dict)
