"""Calls of BatchNorm with relu and max pooling, for the tests of their kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import calls
import kernel_cases
import normplug
import routes
from calls import Tensors, assert_all_no_worse, check_one_graph, truncation
from kernel_cases import HALF, Case, Exact
from normplug import fuse, reference, swap, target_variance
from routes import Pool

INPUTS = ("x", "weight", "bias")


@dataclass(frozen=True)
class PoolCase(Case):
    """A `Case` of channels_last input, and the pooling window; dy is that of the pooled output."""

    layout: str = "channels_last"
    kernel: tuple[int, int] = (3, 3)
    stride: tuple[int, int] = (2, 2)
    padding: tuple[int, int] = (1, 1)
    ceil_mode: bool = False
    needs: tuple[str, ...] = INPUTS

    @property
    def pool(self) -> Pool:
        return Pool(self.kernel, self.stride, self.padding, self.ceil_mode)


def make(case: PoolCase, device: str = "cpu") -> Tensors:
    """Values are multiples of 1/8: two in a window are equal, or differ by more than roundings."""
    tensors = kernel_cases.make(case, device)
    generator = torch.Generator().manual_seed(case.seed)
    eighths = torch.randint(-40, 41, case.shape, generator=generator) / 8 + case.offset
    tensors.x.copy_(eighths)
    if tensors.weight is not None:
        tensors.weight[::2] *= -1
    exact = Exact(case, tensors)
    y, size = case.pool.of(exact.z), case.pool.of(exact.terms_of_z())
    dy = torch.randn(y.shape, generator=generator, dtype=torch.double) + 0.1
    rounding = torch.finfo(reference.accumulator_dtype(case.dtype)).eps
    dy = torch.where(y.abs() > 64 * rounding * size, dy.to(device), 0)
    tensors.dy = dy.to(case.dtype).contiguous(memory_format=torch.channels_last)
    return tensors


def call(
    case: PoolCase, inputs: dict[str, Any], backend: str, **running: Any
) -> dict[str, Tensor]:
    """The output, by name."""
    options = {"norm": routes.batch_norm, "pool": case.pool}
    out = kernel_cases.call(case, inputs, backend, **running, **options)
    assert backend == "torch" or "Pool2D" not in str(out["y"].grad_fn)
    return out


run = partial(calls.run, call)


def assert_accurate(case: PoolCase, device: str = "cpu") -> dict[str, Tensor]:
    """Assert that the kernels are as close to float64 as torch in a wider dtype, rounded once."""
    tensors = make(case, device)
    ours = run(case, tensors, "triton")
    wide = tensors.to(reference.accumulator_dtype(case.dtype))
    theirs = {n: t.to(ours[n].dtype) for n, t in run(case, wide, "torch").items()}
    z = Exact(case, replace(tensors, dy=tensors.x)).z
    pooled, places = F.max_pool2d(
        z.relu(), *case.pool[:3], ceil_mode=case.ceil_mode, return_indices=True
    )
    sent = torch.where(pooled > 0, tensors.dy.double(), 0)
    dz = torch.zeros_like(z).contiguous().flatten(2)
    dz = dz.scatter_add(2, places.flatten(2), sent.flatten(2)).view(case.shape)
    exact = Exact(case, replace(tensors, dy=dz))
    truth, terms = exact.results(), exact.terms()
    truth["y"], terms["y"] = pooled, case.pool.of(terms["y"])
    assert_all_no_worse(
        ours, theirs, truth, terms, lambda name, value: 2 * truncation(value)
    )
    return ours


OPERATOR_CASES = [
    PoolCase((2, 3, 4, 5)),
    PoolCase((2, 16, 4, 4), **HALF, kernel=(2, 2), padding=(0, 0), affine="weight"),
    PoolCase((2, 3, 4, 4), torch.float64, training=False, ceil_mode=True, needs=("x",)),
]


def operators(case: PoolCase) -> tuple[Any, tuple[Any, ...]]:
    from normplug._ops.batch_norm import POOLED

    window = [*case.kernel, *case.stride, *case.padding, int(case.ceil_mode)]
    return POOLED, (
        case.training,
        case.eps,
        target_variance(case.mode),
        "relu",
        0.0,
        window,
        0,
    )


class Stem(nn.Module):
    """The first layers of a ResNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool(self.relu(self.bn(self.conv(x))))


def check_compiled(device: str, backend: str) -> None:
    """Assert that one graph serves every batch size."""
    torch.manual_seed(0)
    # cuDNN's float64 convolutions undo channels_last, and its float32 ones may use TF32.
    dtype = torch.double if device == "cpu" else torch.float32
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    eager, model = (
        swap(Stem(), backend="triton").to(
            device, dtype, memory_format=torch.channels_last
        )
        for _ in range(2)
    )
    model.load_state_dict(eager.state_dict())
    values = [
        torch.randn((batch, 3, 9, 10), dtype=dtype).to(device) for batch in (2, 5, 6)
    ]
    inputs = [x.contiguous(memory_format=torch.channels_last) for x in values]
    graphs = check_one_graph(fuse(model), eager, inputs, backend, **close)
    called = [str(n.target) for g in graphs for n in g.graph.nodes]
    assert any("batch_norm_max_pool" in name for name in called)
    assert isinstance(model.bn, normplug.BatchNorm2d)
