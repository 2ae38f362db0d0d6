"""Calls of SyncBatchNorm over several processes, and how tests run checks in each of them."""

import copy
import math
import os
import traceback
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from accuracy import assert_no_worse, assert_same_bits
from batch_norm_cases import laid_out
from calls import describe
from normplug import SyncBatchNorm, _activations, target_variance
from normplug._ops import collectives
from normplug.modules.probe import Probe, averages
from normplug.reference import accumulator_dtype, channel_dims, per_channel
from programs import STARTS

CHANNELS = 5


@dataclass(frozen=True)
class Case:
    """One call of a layer; batches: samples per process. space: the spatial dimensions.

    activation, residual: whether the call is fused with them.
    """

    batches: tuple[int, ...]
    space: tuple[int, ...] = (4, 3)
    dtype: torch.dtype = torch.float32
    params: torch.dtype | None = None
    layout: str = "contiguous"
    offset: float = 3.0
    mode: str | float = "golden"
    momentum: float | None = 0.1
    affine: bool = True
    track_running_stats: bool = True
    activation: str | None = None
    residual: bool = False

    __str__ = describe

    def settings(self):
        """The arguments that torch's and normplug's constructors share."""
        names = ("momentum", "affine", "track_running_stats")
        return {name: getattr(self, name) for name in names}

    def joined(self):
        """x and dy of all processes together, and the layer's weight and bias."""
        torch.manual_seed(0)
        shape = (sum(self.batches), CHANNELS, *self.space)
        # Each row of the batch is shifted, so that the processes' means differ.
        shift = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        x = (torch.randn(shape) * 2 + self.offset + shift).to(self.dtype)
        dy = (torch.randn(shape) + 0.5).to(self.dtype)
        weight, bias = torch.rand(CHANNELS) + 0.5, torch.randn(CHANNELS)
        return (
            x,
            dy,
            weight.to(self.params or self.dtype),
            bias.to(self.params or self.dtype),
        )

    def joined_residual(self):
        """The residual of all processes together, or None."""
        x, dy, *_ = self.joined()
        return x.flip(0) - dy if self.residual else None

    def of_rank(self, rank, device, backend="auto"):
        """A layer, and one process's share of x, dy and the residual."""
        x, dy, weight, bias = self.joined()
        end = list(accumulate(self.batches))[rank]
        own = slice(end - self.batches[rank], end)
        x, dy, residual = (
            None if t is None else laid_out(t[own], self.layout).to(device)
            for t in (x, dy, self.joined_residual())
        )
        placed = {"device": device, "dtype": weight.dtype, "backend": backend}
        layer = SyncBatchNorm(CHANNELS, mode=self.mode, **self.settings(), **placed)
        if self.affine:
            layer.load_state_dict({"weight": weight, "bias": bias}, strict=False)
        return layer, x, dy, residual


FLAGS = [
    Case((5, 3), mode="standard"),
    Case((4, 4), momentum=None),
    Case((5, 3), affine=False),
    Case((5, 3), track_running_stats=False, mode=0.5),
    Case((3, 2), params=torch.float32, dtype=torch.bfloat16),
    Case((5, 0), (), offset=1e3),
    Case((0, 5), offset=1e3, layout="channels_last"),
    Case((0, 0)),
    Case((1, 1), (), mode="standard"),
]
LAYOUTS = {
    "contiguous": [(), (4, 3)],
    "strided": [(7,)],
    "channels_last": [(4, 3), (2, 3, 2)],
}
OFFSETS = [
    *((3.0, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    *((1e3, dtype) for dtype in (torch.float32, torch.float64)),
]
TWO = [
    Case((5, 3), space, dtype, layout=layout, offset=offset)
    for layout, spaces in LAYOUTS.items()
    for space in spaces
    for offset, dtype in OFFSETS
] + FLAGS
THREE = [
    Case((5, 1, 3)),
    Case((5, 0, 3), dtype=torch.float16),
    Case((0, 6, 0), offset=1e3, layout="channels_last"),
    Case((0, 1, 2), (), offset=1e3, momentum=None),
    Case((0, 0, 0)),
]


def outcome(layer, x, dy, residual=None, activation=None):
    """A layer's results for the second of two equal batches."""
    x = x.detach().requires_grad_()
    residual = None if residual is None else residual.detach().requires_grad_()
    for _ in range(2):
        if residual is None and activation is None:
            y = layer(x)
        elif hasattr(layer, "_fused"):
            y = layer._fused(x, residual, activation)
        else:
            y = _activations.apply(
                activation, layer(x) + (0 if residual is None else residual)
            )
    node = y.grad_fn.name()
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad, "state": layer.state_dict(), "node": node}
    if residual is not None:
        out["dresidual"] = residual.grad
    if layer.affine:
        out |= {"dweight": layer.weight.grad, "dbias": layer.bias.grad}
    return out


def in_one_process(case, dtype=None):
    """torch's results on the joined batch, with sqrt(tv) in the weight."""
    x, dy, weight, bias = (t.to(dtype or t.dtype) for t in case.joined())
    residual = case.joined_residual()
    residual = None if residual is None else residual.to(x.dtype)
    layer = nn.modules.batchnorm._BatchNorm(
        CHANNELS, **case.settings(), dtype=weight.dtype
    )
    layer._check_input_dim = lambda _: None
    scale = math.sqrt(target_variance(case.mode))
    layer.weight = nn.Parameter(
        (weight if case.affine else torch.ones_like(weight)) * scale
    )
    layer.bias = nn.Parameter(bias) if case.affine else None
    out = outcome(layer, x, dy, residual, case.activation)
    if case.affine:
        return out | {"dweight": out["dweight"] * scale}
    return out


def assert_joined(case, parts):
    """Assert that the processes' results are as close to float64 as torch's, in one process."""
    for part in parts[1:]:
        assert_same_bits(part["state"], parts[0]["state"])
    if sum(case.batches) == 0:
        assert torch.equal(parts[0]["state"]["running_var"], torch.ones(CHANNELS))
        assert parts[0]["state"]["num_batches_tracked"] == 0
        assert all(not part["dweight"].any() for part in parts)
        return
    truth, theirs = in_one_process(case, torch.float64), in_one_process(case)
    x, dy, weight, _ = (t.double() for t in case.joined())
    # How much mean >> std amplifies the rounding of the mean.
    amplified = float(1 + x.mean().abs() / x.std())
    slope = per_channel(weight / x.std(channel_dims(x)), x)
    # If a channel has two values, dx cancels.
    terms = {"dx": slope * dy} if case.affine else {}
    names = ("y", "dx", *(["dresidual"] if case.residual else []))
    ours = {name: torch.cat([part[name] for part in parts]) for name in names}
    if case.affine:
        for name in ("dweight", "dbias"):
            ours[name] = sum(part[name].double() for part in parts).to(theirs[name].dtype)
    # The truth has an error of its own, and the processes' means are rounded before their
    # differences are taken.
    rounded = torch.finfo(accumulator_dtype(case.dtype)).eps
    far = max(64 * torch.finfo(torch.float64).eps, rounded) * amplified
    for name, value in ours.items():
        spare = far
        if name in ("dweight", "dbias"):
            spare += torch.finfo(value.dtype).eps  # each process rounds its share
        assert_no_worse(name, value, theirs[name], truth[name], terms.get(name), spare)
    if case.track_running_stats:
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            values = (out["state"][name] for out in (parts[0], theirs, truth))
            assert_no_worse(name, *values, spare=far)


@contextmanager
def counting():
    """Yield a list that records the messages sent inside the block."""
    sent, gather, reduce = [], collectives._all_gather, dist.all_reduce

    def counted_gather(out, own, group):
        sent.append(("gather", own.numel()))
        gather(out, own, group)

    def counted_reduce(values, group):
        sent.append(("reduce", values.numel()))
        reduce(values, group=group)

    with (
        patch.object(collectives, "_all_gather", counted_gather),
        patch.object(dist, "all_reduce", counted_reduce),
    ):
        yield sent


def messages(rank, device, backend="auto"):
    """The messages of a training step, of one without a gradient of the input, and in eval."""
    layer = SyncBatchNorm(CHANNELS, backend=backend, device=device)
    x = torch.randn(4 * rank, CHANNELS, device=device)  # process 0 has no data
    with counting() as training:
        layer(x.requires_grad_()).sum().backward()
    with counting() as fixed_input:
        layer(x.detach()).sum().backward()
    with counting() as evaluation:
        layer.eval()(torch.ones(2, CHANNELS, device=device)).sum().backward()
    return training, fixed_input, evaluation


def a_second_derivative_is_refused(rank, world, device):
    x = torch.randn(4, CHANNELS, device=device, requires_grad=True)
    y = SyncBatchNorm(CHANNELS, device=device)(x)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def a_compiled_layer_is_one_graph_and_computes_the_same(rank, world, device):
    layer, x, dy, _ = Case((5, 3)).of_rank(rank, device)
    twin = copy.deepcopy(layer)
    # Inductor is slow on a CPU.
    layer.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    ours, eager = outcome(layer, x, dy), outcome(twin, x, dy)
    del ours["node"], eager["node"]
    if device == "cpu":
        torch.testing.assert_close(ours.pop("state"), eager.pop("state"))
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)


def one_process_can_measure_alone(rank, world, device, backend="auto"):
    """Process 0's probe has the variances of its own batch, and of y."""
    case = Case((5, 3))
    layer, x, *_ = case.of_rank(rank, device, backend)
    layer._probe = Probe() if rank == 0 else None
    y = layer(x)
    assert_equal_everywhere(layer.running_var)
    if rank != 0:
        assert layer._probe is None
        return
    x, _, weight, _ = case.joined()
    normed = F.batch_norm(x, None, None, training=True) * math.sqrt(
        target_variance("golden")
    )
    own = [t[: case.batches[0]] for t in (x, normed)]
    expected = [t.var((0, 2, 3), correction=0).mean() for t in (*own, y.detach().cpu())]
    expected.append(weight.square().mean().sqrt())
    measured = torch.as_tensor(averages([layer._probe])[0]).cpu()
    torch.testing.assert_close(measured, torch.stack(expected))


def assert_equal_everywhere(tensor, group=None):
    """Assert that all processes have the same bits."""
    own = tensor.reshape(-1)
    found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    assert all(torch.equal(each, own) for each in found)


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(1), nn.Linear(128, 16),
        nn.BatchNorm1d(16), nn.Linear(16, 4),
    )  # fmt: skip
    nn.init.normal_(net[1].weight, 1, 0.5)
    return net


IMAGES = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(1)) * 3 + 5
LABELS = torch.arange(16) % 4


def train(net, images, labels, steps=5):
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for _ in range(steps):
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net


class Results(dict):
    """The checks of one process: looking up one that failed or was skipped does the same."""

    def __getitem__(self, name):
        returned, skipped, failed = super().__getitem__(name)
        if skipped:
            pytest.skip(skipped)
        if failed:
            pytest.fail(failed, pytrace=False)
        return returned


def assert_passed(check, results):
    """Assert that the check raised in none of the processes."""
    assert [result[check.__name__] for result in results] == [None] * len(results)


def ran(process, world, directory, *arguments):
    """Run `process` in `world` processes, once for a directory; return the `Results` of each."""
    files = [directory / f"{rank}.pt" for rank in range(world)]
    if not all(file.exists() for file in files):
        _run(process, world, str(directory), *arguments)
    # weights_only=True would only refuse the tests' own containers.
    return [Results(torch.load(f, weights_only=False, map_location="cpu")) for f in files]


def _run(process, *arguments):
    # Triton reads this variable when it is imported, and a fork server has that of its own start.
    start = "spawn" if "TRITON_INTERPRET" in os.environ else STARTS[0]
    torch.multiprocessing.start_processes(_fork, (process, arguments), start_method=start)


def ran_in(place, process, directory):
    """`ran` in two processes, with kernels: in the "interpreter", or on two "gpus"."""
    if place == "gpus" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    with pytest.MonkeyPatch.context() as patched:
        if place == "interpreter":
            if not pytest.importorskip("interpreted").INTERPRETS:
                pytest.skip("numpy is too new for this Triton")
            patched.setenv("TRITON_INTERPRET", "1")
        return ran(process, 2, directory)


def _fork(_, process, arguments):
    """Fork all processes from this one, which imports for all."""
    torch.multiprocessing.start_processes(
        process, arguments, nprocs=arguments[0], start_method="fork"
    )


def process(rank, world, directory, checks, on_gpu=False, may_warn=()):
    """Run every check; save what each returns or raises as `<rank>.pt`.

    may_warn: checks in which warnings are no errors.
    """
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(rank)
        torch.backends.cudnn.allow_tf32 = False
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=world,
        device_id=torch.device(device) if on_gpu else None,
    )
    results = {}
    for check in checks:
        with warnings.catch_warnings():
            if not on_gpu:
                warnings.simplefilter("ignore" if check in may_warn else "error")
            try:
                results[check.__name__] = check(rank, world, device), "", ""
            except pytest.skip.Exception as skipped:
                results[check.__name__] = None, str(skipped), ""
            except (Exception, pytest.fail.Exception):
                results[check.__name__] = None, "", traceback.format_exc()
    torch.save(results, f"{directory}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
