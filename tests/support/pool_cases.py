"""Calls of BatchNorm with relu and max pooling, for the tests of their kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normplug
import routes
from accuracy import assert_no_worse
from calls import check_one_graph
from kernel_cases import Case, Tensors, _Exact
from kernel_cases import make as make_norm
from normplug import fuse, reference, swap, target_variance
from routes import Pool

INPUTS = ("x", "weight", "bias")


@dataclass(frozen=True)
class PoolCase(Case):
    """A `Case` of channels_last input, and what is pooled at a time; dy is the pooled one's."""

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
    """Values are eighths, so that two in a window are the same, or further apart than roundings."""
    tensors = make_norm(case, device)
    generator = torch.Generator().manual_seed(case.seed)
    eighths = torch.randint(-40, 41, case.shape, generator=generator) / 8 + case.offset
    tensors.x.copy_(eighths)
    if tensors.weight is not None:
        tensors.weight[::2] *= -1
    exact = _Exact(case, tensors)
    y, size = case.pool(exact.z), case.pool(exact.terms_of_z())
    dy = torch.randn(y.shape, generator=generator, dtype=torch.double) + 0.1
    rounding = torch.finfo(reference.accumulator_dtype(case.dtype)).eps
    dy = torch.where(y.abs() > 64 * rounding * size, dy.to(device), 0)
    tensors.dy = dy.to(case.dtype).contiguous(memory_format=torch.channels_last)
    return tensors


def run(case: PoolCase, tensors: Tensors, backend: str) -> dict[str, Tensor]:
    """Forward and backward: all that comes out, by name."""
    count = torch.tensor(3, device=tensors.x.device)
    leaves = {name: leaf(getattr(tensors, name), name in case.needs) for name in INPUTS}
    mean, var = (
        None if t is None else t.clone() for t in (tensors.running_mean, tensors.running_var)
    )
    y = routes.batch_norm(
        leaves["x"], mean, var, leaves["weight"], leaves["bias"], case.training, case.momentum,
        case.eps, mode=case.mode, pool=case.pool, backend=backend,
        num_batches_tracked=count if case.running else None,
    )  # fmt: skip
    assert backend == "torch" or "Pool2D" not in str(y.grad_fn)
    out = {"y": y.detach()}
    asked = {f"d{name}": t for name, t in leaves.items() if t is not None and t.requires_grad}
    if asked:
        gradients = torch.autograd.grad(y, list(asked.values()), tensors.dy)
        out.update(zip(asked, gradients, strict=True))
    if mean is not None and var is not None:
        out.update(running_mean=mean, running_var=var, num_batches_tracked=count)
    return out


def leaf(tensor: Tensor | None, needed: bool = True) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone().requires_grad_(needed)


def assert_accurate(case: PoolCase, device: str = "cpu") -> dict[str, Tensor]:
    """The kernels' results, which are as close to float64 as torch's own, rounded at the end."""
    tensors = make(case, device)
    ours = run(case, tensors, "triton")
    wide = reference.accumulator_dtype(case.dtype)
    theirs = run(
        case, Tensors(*(t if t is None else t.to(wide) for t in vars(tensors).values())), "torch"
    )
    z = _Exact(case, replace(tensors, dy=tensors.x)).z
    pooled, places = F.max_pool2d(
        z.relu(), *case.pool[:3], ceil_mode=case.ceil_mode, return_indices=True
    )
    sent = torch.where(pooled > 0, tensors.dy.double(), 0)
    dz = torch.zeros_like(z).contiguous().flatten(2)
    dz = dz.scatter_add(2, places.flatten(2), sent.flatten(2)).view(case.shape)
    exact = _Exact(case, replace(tensors, dy=dz))
    truth, terms = exact.results(), exact.terms()
    truth["y"], terms["y"] = pooled, case.pool(terms["y"])
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name == "num_batches_tracked":
            assert torch.equal(value, theirs[name])
            continue
        # Triton's interpreter cuts off what a GPU rounds.
        truncated = value.is_cpu and value.dtype == torch.bfloat16
        spare = torch.finfo(value.dtype).eps if truncated else 0.0
        assert_no_worse(name, value, theirs[name].to(value.dtype), truth[name], terms[name], spare)
    return ours


OPERATOR_CASES = [
    PoolCase((2, 3, 4, 5)),
    PoolCase(
        (2, 16, 4, 4),
        torch.bfloat16,
        params=torch.float32,
        kernel=(2, 2),
        padding=(0, 0),
        affine="weight",
    ),
    PoolCase((2, 3, 4, 4), torch.float64, training=False, ceil_mode=True, needs=("x",)),
]


def check_operators(case: Case, device: str) -> None:
    """`torch.library.opcheck` of the operator with gradients and of the two that it consists of."""
    from normplug._ops.batch_norm.compiled import POOLED

    tensors = make(case, device)
    x, weight, bias = (leaf(getattr(tensors, name), name in case.needs) for name in INPUTS)
    running = (None, None) if case.training else (tensors.running_mean, tensors.running_var)
    window = [*case.kernel, *case.stride, *case.padding, int(case.ceil_mode)]
    numbers = (case.training, case.eps, target_variance(case.mode), "relu", window)
    t = routes.Tensors(x, None, weight, bias, None, *running)
    routes.check_operators(POOLED, t, numbers, tensors.dy)


class Stem(nn.Module):
    """The first layers of a ResNet."""

    def __init__(self, width: int = 8, **pool: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(**{"kernel_size": 3, "stride": 2, "padding": 1, **pool})

    def forward(self, x: Tensor) -> Tensor:
        return self.maxpool(self.relu(self.bn(self.conv(x))))


def check_compiled(device: str, backend: str) -> None:
    """One graph serves every batch size."""
    torch.manual_seed(0)
    # cuDNN's convolutions of float64 undo channels_last, and of float32 may take TF32.
    dtype = torch.double if device == "cpu" else torch.float32
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {}
    eager, model = (
        swap(Stem(), backend="triton").to(device, dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    model.load_state_dict(eager.state_dict())
    values = [torch.randn((batch, 3, 9, 10), dtype=dtype).to(device) for batch in (2, 5, 6)]
    inputs = [x.contiguous(memory_format=torch.channels_last) for x in values]
    graphs = check_one_graph(fuse(model), eager, inputs, backend, **close)
    called = [str(n.target) for g in graphs for n in g.graph.nodes]
    assert any("batch_norm_max_pool" in name for name in called)
    assert isinstance(model.bn, normplug.BatchNorm2d)
