"""Faults reported to PyTorch: the stock model shows each, and the swapped one does not."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import statistics_cases
import sync_cases
from calls import saved_bytes
from normplug import freeze, recalibrate, swap
from statistics_cases import images, net, statistics


def equal(a, b):
    return all(torch.equal(a[key], b[key]) for key in a)


def test_66073_train_undoes_eval_but_not_a_freeze():
    for model, stays in ((net(), False), (freeze(swap(net())), True)):
        before = statistics(model)
        model[1].eval()
        model.train()
        model(images(4))
        assert equal(before, statistics(model)) is stays


def test_88474_one_inf_poisons_the_statistics_for_good():
    for model, finite in ((net(), False), (swap(net(), statistics="safe"), True)):
        bad = images(4)
        bad[0, 0, 4, 4] = float("inf")
        for x in (bad, *(images(4, seed) for seed in range(20))):
            model(x)
        assert bool(model[1].running_var.isfinite().all()) is finite
        assert bool(model.eval()(images(4)).isfinite().all()) is finite


@pytest.mark.parametrize("reentrant", [False, True])
def test_96136_checkpointing_counts_each_batch_twice(reentrant):
    for model, count in ((net(), 2), (swap(net(), statistics="safe"), 1)):
        x = images(4).requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        assert model[1].num_batches_tracked == count


def test_30718_ranks_evaluate_differently(tmp_path):
    results = sync_cases.ran(sync_cases.process, 2, tmp_path, [statistics_cases.evaluated])
    (stock, synced), (other, same) = (result["evaluated"] for result in results)
    assert not torch.equal(stock, other)
    assert torch.equal(synced, same)


def test_4741_evaluation_is_far_from_training_after_few_steps():
    def gap(model):
        x = images(64)
        return (copy.deepcopy(model).train()(x) - model.eval()(x)).square().mean().sqrt().item()

    model = swap(net())
    for seed in range(2):
        model(images(16, seed))
    stale = gap(copy.deepcopy(model))
    recalibrate(model, images(64).split(16))
    assert stale > 0.5
    assert gap(model) < 0.02


def test_133566_a_frozen_norm_saves_an_input_that_it_does_not_need():
    """On the CPU; `test_constant_kernels.py` shows that the kernels save no input."""
    pytest.importorskip("triton")
    stock, x = nn.BatchNorm2d(3).eval(), images(4).requires_grad_()
    stock.requires_grad_(False)
    assert saved_bytes(lambda: stock(x)) > x.numel() * 4
