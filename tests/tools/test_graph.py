"""CUDA graphs of a training step, with a stand-in for what records them where there is no GPU."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import normplug
from normplug.experiment.errors import UserError
from normplug.experiment.graph import GraphedLoss, refuse_graph
from normplug.lightning import heat_map
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
    monkeypatch.setattr(heat_map, "draw_heat_map", lambda *rows, **names: None)
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
    graphed.release()
    assert graphed._step is None


def test_the_gradients_of_fused_optimizers_are_clipped_in_bfloat16(trains, tmp_path):
    options = [*SMALL, "optimizer=sgd", "++optimizer.fused=true", "optimizer.weight_decay=0"]
    options += ["trainer.precision=bf16-mixed", "callbacks.variance=null"]
    weights = []
    for value in ("trainer.gradient_clip_val=1e-12", "optimizer.lr=1e-12", "optimizer.lr=1e-2"):
        run = tmp_path / value.replace("=", "_")
        trains(*options, value, f"hydra.run.dir={run}")
        checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
        weights.append(checkpoint["state_dict"]["net.class_token"])
    assert torch.allclose(weights[0], weights[1], atol=1e-8)
    assert not torch.allclose(weights[0], weights[2], atol=1e-8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA")
def test_a_graphed_loss_has_the_gradients_and_statistics_of_the_loss():
    torch.manual_seed(0)
    stock = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    net = normplug.fuse(normplug.swap(nn.Sequential(*stock, nn.Linear(576, 4)).to("cuda")))
    twin = copy.deepcopy(net)

    def loss(module, inputs, targets):
        return nn.functional.cross_entropy(module(inputs), targets)

    graphed = GraphedLoss(partial(loss, net), net)
    for batch in (8, 8, 3, 8):  # the third has another shape, and no graph
        inputs = torch.randn(batch, 3, 8, 8, device="cuda")
        targets = torch.randint(4, (batch,), device="cuda")
        for module, value in ((net, graphed), (twin, partial(loss, twin))):
            module.zero_grad()
            value(inputs, targets).backward()
        gradients = ({n: p.grad for n, p in m.named_parameters()} for m in (net, twin))
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dict(net.named_buffers()), dict(twin.named_buffers()))
    graphed.release()


def test_a_graph_is_refused_where_it_cannot_be(refuses):
    assert "graph=true needs an NVIDIA GPU; this run is on cpu. Leave" in refuses(
        *SMALL, "graph=true", "trainer.accelerator=cpu"
    )
    gpu = SimpleNamespace(root_device=torch.device("cuda", 0))
    for processes, batches, words in [(2, 1, "single process; this run has 2"), (1, 4, "=4 accum")]:
        trainer = SimpleNamespace(
            strategy=gpu, world_size=processes, accumulate_grad_batches=batches
        )
        with pytest.raises(UserError, match=words):
            refuse_graph(trainer)
    refuse_graph(SimpleNamespace(strategy=gpu, world_size=1, accumulate_grad_batches=1))
