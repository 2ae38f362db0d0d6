"""What each process runs in the tests of DTensor input and FSDP2, and saves for pytest."""

import copy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

import sync_cases
from interpreted import INTERPRETS
from joined_cases import quiet
from normplug import check, functional, swap, unswap
from normplug.modules.probe import Probe
from probes import probed

ROWS, IMAGES = (3, 6, 8), (3, 8, 3, 2)
BATCH_NORM = partial(nn.BatchNorm2d, 8, momentum=0.5)
INSTANCE_NORM = partial(nn.InstanceNorm2d, 8, affine=True)
TRACKING = partial(INSTANCE_NORM, track_running_stats=True)
MODE = 0.5


@dataclass(frozen=True)
class Case:
    """One call of a layer on sharded input.

    shard: the sharded dimension, or "replicated", or "partial" for a partial sum, or "both" for the
        first two dimensions over a two-dimensional mesh.
    after: the same for the output.
    """

    make: partial
    shape: tuple[int, ...]
    shard: int | str
    after: int | str = "replicated"
    backend: str = "auto"
    dtype: torch.dtype = torch.float32
    training: bool = True
    swap_first: bool = True

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        state = "train" if self.training else "eval"
        return f"{self.make.func.__name__}-{self.shape}-{self.shard}-{self.backend}-{dtype}-{state}"

    def layer(self):
        torch.manual_seed(0)
        layer = self.make(dtype=self.dtype).train(self.training)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, 1, 0.5)
        if getattr(layer, "running_var", None) is not None:
            nn.init.uniform_(layer.running_var, 0.5, 2)
        return layer

    def tensors(self):
        """x, whose mean is far from zero, and dy."""
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(self.shape, generator=generator) for _ in range(2))
        return (x + 30).to(self.dtype), dy.to(self.dtype)


LAYER_NORM, RMS_NORM = partial(nn.LayerNorm, 8), partial(nn.RMSNorm, 8)
GROUP_NORM = partial(nn.GroupNorm, 2, 8)
CASES = [
    # Norms of rows, with uneven or empty shards.
    Case(LAYER_NORM, ROWS, 0, 0),
    Case(LAYER_NORM, ROWS, 1, 1, "triton", torch.bfloat16, swap_first=False),
    Case(LAYER_NORM, (1, 6, 8), 0, 0),
    Case(LAYER_NORM, ROWS, "both", "both"),
    Case(LAYER_NORM, ROWS, 2),
    Case(LAYER_NORM, ROWS, "partial"),
    Case(partial(nn.LayerNorm, 8, elementwise_affine=False), ROWS, "replicated"),
    Case(RMS_NORM, ROWS, 1, 1, "triton"),
    Case(RMS_NORM, ROWS, 0, 0, dtype=torch.float64, swap_first=False),
    Case(RMS_NORM, ROWS, 2),
    # Norms of samples.
    Case(GROUP_NORM, IMAGES, 0, 0, "triton"),
    Case(GROUP_NORM, (1, *IMAGES[1:]), 0, 0),
    Case(GROUP_NORM, IMAGES, 1),
    Case(INSTANCE_NORM, IMAGES, 0, 0, "triton"),
    Case(TRACKING, IMAGES, 0, swap_first=False),
    Case(TRACKING, IMAGES, 2, 2, training=False),
    # Norms of the whole batch, and with constant statistics.
    Case(BATCH_NORM, IMAGES, 0),
    Case(BATCH_NORM, IMAGES, 0, 0, "triton", training=False),
    Case(BATCH_NORM, IMAGES, 3, 3, training=False),
]


def tools():
    """`torch.distributed.tensor`, which pytest's own process does not need."""
    import torch.distributed.tensor as tensor

    return tensor


def mesh_and_placements(shard):
    tensor = tools()
    named = {"replicated": tensor.Replicate(), "partial": tensor.Partial()}
    if shard == "both":
        mesh = tensor.init_device_mesh("cpu", (1, 2))
        return mesh, [tensor.Shard(0), tensor.Shard(1)]
    mesh = tensor.init_device_mesh("cpu", (2,))
    return mesh, [named[shard] if shard in named else tensor.Shard(shard)]


def distributed(x, shard):
    """x as a DTensor."""
    tensor = tools()
    mesh, placements = mesh_and_placements(shard)
    if shard == "partial":
        return tensor.DTensor.from_local(x / 2, mesh, placements)
    return tensor.distribute_tensor(x, mesh, placements)


def whole(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def gradients(layer):
    return {f"d{name}": whole(p.grad) for name, p in layer.named_parameters()}


def one(case):
    """A layer's results, and whether y is sharded as expected; None where the case cannot run."""
    if case.backend == "triton" and not INTERPRETS:
        return None
    layer, (x, dy) = case.layer(), case.tensors()
    mesh, placements = mesh_and_placements(case.shard)
    if case.swap_first:
        swap(layer, MODE, backend=case.backend)
    layer = tools().distribute_module(layer, mesh)
    swap(layer, MODE, backend=case.backend)
    x = distributed(x, case.shard).detach().requires_grad_()
    y = layer(x)
    y.backward(distributed(dy, case.after))
    out = {"y": whole(y), "dx": whole(x.grad), **gradients(layer)}
    used = isinstance(layer, nn.BatchNorm2d | nn.InstanceNorm2d)
    buffers = {name: whole(b) for name, b in layer.named_buffers()} if used else {}
    same = list(y.placements) == mesh_and_placements(case.after)[1]
    return out | buffers, y.stride() == out["y"].stride() and same


def numbers(rank, world, device):
    """Every case's outcome."""
    return [one(case) for case in CASES]


def added(rank, world, device):
    """x + residual and its norm, where x is a partial sum that is yet to be reduced."""
    case = Case(LAYER_NORM, ROWS, "partial")
    x, residual = case.tensors()
    weight = torch.full((8,), 2.0, requires_grad=True)  # a plain tensor
    x = distributed(x, "partial").requires_grad_()
    args = x, distributed(residual, 1), (8,), weight
    y, total = functional.add_layer_norm(*args, mode=MODE)
    (y.sum() + (total * total).sum()).backward()
    return [whole(t) for t in (y, total, x.grad, weight.grad)]


def arriving(rank, world, device):
    """A norm and its gradient for tensors whose all-reduce is in flight, and their class."""
    backend, replicated = "triton" if INTERPRETS else "torch", [tools().Replicate()]
    x, dy = (distributed(t, "partial") for t in Case(LAYER_NORM, ROWS, 1).tensors())
    x.requires_grad_()
    in_flight = x.redistribute(placements=replicated, async_op=True)
    kind = type(in_flight.to_local()).__name__
    y = functional.layer_norm(in_flight, (8,), mode=MODE, backend=backend)
    y.backward(dy.redistribute(placements=replicated, async_op=True))
    return [whole(y), whole(x.grad)], kind


def compiled(rank, world, device):
    """A compiled layer's results, and the layer's own."""
    case = Case(LAYER_NORM, ROWS, 1, 1)
    layer = tools().distribute_module(swap(case.layer()), mesh_and_placements(1)[0])
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        y = call(distributed(case.tensors()[0], 1))
        y.square().sum().backward()
        results.append({"y": whole(y), **gradients(layer)})
    return results


def refused(rank, world, device):
    """The error for sharded running statistics."""
    layer = swap(nn.BatchNorm2d(8).eval())
    layer.running_mean = distributed(layer.running_mean, 0)
    try:
        layer(distributed(torch.randn(IMAGES), 0))
    except ValueError as error:
        return str(error)


class Block(nn.Module):
    """The norms of a transformer's block, which PyTorch shards over the sequence."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.RMSNorm(8)

    def forward(self, x):
        x = self.norm2(torch.tanh(self.norm1(x)))
        return x.full_tensor() if hasattr(x, "full_tensor") else x


def trained(net, x, steps=2):
    """Train some steps; return the losses, the weights, and the output after them."""
    optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean(-1).sub(2).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    weights = {name: whole(p) for name, p in net.named_parameters()}
    with torch.no_grad():
        return losses, weights, whole(net(x))


def sequence_parallel(rank, world, device):
    """A block trained with norms sharded over the sequence: swapped before, after, and never."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh, _ = mesh_and_placements(0)
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    x, results = distributed(Case(LAYER_NORM, ROWS, 1).tensors()[0], "replicated"), []
    for first in ("swap", "parallelize", "never swap"):
        net = Block()
        if first == "swap":
            swap(net, MODE)
        parallelize_module(net, mesh, plan)
        if first == "parallelize":
            swap(net, MODE)
        if first != "never swap":
            report = check(net).summary()
            net.norm1._probe = Probe() if rank == 0 else None
        losses, weights, y = trained(net, x)
        result = SimpleNamespace(losses=losses, weights=weights, y=y)
        if first != "never swap":
            result.report, result.probe = report, probed(net.norm1)
            result.tracked = whole(net.norm1.watched_count)
            unswap(net)
            with torch.no_grad():
                result.unswapped = whole(net(x))
        results.append(vars(result))
    return results


class Net(nn.Module):
    """A layer of each family."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.gn = nn.Conv2d(3, 8, 2), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.inorm, self.fc = nn.InstanceNorm2d(8, affine=True), nn.Linear(32, 16)
        self.norm, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        x = self.inorm(self.gn(self.bn(self.conv(x)).relu())).flatten(1)
        return self.norm(self.rms(self.fc(x)).relu())


def fully_sharded(rank, world, device):
    """A model trained by FSDP2 on the process's share, stock and swapped in mode standard."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    x, results = (torch.randn(8, 3, 3, 3) * 3 + 5)[rank::world], []
    for first in ("never swap", "swap", "shard"):
        net = copy.deepcopy(Net())
        if first == "swap":
            swap(net, "standard")
        for part in (net.bn, net.rms, net):
            fully_shard(part)
        if first == "shard":
            swap(net, "standard")
        results.append(trained(net, x))
    return results


def process(rank, world, directory):
    """Run every check; save the results as `<rank>.pt`."""
    checks = [numbers, added, arriving, compiled, refused, sequence_parallel]
    if torch.__version__ >= "2.14":  # before, fully_shard does not run on the CPU
        checks.append(fully_sharded)
    sync_cases.process(rank, world, directory, checks=[quiet(check) for check in checks])
