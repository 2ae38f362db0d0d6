"""What each process runs in the tests of CUDA graphs with DistributedDataParallel."""

import copy
import tempfile

import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_cases
import sync_cases
from normplug import fuse, swap
from normplug._measure import ACCURACY
from normplug.experiment.learner import Learner
from normplug.lightning import SyncNorms, VarianceLogger
from recompute_cases import Residual


def make_net():
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    net = nn.Sequential(*stem, Residual(width=16), nn.Flatten(), nn.Linear(16 * 64, 4))
    return fuse(swap(net, "golden")).to(memory_format=torch.channels_last)


def settings(graph):
    """The part of a configuration that a Learner reads."""
    optimizer = {
        "_target_": "torch.optim.SGD",
        "_partial_": True,
        "lr": 0.05,
        "momentum": 0.9,
    }
    schedule = {"schedule": "constant", "warmup": 0.0, "cycle_momentum": False}
    norms = {"lr": 1.0, "decay": 0.0}
    factors = {
        "norm_weight": norms,
        "norm_bias": norms,
        "head": {"lr": 1.0, "decay": 1.0},
    }
    others = {"factors": factors, "seed": 0, "label_smoothing": 0.1, "graph": graph}
    return OmegaConf.create({"optimizer": optimizer, **schedule, **others})


class Graphs(Callback):
    """Counts the steps after which there are graphs."""

    count = 0

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.count += (
            pl_module._graphed is not None and pl_module._graphed._step is not None
        )


def trained(rank, world, device):
    """For each precision, without and with graphs: the steps with graphs, and the final state.

    An epoch has three batches of 16 images in a process, and one of 8. Steps 0 and 5 are measured.
    """
    lightning_cases.as_under_torchrun(rank, world)
    torch.backends.cudnn.deterministic = True
    random = torch.Generator().manual_seed(1)
    images = torch.randn(112, 3, 8, 8, generator=random)
    data = TensorDataset(images, torch.randint(4, (112,), generator=random))
    results = {}
    for precision in ("32-true", "bf16-mixed"):
        for graph in (False, True):
            learner, graphs = Learner(make_net(), ACCURACY, settings(graph)), Graphs()
            environment = TorchElasticEnvironment()
            with tempfile.TemporaryDirectory() as directory:
                lightning_cases.trainer(
                    directory,
                    VarianceLogger(5, directory),
                    graphs,
                    accelerator="gpu",
                    devices=world,
                    strategy=DDPStrategy(
                        cluster_environment=environment, broadcast_buffers=False
                    ),
                    plugins=[SyncNorms()],
                    precision=precision,
                    max_epochs=2,
                ).fit(learner, DataLoader(data, 16))
            results[precision, graph] = (
                graphs.count,
                copy.deepcopy(learner.net.state_dict()),
            )
    return results


def process(rank, world, directory):
    sync_cases.process(rank, world, directory, [trained], on_gpu=True)
