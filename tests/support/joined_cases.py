"""What each process runs in the tests of the joined kernels: see `sync_cases`."""

import copy
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from functools import partial, wraps
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import sync_cases
from normplug import BatchNorm1d, SyncBatchNorm, fuse, swap
from normplug._kernels.batch_norm.exchange import room
from normplug._kernels.launch import INTERPRETED
from normplug._ops import peers, recompute
from sync_cases import CHANNELS, Case, counting

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
    return [
        sync_cases.outcome(*case.of_rank(rank, device, "triton"), case.activation) for case in CASES
    ]


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
def recomputed(rank, world, device):
    """y, and y recomputed from its saved tensors."""
    case = Case((5, 3), **LAST, **ADD_RELU)
    layer, x, _, residual = case.of_rank(rank, device, "triton")
    y = layer._fused(x.requires_grad_(), residual.requires_grad_(), "relu", keeps_residual=True)
    assert recompute.will_recompute(y) == recompute.AVAILABLE
    return y.detach(), recompute._recomputation(y)()


@quiet
def measured(rank, world, device):
    """See `sync_cases.measured`."""
    return sync_cases.measured(rank, world, device, "triton")


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
    last = {"memory_format": torch.channels_last}  # so that there are kernels for the pooling
    x, stock, results = x.to(**last), Block().to(device, **last), []
    for backend in ("torch", "triton"):
        plain = swap(copy.deepcopy(stock), sync=True, backend=backend)
        for net in (plain, fuse(copy.deepcopy(plain))):
            y = net(x)
            y.square().sum().backward()
            gradients = {name: p.grad for name, p in net.named_parameters()}
            results.append({"y": y.detach(), **gradients, **dict(net.named_buffers())})
    return results, y.grad_fn.name()


@quiet
def stopped(rank, world, device):
    """What process 0 gets while process 1 leaves a layer out: y, its buffers and the next error."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    layer = SyncBatchNorm(CHANNELS, process_group=group, backend="triton", device=device)
    x = torch.randn(4, CHANNELS, device=device)
    layer(x)  # the group's processes meet
    state = copy.deepcopy(layer.state_dict())
    if rank == 1:
        return None
    start = time.perf_counter()
    y = layer(x)
    values = y.cpu(), layer.state_dict(), state, time.perf_counter() - start
    try:
        layer(x)
    except RuntimeError as error:
        return *values, str(error)


@quiet
def later(rank, world, device):
    """What process 1 gets after process 0 has waited for it in vain: y, dx and the next error."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=2))
    layer = SyncBatchNorm(CHANNELS, process_group=group, backend="triton", device=device)
    x = torch.randn(4, CHANNELS, device=device, requires_grad=True)
    layer(x)  # the group's processes meet
    if rank == 1:
        dist.barrier()
    with patch.object(peers.Peers, "check", lambda self: None):  # as if all were in the queue
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        own, dx = y.detach().cpu(), dx.cpu()
    if rank == 0:
        dist.barrier()
    try:
        layer(x)
    except RuntimeError as error:
        return own, dx, str(error)


@quiet
def other_layers(rank, world, device):
    """What each process gets while they call layers of different sizes: y and the next error."""
    dist.barrier()  # to make a group takes all processes at a time, within its timeout
    group = dist.new_group(timeout=timedelta(seconds=2))
    same, own = (
        SyncBatchNorm(channels, process_group=group, backend="triton", device=device)
        for channels in (CHANNELS, CHANNELS - rank)
    )
    same(torch.randn(4, CHANNELS, device=device))  # the group's processes meet
    x = torch.randn(4, CHANNELS - rank, device=device)
    y = own(x).cpu()
    try:
        own(x)
    except RuntimeError as error:
        return y, str(error)


def replayed(rank, world, device):
    """A captured step's results after three replays, and those of eager steps."""
    case = Case((64, 32), (14, 14), **HALVES, **LAST, **ADD_RELU)

    def run(layer, x, dy, residual):
        y = layer._fused(x, residual, "relu")
        return y, *torch.autograd.grad(y, [x, residual, *layer.parameters()], dy)

    results = []
    for captured in (False, True):
        layer, x, dy, residual = case.of_rank(rank, device)
        step = partial(run, layer, x.requires_grad_(), dy, residual.requires_grad_())
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = step()
            for _ in range(3):
                graph.replay()
        else:
            for _ in range(3):
                out = step()
        results.append([t.detach().clone() for t in (*out, *layer.buffers())])
    return results


def many_steps(rank, world, device):
    """Bits that must agree, after steps of layers of several sizes with processes late in turn."""
    torch.manual_seed(rank)
    groups = [None, dist.new_group()]
    layers = [
        SyncBatchNorm(c, process_group=groups[c % 3 == 1], device=device)
        for c in (8, 64, 256, 1000, 2048)
    ]
    for step in range(300):
        torch.cuda._sleep(int(torch.randint(1, 200_000, ())))
        if step % 100 == 50 + rank:
            time.sleep(0.5)
        for layer in layers:
            n = int(torch.randint(0, 40, ()))
            x = torch.randn(n, layer.num_features, 5, 5, device=device) + step
            layer(x.requires_grad_()).square().sum().backward()
    return [layer.state_dict() for layer in layers]


SIDES = 4  # two groups of processes, on two streams


def side_batch(step, side):
    """x of all processes together, for a layer of `sides`."""
    random = torch.Generator().manual_seed(SIDES * step + side)
    return torch.randn(10, 64, 5, 5, generator=random) * (1 + side) + step


def sides(rank, world, device):
    """For each of two groups and two streams: y, dx and the layer's state after 20 steps.

    Process 0 is late on the first stream, and process 1 on the second.
    """
    groups = [dist.new_group(), dist.new_group()]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    layers = [SyncBatchNorm(64, process_group=groups[i // 2], device=device) for i in range(SIDES)]
    for step in range(20):
        results = []
        for side, layer in enumerate(layers):
            with torch.cuda.stream(streams[side % 2]):
                if side % 2 == rank:
                    torch.cuda._sleep(1_000_000)
                x = side_batch(step, side).split((6, 4))[rank].to(device).requires_grad_()
                y = layer(x)
                y.pow(3).sum().backward()
                results.append((y, x.grad, layer))
    torch.cuda.synchronize()
    return [(y.detach(), dx, layer.state_dict()) for y, dx, layer in results]


def data_parallel(rank, world, device):
    """Losses of a network under DistributedDataParallel, by normplug's layers and by torch's."""
    torch.manual_seed(0)
    stock = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1), nn.BatchNorm2d(64),
                        nn.ReLU()) for i in range(8)),
        nn.Flatten(), nn.Linear(64 * 64, 10),
    ).to(device)  # fmt: skip
    torch.manual_seed(rank)
    x, labels = torch.randn(16 + 8 * rank, 3, 8, 8), torch.randint(10, (16 + 8 * rank,))
    x, labels = x.to(device), labels.to(device)
    losses = []
    for ours in (True, False):
        net = copy.deepcopy(stock)
        net = (
            fuse(swap(net, 1.0, sync=True))
            if ours
            else nn.SyncBatchNorm.convert_sync_batchnorm(net)
        )
        ddp = nn.parallel.DistributedDataParallel(net, device_ids=[rank], bucket_cap_mb=0.05)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        found = []
        for step in range(12):
            with ddp.no_sync() if step % 3 else nullcontext():
                loss = nn.functional.cross_entropy(ddp(x), labels)
                loss.backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    return losses


def exchange_us(rank, world, device):
    """Microseconds that one exchange adds to a small layer's forward, in a CUDA graph."""
    x = torch.randn(64, 256, device=device)
    times = []
    for cls in (SyncBatchNorm, BatchNorm1d):
        layer = cls(256, device=device)
        layer(x), layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            for _ in range(100):
                layer(x)
        graph.replay()
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))  # of 1000 calls: microseconds each
    return times


STOPPING = [stopped, later, other_layers]
SHARED = [numbers, messages, recomputed, measured, fused, sync_cases.refuses_a_second_derivative]
ON_GPU = [
    *SHARED, sync_cases.without_waiting, replayed, many_steps, sides, data_parallel, exchange_us,
    sync_cases.compiled, *STOPPING,
]  # fmt: skip


def _stand_in(group, device):
    """Peers whose inboxes are memory that the processes share, on a machine without GPUs."""
    timeout = 60.0 if len(SPARE) == 4 else 1.0
    inboxes = SPARE.pop()
    addresses = [each.data_ptr() for each in inboxes]
    return peers._Agreement(peers.Peers(group.rank(), addresses, device, timeout, inboxes), "")


# Allocated before the processes are forked, so that it has the same address in each.
SPARE = []
if INTERPRETED:
    SPARE += [torch.zeros(2, room(2), dtype=torch.int64).share_memory_() for _ in range(4)]


def process(rank, world, directory, on_gpu=False):
    """Run every check; save the results as `<rank>.pt`. Without GPUs, in the interpreter."""
    if not on_gpu:
        peers._agree = _stand_in
    sync_cases.process(rank, world, directory, on_gpu, ON_GPU if on_gpu else [*SHARED, *STOPPING])
