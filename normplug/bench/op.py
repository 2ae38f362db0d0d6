"""What is measured: the tensors of a case, and an operation with its rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from normplug.bench.accuracy import Piece
from normplug.bench.suites import Case
from normplug.bench.timing import Call

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Problem:
    """The tensors of one case.

    Attributes:
        leaves: arguments that get a gradient.
        state: arguments that a call updates in place.
        dy: the gradient of the output.
    """

    leaves: dict[str, Tensor]
    state: dict[str, Tensor]
    dy: Tensor

    def calls(self, function: Function) -> dict[str, Call]:
        """Direction -> a call of `function` in that direction, as a training step makes it."""
        forward = partial(function, **self.leaves, **self.state)
        inputs = tuple(self.leaves.values())
        return {"F": forward, "F+B": lambda: torch.autograd.grad(forward(), inputs, self.dy)}

    def outputs(self, function: Function) -> dict[str, Tensor]:
        """All that `function` computes: y, the gradients and the state, which is spared here."""
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        y = function(**self.leaves, **state)
        gradients = torch.autograd.grad(y, tuple(self.leaves.values()), self.dy)
        names = [f"d{name}" for name in self.leaves]
        return {"y": y.detach(), **dict(zip(names, gradients, strict=True)), **state}


@dataclass(frozen=True)
class Op:
    """An operation to measure.

    Attributes:
        name: as in `Case.op`.
        passes: direction -> the fewest passes over the input's bytes that it can be done in.
        make: the tensors of a case, on a device.
        normplug: takes what a problem holds, and `backend`; golden.
        eager: takes what a problem holds; the stock norm, as separate calls of torch.
        truth: what a problem's outputs are under a target variance.
        eager_facts: what else a row about `eager` should say.
    """

    name: str
    passes: Mapping[str, int]
    make: Callable[[Case, str], Problem]
    normplug: Function
    eager: Function
    truth: Callable[[Problem, float], Iterator[Piece]]
    eager_facts: Callable[[Problem], dict[str, str]]
