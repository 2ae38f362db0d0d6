"""CUDA graphs of a training step, with a stand-in for what records them where there is no GPU."""

import pytest

pytest.importorskip("normplug.experiment")

import copy
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

import graph_cases
import normplug
from accuracy import assert_same_bits
from normplug import SyncBatchNorm
from normplug._ops import exchange
from normplug._tools import heat_map
from normplug.experiment.errors import UserError
from normplug.experiment.graph import GraphedLoss, refuse_graph
from sync_cases import ran
from training import SMALL

WARM_UPS = 3


@pytest.fixture
def replays(monkeypatch):
    """Record nothing, run the steps as they are, and keep the shapes of those that are replayed."""
    shapes = []

    def record(step, static, allow_unused_input):
        for _ in range(WARM_UPS):
            step(*static)
        loss = step.forward

        def forward(*batch):
            shapes.append(tuple(tensor.shape for tensor in batch))
            return loss(*batch)

        step.forward = forward

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", record)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.get_rng_state())
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: torch.set_rng_state(state)
    )
    return shapes


def test_a_run_with_graphs_reaches_the_numbers_of_one_without(
    trains, replays, tmp_path, monkeypatch
):
    monkeypatch.setattr("normplug.experiment.run.refuse_graph", lambda trainer: None)
    monkeypatch.setattr(heat_map, "draw_heat_map", lambda *_: None)
    # 5 steps an epoch; steps 0, 4 and 8 are measured.
    options = [*SMALL, "data.num_images=112", "model.dropout=0.1", "trainer.max_epochs=2"]
    for graph in ("true", "false"):
        trains(*options, f"graph={graph}", f"hydra.run.dir={tmp_path}/{graph}")
    logs = [(tmp_path / graph / "metrics.csv").read_text() for graph in ("true", "false")]
    assert logs[0] == logs[1]
    assert len(replays) == 7


def test_recording_leaves_running_statistics_and_random_numbers_as_they_were(replays):
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    random = torch.get_rng_state()
    graphed = GraphedLoss(lambda x, y: (net(x).mean(1) - y).square().mean(), net)
    for rows in (4, 4, 2, 4):  # a smaller batch runs without a graph
        graphed(torch.randn(rows, 3), torch.zeros(rows)).backward()
    assert replays == [((4, 3), (4,))] * 3
    assert net[0].num_batches_tracked == 4
    torch.set_rng_state(random)
    twin = nn.BatchNorm1d(3)
    for rows in (4, 4, 2, 4):
        nn.functional.dropout(twin(torch.randn(rows, 3)))
    assert torch.equal(net[0].running_var, twin.running_var)


def test_the_gradients_of_fused_optimizers_are_clipped_in_bfloat16(trains, tmp_path):
    options = [
        *SMALL,
        "optimizer=sgd",
        "++optimizer.fused=true",
        "optimizer.weight_decay=0",
    ]
    options += ["trainer.precision=bf16-mixed", "callbacks.variance=null"]
    weights = []
    for value in (
        "trainer.gradient_clip_val=1e-12",
        "optimizer.lr=1e-12",
        "optimizer.lr=1e-2",
    ):
        run = tmp_path / value.replace("=", "_")
        trains(*options, value, f"hydra.run.dir={run}")
        checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        weights.append(checkpoint["state_dict"]["net.class_token"])
    assert torch.allclose(weights[0], weights[1], atol=1e-8)
    assert not torch.allclose(weights[0], weights[2], atol=1e-8)


@pytest.mark.gpu
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS, but there was no current CUDA"
)
def test_a_graphed_loss_has_the_gradients_and_statistics_of_the_loss():
    torch.manual_seed(0)
    stock = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()
    )
    net = normplug.fuse(
        normplug.swap(nn.Sequential(*stock, nn.Linear(576, 4)).to("cuda"))
    )
    twin = copy.deepcopy(net)

    def loss(module, inputs, targets):
        return nn.functional.cross_entropy(module(inputs), targets)

    graphed = GraphedLoss(partial(loss, net), net)
    for batch in (8, 8, 3, 8):  # the third has another shape, and no graph
        inputs = torch.randn(batch, 3, 8, 8, device="cuda")
        targets = torch.randint(4, (batch,), device="cuda")
        gradients = []
        for module, value in ((net, graphed), (twin, partial(loss, twin))):
            module.zero_grad()
            value(inputs, targets).backward()
            gradients.append([p.grad for p in module.parameters()])
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))
    graphed.release()


def test_a_graph_is_refused_where_it_cannot_be(refuses):
    output = refuses(*SMALL, "graph=true", "trainer.accelerator=cpu")
    assert "graph=true needs an NVIDIA GPU" in output
    assert (
        "this run is on cpu, accumulates 1, and has SingleDeviceStrategy in 1." in output
    )
    gpu = SimpleNamespace(root_device=torch.device("cuda", 0))
    ddp = DDPStrategy(parallel_devices=[torch.device("cuda", 0)])
    ddp.cluster_environment = SimpleNamespace(local_rank=lambda: 0)
    for strategy, processes, batches, words in [
        (gpu, 2, 1, "has SimpleNamespace in 2"),
        (ddp, 2, 4, "accumulates 4"),
        (gpu, 1, 1, None),
        (ddp, 2, 1, None),
    ]:
        trainer = SimpleNamespace(
            strategy=strategy, world_size=processes, accumulate_grad_batches=batches
        )
        with pytest.raises(UserError, match=words) if words else nullcontext():
            refuse_graph(trainer)


def joined_loss(monkeypatch, layer, agreed):
    """A loss of a net with a layer that two processes join by these peers, or by collectives."""
    monkeypatch.setattr(SyncBatchNorm, "group_to_join", lambda layer: "the group")
    monkeypatch.setattr(exchange, "_agreed", {("the group", torch.device("cpu")): agreed})
    net = nn.Sequential(nn.Linear(3, 3), layer)
    return GraphedLoss(lambda x, y: (net[0](x).mean(1) - y).square().mean(), net)


@pytest.mark.parametrize("layer", [SyncBatchNorm(3), nn.SyncBatchNorm(3)])
def test_layers_that_send_collectives_are_refused(layer, monkeypatch, replays):
    graphed = joined_loss(monkeypatch, layer, None)
    with pytest.raises(UserError, match="but 1 sends collectives"):
        graphed(torch.randn(4, 3), torch.zeros(4))


def test_a_replay_says_which_process_has_stopped(monkeypatch, replays):
    class Others:
        def check(self):
            if len(replays) == 2:
                raise RuntimeError("rank 1 has stopped")

    graphed = joined_loss(monkeypatch, SyncBatchNorm(3), Others())
    for _ in range(2):
        graphed(torch.randn(4, 3), torch.zeros(4))
    with pytest.raises(RuntimeError, match="rank 1 has stopped"):
        graphed(torch.randn(4, 3), torch.zeros(4))


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    return ran(graph_cases.process, 2, tmp_path_factory.mktemp("two_gpus"))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "rtol", "atol"), [("32-true", 1e-3, 1e-5), ("bf16-mixed", 2e-2, 2e-3)]
)
def test_two_gpus_train_with_graphs_as_without(precision, rtol, atol, two_gpus):
    for graph, count in (
        (False, 0),
        (True, 7),
    ):
        # The first step is measured, without a graph.
        steps, states = zip(
            *(result["trained"][precision, graph] for result in two_gpus), strict=True
        )
        assert steps == (count, count)
        assert_same_bits(*states)
    for result in two_gpus:
        eager, graphed = (
            result["trained"][precision, graph][1] for graph in (False, True)
        )
        torch.testing.assert_close(graphed, eager, rtol=rtol, atol=atol)
