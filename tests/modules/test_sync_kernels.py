"""SyncBatchNorm on normplug's kernels over two processes, compared with torch in one process."""

import copy
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import normplug
import routes
import sync_cases
from accuracy import assert_same_bits
from interpreted import NEEDS_SINGLE_MASKS
from normplug import SyncBatchNorm, fuse, swap
from normplug._kernels.batch_norm.exchange import room
from normplug._kernels.launch import INTERPRETED
from normplug._ops import exchange, recompute
from programs import shared_folder
from sync_cases import CHANNELS, Case, assert_passed, ran_in

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


def numbers(rank, world, device):
    """Every case's results for the second of two equal batches."""
    calls = (case.of_rank(rank, device, "triton") for case in CASES)
    return [
        sync_cases.outcome(*call, case.activation)
        for call, case in zip(calls, CASES, strict=True)
    ]


def kernels_that_exchange_statistics_send_no_message(rank, world, device):
    assert sync_cases.messages(rank, device, "triton") == ([], [], [])


def a_joined_norm_can_be_recomputed(rank, world, device):
    case = Case((5, 3), **LAST, **ADD_RELU)
    layer, x, _, residual = case.of_rank(rank, device, "triton")
    y = layer._fused(
        x.requires_grad_(), residual.requires_grad_(), "relu", keeps_residual=True
    )
    assert recompute.will_recompute(y) == recompute.AVAILABLE
    assert torch.equal(y, recompute._recomputation(y)())


def the_operators_compute_the_same_as_an_eager_call(rank, world, device):
    case = Case((5, 3), **LAST, **ADD_RELU)
    eager = sync_cases.outcome(*case.of_rank(rank, device, "triton"), case.activation)
    with pytest.MonkeyPatch.context() as change:
        routes.use_operators(change)
        call = case.of_rank(rank, device, "triton")
        operator = sync_cases.outcome(*call, case.activation)
    assert eager.pop("node") != operator.pop("node")
    torch.testing.assert_close(operator, eager)


def one_process_can_measure_alone(rank, world, device):
    sync_cases.one_process_can_measure_alone(rank, world, device, "triton")


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


def a_fused_model_computes_the_same_and_runs_each_norm_as_one_call(rank, world, device):
    x = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(rank)).to(
        device
    )
    # So that there are kernels for the pooling.
    last = {"memory_format": torch.channels_last}
    x, stock, results = x.to(**last), Block().to(device, **last), []
    for backend in ("torch", "triton"):
        plain = swap(copy.deepcopy(stock), sync=True, backend=backend)
        for net in (plain, fuse(copy.deepcopy(plain))):
            y = net(x)
            y.square().sum().backward()
            gradients = {name: p.grad for name, p in net.named_parameters()}
            results.append({"y": y.detach(), **gradients, **dict(net.named_buffers())})
    assert y.grad_fn.name().endswith("NormBackward")  # with the addition and relu in it
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-4, atol=1e-4)


class Shortcut(nn.Module):
    """The end of a residual block, whose shortcut has a norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.Conv2d(3, CHANNELS, 3, bias=False)
        self.down = nn.Conv2d(3, CHANNELS, 3, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)
        self.relu = nn.ReLU()
        for norm in (self.norm1, self.norm2):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.uniform_(norm.bias)

    def forward(self, x):
        return self.relu(self.norm1(self.main(x)) + self.norm2(self.down(x)))


def step_of(net, x):
    """Output, gradients and buffers of a net after a second equal step; `dx` is of x."""
    x = x.detach().requires_grad_()
    for _ in range(2):
        net.zero_grad()
        y = net(x)
    y.square().sum().backward()
    gradients = {name: p.grad for name, p in net.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **gradients, **dict(net.named_buffers())}


def a_shortcuts_norm_is_joined_in_the_call_that_adds_it(rank, world, device):
    """With the float64 results of the stock block on all processes' images."""
    small, large = (9, 8), (13, 15)  # for the kernels of rows, and of planes
    for sizes, size in (
        ((5, 3), small),
        ((0, 4), small),
        ((2, 1), large),
        ((0, 2), large),
    ):
        for layout in (torch.contiguous_format, torch.channels_last):
            random = torch.Generator().manual_seed(1)
            images = torch.randn(sum(sizes), 3, *size, generator=random) + 2
            stock = Shortcut()
            truth = step_of(copy.deepcopy(stock).double(), images.double())
            net = stock.to(device, memory_format=layout)
            fuse(swap(net, sync=True, backend="triton"))
            x = images.split(sizes)[rank].to(device, memory_format=layout)
            fused, calls = SyncBatchNorm._fused_norms, []

            def counted(*call, fused=fused, calls=calls):
                calls.append(call)
                return fused(*call)

            with patch.object(SyncBatchNorm, "_fused_norms", counted):
                ours = step_of(net, x)
            assert len(calls) == 2
            for name, value in ours.items():
                expected = truth[name].float()
                value = value.detach().clone()
                if name in ("y", "dx"):
                    expected = expected.split(sizes)[rank]
                elif name.endswith(("weight", "bias")):
                    dist.all_reduce(value)
                torch.testing.assert_close(
                    value.cpu(), expected.to(value.cpu()), rtol=1e-3, atol=1e-3
                )


def a_layer_of_an_impatient_group(device, channels=CHANNELS):
    group = dist.new_group(timeout=timedelta(seconds=2))
    return SyncBatchNorm(channels, process_group=group, backend="triton", device=device)


def a_process_that_stops_is_named_and_no_wrong_result_is_used(rank, world, device):
    """Process 1 leaves a layer out."""
    layer, x = (
        a_layer_of_an_impatient_group(device),
        torch.randn(4, CHANNELS, device=device),
    )
    layer(x)  # the group's processes meet
    state = copy.deepcopy(layer.state_dict())
    if rank == 1:
        return
    start = time.perf_counter()
    assert layer(x).isnan().all()
    torch.testing.assert_close(layer.state_dict(), state, rtol=0, atol=0)
    assert time.perf_counter() - start < 120  # in the interpreter
    who = "rank 0 of 2 has waited .*for rank 1 in the forward"
    with pytest.raises(RuntimeError, match=who) as error:
        layer(x)
    assert f"of a layer of {CHANNELS} channels" in str(error.value)
    assert str(error.value).endswith("than the group's timeout.")


def a_process_that_is_too_late_does_not_use_what_the_other_made_of_its_absence(
    rank, world, device
):
    """Process 1 calls a layer after process 0 has waited for it in vain."""
    dist.barrier()
    layer = a_layer_of_an_impatient_group(device)
    x = torch.randn(4, CHANNELS, device=device, requires_grad=True)
    layer(x)  # the group's processes meet
    if rank == 1:
        dist.barrier()
    with patch.object(exchange.Peers, "check", lambda self: None):
        # As if all were in the queue.
        y = layer(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        own, dx = y.detach().cpu(), dx.cpu()
    if rank == 0:
        dist.barrier()
    who = "for rank 1 in the forward" if rank == 0 else "for rank 0 in the backward"
    with pytest.raises(RuntimeError, match=who):
        layer(x)
    if rank == 0:
        assert own.isnan().all()
    else:
        assert own.isfinite().all()  # process 0 had sent its statistics before it gave up
        assert dx.isnan().all()


def processes_that_call_different_layers_all_fail(rank, world, device):
    dist.barrier()  # to make a group takes all processes at a time, within its timeout
    same = a_layer_of_an_impatient_group(device)
    own = SyncBatchNorm(
        CHANNELS - rank, process_group=same.process_group, backend="triton", device=device
    )
    same(torch.randn(4, CHANNELS, device=device))  # the group's processes meet
    x = torch.randn(4, CHANNELS - rank, device=device)
    assert own(x).isnan().all()
    who = f"rank {rank} of 2 .*for rank {1 - rank} in the forward of a layer of {CHANNELS - rank}"
    with pytest.raises(RuntimeError, match=who):
        own(x)


def a_captured_step_computes_the_same_as_an_eager_one(rank, world, device):
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
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def processes_agree_bit_for_bit_after_many_steps_with_late_processes(rank, world, device):
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
    for layer in layers:
        assert layer.num_batches_tracked > 290
        for value in layer.state_dict().values():
            sync_cases.assert_equal_everywhere(value)


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
    layers = [
        SyncBatchNorm(64, process_group=groups[i // 2], device=device)
        for i in range(SIDES)
    ]
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


def losses_under_data_parallel_are_those_of_torchs_layers(rank, world, device):
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
        convert = nn.SyncBatchNorm.convert_sync_batchnorm
        net = fuse(swap(net, 1.0, sync=True)) if ours else convert(net)
        ddp = nn.parallel.DistributedDataParallel(
            net, device_ids=[rank], bucket_cap_mb=0.05
        )
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
    torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-3)


def an_exchange_takes_at_most_ten_microseconds(rank, world, device):
    """In a CUDA graph, next to a small layer's forward. The least of several times counts.

    Tests in other processes may use the same GPUs.
    """
    x = torch.randn(64, 256, device=device)
    times = []
    for cls in (SyncBatchNorm, normplug.BatchNorm1d):
        layer = cls(256, device=device)
        layer(x), layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            for _ in range(100):
                layer(x)
        graph.replay()
        rounds = []
        for _ in range(10):
            dist.barrier()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            rounds.append(start.elapsed_time(end))  # of 1000 calls: microseconds each
        times.append(min(rounds))
    assert rank != 0 or times[0] - times[1] < 10, times


def the_host_never_waits_for_the_gpu(rank, world, device):
    layer = SyncBatchNorm(CHANNELS, momentum=None, device=device)
    x = torch.randn(8, CHANNELS, 6, 6, device=device, requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


IN_BOTH = [
    kernels_that_exchange_statistics_send_no_message,
    a_joined_norm_can_be_recomputed,
    the_operators_compute_the_same_as_an_eager_call,
    one_process_can_measure_alone,
    a_fused_model_computes_the_same_and_runs_each_norm_as_one_call,
    a_shortcuts_norm_is_joined_in_the_call_that_adds_it,
    sync_cases.a_second_derivative_is_refused,
]
ON_GPU = [
    the_host_never_waits_for_the_gpu,
    a_captured_step_computes_the_same_as_an_eager_one,
    processes_agree_bit_for_bit_after_many_steps_with_late_processes,
    losses_under_data_parallel_are_those_of_torchs_layers,
    an_exchange_takes_at_most_ten_microseconds,
    sync_cases.a_compiled_layer_is_one_graph_and_computes_the_same,
]
# The last ones, since they leave groups that have failed.
STOPPING = [
    a_process_that_stops_is_named_and_no_wrong_result_is_used,
    a_process_that_is_too_late_does_not_use_what_the_other_made_of_its_absence,
    processes_that_call_different_layers_all_fail,
]


def _stand_in(group, device):
    """Peers whose inboxes are memory that the processes share, on a machine without GPUs."""
    timeout = 60.0 if len(SPARE) == 4 else 1.0
    inboxes = SPARE.pop()
    addresses = [each.data_ptr() for each in inboxes]
    return exchange.Peers(group.rank(), addresses, device, timeout, inboxes), ""


# Allocated before the processes are forked, so that it has the same address in each.
SPARE = []
if INTERPRETED:
    SPARE += [
        torch.zeros(2, room(2), dtype=torch.int64).share_memory_() for _ in range(4)
    ]


def on_cpus(*where):
    """In the interpreter, in which numpy warns of values that are masked afterwards."""
    exchange._agree = _stand_in
    checks = [numbers, *IN_BOTH, *STOPPING]
    sync_cases.process(*where, checks, may_warn=checks)


def on_gpus(*where):
    checks = [numbers, *IN_BOTH, sides, *ON_GPU, *STOPPING]
    sync_cases.process(*where, checks, on_gpu=True)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    with shared_folder(tmp_path_factory, "interpreted") as folder:
        return ran_in("interpreter", on_cpus, folder)


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    # In one pytest process only: kernels that wait for each other would wait for other runs' too.
    with shared_folder(tmp_path_factory, "two_gpus") as folder:
        return ran_in("gpus", on_gpus, folder)


@pytest.fixture(params=["interpreted", pytest.param("two_gpus", marks=pytest.mark.gpu)])
def pair(request):
    """The results of two processes, in the interpreter and on two GPUs."""
    return request.getfixturevalue(request.param)


# An empty joined batch is not counted.
MARKS = {case: NEEDS_SINGLE_MASKS for case in CASES if sum(case.batches) == 0}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES], ids=str
)
def test_two_processes_are_as_close_to_float64_as_torch_on_the_joined_batch(case, pair):
    parts = [result["numbers"][CASES.index(case)] for result in pair]
    for part in parts:
        assert part["node"].endswith("NormBackward")
    sync_cases.assert_joined(case, parts)


@pytest.mark.parametrize("check", [*IN_BOTH, *STOPPING], ids=lambda check: check.__name__)
def test_in_each_of_two_processes(check, pair):
    assert_passed(check, pair)


@pytest.mark.gpu
@pytest.mark.parametrize("check", ON_GPU, ids=lambda check: check.__name__)
def test_on_each_of_two_gpus(check, two_gpus):
    assert_passed(check, two_gpus)


@pytest.mark.gpu
@pytest.mark.parametrize("side", range(SIDES))
def test_layers_in_two_groups_and_on_two_streams_join_the_batches_of_their_calls(
    side, two_gpus
):
    parts = [result["sides"][side] for result in two_gpus]
    assert_same_bits(parts[0][2], parts[1][2])
    layer = torch.nn.BatchNorm2d(64, dtype=torch.float64)
    for step in range(20):
        x = side_batch(step, side).double().requires_grad_()
        y = layer(x)
        y.pow(3).sum().backward()
    ours = [torch.cat([part[i] for part in parts]).double() for i in range(2)]
    torch.testing.assert_close(ours, [y.detach(), x.grad], rtol=1e-3, atol=1e-4)
    for name in ("running_mean", "running_var"):
        expected = layer.state_dict()[name].float()
        torch.testing.assert_close(parts[0][2][name], expected, rtol=1e-4, atol=1e-4)
