"""The base class of data: three fixed parts, their loaders, and the sizes for a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from normplug.experiment.memory import Batch, Batches, MemoryPart
from normplug.experiment.streams import Shard, epoch_sampler

if TYPE_CHECKING:
    from normplug.experiment.learner import Learner

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
T = TypeVar("T")
GPU_SHARE = 0.25  # of a GPU's free memory; device="auto" keeps larger data on the host
# Evaluation keeps no activations for a backward, so its batches can be larger than in training.
# The host then launches fewer kernels.
EVALUATION_BATCHES = 4  # times batch_size


class Source(LightningDataModule, ABC):
    """Inputs and targets in three fixed parts, which are the same in every run.

    A subclass sets the parts in `setup`. `seed` decides only what a run draws from them.

    Args:
        seed: with the epoch, fixes the order of the training part, regardless of other random
            draws.
        batch_size: samples per step on each device; an evaluation step takes 4 times as many.
        device: where decoded data are kept: "cuda" in the memory of the run's GPU, "cpu" on the
            host. "auto" is the GPU if the run has one and the data take at most a quarter of its
            free memory. Order and augmentation do not depend on it.

    Attributes:
        name: the name in reports.
        gives: names of the attributes that a model takes as arguments; known before `setup`.
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

    def __init__(self, *, seed: int = 0, batch_size: int = 128, device: Device = "auto") -> None:
        super().__init__()
        self.seed = seed
        self.batch_size = batch_size
        self.device = device

    @abstractmethod
    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> Learner:
        """Return the LightningModule that trains `net` on this data."""

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a model that come from the data."""
        return {name: getattr(self, name) for name in self.gives}

    @property
    def items_per_batch(self) -> int:
        """Number of items in a batch of one device, for the speed in items/s."""
        return self.batch_size

    def facts(self) -> dict[str, Any]:
        """The data's part of `result.json`."""
        return {}

    def set_parts(self, *parts: Dataset[Batch]) -> None:
        """Set the training, validation and test part, moved to the device that stores them.

        Raises:
            ValueError: `device` is "cuda" in a run without a GPU, or with data that are decoded
                for every batch.
        """
        device = self._storage(parts)
        self.train_part, self.val_part, self.test_part = (
            part.to(device) if isinstance(part, MemoryPart) else part for part in parts
        )

    def train_dataloader(self) -> DataLoader[Batch] | Batches:
        """Return the loader of the training part, which reshuffles it every epoch."""
        shards, shard = self.shards()
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        sampler = epoch_sampler(self.train_part, self.seed, epoch=epoch, shards=shards, shard=shard)
        drop_last = len(sampler) > self.batch_size
        return self._loader(self.train_part, sampler, self.batch_size, drop_last=drop_last)

    def val_dataloader(self) -> DataLoader[Batch] | Batches:
        """Return the loader of the validation part, in a fixed order."""
        return self._evaluation_loader(self.val_part)

    def test_dataloader(self) -> DataLoader[Batch] | Batches:
        """Return the loader of the test part, in a fixed order."""
        return self._evaluation_loader(self.test_part)

    @property
    def caller(self) -> str:
        """How error messages name this source."""
        return f"normplug.experiment.{type(self).__name__}"

    def workers(self, part: Dataset[Batch]) -> int:
        """Return the number of worker processes that load a part; 0 if it is in memory."""
        return 0

    def shards(self) -> tuple[int, int]:
        """Return the number of data-parallel processes, and the rank of this one."""
        shards = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if shards is None else (shards["num_replicas"], shards["rank"])

    def _storage(self, parts: Sequence[Dataset[Batch]]) -> torch.device:
        """Choose the device that stores the parts in memory."""
        host = torch.device("cpu")
        runs_on = host if self.trainer is None else self.trainer.strategy.root_device
        sizes = [part.nbytes for part in parts if isinstance(part, MemoryPart)]
        if self.device == "cuda" and runs_on.type != "cuda":
            raise ValueError(
                f"{self.caller}: device=cuda keeps the data in the memory of a GPU, but this run "
                f"is on {runs_on}. Use data.device=auto, which takes a GPU if there is one."
            )
        if self.device == "cuda" and not sizes:
            raise ValueError(
                f"{self.caller}: device=cuda keeps decoded data in the memory of a GPU, but these "
                "are decoded for every batch. Use data.device=auto, or a larger data.memory_gib."
            )
        if self.device == "cpu" or runs_on.type != "cuda":
            return host
        if self.device == "cuda":
            return runs_on
        free, _ = torch.cuda.mem_get_info(runs_on)
        return runs_on if sum(sizes) <= GPU_SHARE * free else host

    def _evaluation_loader(self, part: Dataset[Batch]) -> DataLoader[Batch] | Batches:
        shards, shard = self.shards()
        batch_size = EVALUATION_BATCHES * self.batch_size
        samples, longer = divmod(len(part), shards)  # type: ignore[arg-type]
        if longer:  # by one sample, which must not be a batch of its own: others would wait for it
            if not samples:
                raise ValueError(
                    f"{self.caller}: validation and test need a sample for each process; got "
                    f"{longer} for {shards} processes. Use more data or fewer processes."
                )
            batch_size = next(size for size in count(batch_size) if samples % size)
        return self._loader(part, Shard(part, shards, shard), batch_size)

    def _loader(
        self,
        part: Dataset[Batch],
        sampler: DistributedSampler[int],
        batch_size: int,
        *,
        drop_last: bool = False,
    ) -> DataLoader[Batch] | Batches:
        if isinstance(part, MemoryPart):
            return Batches(part, BatchSampler(sampler, batch_size, drop_last))
        workers = self.workers(part)
        return DataLoader(
            part,
            batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_is,  # `__getitems__` returns whole batches
            pin_memory=torch.cuda.is_available(),
            drop_last=drop_last,
            # Otherwise each pass would draw a seed from the global generator, which dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _as_is(batch: T) -> T:
    return batch
