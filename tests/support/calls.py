"""What the cases of every norm's kernels share: tensors, steps, comparisons, compilers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import normplug
import routes
from accuracy import assert_no_worse

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
INPUTS = ("x", "residual", "weight", "bias", "input_bias")


def case_id(value: Any) -> str:
    """The id of a parameter that is a module of cases or a case."""
    return (
        value.__name__
        if hasattr(value, "__name__")
        else f"{type(value).__name__} {value}"
    )


def paired(
    setups: Iterable[str], variants: list[Any], *places: int
) -> pytest.MarkDecorator:
    """Run a test for each setup with a few of the variants, in turns."""
    count = len(variants)
    pairs = [(s, variants[(i + k) % count]) for i, s in enumerate(setups) for k in places]
    return pytest.mark.parametrize(("setup", "options"), pairs, ids=str)


@dataclass
class Tensors:
    """The inputs of a call, and the gradients of its outputs; None where there is none."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    residual: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    dy: Tensor
    input_bias: Tensor | None = None
    dtotal: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Tensors:
        return Tensors(*(None if t is None else t.to(dtype) for t in vars(self).values()))

    def inputs(self, needs: Iterable[str]) -> dict[str, Any]:
        """The inputs by name; those in `needs` require a gradient."""
        found = {name: getattr(self, name) for name in INPUTS}
        return {
            n: t if t is None else t.detach().requires_grad_(n in needs)
            for n, t in found.items()
        }

    def running(self, tracked: bool = True) -> dict[str, Tensor]:
        """Copies of the running statistics, if any, after three batches."""
        given = {name: getattr(self, name) for name in ("running_mean", "running_var")}
        copies = {
            name: running.clone()
            for name, running in given.items()
            if running is not None
        }
        if copies and tracked:
            copies["num_batches_tracked"] = torch.tensor(3, device=self.x.device)
        return copies


def run(
    call: Callable[..., dict[str, Tensor]],
    case: Any,
    tensors: Tensors,
    backend: str,
    used: Iterable[str] = ("y",),
    tracked: bool = True,
) -> dict[str, Tensor]:
    """Run forward and backward; return outputs, gradients and running statistics by name."""
    inputs, running = tensors.inputs(case.needs), tensors.running(tracked)
    outputs = call(case, inputs, backend, **running)
    out = {name: output.detach() for name, output in outputs.items()}
    asked = {
        f"d{name}": t for name, t in inputs.items() if t is not None and t.requires_grad
    }
    if asked:
        sources = {n: y for n, y in outputs.items() if n in used and y.requires_grad}
        dys = [getattr(tensors, f"d{name}") for name in sources]
        gradients = torch.autograd.grad(list(sources.values()), list(asked.values()), dys)
        out.update(zip(asked, gradients, strict=True))
    return {**out, **running}


def describe(case: Any) -> str:
    """The fields that differ from their defaults, as text."""
    changed = [f for f in fields(case) if getattr(case, f.name) != f.default]
    return " ".join(f"{f.name}={getattr(case, f.name)}" for f in changed).replace(
        "torch.", ""
    )


def truncation(value: Tensor) -> float:
    """A relative error to allow: Triton's interpreter truncates to bfloat16, where a GPU rounds."""
    truncated = value.is_cpu and value.dtype == torch.bfloat16
    return 0.5 * torch.finfo(value.dtype).eps if truncated else 0.0


def assert_all_no_worse(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    truth: dict[str, Tensor],
    terms: dict[str, Tensor],
    spare: Callable[[str, Tensor], float] = lambda name, value: truncation(value),
) -> None:
    """Assert that each of ours is as close to the truth as theirs, and that counts are equal."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name.endswith("num_batches_tracked"):
            assert torch.equal(value, theirs[name])
            continue
        assert_no_worse(
            name, value, theirs[name], truth[name], terms[name], spare(name, value)
        )


def assert_recomputable(y: Tensor, buffers: Iterable[Tensor]) -> None:
    """Assert that y is recomputed bit for bit from saved tensors, and that no buffer changes."""
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
    """Assert that one graph serves every number of rows, gradients and statistics included."""
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
        torch.testing.assert_close(*outputs, **close)
    assert graphs.frame_count <= 2  # the first may be specialised to its size
    torch.testing.assert_close([*ours.buffers()], [*eager.buffers()])
    return graphs.graphs


def saved_bytes(call: Callable[[], Any], besides: Iterable[Tensor] = ()) -> int:
    """The bytes that autograd saves in `call`, without those of the tensors `besides`."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    present = {tensor.untyped_storage().data_ptr() for tensor in besides}
    return sum(size for pointer, size in kept.items() if pointer not in present)


def walked(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[tuple[str, str]]:
    """The functions of normplug that a call enters, in order: (file, name)."""
    root, found = str(Path(normplug.__file__).parent), []

    def note(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            found.append((code.co_filename.removeprefix(root), code.co_name))

    sys.setprofile(note)
    try:
        function(*args, **kwargs)
    finally:
        sys.setprofile(None)
    return found
