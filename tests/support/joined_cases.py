"""What each process runs in the tests of the joined kernels: see `sync_cases`."""

import copy
import warnings
from dataclasses import dataclass
from functools import wraps

import torch
from torch import nn

import sync_cases
from batch_norm_cases import laid_out
from normplug import SyncBatchNorm, fuse, swap
from normplug._ops import recompute
from normplug.modules.probe import Probe
from probes import probed
from sync_cases import CHANNELS, counting


@dataclass(frozen=True)
class Case(sync_cases.Case):
    """A case with the arguments of a fused call; `backends` has one for each process."""

    activation: str | None = None
    residual: bool = False
    backends: tuple[str, ...] = ("triton", "triton")

    def joined_residual(self):
        """The residual of all processes together, or None."""
        x, dy, *_ = self.joined()
        return x.flip(0) - dy if self.residual else None

    def own_residual(self, rank, device):
        residual = self.joined_residual()
        if residual is None:
            return None
        start = sum(self.batches[:rank])
        own = residual[start : start + self.batches[rank]]
        return laid_out(own, self.layout).to(device).requires_grad_()


BFLOAT16, FLOAT16, FLOAT64 = torch.bfloat16, torch.float16, torch.float64
HALVES = {"dtype": BFLOAT16, "params": torch.float32}
LAST = {"layout": "channels_last"}
ADD_RELU = {"activation": "relu", "residual": True}
PLANES = (11, 13)
CASES = [
    Case((5, 3), **ADD_RELU),
    Case((3, 2), **HALVES, **LAST, **ADD_RELU),
    Case((2, 1), PLANES, activation="silu", residual=True),
    Case((1, 2), PLANES, activation="relu", momentum=None, mode="standard"),
    Case((2, 1), PLANES, FLOAT64, offset=1e3, **ADD_RELU),
    Case((24, 14), (10, 10), FLOAT16, **LAST, activation="gelu"),
    Case((5, 0), (), offset=1e3, **ADD_RELU),
    Case((0, 6), **LAST, offset=1e3, momentum=None, activation="silu", residual=True),
    Case((0, 0), activation="relu"),
    Case((5, 3), affine=False, residual=True),
    Case((5, 3), track_running_stats=False, mode=0.5),
    Case((7, 1), (7,), layout="strided", activation="hardswish", residual=True),
    Case((1, 1), (), mode="standard"),
    Case((5, 3), **LAST, **ADD_RELU, backends=("triton", "torch")),
]


def quiet(check):
    """Silence numpy's warnings in the interpreter about values that are masked afterwards."""

    @wraps(check)
    def quieter(*arguments):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(*arguments)

    return quieter


@quiet
def numbers(rank, world, device):
    """Every case's results for the second of two equal batches."""
    results = []
    for case in CASES:
        layer, x, dy = case.of_rank(rank, device)
        x.requires_grad_()
        residual = case.own_residual(rank, device)
        layer.backend = case.backends[rank]
        layer._fused(x, residual, case.activation)
        y = layer._fused(x, residual, case.activation)
        y.backward(dy)
        out = {"y": y.detach(), "dx": x.grad, "state": layer.state_dict()}
        if residual is not None:
            out["dresidual"] = residual.grad
        if case.affine:
            out |= {"dweight": layer.weight.grad, "dbias": layer.bias.grad}
        out["by_kernels"] = type(y.grad_fn).__name__ == "_JoinedNormBackward"
        results.append(out)
    return results


@quiet
def messages(rank, world, device):
    """The messages of a training step, of one without a gradient of the input, and in eval."""
    layer = SyncBatchNorm(CHANNELS, backend="triton", device=device)
    x = torch.randn(4 * rank, CHANNELS, device=device)  # process 0 has no data
    with counting() as training:
        layer(x.requires_grad_()).sum().backward()
    with counting() as fixed_input:
        layer(x.detach()).sum().backward()
    with counting() as evaluation:
        layer.eval()(torch.ones(2, CHANNELS, device=device))
    return training, fixed_input, evaluation


@quiet
def too_few(rank, world, device):
    """The error for one value per channel in the joined batch."""
    layer = SyncBatchNorm(CHANNELS, backend="triton")
    try:
        layer(torch.randn(rank, CHANNELS))
    except ValueError as error:
        return str(error), layer.state_dict()


TWICE = Case((5, 3), dtype=FLOAT64, **ADD_RELU)


@quiet
def second_derivatives(rank, world, device):
    """The gradients of a penalty on the input's gradient."""
    layer, x, dy = TWICE.of_rank(rank, device)
    residual = TWICE.own_residual(rank, device)
    layer.backend = TWICE.backends[rank]
    y = layer._fused(x.requires_grad_(), residual, "relu")
    (dx,) = torch.autograd.grad(y.square(), x, dy, create_graph=True)
    dx.square().sum().backward()
    return {"x": x.grad, "residual": residual.grad, "weight": layer.weight.grad}


@quiet
def recomputed(rank, world, device):
    """y, and y recomputed from its saved tensors."""
    case = Case((5, 3), **LAST, **ADD_RELU)
    layer, x, _ = case.of_rank(rank, device)
    residual = case.own_residual(rank, device)
    layer.backend = case.backends[rank]
    y = layer._fused(x.requires_grad_(), residual, "relu", keeps_residual=True)
    assert recompute.will_recompute(y) == recompute.AVAILABLE
    return y.detach(), type(y.grad_fn)._forward_cls.recompute(y.grad_fn)


MEASURED = Case((5, 3), backends=("triton", "triton"))


@quiet
def measured(rank, world, device):
    """The variance probe of process 0, which alone measures while all train."""
    layer, x, _ = MEASURED.of_rank(rank, device)
    layer.backend = MEASURED.backends[rank]
    if rank == 0:
        layer._probe = Probe()
    y = layer(x)
    return y.detach(), probed(layer), layer.state_dict()


class Block(nn.Module):
    """The end of a residual block, and a pooled stem before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm1 = nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS)
        self.conv, self.norm2 = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.BatchNorm2d(CHANNELS)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x):
        x = self.pool(self.relu(self.norm1(self.stem(x))))
        return self.relu(self.norm2(self.conv(x)) + x)


@quiet
def fused(rank, world, device):
    """A model's results unfused and fused, by torch and by kernels, and the last autograd node."""
    x = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(rank)).to(device)
    stock, results = Block().to(device), []
    for backend in ("torch", "triton"):
        plain = swap(copy.deepcopy(stock), sync=True, backend=backend)
        for net in (plain, fuse(copy.deepcopy(plain))):
            y = net(x)
            y.square().sum().backward()
            gradients = {name: p.grad for name, p in net.named_parameters()}
            results.append({"y": y.detach(), **gradients, **dict(net.named_buffers())})
    return results, type(y.grad_fn).__name__


ON_CPU = [
    numbers, messages, too_few, second_derivatives, recomputed, measured, fused,
]  # fmt: skip
ON_GPU = [
    numbers, messages, second_derivatives, recomputed, measured, fused, sync_cases.without_waiting,
]  # fmt: skip


def process(rank, world, directory, on_gpu=False):
    """Run every check; save the results as `<rank>.pt`."""
    sync_cases.process(rank, world, directory, on_gpu, ON_GPU if on_gpu else ON_CPU)
