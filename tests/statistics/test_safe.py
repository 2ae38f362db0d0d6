"""`swap(statistics="safe")`: bad batches, and forwards inside a backward.

A number is that of PyTorch's issue, whose fault the stock model shows.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.checkpoint import checkpoint

from normplug import fuse, swap, swapped
from statistics_cases import (
    batches_with_bad_channels,
    equal,
    images,
    net,
    safe_statistics,
    statistics,
)

KINDS = (nn.BatchNorm2d, nn.InstanceNorm2d)


def compiled(model, batches):
    torch.compiler.reset()  # each model is one more graph of the same forward
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for batch in batches:
        run(batch)
    return statistics(model)


def exported(model, batches):
    run = torch.export.export(model, (batches[0],)).module()
    for batch in batches:
        run(batch)
    return statistics(run)


def vectorised(model, batches):
    parameters, buffers = stack_module_state([model])
    run = vmap(lambda buffers, x: functional_call(model, buffers, x), (0, None))
    for batch in batches:
        run({**parameters, **buffers}, batch)
    return {name: buffer[0] for name, buffer in buffers.items()}


def eager(model, batches):
    for batch in batches:
        model(batch)
    return statistics(model)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of lerp_ in vmap
@pytest.mark.parametrize("way", [eager, compiled, exported, vectorised])
@pytest.mark.parametrize(("momentum", "fused"), [(0.1, False), (None, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_leaves_out_the_same_channels_of_the_same_batches(
    kind, momentum, fused, way
):
    batches = batches_with_bad_channels()
    norm = kind(4, momentum=momentum, track_running_stats=True)
    model = swap(nn.Sequential(norm, nn.ReLU()), statistics="safe")
    got = way(fuse(model) if fused else model, batches)
    expected = safe_statistics(batches, momentum, kind is nn.InstanceNorm2d)
    for name, value in zip(("running_mean", "running_var"), expected, strict=False):
        torch.testing.assert_close(got[f"0.{name}"].double(), value, rtol=1e-5, atol=1e-5)
    # torch.export of torch 2.6 drops a counter that is never written, as an InstanceNorm's.
    assert got.get("0.num_batches_tracked", 0) == expected[2]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_channel_that_was_poisoned_before_leaves_the_others_right(momentum):
    plain, poisoned = (nn.BatchNorm2d(4, momentum=momentum) for _ in range(2))
    poisoned.running_mean[0] = float("nan")
    swap(poisoned, statistics="safe")
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(3, 4, 5, 5)
        plain(x)
        poisoned(x)
    assert poisoned.num_batches_tracked == 3
    assert torch.equal(poisoned.running_mean[1:], plain.running_mean[1:])
    assert torch.equal(poisoned.running_var, plain.running_var)
    assert poisoned.running_mean[0].isnan()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_in_float16_do_not_overflow(momentum):
    layer = swap(nn.BatchNorm1d(2, momentum=momentum).half(), statistics="safe")
    for seed in range(3):
        torch.manual_seed(seed)
        layer(torch.randn(8, 2).mul(torch.tensor([1.0, 3e4])).half())
    assert layer.num_batches_tracked == 3
    assert layer.running_mean.isfinite().all()
    assert layer.running_var[0] != 1
    assert layer.running_var[1] == 1  # each batch has a variance of about 9e8


def test_an_empty_batch_changes_nothing():
    model = swap(net(), statistics="safe")
    before = statistics(model)
    model(images(0))
    assert equal(before, statistics(model))


@pytest.mark.parametrize("kind", KINDS)
def test_96136_checkpointing_counts_a_batch_twice_in_stock_layers(kind):
    plain, stock = net(kind), net(kind)
    x = images(4).requires_grad_()
    plain(x)
    checkpoint(stock, x, use_reentrant=False).sum().backward()
    # Twice the same batch, with a momentum of 0.1.
    torch.testing.assert_close(stock[1].running_mean, 1.9 * plain[1].running_mean)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["standard", "golden"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm2d(4),
        lambda: nn.BatchNorm2d(4, momentum=None),
        lambda: nn.BatchNorm2d(4, track_running_stats=False),
        lambda: nn.BatchNorm2d(4).eval(),
        lambda: nn.InstanceNorm2d(4, affine=True),
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        lambda: nn.GroupNorm(2, 4),
    ],
)
def test_checkpointing_changes_neither_gradients_nor_statistics(make, mode, reentrant):
    results = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model = swap(nn.Sequential(nn.Conv2d(3, 4, 3), make()), mode, statistics="safe")
        x = images(2).requires_grad_()
        y = checkpoint(model, x, use_reentrant=reentrant) if checkpoints else model(x)
        y.square().sum().backward()
        results.append({"x": x.grad, **statistics(model)})
    assert equal(*results)


@pytest.mark.parametrize("case", ["joined", "averaged"])
def test_two_processes_leave_joined_statistics_alike(case, two_ranks):
    (before, after, good), other = (result[case] for result in two_ranks)
    assert equal(before, after)
    assert not equal(after, good)
    assert equal(good, other[2])


def test_the_option_is_set_checked_and_restored():
    model = swap(net(), statistics="safe")
    with swapped(model):
        assert model[1].statistics == "torch"
    assert model[1].statistics == "safe"
    with pytest.raises(
        ValueError, match="statistics must be one of 'torch', 'safe'; got 'off'"
    ):
        swap(net(), statistics="off")


def test_88474_one_inf_poisons_the_statistics_for_good():
    for model, finite in ((net(), False), (swap(net(), statistics="safe"), True)):
        bad = images(4)
        bad[0, 0, 4, 4] = float("inf")
        for x in (bad, *(images(4, seed) for seed in range(20))):
            model(x)
        assert bool(model[1].running_var.isfinite().all()) is finite
        assert bool(model.eval()(images(4)).isfinite().all()) is finite
