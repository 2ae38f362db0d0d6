"""`recalibrate` and `sync_buffers`.

A number is that of PyTorch's issue, whose fault the stock model shows.
"""

import copy
import random
import threading

import numpy as np
import pytest
import torch
from torch import nn

from normplug import doctor, freeze, fuse, recalibrate, swap
from statistics_cases import equal, images, net, statistics


def inputs(model, data, layer):
    """Everything that reaches a layer while it normalises by these batches."""
    seen = []
    hook = layer.register_forward_pre_hook(
        lambda _, x: seen.append(x[0].detach().double())
    )
    model.eval()
    for norm in (model[1], model[4]):
        norm.train()
    with torch.no_grad():
        for x in data:
            model(x)
    hook.remove()
    return torch.cat(seen)


@pytest.mark.parametrize("change", [lambda m: m, swap, lambda m: fuse(swap(m))])
def test_statistics_are_those_of_all_the_data_in_uneven_batches(change):
    data = images(11).split([4, 4, 3])
    model = change(net())
    report = recalibrate(model, data)
    assert [(row.path, row.calls) for row in report] == [("1", 3), ("4", 3)]
    summary = "2 layers recalibrated. mean, variance: the shift, in standard errors"
    assert report.summary() == summary
    assert all(m.training for m in model.modules())
    for index in (1, 4):
        twin = net()
        x = inputs(twin, data, twin[index])
        torch.testing.assert_close(model[index].running_mean.double(), x.mean((0, 2, 3)))
        torch.testing.assert_close(model[index].running_var.double(), x.var((0, 2, 3)))
        assert model[index].num_batches_tracked == 0


def test_frozen_layers_keep_their_statistics():
    model = net()
    freeze(model, include="1")
    before = statistics(model)
    assert [row.path for row in recalibrate(model, images(4))] == ["4"]
    after = statistics(model)
    assert torch.equal(before["1.running_mean"], after["1.running_mean"])
    assert torch.equal(before["1.running_var"], after["1.running_var"])
    assert not torch.equal(before["4.running_mean"], after["4.running_mean"])
    with pytest.raises(ValueError, match="that is not frozen"):
        recalibrate(freeze(model), images(4))


def test_how_far_it_moved_counts_unbiased_variances():
    x = torch.randn(4, 3, 1, dtype=torch.float64)  # batches of three values
    model = nn.BatchNorm1d(1).double()
    (row,) = recalibrate(model, list(x))
    variances = x.var(1).flatten()
    error = (variances.var() / 4).sqrt()
    assert row.variance == pytest.approx(((1 - x.flatten().var()) / error).abs().item())


class Ema(nn.Module):
    """Assigns a new tensor to its buffer, changes another, and makes a third."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros(()))
        self.norm, self.scale = nn.BatchNorm1d(4), nn.Parameter(torch.ones(()))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.count += 1
        self.scale.data += 1
        self.register_buffer("last", x.detach(), persistent=False)
        return self.norm(x) * self.scale


@pytest.mark.parametrize("use", [recalibrate, doctor])
@pytest.mark.parametrize("copies", [True, False])
def test_buffers_and_parameters_are_left_by_name_and_bit_for_bit(use, copies):
    model = Ema()
    if not copies:
        model.lock = threading.Lock()  # cannot be copied
    before = model.state_dict(keep_vars=True)
    values = copy.deepcopy(before)
    use(model, [torch.randn(8, 4) + 5 for _ in range(2)])
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert "last" not in dict(model.named_buffers())
    assert not model._non_persistent_buffers_set
    for name, t in after.items():
        assert t is before[name], name
        statistic = "running" in name and use is recalibrate
        assert torch.equal(t, values[name]) != statistic, name


def test_watched_statistics_do_not_start_with_the_batches_of_recalibrate():
    body = nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
    model = swap(nn.Sequential(*body), track_running_stats=True)
    model = model.to("meta").to_empty(device="cpu")
    for t in (*model.parameters(), *model.buffers()):
        nn.init.ones_(t)
    assert model[1].watched_var is None
    recalibrate(model, torch.randn(8, 4))
    assert model[1].watched_var is None


def test_an_instance_norm_averages_over_samples():
    model, data = net(nn.InstanceNorm2d), images(7).split([4, 3])
    recalibrate(model, data)
    x = model[0](torch.cat(data)).double()
    torch.testing.assert_close(model[1].running_mean.double(), x.mean((0, 2, 3)))
    torch.testing.assert_close(model[1].running_var.double(), x.var((2, 3)).mean(0))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("change", [lambda m: m, lambda m: swap(m, statistics="safe")])
def test_a_batch_that_is_not_finite_is_refused_and_changes_nothing(change, kind):
    model = change(net(kind))
    before = statistics(model)
    data = images(12).split(4)
    data[1][0, 0, 4, 4] = float("inf")
    rule = r"recalibrate: running statistics must be finite; .* not in 1 \(4 of 4 channels\), 4 \("
    with pytest.raises(ValueError, match=rule):
        recalibrate(model, data)
    assert equal(before, statistics(model))
    assert all(m.training for m in model.modules())


def test_statistics_that_overflow_in_their_dtype_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(2).half())
    x = (torch.randn(16, 2) * torch.tensor([1.0, 3e4])).half()
    with pytest.raises(ValueError, match=r"not in 0 \(1 of 2 channels\)"):
        recalibrate(model, [x])
    assert model[0].running_var.tolist() == [1, 1]


def test_a_layer_that_is_called_several_times_counts_every_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, twice=True):
            return self.norm(x) + self.norm(5 * x)

    x = torch.randn(6, 3).double()
    model = Twice().double()
    assert [row.calls for row in recalibrate(model, [{"x": x, "label": 1}])] == [2]
    whole = torch.cat([x, 5 * x])
    torch.testing.assert_close(model.norm.running_var, whole.var(0))


def test_how_far_it_moved_is_in_standard_errors():
    model, data = net(), images(64).split(4)
    far = list(recalibrate(model, data))
    near = list(recalibrate(model, images(64, seed=2).split(4)))
    assert all(row.mean > 10 for row in far)
    assert all(0.2 < row.mean < 4 and 0.2 < row.variance < 4 for row in near)


def test_generators_modes_and_after_an_error_statistics_are_restored():
    model = nn.Sequential(net(), nn.Dropout(), nn.Flatten(), nn.Linear(7, 1))
    before, states = statistics(model), (random.getstate(), torch.get_rng_state())
    np_state = np.random.get_state()[1].copy()

    def loader():
        yield torch.rand(2, 3, 9, 9) + random.random() + np.random.rand()

    with pytest.raises(RuntimeError, match="shapes"):
        recalibrate(model, loader())
    assert equal(before, statistics(model))
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    assert (np_state == np.random.get_state()[1]).all()
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_model_without_running_statistics_is_refused():
    rule = "no BatchNorm or InstanceNorm with running statistics"
    with pytest.raises(ValueError, match=rule):
        recalibrate(nn.LayerNorm(3), [])


BAD = {
    "recalibrated_with_a_bad_batch": "the batches give a mean or variance that is not in 1 (4 of 4",
    "synchronised_with_bad_statistics": "the merged mean or variance is not in 4 (1 of 6 channels)",
}


def test_two_processes_get_the_same_statistics_and_leave_frozen_ones_alone(two_ranks):
    (first, calls), (second, _) = (result["recalibrated"] for result in two_ranks)
    alone = net()
    recalibrate(alone, images(12).split(4))
    assert calls == [3, 3]
    for key, value in statistics(alone).items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], value)
    for rank, result in enumerate(two_ranks):
        for name, bad in BAD.items():
            assert f"running statistics must be finite; {bad}" in result[name]
        merged = result["synchronised"]
        assert (merged["1.running_mean"] == 3.0).all()
        assert (merged["4.running_var"] == 1.75 + 3.0).all()
        assert merged["4.num_batches_tracked"] == 2
        assert result["rounded"] == 2  # of 1.5
        frozen = result["partly_frozen"]
        assert (frozen["1.running_mean"] == rank).all()
        assert (frozen["4.running_mean"] == 0.5).all()


def test_30718_ranks_evaluate_differently(two_ranks):
    (stock, synced), (other, same) = (result["evaluated"] for result in two_ranks)
    assert not torch.equal(stock, other)
    assert torch.equal(synced, same)


def test_4741_evaluation_is_far_from_training_after_few_steps():
    def gap(model):
        x = images(64)
        difference = copy.deepcopy(model).train()(x) - model.eval()(x)
        return difference.square().mean().sqrt().item()

    model = swap(net())
    for seed in range(2):
        model(images(16, seed))
    stale = gap(copy.deepcopy(model))
    recalibrate(model, images(64).split(16))
    assert stale > 0.5
    assert gap(model) < 0.02


@pytest.mark.skipif(torch.__version__ < "2.14", reason="fully_shard needs a GPU")
@pytest.mark.parametrize("use", [recalibrate, doctor])
def test_a_model_under_fsdp_trains_on(use, monkeypatch):
    from torch.distributed.fsdp import fully_shard

    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29672"}
    for variable, value in {**place, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(variable, value)
    torch.distributed.init_process_group("gloo")
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        body = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)
        model = fully_shard(nn.Sequential(*body), mesh=mesh)
        x = torch.randn(16, 4)
        y = model(x)
        y.sum().backward()  # which shards the parameters again
        use(model, (x, torch.zeros(16)))
        again = model(x)
        assert torch.equal(again, y)
        again.sum().backward()
    finally:
        torch.distributed.destroy_process_group()
