"""The random streams of a run: each depends only on its purpose, the seed, epoch and shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import Dataset, DistributedSampler

ORDER, AUGMENTATION, MODEL = 0, 1, 2


def stream(purpose: int, seed: int, epoch: int, *, shard: int = 0) -> torch.Generator:
    """Return a new CPU generator at the start of a stream; one of a GPU would draw other numbers.

    The purpose is `ORDER`, `AUGMENTATION` or `MODEL`; `shard` is the data-parallel process.
    """
    return torch.Generator().manual_seed(_seed(purpose, seed, epoch, shard))


def _seed(purpose: int, seed: int, epoch: int = 0, shard: int = 0) -> int:
    # A hash: with seed + epoch, nearby seeds would share most of their epochs.
    return int(np.random.SeedSequence((seed, epoch, purpose, shard)).generate_state(1)[0])


class SeedEpochs(Callback):
    """Seed torch's global generators at the start of every epoch.

    Dropout draws from them. So a run that resumes draws the same numbers as an uninterrupted run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed by epoch and process."""
        torch.manual_seed(_seed(MODEL, self.seed, trainer.current_epoch, trainer.global_rank))


def epoch_sampler(
    part: Dataset[Any], seed: int, *, epoch: int = 0, shards: int = 1, shard: int = 0
) -> DistributedSampler[int]:
    """Return a sampler that shuffles all samples every epoch and divides them among the shards.

    It is a `DistributedSampler` even for one shard, so that Lightning does not replace it. When a
    run resumes, Lightning starts the loader's workers, which prefetch, before it calls `set_epoch`.
    So the first epoch is set here.
    """
    sampler: DistributedSampler[int] = DistributedSampler(
        part, num_replicas=shards, rank=shard, seed=_seed(ORDER, seed), drop_last=True
    )
    sampler.set_epoch(epoch)
    return sampler


class Shard(DistributedSampler[int]):
    """The samples of one process, in a fixed order; unlike its base class, it repeats none."""

    def __iter__(self) -> Iterator[int]:
        return iter(self._samples())

    def __len__(self) -> int:
        return len(self._samples())

    def _samples(self) -> range:
        return range(self.rank, len(self.dataset), self.num_replicas)  # type: ignore[arg-type]
