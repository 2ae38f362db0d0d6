"""What all sources of data share: three fixed parts, their loaders, and what a model needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from normplug.experiment.streams import epoch_sampler

if TYPE_CHECKING:
    from normplug.experiment.learner import Learner

Batch: TypeAlias = tuple[Tensor, Tensor]
T = TypeVar("T")


class Source(LightningDataModule, ABC):
    """Inputs and targets in three fixed parts, which are the same in every run.

    `setup` of a subclass sets the parts. `seed` decides only what a run draws from them.

    Args:
        seed: decides, with the epoch, the order of the training part, whatever else draws random
            numbers.
        batch_size: samples a step on each device.

    Attributes:
        name: in reports.
        gives: the arguments of a model that come from the data; attributes, known before `setup`.
        held_out: how the parts are divided; kept in checkpoints.
        train_part: what the model trains on.
        val_part: what it is validated on.
        test_part: what it is tested on.
    """

    name: str
    gives: ClassVar[tuple[str, ...]]
    held_out: ClassVar[str]
    train_part: Dataset[Batch]
    val_part: Dataset[Batch]
    test_part: Dataset[Batch]

    def __init__(self, *, seed: int = 0, batch_size: int = 128) -> None:
        super().__init__()
        self.seed = seed
        self.batch_size = batch_size

    @abstractmethod
    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> Learner:
        """Return the LightningModule that trains `net` on this data."""

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a model that come from the data."""
        return {name: getattr(self, name) for name in self.gives}

    @property
    def items_per_batch(self) -> int:
        """What the speed counts in a batch of one device."""
        return self.batch_size

    def facts(self) -> dict[str, Any]:
        """The data's part of `result.json`."""
        return {}

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the training part, in a new order every epoch."""
        shards, shard = self.shards()
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        return self._loader(
            self.train_part,
            epoch_sampler(self.train_part, self.seed, epoch=epoch, shards=shards, shard=shard),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the validation part, in a fixed order."""
        return self._loader(self.val_part)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the test part, in a fixed order."""
        return self._loader(self.test_part)

    @property
    def caller(self) -> str:
        """How error messages name this source."""
        return f"normplug.experiment.{type(self).__name__}"

    def workers(self, part: Dataset[Batch]) -> int:
        """Return the number of processes that load a part; 0 for what is in memory."""
        return 0

    def shards(self) -> tuple[int, int]:
        """Return the number of data-parallel processes, and which of them this is."""
        shards = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if shards is None else (shards["num_replicas"], shards["rank"])

    def _loader(
        self, part: Dataset[Batch], sampler: DistributedSampler[Batch] | None = None
    ) -> DataLoader[Batch]:
        workers = self.workers(part)
        return DataLoader(
            part,
            self.batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_is,
            pin_memory=torch.cuda.is_available(),
            drop_last=sampler is not None and len(sampler) > self.batch_size,
            # Otherwise each pass would draw from the global generator, as dropout does.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _as_is(batch: T) -> T:
    return batch
