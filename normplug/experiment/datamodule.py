"""What all sources of images share: the split, the loaders, the work on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypedDict, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler

from normplug.experiment.augment import Augment, crop_and_flip, normalise
from normplug.experiment.images import (
    Batch,
    FileImages,
    ImageSet,
    channel_statistics,
    stratified_split,
)
from normplug.experiment.streams import AUGMENTATION, epoch_sampler, stream

T = TypeVar("T")


class Options(TypedDict, total=False):
    """The arguments of `ImageData`, which every source passes on."""

    seed: int
    batch_size: int
    augment: Mapping[str, Any] | None
    val_fraction: float


class ImageData(LightningDataModule, ABC):
    """Labelled images in three fixed parts, normalised and augmented on the device.

    A subclass implements `load`. The three parts are the same in every run; `seed` decides only
    the order and the augmentation of the training images.

    Args:
        seed: decides, with the epoch, order and augmentation, whatever else draws random numbers.
        batch_size: images a step on each device.
        augment: the fields of `Augment`; None for no augmentation.
        val_fraction: share of each class's training images that is held out for validation.

    Attributes:
        name: in reports.
        num_classes: number of labels; known before `setup`.
        image_size: height and width in pixels; known before `setup`.
        mean: (3,), float32, of the training images' pixels, scaled to [0, 1].
        std: (3,), float32, of the same pixels.
    """

    name: str
    num_classes: int
    image_size: int
    num_workers = 0  # used only where images are decoded on demand

    def __init__(
        self,
        *,
        seed: int = 0,
        batch_size: int = 128,
        augment: Mapping[str, Any] | None = None,
        val_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.batch_size = batch_size
        self.augment = Augment(**(augment or {}))
        self.val_fraction = val_fraction
        self._is_set_up = False
        self._stream: tuple[int, torch.Generator] | None = None

    @abstractmethod
    def load(self) -> tuple[ImageSet, ImageSet]:
        """Return the training images, validation included, and the test images."""

    def setup(self, stage: str) -> None:
        """Load, split and measure the images once, whatever the stage."""
        if self._is_set_up:
            return
        self.train_images, self.val_images, self.test_images = self.split()
        mean, std = channel_statistics(self.train_images)
        self.mean, self.std = mean.float(), std.float()
        self._is_set_up = True

    def split(self) -> tuple[ImageSet, ImageSet, ImageSet]:
        """Return the training, validation and test images."""
        images, test = self.load()
        train, val = self.hold_out(images, self.val_fraction)
        return train, val, test

    def hold_out(self, images: ImageSet, fraction: float) -> tuple[ImageSet, ImageSet]:
        """Split off `fraction` of every class, by `stratified_split`.

        Raises:
            ValueError: a part would have less than one image a class, or a class has a single one.
        """
        try:
            kept, held = stratified_split(images.labels, fraction)
        except ValueError:
            raise ValueError(
                f"{self.caller}: both parts of a split need an image of each class; {fraction} of "
                f"{len(images)} images cannot be held out, as the smallest class has "
                f"{images.labels.unique(return_counts=True)[1].min()}. Use more images a class or "
                f"another val_fraction (it is {self.val_fraction})."
            ) from None
        return images.subset(kept), images.subset(held)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the training images, in a new order every epoch."""
        self._stream = None  # a second fit must not go on where the first one stopped
        shards, shard = self._shards()
        epoch = 0 if self.trainer is None else self.trainer.current_epoch
        return self._loader(
            self.train_images,
            epoch_sampler(self.train_images, self.seed, epoch=epoch, shards=shards, shard=shard),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the validation images, in a fixed order."""
        return self._loader(self.val_images)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the test images, in a fixed order."""
        return self._loader(self.test_images)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise a batch on its device; while training, augment it too."""
        images, labels = batch
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        images = normalise(images, self.mean, self.std)
        if self.trainer is None:
            return images, labels
        if self.trainer.training and self.augment != Augment():
            generator = self._augmentation_stream(self.trainer.current_epoch, images.device)
            images = crop_and_flip(images, self.augment, generator)
        # Lightning's own call came too early for precision=bf16-true: the images were uint8 then.
        return self.trainer.precision_plugin.convert_input(images), labels

    @property
    def caller(self) -> str:
        """How error messages name this source."""
        return f"normplug.experiment.{type(self).__name__}"

    def _loader(
        self, images: ImageSet, sampler: DistributedSampler[Batch] | None = None
    ) -> DataLoader[Batch]:
        workers = self.num_workers if isinstance(images, FileImages) else 0
        return DataLoader(
            images,
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

    def _shards(self) -> tuple[int, int]:
        """Return the number of data-parallel processes, and which of them this is."""
        shards = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if shards is None else (shards["num_replicas"], shards["rank"])

    def _augmentation_stream(self, epoch: int, device: torch.device) -> torch.Generator:
        """Return the generator of this epoch, a new one at the epoch's first batch."""
        if self._stream is None or self._stream[0] != epoch:
            _, shard = self._shards()
            new = stream(AUGMENTATION, self.seed, epoch, shard=shard, device=device)
            self._stream = (epoch, new)
        return self._stream[1]


def _as_is(batch: T) -> T:
    return batch
