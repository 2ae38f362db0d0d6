"""The base class of image data: the split, and preprocessing on the device."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from normplug.experiment.augment import Augment, crop_and_flip, normalise
from normplug.experiment.classifier import Classifier
from normplug.experiment.images import (
    SPLIT,
    FileImages,
    ImageSet,
    channel_statistics,
    stratified_split,
)
from normplug.experiment.memory import Batch, Batches
from normplug.experiment.source import Device, Source
from normplug.experiment.streams import AUGMENTATION, stream


class Options(TypedDict, total=False):
    """The arguments of `ImageData`, which every subclass forwards."""

    seed: int
    batch_size: int
    augment: Mapping[str, Any] | None
    val_fraction: float
    device: Device


class ImageData(Source):
    """Labelled images in three fixed parts, normalised and augmented on the device.

    A subclass implements `load`. The three parts are the same in every run; `seed` decides only
    the order and the augmentation of the training images.

    Args:
        seed: with the epoch, fixes order and augmentation, regardless of other random draws.
        batch_size: images per step on each device.
        augment: the fields of `Augment`; None for no augmentation.
        val_fraction: fraction of each class's training images that is held out for validation.
        device: see `Source`.

    Attributes:
        num_classes: number of labels; known before `setup`.
        image_size: height and width in pixels; known before `setup`.
        mean: (3,), float32, of the training images' pixels, scaled to [0, 1].
        std: (3,), float32, of the same pixels.
    """

    gives = ("num_classes", "image_size")
    held_out = SPLIT
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
        device: Device = "auto",
    ) -> None:
        super().__init__(seed=seed, batch_size=batch_size, device=device)
        self.augment = Augment(**(augment or {}))
        self.val_fraction = val_fraction
        self._is_set_up = False
        self._stream: tuple[int, torch.Generator] | None = None

    @abstractmethod
    def load(self) -> tuple[ImageSet, ImageSet]:
        """Return the training images, validation included, and the test images."""

    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> Classifier:
        """Return the LightningModule that trains `net` on these images."""
        return Classifier(net, self.num_classes, optimizer, **options)

    def setup(self, stage: str) -> None:
        """Load and split the images and compute `mean` and `std`, once for all stages."""
        if self._is_set_up:
            return
        train, val, test = self.split()
        mean, std = channel_statistics(train)
        self.mean, self.std = mean.float(), std.float()
        self.set_parts(train, val, test)
        self._is_set_up = True

    def split(self) -> tuple[ImageSet, ImageSet, ImageSet]:
        """Return the training, validation and test images."""
        images, test = self.load()
        train, val = self.hold_out(images, self.val_fraction)
        return train, val, test

    def hold_out(self, images: ImageSet, fraction: float) -> tuple[ImageSet, ImageSet]:
        """Split off `fraction` of every class, by `stratified_split`.

        Raises:
            ValueError: a part would have fewer images than classes, or a class has a single image.
        """
        try:
            kept, held = stratified_split(images.labels, fraction)
        except ValueError:
            raise ValueError(
                f"{self.caller}: both parts of a split need an image of each class; {fraction} of "
                f"{len(images)} images cannot be held out, as the smallest class has "
                f"{images.labels.unique(return_counts=True)[1].min()}. Use more images per class "
                f"or another val_fraction (it is {self.val_fraction})."
            ) from None
        return images.subset(kept), images.subset(held)

    def train_dataloader(self) -> DataLoader[Batch] | Batches:
        """Return the loader of the training images, which reshuffles them every epoch."""
        self._stream = None  # a second fit must not continue the stream of the first
        return super().train_dataloader()

    def workers(self, part: Dataset[Batch]) -> int:
        """Return the number of worker processes that decode a part; 0 for decoded images."""
        return self.num_workers if isinstance(part, FileImages) else 0

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise a batch on its device; while training, augment it too."""
        images, labels = batch
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        images = normalise(images, self.mean, self.std)
        if self.trainer is None:
            return images, labels
        if self.trainer.training and self.augment != Augment():
            generator = self._augmentation_stream(self.trainer.current_epoch)
            images = crop_and_flip(images, self.augment, generator)
        # Lightning calls convert_input before this hook, too early: bf16-true skips uint8 images.
        return self.trainer.precision_plugin.convert_input(images), labels

    def _augmentation_stream(self, epoch: int) -> torch.Generator:
        """Return the generator of this epoch, created at its first batch."""
        if self._stream is None or self._stream[0] != epoch:
            _, shard = self.shards()
            self._stream = (epoch, stream(AUGMENTATION, self.seed, epoch, shard=shard))
        return self._stream[1]
