"""The random streams of a run, each a function of (seed, epoch, shard) alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DistributedSampler

from normplug.experiment.images import ImageSet

ORDER, AUGMENTATION, MODEL = 0, 1, 2


def stream(
    purpose: int, seed: int, epoch: int, *, shard: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a new generator on `device`, at the start of the named stream.

    The numbers are hashed together: with `seed + epoch` the runs of two near seeds would share
    most of their orders.

    Args:
        purpose: `ORDER`, `AUGMENTATION` or `MODEL`.
        seed: of the run.
        epoch: from 0.
        shard: which data-parallel process draws.
        device: where it draws.
    """
    return torch.Generator(device).manual_seed(_seed(purpose, seed, epoch, shard))


def _seed(purpose: int, seed: int, epoch: int, shard: int) -> int:
    return int(np.random.SeedSequence((seed, epoch, purpose, shard)).generate_state(1)[0])


class SeedEpochs(Callback):
    """Seed torch's global generators, which feed dropout, at the start of every epoch.

    So a run that resumes draws the same numbers as one that was never interrupted.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Seed, by epoch and process."""
        torch.manual_seed(_seed(MODEL, self.seed, trainer.current_epoch, trainer.global_rank))


class EpochSampler(DistributedSampler[int]):
    """A new order of all images every epoch, dealt out to the shards.

    It is a `DistributedSampler`, even for one shard, so that Lightning leaves it in place. When
    a run resumes, Lightning starts the loader's workers before it calls `set_epoch`, and they read
    ahead: so the epoch is given here, which Lightning's own samplers cannot be.

    Args:
        images: what is sampled; only its length matters.
        seed: of the run.
        epoch: the first epoch; `set_epoch` moves on.
        shards: number of data-parallel processes.
        shard: which of them this is.
    """

    def __init__(
        self, images: ImageSet, seed: int, *, epoch: int = 0, shards: int = 1, shard: int = 0
    ) -> None:
        super().__init__(images, num_replicas=shards, rank=shard, seed=seed, drop_last=True)
        self._count = len(images)
        self.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        generator = stream(ORDER, self.seed, self.epoch)
        order = torch.randperm(self._count, generator=generator)[: self.total_size]
        return iter(order[self.rank :: self.num_replicas].tolist())
