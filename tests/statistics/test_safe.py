"""`swap(statistics="safe")`: bad batches, and forwards inside a backward.

A number is that of PyTorch's issue, whose fault the stock model shows.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import statistics_cases
import sync_cases
from normplug import swap, swapped
from statistics_cases import equal, images, net, statistics


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_good_batches_count_as_in_torch_and_bad_ones_do_not(kind, momentum):
    ours, stock = (net(lambda n, **how: kind(n, momentum=momentum, **how)) for _ in range(2))
    swap(ours, statistics="safe")
    for seed in range(3):
        bad = images(4, seed)
        bad[1, :, 4, 4] = float("inf")
        before = statistics(ours)
        ours(bad)
        assert equal(before, statistics(ours))
        for model in (ours, stock):
            model(images(4, seed))
    torch.testing.assert_close(statistics(ours), statistics(stock))


def test_an_empty_batch_changes_nothing():
    model = swap(net(), statistics="safe")
    before = statistics(model)
    model(images(0))
    assert equal(before, statistics(model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_96136_checkpointing_counts_a_batch_twice_in_stock_layers_only(kind, reentrant):
    plain, stock, ours = net(kind), net(kind), swap(net(kind), statistics="safe")
    x = images(4).requires_grad_()
    plain(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(ours, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(statistics(ours), statistics(plain))
    checkpoint(stock, x, use_reentrant=reentrant).sum().backward()
    # Twice the same batch, with a momentum of 0.1.
    torch.testing.assert_close(stock[1].running_mean, 1.9 * plain[1].running_mean)


def test_two_processes_leave_joined_statistics_alike(tmp_path):
    results = sync_cases.ran(sync_cases.process, 2, tmp_path, [statistics_cases.joined])
    (before, after, good), other = (result["joined"] for result in results)
    assert equal(before, after)
    assert not equal(after, good)
    assert equal(good, other[2])


def test_the_option_is_set_checked_and_restored():
    model = swap(net(), statistics="safe")
    with swapped(model):
        assert model[1].statistics == "torch"
    assert model[1].statistics == "safe"
    with pytest.raises(ValueError, match="statistics must be one of 'torch', 'safe'; got 'off'"):
        swap(net(), statistics="off")


def test_a_compiled_layer_is_safe_too():
    model = torch.compile(swap(net(), statistics="safe"), backend="aot_eager", fullgraph=True)
    before = statistics(model)
    model(images(4) * float("nan"))
    assert equal(before, statistics(model))
    model(images(4))
    assert not equal(before, statistics(model))


def test_88474_one_inf_poisons_the_statistics_for_good():
    for model, finite in ((net(), False), (swap(net(), statistics="safe"), True)):
        bad = images(4)
        bad[0, 0, 4, 4] = float("inf")
        for x in (bad, *(images(4, seed) for seed in range(20))):
            model(x)
        assert bool(model[1].running_var.isfinite().all()) is finite
        assert bool(model.eval()(images(4)).isfinite().all()) is finite
