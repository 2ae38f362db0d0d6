"""Models, data, and what each of two processes checks about running statistics."""

import csv
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normplug import doctor, freeze, recalibrate, swap, sync_buffers


class Checkpointed(nn.Module):
    def __init__(self, inner, reentrant=False):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def net(kind=nn.BatchNorm2d):
    torch.manual_seed(0)
    norms = kind(4, track_running_stats=True), kind(6, track_running_stats=True)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Conv2d(4, 6, 3), norms[1]
    )


def images(count, seed=1):
    torch.manual_seed(seed)
    return torch.randn(count, 3, 9, 9) * 2 + 1


def healthy():
    model = net()
    model[0].bias = model[3].bias = None
    return model


def trained(model=None, steps=30):
    """The model, by default a healthy one, whose statistics have followed so many batches."""
    model = healthy() if model is None else model
    for seed in range(steps):
        model(images(16, seed))
    return model


def statistics(model):
    return {
        k: v.clone()
        for k, v in model.state_dict().items()
        if "running" in k or "num_" in k
    }


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def batches_with_bad_channels():
    """Batches of four channels; the first channel is bad in one of them, another in others."""
    torch.manual_seed(0)
    batches = [torch.randn(3, 4, 5, 5) * 2 + 1 for _ in range(6)]
    # Its mean is finite, and its variance is not.
    batches[0][0, 3] = 1e30 * torch.randn(5, 5)
    batches[1][1, 2] = float("inf")
    batches[2][0, 0, 0, 0] = float("nan")
    batches[3][2] = -float("inf")  # in all channels
    return batches


def safe_statistics(batches, momentum, instance=False):
    """Running mean, running variance and count after the batches, by the rule of `docs/safe.md`."""
    channels = batches[0].shape[1]
    mean = torch.zeros(channels, dtype=torch.float64)
    var = torch.ones(channels, dtype=torch.float64)
    count = 0
    for batch in batches:
        batch = batch.double()
        if instance:
            batch_var, batch_mean = (
                each.mean(0) for each in torch.var_mean(batch, (2, 3))
            )
        else:
            batch_var, batch_mean = torch.var_mean(batch, (0, 2, 3))
        largest = torch.finfo(torch.float32).max
        finite = (batch_mean.abs() < largest) & (batch_var < largest)
        counts = finite.any() if momentum is None else finite[0]
        count += 0 if instance else int(counts)
        step = momentum
        if momentum is None:
            step = 0.0 if instance else 1.0 / max(count, 1)
        mean = torch.where(finite, mean + step * (batch_mean - mean), mean)
        var = torch.where(finite, var + step * (batch_var - var), var)
    return mean, var, count


# Layer with running statistics -> what makes it of a number of channels, and a shape of its input.
KINDS = {
    "BatchNorm1d": (nn.BatchNorm1d, (8, 4)),
    "BatchNorm2d": (nn.BatchNorm2d, (8, 4, 3, 3)),
    "BatchNorm2d without weight": (partial(nn.BatchNorm2d, affine=False), (8, 4, 3, 3)),
    "BatchNorm3d": (nn.BatchNorm3d, (8, 4, 2, 3, 3)),
    "SyncBatchNorm": (nn.SyncBatchNorm, (8, 4, 3, 3)),
    "InstanceNorm1d": (nn.InstanceNorm1d, (8, 4, 9)),
    "InstanceNorm2d": (partial(nn.InstanceNorm2d, affine=True), (8, 4, 3, 3)),
    "InstanceNorm3d": (nn.InstanceNorm3d, (8, 4, 2, 3, 3)),
    "BatchNormAct2d": (None, (8, 4, 3, 3)),  # of timm
}


def layer_and_input(kind):
    """A layer of a kind with values that are not those of its start, and an input for it."""
    make, shape = KINDS[kind]
    make = make or pytest.importorskip("timm.layers").BatchNormAct2d
    torch.manual_seed(0)
    layer = make(4, track_running_stats=True)
    for t in (*layer.parameters(), *layer.buffers()):
        if t.is_floating_point():
            t.data.uniform_(0.5, 2.0)
    return layer, torch.randn(shape)


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def recalibrated(rank, world, device):
    """Each process has another part of the data, of another size."""
    model = swap(net())
    data = images(12)
    own = [data[:4], data[4:8]] if rank == 0 else [data[8:]]
    rows = list(recalibrate(model, own))
    return statistics(model), [row.calls for row in rows]


def refused(use, model, *args):
    """The error of a use, which leaves the statistics of the model as they were."""
    before = statistics(model)
    try:
        use(model, *args)
    except ValueError as error:
        after = statistics(model)
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        return str(error)
    return "no error"


def recalibrated_with_a_bad_batch(rank, world, device):
    """Process 1 has an inf."""
    data = images(4)
    if rank == 1:
        data[0, 0, 4, 4] = float("inf")
    return refused(recalibrate, net(), [data])


def synchronised_with_bad_statistics(rank, world, device):
    """Process 1 has nan in one channel."""
    model = net()
    model[1].running_mean.fill_(rank)
    if rank == 1:
        model[4].running_var[2] = float("nan")
    return refused(sync_buffers, model)


def synchronised(rank, world, device):
    """Process 1 has counted three batches for process 0's one. The weights are 1/4 and 3/4."""
    model = net()
    for layer in (model[1], model[4]):
        layer.running_mean.fill_(4.0 * rank)
        layer.running_var.fill_(1.0 + rank)
        layer.num_batches_tracked.fill_(1 + 2 * rank)
    assert sync_buffers(model) is model
    return statistics(model)


def rounded(rank, world, device):
    """The processes have counted one batch and two."""
    layer = nn.BatchNorm2d(4)
    layer.num_batches_tracked.fill_(1 + rank)
    return sync_buffers(layer).num_batches_tracked.item()


def partly_frozen(rank, world, device):
    """Each process has other statistics; one layer is frozen."""
    model = freeze(net(), include="1")
    for layer in (model[1], model[4]):
        layer.running_mean.fill_(rank)
    return statistics(sync_buffers(model))


def joined(rank, world, device, momentum=0.1):
    """Process 1 has a bad batch, and then none."""
    plain = net(lambda n, **how: nn.BatchNorm2d(n, momentum=momentum, **how))
    model = swap(plain, sync=True, statistics="safe")
    found = [statistics(model)]
    for bad in (True, False):
        x = images(4, seed=rank)
        if bad and rank == 1:
            x[0, 0, 4, 4] = float("nan")
        model(x)
        found.append(statistics(model))
    return found


def averaged(rank, world, device):
    """As `joined`, with averages over all batches."""
    return joined(rank, world, device, momentum=None)


def examined(rank, world, device):
    """Process 1 has other statistics in one layer."""
    model = trained()
    model[1].running_mean += 0.1 * rank
    before = [tuple(row) for row in doctor(model, images(16))]
    return before, [tuple(row) for row in doctor(sync_buffers(model), images(16))]


def evaluated(rank, world, device):
    """The output in evaluation, before and after a synchronisation."""
    model = swap(net())
    model(images(8, seed=rank))
    before = model.eval()(images(4)).detach()
    return before, sync_buffers(model)(images(4)).detach()


IN_TWO = [
    recalibrated,
    recalibrated_with_a_bad_batch,
    synchronised_with_bad_statistics,
    synchronised,
    rounded,
    partly_frozen,
    joined,
    averaged,
    examined,
    evaluated,
]
