"""Models that a Trainer trains, and what it does with SyncNorms in each of two processes."""

import os
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sync_cases
from normplug.lightning import SwapNorms, SyncNorms, VarianceLogger


class Module(LightningModule):
    """Trains what `make` builds, by default with two BatchNorms; late: in `configure_model`."""

    def __init__(self, make=sync_cases.make_net, late=False):
        super().__init__()
        self.make = make
        self.net = None if late else make()

    def configure_model(self):
        if self.net is None:
            self.net = self.make()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def trainer(directory, *callbacks, **options):
    """A Trainer that only trains, on the CPU."""
    off = (
        "logger",
        "enable_checkpointing",
        "enable_progress_bar",
        "enable_model_summary",
    )
    usual = {"accelerator": "cpu", "max_epochs": 1, "log_every_n_steps": 1}
    options = dict.fromkeys(off, False) | usual | options
    return Trainer(callbacks=list(callbacks), default_root_dir=directory, **options)


def classes(model):
    """The classes of the BatchNorms."""
    found = [
        type(m) for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    return [f"{cls.__module__}.{cls.__name__}" for cls in found]


def fit(module, batch, directory, *callbacks, **options):
    """Train; return the classes of the BatchNorms during training, and after."""
    seen = []
    note = LambdaCallback(on_train_batch_end=lambda *_: seen.append(classes(module)))
    data = TensorDataset(sync_cases.IMAGES, sync_cases.LABELS)
    run = trainer(directory, *callbacks, note, max_epochs=3, **options)
    run.fit(module, DataLoader(data, batch))
    return seen[-1], classes(module)


def as_under_torchrun(rank, world):
    """Set the environment variables from which Lightning learns that its processes run already."""
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
    }
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }


def distributed(directory):
    """Train on this process's share; return classes during training, classes after, and weights."""
    runs = {
        "stock": (Module(), []),
        "swapped": (Module(), [SwapNorms("golden")]),
        "late": (Module(late=True), [SwapNorms("golden")]),
    }
    ddp = partial(DDPStrategy, cluster_environment=TorchElasticEnvironment())
    results = {}
    for name, (module, callbacks) in runs.items():
        callbacks.append(VarianceLogger(2, directory))
        options = {"plugins": [SyncNorms()], "devices": 2, "strategy": ddp()}
        seen, after = fit(module, 8, directory, *callbacks, **options)
        results[name] = seen, after, module.net.state_dict()
    try:
        options = {"sync_batchnorm": True, "devices": 2, "strategy": ddp()}
        fit(Module(), 8, directory, SwapNorms("golden"), **options)
    except RuntimeError as error:
        results["refused"] = str(error)
    return results
