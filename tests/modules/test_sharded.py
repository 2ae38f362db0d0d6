"""Norms of DTensors and norms under FSDP2, compared with stock layers in one process."""

import copy
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sync_cases
from accuracy import assert_no_worse
from calls import describe
from interpreted import INTERPRETS
from normplug import check, functional, swap, unswap
from normplug.modules.probe import Probe, averages
from programs import shared_folder
from sync_cases import assert_passed

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

    __str__ = describe

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


def in_one_process(case, dtype):
    """The stock layer's results on all of x, with sqrt(tv) in its weight."""
    layer, (x, dy) = case.layer().to(dtype), (t.to(dtype) for t in case.tensors())
    x.requires_grad_()
    scale = math.sqrt(MODE)
    if layer.weight is not None:
        layer.weight.data *= scale
    y = layer(x) if layer.weight is not None else layer(x) * scale
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad, **gradients(layer)}
    if "dweight" in out:
        out["dweight"] *= scale
    return out | dict(layer.named_buffers())


def add_layer_norm_reduces_a_partial_sum_first(rank, world, device):
    x, residual = (t.requires_grad_() for t in Case(LAYER_NORM, ROWS, 0).tensors())
    weight = torch.full((8,), 2.0, requires_grad=True)  # a plain tensor
    total = x + residual
    y = F.layer_norm(total, (8,), weight * math.sqrt(MODE))
    (y.sum() + (total * total).sum()).backward()
    expected = [y, total, x.grad, weight.grad]

    x, weight.grad = distributed(x.detach(), "partial").requires_grad_(), None
    args = x, distributed(residual.detach(), 1), (8,), weight
    y, total = functional.add_layer_norm(*args, mode=MODE)
    (y.sum() + (total * total).sum()).backward()
    torch.testing.assert_close(
        [whole(t) for t in (y, total, x.grad, weight.grad)], expected
    )


def gates_scales_and_shifts_belong_to_the_rows_of_each_process(rank, world, device):
    """Where x is sharded over samples, it is gathered for their scales."""
    backend = "triton" if INTERPRETS else "torch"
    x, other = Case(LAYER_NORM, ROWS, 0).tensors()
    vectors = torch.linspace(0.5, 2, 48).view(2, 3, 8)
    gate = {"gate": other, "gate_first": True, "weight": vectors[0, 0], "eps": 1e-5}
    of_samples = dict(zip(("scale", "shift"), vectors, strict=True))
    for shard, options in ((0, gate), (1, gate), (1, of_samples), (0, of_samples)):
        norm = functional.rms_norm if "gate" in options else functional.layer_norm
        found = []
        for is_sharded in (True, False):
            given = {"input": x, **options}
            if is_sharded:
                given = {
                    name: distributed(t, shard) if t is x or t is other else t
                    for name, t in given.items()
                }
            leaves = {
                name: t.detach().requires_grad_()
                for name, t in given.items()
                if hasattr(t, "detach")
            }
            how = {"mode": MODE, "backend": backend, "normalized_shape": (8,)}
            y = norm(**{**given, **leaves}, **how)
            y.square().sum().backward()
            found.append([whole(t) for t in (y, *(t.grad for t in leaves.values()))])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)


def tensors_whose_all_reduce_is_in_flight_are_waited_for(rank, world, device):
    backend, replicated = "triton" if INTERPRETS else "torch", [tools().Replicate()]
    x, dy = Case(LAYER_NORM, ROWS, 1).tensors()
    exact = x.double().requires_grad_()
    expected = F.layer_norm(exact, (8,)) * math.sqrt(MODE)
    expected.backward(dy.double())

    x, dy = (distributed(t, "partial") for t in (x, dy))
    x.requires_grad_()
    in_flight = x.redistribute(placements=replicated, async_op=True)
    assert type(in_flight.to_local()).__name__ == "AsyncCollectiveTensor"
    y = functional.layer_norm(in_flight, (8,), mode=MODE, backend=backend)
    y.backward(dy.redistribute(placements=replicated, async_op=True))
    found = [whole(y), whole(x.grad)]
    torch.testing.assert_close(found, [expected.detach().float(), exact.grad.float()])


def a_compiled_layer_of_dtensors_is_one_graph(rank, world, device):
    case = Case(LAYER_NORM, ROWS, 1, 1)
    layer = tools().distribute_module(swap(case.layer()), mesh_and_placements(1)[0])
    results = []
    for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        y = call(distributed(case.tensors()[0], 1))
        y.square().sum().backward()
        results.append({"y": whole(y), **gradients(layer)})
    torch.testing.assert_close(*results)


def sharded_running_statistics_are_refused(rank, world, device):
    layer = swap(nn.BatchNorm2d(8).eval())
    layer.running_mean = distributed(layer.running_mean, 0)
    with pytest.raises(
        ValueError, match="running_mean must be replicated; got a DTensor"
    ):
        layer(distributed(torch.randn(IMAGES), 0))


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


def norms_under_sequence_parallel_train_as_in_one_process(rank, world, device):
    """Swapped before they are sharded over the sequence, after, and never."""
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

    mesh, _ = mesh_and_placements(0)
    sharding = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    own = Case(LAYER_NORM, ROWS, 1).tensors()[0]
    x, swapped = (
        distributed(own, "replicated"),
        trained(swap(Block(), MODE, track_running_stats=True), own),
    )
    for first in ("swap", "parallelize", "never swap"):
        net = Block()
        if first == "swap":
            swap(net, MODE, track_running_stats=True)
        parallelize_module(net, mesh, sharding)
        if first == "never swap":
            torch.testing.assert_close(trained(net, x), trained(Block(), own))
            continue
        if first == "parallelize":
            swap(net, MODE, track_running_stats=True)
        assert check(net).summary() == "2 norm layers verified: 2 in mode 0.5"
        net.norm1._probe = Probe() if rank == 0 else None
        *_, y = result = trained(net, x)
        torch.testing.assert_close(result, swapped)
        assert whole(net.norm1.watched_count) == 3
        if rank == 0:
            measured = torch.as_tensor(averages([net.norm1._probe])[0])
            torch.testing.assert_close(
                measured[0], own[:, :3].var(-1, correction=0).mean()
            )
        unswap(net)
        with torch.no_grad():
            torch.testing.assert_close(whole(net(x)), y)


class Net(nn.Module):
    """A layer of each family."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.gn = (
            nn.Conv2d(3, 8, 2),
            nn.BatchNorm2d(8),
            nn.GroupNorm(2, 8),
        )
        self.inorm, self.fc = nn.InstanceNorm2d(8, affine=True), nn.Linear(32, 16)
        self.norm, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        x = self.inorm(self.gn(self.bn(self.conv(x)).relu())).flatten(1)
        return self.norm(self.rms(self.fc(x)).relu())


def norms_under_fsdp2_train_as_stock_layers(rank, world, device):
    """Each process trains on its share: stock and swapped in mode standard."""
    if torch.__version__ < "2.14":
        pytest.skip("fully_shard before torch 2.14 does not run on the CPU")
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
    for ours in results[1:]:
        torch.testing.assert_close(ours, results[0])


CHECKS = [
    add_layer_norm_reduces_a_partial_sum_first,
    gates_scales_and_shifts_belong_to_the_rows_of_each_process,
    tensors_whose_all_reduce_is_in_flight_are_waited_for,
    a_compiled_layer_of_dtensors_is_one_graph,
    sharded_running_statistics_are_refused,
    norms_under_sequence_parallel_train_as_in_one_process,
    norms_under_fsdp2_train_as_stock_layers,
]


def two_processes(*where):
    """In the interpreter, in which numpy warns of values that are masked afterwards."""
    checks = [numbers, *CHECKS]
    sync_cases.process(*where, checks, may_warn=checks)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with (
        shared_folder(tmp_path_factory, "sharded") as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TRITON_INTERPRET", "1")
        return sync_cases.ran(two_processes, 2, folder)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_a_sharded_norm_is_as_close_to_float64_as_torch_in_one_process(index, pair):
    case = CASES[index]
    if pair[0]["numbers"][index] is None:
        pytest.skip("numpy is too new for this Triton")
    truth, theirs = in_one_process(case, torch.float64), in_one_process(case, case.dtype)
    for result in pair:
        ours, is_placed = result["numbers"][index]
        assert is_placed
        rounded = 4 * torch.finfo(case.dtype).eps  # of each process's share
        for name, value in ours.items():
            spare = rounded if name in ("dweight", "dbias") else 0.0
            assert_no_worse(name, value, theirs[name], truth[name], spare=spare)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_each_of_two_processes(check, pair):
    assert_passed(check, pair)
