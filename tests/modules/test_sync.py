"""SyncBatchNorm over several processes, compared with BatchNorm on the joined batch in one."""

import copy
import math
import pickle
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import emulated
import lightning_cases
import normplug
import sync_cases
from accuracy import assert_same_bits
from normplug import SyncBatchNorm, plan, set_mode, swap, unswap
from normplug._ops import exchange
from normplug.lightning import SwapNorms, SyncNorms
from programs import shared_folder
from sync_cases import (
    CHANNELS,
    THREE,
    TWO,
    assert_joined,
    assert_passed,
    make_net,
    outcome,
    ran,
)


def numbers(rank, world, device):
    """Every case's outcome."""
    cases = TWO if world == 2 else THREE
    return [outcome(*case.of_rank(rank, device), case.activation) for case in cases]


def numbers_by_kernels(rank, world, device):
    """The same through PyTorch's CUDA kernels, which the CPU emulates."""
    with emulated.kernels_of_sync_batch_norm():
        return numbers(rank, world, device)


def one_message_forward_one_backward_and_none_in_eval(rank, world, device):
    training, fixed_input, evaluation = sync_cases.messages(rank, device)
    assert training == [("gather", 2 * CHANNELS + 1), ("reduce", 2 * CHANNELS)]
    assert fixed_input == training[:1]
    assert evaluation == []


def no_message_without_running_statistics_in_eval(rank, world, device):
    layer = SyncBatchNorm(CHANNELS, track_running_stats=False, device=device).eval()
    with sync_cases.counting() as sent:
        layer(torch.randn(4, CHANNELS, device=device))
    assert sent == []


def one_value_in_the_joined_batch_is_refused_on_every_process(rank, world, device):
    layer = SyncBatchNorm(CHANNELS)
    with pytest.raises(
        ValueError, match="the joined batch of 2 processes has 1. Use .eval()"
    ):
        layer(torch.randn(1 if rank == world - 1 else 0, CHANNELS))
    assert torch.equal(layer.running_var, torch.ones(CHANNELS))


def one_value_in_the_joined_batch_gives_the_bias(rank, world, device):
    layer = SyncBatchNorm(CHANNELS, device=device)
    before = copy.deepcopy(layer.state_dict())
    y = layer(torch.randn(1 - rank, CHANNELS, device=device))
    assert not y.any()
    assert_same_bits(layer.state_dict(), before)


def a_norm_and_the_norm_that_it_adds_are_joined_by_collectives_too(rank, world, device):
    """As in `fuse`, where the kernels refuse a call that they usually run."""
    torch.manual_seed(0)
    x, residual = torch.randn(2, 8, CHANNELS, 4, dtype=torch.float64) * 2 + 3
    pairs = []
    for ours in (True, False):
        layers = [SyncBatchNorm(CHANNELS, device=device, dtype=x.dtype) for _ in "ab"]
        own = slice(0, 5) if rank == 0 else slice(5, 8)
        inputs = [each[own].clone().requires_grad_() for each in (x, residual)]
        if ours:
            y = layers[0]._fused_norms(*inputs, layers[1], "relu")
        else:
            y = torch.relu(layers[0](inputs[0]) + layers[1](inputs[1]))
        y.square().sum().backward()
        parameters = [p.grad for layer in layers for p in layer.parameters()]
        buffers = [b for layer in layers for b in layer.buffers()]
        gradients = [each.grad for each in inputs]
        pairs.append([y.detach(), *gradients, *parameters, *buffers])
    torch.testing.assert_close(*pairs)


def data_parallel_training_matches_one_process_on_all_data(rank, world, device):
    net, images, labels = make_net(), sync_cases.IMAGES, sync_cases.LABELS
    truth = swap(make_net(), "golden", preserve_output=False)
    sync_cases.train(truth, images, labels)
    # Which refuses to wrap a SyncBatchNorm.
    ddp = nn.parallel.DistributedDataParallel(net)
    swap(ddp, "golden", sync=True, preserve_output=False)
    sync_cases.train(ddp, images[rank::world], labels[rank::world])
    assert_close_states(net.state_dict(), truth.state_dict())


def a_process_group_joins_its_own_processes_only(rank, world, device):
    """Processes 0 and 2 together, and process 1 alone."""
    pair, single = dist.new_group([0, 2]), dist.new_group([1])
    group, ranks = (single, [1]) if rank == 1 else (pair, [0, 2])
    layer = swap(SyncBatchNorm(CHANNELS, process_group=group, momentum=1.0), 0.5)
    batches = [torch.randn(4, CHANNELS) + each for each in range(world)]
    layer(batches[rank])
    together = torch.cat([batches[each] for each in ranks])
    torch.testing.assert_close(layer.running_mean, together.mean(0))
    sync_cases.assert_equal_everywhere(layer.running_mean, group)


def with_lightning(rank, world, device):
    """Models trained by Lightning's strategy ddp."""
    lightning_cases.as_under_torchrun(rank, world)
    with tempfile.TemporaryDirectory() as directory:
        return lightning_cases.distributed(directory)


IN_TWO = [
    one_message_forward_one_backward_and_none_in_eval,
    no_message_without_running_statistics_in_eval,
    one_value_in_the_joined_batch_is_refused_on_every_process,
    a_norm_and_the_norm_that_it_adds_are_joined_by_collectives_too,
    data_parallel_training_matches_one_process_on_all_data,
    sync_cases.a_second_derivative_is_refused,
    sync_cases.a_compiled_layer_is_one_graph_and_computes_the_same,
    sync_cases.one_process_can_measure_alone,
]


def two_processes(*where):
    warning = (
        sync_cases.a_compiled_layer_is_one_graph_and_computes_the_same,
        with_lightning,
    )
    sync_cases.process(
        *where, [numbers, numbers_by_kernels, *IN_TWO, with_lightning], may_warn=warning
    )


def three_processes(*where):
    checks = [numbers, numbers_by_kernels, a_process_group_joins_its_own_processes_only]
    sync_cases.process(*where, checks)


def by_collectives(*where):
    """Processes whose kernels cannot exchange statistics."""
    exchange._agree = lambda group, device: (None, "the GPUs count as two hosts'")
    checks = [numbers, one_value_in_the_joined_batch_gives_the_bias]
    sync_cases.process(*where, checks, on_gpu=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with shared_folder(tmp_path_factory, "two") as folder:
        return ran(two_processes, 2, folder)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with shared_folder(tmp_path_factory, "three") as folder:
        return ran(three_processes, 3, folder)


WAYS = ("numbers", "numbers_by_kernels")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes_are_as_close_to_float64_on_the_joined_batch_as_torch(
    case, way, two
):
    assert_joined(case, [result[way][TWO.index(case)] for result in two])


@pytest.mark.gpu
def test_so_are_two_gpus_whose_kernels_cannot_exchange_statistics(tmp_path):
    results = sync_cases.ran_in("gpus", by_collectives, tmp_path)
    for index, case in enumerate(TWO):
        assert_joined(case, [result["numbers"][index] for result in results])
    assert_passed(one_value_in_the_joined_batch_gives_the_bias, results)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", THREE, ids=str)
def test_three_processes_with_uneven_and_empty_batches(case, way, three):
    assert_joined(case, [result[way][THREE.index(case)] for result in three])


@pytest.mark.parametrize("check", IN_TWO, ids=lambda check: check.__name__)
def test_in_each_of_two_processes(check, two):
    assert_passed(check, two)


def test_groups_of_three_processes(three):
    assert_passed(a_process_group_joins_its_own_processes_only, three)


def assert_close_states(state, truth):
    torch.testing.assert_close(state, truth, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("run", ["stock", "swapped", "late"])
def test_lightnings_processes_train_as_one_and_get_their_layers_back(run, two, tmp_path):
    mode = [] if run == "stock" else [SwapNorms("golden")]
    module = lightning_cases.Module()
    plain = lightning_cases.fit(module, 16, tmp_path, *mode, plugins=[SyncNorms()])
    truth = module.net.state_dict()
    for result in two:
        seen, after, state = result["with_lightning"][run]
        assert seen == ["normplug.modules.batch_norm.SyncBatchNorm"] * 2
        assert after == plain[1] == plain[0]  # one process joins nothing
        assert_close_states(state, truth)


def test_lightnings_own_synchronisation_of_swapped_layers_is_refused(two):
    for result in two:
        text = result["with_lightning"]["refused"]
        assert "would rebuild every BatchNorm" in text
        assert "plugins=[normplug.lightning.SyncNorms()]" in text


def test_sync_norms_keeps_a_mode_that_is_set_between_apply_and_revert():
    model, plugin = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), SyncNorms()
    plugin.apply(model)
    set_mode(model[0], 0.5)
    plugin.revert(model)
    assert [type(m) for m in model] == [normplug.BatchNorm1d, nn.BatchNorm1d]
    assert vars(model[1]).keys() == vars(nn.BatchNorm1d(4)).keys()
    plugin.apply(model)
    unswap(model)
    plugin.revert(model)
    assert [type(m) for m in model] == [nn.BatchNorm1d, nn.BatchNorm1d]


@pytest.mark.parametrize("training", [True, False])
def test_in_one_process_it_is_batch_norm_bit_for_bit(training):
    x = torch.randn(4, 3, 5, 2)
    ours, twin = SyncBatchNorm(3).train(training), normplug.BatchNorm2d(3).train(training)
    assert torch.equal(ours(x), twin(x))
    assert_same_bits(ours.state_dict(), twin.state_dict())
    with pytest.raises(ValueError, match="more than one value per channel"):
        SyncBatchNorm(3)(torch.randn(1, 3))
    with pytest.raises(ValueError, match="at least 2D"):
        SyncBatchNorm(3)(torch.randn(3))


def test_a_wrong_call_is_refused_before_a_message_is_sent(monkeypatch):
    monkeypatch.setattr(SyncBatchNorm, "group_to_join", lambda layer: object())
    for name, wrong in (("momentum", math.inf), ("running_var", torch.ones(2))):
        layer = SyncBatchNorm(3)
        setattr(layer, name, wrong)
        with pytest.raises(ValueError, match=f"^normplug.SyncBatchNorm: {name} must be "):
            layer(torch.randn(4, 3))


def let_kernels_join(monkeypatch):
    """Have this torch and its Triton look as if kernels could exchange statistics."""
    launch = pytest.importorskip("normplug._kernels.launch", reason="needs Triton")
    monkeypatch.setattr(launch, "BUILDS", True)
    monkeypatch.setattr(exchange, "symmetric_memory", lambda: SimpleNamespace())


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ((None, "host", "GPU-0"), ""),
        ((None, "another", "GPU-0"), "the group spans several hosts"),
        ((None, "host", "GPU-1"), "two processes use one GPU"),
        (
            ("CUDA_DEVICE_MAX_CONNECTIONS is 1", "host", "GPU-0"),
            "CUDA_DEVICE_MAX_CONNECTIONS is 1",
        ),
    ],
)
def test_the_processes_of_a_group_agree_on_one_way(others, why, monkeypatch):
    group, device = (
        SimpleNamespace(size=lambda: 2, rank=lambda: 1),
        torch.device("cuda", 0),
    )
    properties = SimpleNamespace(uuid="GPU-1")
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    let_kernels_join(monkeypatch)
    monkeypatch.setattr(exchange, "_host", lambda: "host")
    monkeypatch.setattr(exchange, "_connect", lambda group, device: "the peers")
    told = {tuple: others, str: None, type(None): None}
    monkeypatch.setattr(exchange, "_gather", lambda group, own: [told[type(own)], own])
    assert exchange._agree(group, device) == (None if why else "the peers", why)
    told[type(None)] = "its GPU cannot read the memory of another"
    assert exchange._agree(group, device) == (None, why or "another rank refused")
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "gloo")
    assert exchange._agree(group, device) == (None, "the group's backend is gloo")


def test_a_group_falls_back_where_a_waiting_kernel_could_block_it(monkeypatch):
    let_kernels_join(monkeypatch)
    group = SimpleNamespace(size=lambda: 2)
    assert exchange._refusal(group) is None
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert exchange._refusal(group) == "CUDA_DEVICE_MAX_CONNECTIONS is 1"
    assert "more than 16" in exchange._refusal(SimpleNamespace(size=lambda: 17))


def test_the_status_and_a_plan_say_how_a_group_is_joined(monkeypatch):
    monkeypatch.setattr(exchange, "groups", [])
    monkeypatch.setattr(exchange, "_agree", lambda *_: (None, "the hosts differ"))
    group = type("Group", (), {"size": lambda self: 4})()
    assert exchange.of(group, torch.device("cpu")) is None
    text = "SyncBatchNorm of 4 processes: collectives, because the hosts differ."
    assert text in str(normplug.status())
    assert text in str(plan(nn.BatchNorm1d(4), sync=True))
    assert text not in str(plan(nn.BatchNorm1d(4)))


def classes(model):
    return [(type(m), sorted(vars(m))) for m in model.modules()]


def test_swap_synchronises_batch_norms_and_unswap_restores_them():
    swapped = normplug.BatchNorm3d(8, mode=0.5)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), swapped, nn.LayerNorm(4))
    model.other = nn.SyncBatchNorm(8, process_group="a group")
    before, layers = classes(model), list(model.modules())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    text = str(plan(model, sync=True))
    assert text.count("normplug.SyncBatchNorm") == 3
    assert classes(model) == before
    swap(model, "golden", sync=True)
    synced = [type(m).__name__ for m in model.modules()][2:]
    sync = "SyncBatchNorm"
    assert synced == [sync, sync, "LayerNorm", sync]
    assert isinstance(model[1], nn.SyncBatchNorm)
    assert model[1].process_group is None
    assert model.other.process_group == "a group"
    assert "mode=golden" in repr(model[1])
    for mode in (0.5, "golden"):
        swap(model, mode)  # without sync, they stay synchronised
        assert [type(m).__name__ for m in model.modules()][2:] == synced
    assert [row.becomes for row in plan(model)] == synced
    unswap(model, fold=False)
    assert list(model.modules()) == layers
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    now = classes(model)
    assert type(model[2]) is nn.BatchNorm3d
    assert now[:3] + now[4:] == before[:3] + before[4:]


def test_swapped_layers_can_be_synchronised_later_and_filters_apply():
    model = swap(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), 0.5)
    swap(model, 0.5, sync=True, include="0")
    assert type(model[0]) is SyncBatchNorm
    assert type(model[1]) is normplug.BatchNorm1d
    set_mode(model, "golden")
    x = torch.randn(6, 4)
    expected = copy.deepcopy(model).eval()(x)
    torch.testing.assert_close(unswap(model).eval()(x), expected)
    assert [type(m) for m in model] == [nn.BatchNorm1d, nn.BatchNorm1d]


def test_a_synchronised_layer_accepts_the_same_inputs_as_before_and_survives_copies():
    layer = swap(nn.BatchNorm2d(3), "golden", sync=True)
    for one in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert one(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
        with pytest.raises(ValueError, match="expected 4D input"):
            one(torch.randn(2, 3))
        assert type(unswap(one)) is nn.BatchNorm2d
