"""What the cases of every norm's kernels share: names, comparisons, operators, compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
import torch._dynamo.testing
from torch import Tensor

import routes
from accuracy import assert_no_worse

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
# Of an operator that is traced within another one, whose test compiles both.
INNER_RULES = ("test_schema", "test_autograd_registration", "test_faketensor")


def said(case: Any) -> str:
    """What differs from the defaults."""
    said = [f for f in fields(case) if getattr(case, f.name) != f.default]
    return " ".join(f"{f.name}={getattr(case, f.name)}" for f in said).replace("torch.", "")


def truncation(value: Tensor) -> float:
    """A relative error to allow: Triton's interpreter cuts off what a GPU rounds."""
    truncated = value.is_cpu and value.dtype == torch.bfloat16
    return 0.5 * torch.finfo(value.dtype).eps if truncated else 0.0


def assert_all_no_worse(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    exact: Any,
    spare: Callable[[str, Tensor], float] = lambda name, value: truncation(value),
) -> None:
    """Each of ours is as close to what is `exact` as theirs; counts are equal."""
    assert ours.keys() == theirs.keys()
    truth, terms = exact.results(), exact.terms()
    for name, value in ours.items():
        if name == "num_batches_tracked":
            assert torch.equal(value, theirs[name])
            continue
        assert_no_worse(name, value, theirs[name], truth[name], terms[name], spare(name, value))


def assert_recomputable(y: Tensor, buffers: Iterable[Tensor]) -> None:
    """What the backward keeps gives y again, to the bit; no buffer moves."""
    before = [(buffer, buffer.clone()) for buffer in buffers]
    again = routes.recomputed(y)
    assert torch.equal(again, y)
    assert (again.stride(), again.dtype) == (y.stride(), y.dtype)
    assert all(torch.equal(buffer, value) for buffer, value in before)


def check_one_graph(
    ours: torch.nn.Module,
    eager: torch.nn.Module,
    inputs: Iterable[Tensor],
    backend: str,
    **close: float,
) -> list[torch.fx.GraphModule]:
    """One graph of `ours` serves every number of rows, gradients and statistics included."""
    graphs = torch._dynamo.testing.CompileCounterWithBackend(backend)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=graphs)
    for x in inputs:
        outputs = []
        for module in (compiled, eager):
            leaf = x.detach().requires_grad_()
            y = module(leaf)
            leaves = (leaf, *module.parameters())
            outputs.append((y, *torch.autograd.grad(y.square().sum(), leaves)))
        for got, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(got, expected, **close)
    assert graphs.frame_count <= 2
    for got, expected in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(got, expected)
    return graphs.graphs
