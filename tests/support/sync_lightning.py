"""What a Trainer does with SyncNorms, in one process and in each of two."""

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sync_cases
from normplug.lightning import SwapNorms, SyncNorms, VarianceLogger


class Module(LightningModule):
    """A model of two BatchNorms; late: made in `configure_model`."""

    def __init__(self, late=False):
        super().__init__()
        self.net = None if late else sync_cases.make_net()

    def configure_model(self):
        if self.net is None:
            self.net = sync_cases.make_net()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class Classes(Callback):
    """Notes what the BatchNorms are while they train."""

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.seen = classes(pl_module)


def classes(model):
    is_norm = nn.modules.batchnorm._BatchNorm
    return [
        f"{type(m).__module__}.{type(m).__name__}"
        for m in model.modules()
        if isinstance(m, is_norm)
    ]


def fit(module, batch, directory, *callbacks, **options):
    """The classes of the BatchNorms while it trains, and after."""
    noted = Classes()
    data = TensorDataset(sync_cases.IMAGES, sync_cases.LABELS)
    Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory,
        callbacks=[*callbacks, noted], **options,
    ).fit(module, DataLoader(data, batch))  # fmt: skip
    return noted.seen, classes(module)


def distributed(directory):
    """Fits of one process's share, by name: classes while it trains, after, and the weights."""
    runs = {
        "stock": (Module(), []),
        "swapped": (Module(), [SwapNorms("golden")]),
        "late": (Module(late=True), [SwapNorms("golden")]),
    }
    results = {}
    for name, (module, callbacks) in runs.items():
        callbacks.append(VarianceLogger(2, directory))
        seen, after = fit(
            module, 8, directory, *callbacks, plugins=[SyncNorms()], devices=2,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        )  # fmt: skip
        results[name] = seen, after, module.net.state_dict()
    try:
        fit(
            Module(), 8, directory, SwapNorms("golden"), sync_batchnorm=True, devices=2,
            strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        )  # fmt: skip
    except RuntimeError as error:
        results["refused"] = str(error)
    return results
