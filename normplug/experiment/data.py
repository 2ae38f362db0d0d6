"""The data of `configs/data`: three fixed parts, the same in every run, and their batches."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from filelock import FileLock
from lightning.pytorch import LightningDataModule
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import datasets
from torchvision.transforms.v2 import functional as v2
from typing_extensions import TypedDict  # pydantic cannot read that of Python < 3.12

from normplug._extras import needs
from normplug.experiment.config import Count, Natural, Number, Seed, checked
from normplug.experiment.errors import WHO
from normplug.experiment.resume import save

if TYPE_CHECKING:
    from normplug.experiment.learner import Learner

Batch: TypeAlias = tuple[Tensor, Tensor]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]

ORDER, AUGMENTATION, MODEL = 0, 1, 2  # the random streams of a run
SPLIT_SEED = 1618  # any constant: every run of a comparison must hold out the same images
TEST_FRACTION = 0.2  # held out from a source without a test set
STATISTICS_SAMPLE = 2048  # images decoded for mean and std, if the set is not in memory
GPU_SHARE = 0.25  # of a GPU's free memory; device="auto" keeps larger data on the host
# Evaluation keeps no activations for a backward, so its batches can be larger than in training.
EVALUATION_BATCHES = 4  # times batch_size
# Decoding a smaller file mostly holds the GIL: two threads need 0.39 ms for a 32x32 JPEG, one needs
# 0.2 ms. Above 16 KiB, threads win (2 cores of an Intel Xeon, November 2026).
SMALL_FILE = 8192  # bytes


def stream_seed(purpose: int, seed: int, epoch: int = 0, shard: int = 0) -> int:
    """Hash a purpose, the run's seed, the epoch and the process to the seed of a random stream."""
    # With seed + epoch, nearby seeds would share most of their epochs.
    return int(np.random.SeedSequence((seed, epoch, purpose, shard)).generate_state(1)[0])


class MemoryPart(Dataset[Batch]):
    """Samples in memory, on the host or on a GPU: inputs (N, ...) and targets (N, ...)."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        where = torch.tensor(rows).to(self.inputs.device, non_blocking=True)
        return self.inputs[where], self.targets[where]

    def subset(self, rows: Tensor) -> MemoryPart:
        """Return the samples at `rows`, copied."""
        return MemoryPart(self.inputs[rows], self.targets[rows])


class FilePart(Dataset[Batch]):
    """Image files with their labels, decoded each time they are indexed."""

    def __init__(self, samples: Sequence[tuple[str, int]], image_size: int) -> None:
        self.samples = samples
        self.targets = torch.tensor([label for _, label in samples], dtype=torch.int64)
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, rows: Sequence[int]) -> Batch:
        images = torch.stack([decode(self.samples[i][0], self.image_size) for i in rows])
        return images, self.targets[torch.as_tensor(rows)]

    def subset(self, rows: Tensor) -> FilePart:
        """Return the files at `rows`."""
        return FilePart([self.samples[i] for i in rows.tolist()], self.image_size)


Part: TypeAlias = MemoryPart | FilePart


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
        num_workers: processes that decode a part of files.

    Attributes:
        name: the name in reports.
        gives: names of the attributes that a model takes as arguments; known before `setup`.
        held_out: how the parts are divided; kept in checkpoints.
    """

    name: str
    gives: ClassVar[tuple[str, ...]]
    held_out: ClassVar[str]
    train_part: Part
    val_part: Part
    test_part: Part

    @checked
    def __init__(
        self,
        *,
        seed: Seed = 0,
        batch_size: Count = 128,
        device: Device = "auto",
        num_workers: Natural = 0,
    ) -> None:
        super().__init__()
        self.seed = seed
        self.batch_size = batch_size
        self.device = device
        self.num_workers = num_workers
        self.caller = f"{WHO}.{type(self).__name__}"  # the name in error messages

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

    def set_parts(self, *parts: Part) -> None:
        """Set the training, validation and test part, moved to the device that stores them.

        Raises:
            ValueError: `device` is "cuda" in a run without a GPU, or with data that are decoded
                for every batch.
        """
        device = self._storage([part for part in parts if isinstance(part, MemoryPart)])
        self.train_part, self.val_part, self.test_part = (
            MemoryPart(part.inputs.to(device), part.targets.to(device))
            if isinstance(part, MemoryPart)
            else part
            for part in parts
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the training part, which reshuffles it every epoch."""
        shards, shard = self.shards()
        # It is a DistributedSampler even for one shard, so that Lightning does not replace it.
        sampler: DistributedSampler[int] = DistributedSampler(
            self.train_part, shards, shard, seed=stream_seed(ORDER, self.seed), drop_last=True
        )
        # When a run resumes, Lightning starts the workers, which prefetch, before `set_epoch`.
        sampler.set_epoch(0 if self.trainer is None else self.trainer.current_epoch)
        drop_last = len(sampler) > self.batch_size
        return self._loader(self.train_part, sampler, self.batch_size, drop_last=drop_last)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the validation part, in a fixed order."""
        return self._evaluation_loader(self.val_part)

    def test_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the test part, in a fixed order."""
        return self._evaluation_loader(self.test_part)

    def shards(self) -> tuple[int, int]:
        """Return the number of data-parallel processes, and the rank of this one."""
        shards = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if shards is None else (shards["num_replicas"], shards["rank"])

    def _storage(self, parts: Sequence[MemoryPart]) -> torch.device:
        """Choose the device that stores the parts in memory."""
        host = torch.device("cpu")
        runs_on = host if self.trainer is None else self.trainer.strategy.root_device
        if self.device == "cuda" and (runs_on.type != "cuda" or not parts):
            why = f"this run is on {runs_on}" if parts else "these are decoded for every batch"
            raise ValueError(
                f"{self.caller}: device=cuda keeps decoded data in the memory of a GPU, but {why}. "
                "Use data.device=auto, which takes a GPU where that is possible."
            )
        if self.device == "cpu" or runs_on.type != "cuda":
            return host
        size = sum(part.inputs.nbytes + part.targets.nbytes for part in parts)
        fits = self.device == "cuda" or size <= GPU_SHARE * torch.cuda.mem_get_info(runs_on)[0]
        return runs_on if fits else host

    def _evaluation_loader(self, part: Part) -> DataLoader[Batch]:
        shards, shard = self.shards()
        batch_size = EVALUATION_BATCHES * self.batch_size
        samples, longer = divmod(len(part), shards)
        if longer:  # by one sample, which must not be a batch of its own: others would wait for it
            if not samples:
                raise ValueError(
                    f"{self.caller}: validation and test need a sample for each process; got "
                    f"{longer} for {shards} processes. Use more data or fewer processes."
                )
            batch_size = next(size for size in count(batch_size) if samples % size)
        sampler = UnrepeatedDistributedSampler(part, num_replicas=shards, rank=shard, shuffle=False)
        return self._loader(part, sampler, batch_size)

    def _loader(
        self, part: Part, sampler: DistributedSampler[int], size: int, *, drop_last: bool = False
    ) -> DataLoader[Batch]:
        workers = self.num_workers if isinstance(part, FilePart) else 0
        on_host = isinstance(part, FilePart) or not part.inputs.is_cuda
        return DataLoader(
            part,
            size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_is,  # `__getitems__` returns whole batches
            pin_memory=torch.cuda.is_available() and on_host,
            drop_last=drop_last,
            # Otherwise each pass would draw a seed from the global generator, which dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
        )


def _as_is(batch: Any) -> Any:
    return batch


class Augment(TypedDict, total=False):
    """How training images are augmented.

    Attributes:
        pad: pixels added on every side before a random crop to the original size; 0 for no crop.
        flip: flip horizontally with probability 1/2.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    pad: Natural
    flip: bool


class ImageData(Source):
    """Labelled images in three fixed parts, normalised and augmented on the device.

    A subclass implements `load`. The three parts are the same in every run; `seed` decides only
    the order and the augmentation of the training images.

    Args:
        augment: see `Augment`; None for no augmentation.
        val_fraction: fraction of each class's training images that is held out for validation.
        **options: see `Source`.

    Attributes:
        num_classes: number of labels; known before `setup`.
        image_size: height and width in pixels; known before `setup`.
        mean: (3,), float32, of the training images' pixels, scaled to [0, 1].
        std: (3,), float32, of the same pixels.
    """

    gives = ("num_classes", "image_size")
    held_out = f"train_test_split(random_state={SPLIT_SEED})"
    num_classes: int
    image_size: int

    @checked
    def __init__(
        self,
        *,
        augment: Augment | None = None,
        val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        given = augment or {}
        self.augment = given.get("pad", 0), given.get("flip", False)
        self.val_fraction = val_fraction
        self._is_set_up = False
        self._stream: tuple[int, torch.Generator] | None = None

    @abstractmethod
    def load(self) -> tuple[Part, Part]:
        """Return the training images, validation included, and the test images."""

    def learner(self, net: nn.Module, optimizer: Any, **options: Any) -> Learner:
        """Return the LightningModule that trains `net` on these images."""
        from normplug.experiment.learner import Classifier

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

    def split(self) -> tuple[Part, Part, Part]:
        """Return the training, validation and test images."""
        images, test = self.load()
        train, val = self.hold_out(images, self.val_fraction)
        return train, val, test

    def hold_out(self, images: Part, fraction: float) -> tuple[Part, Part]:
        """Split off `fraction` of every class, the same images in every run.

        Raises:
            ValueError: a part would have fewer images than classes, or a class has a single image.
        """
        from sklearn.model_selection import train_test_split  # slow to import

        counts = images.targets.unique(return_counts=True)[1]
        count = int((counts * fraction).round().sum())
        count = max(count, len(counts)) if count else 0  # scikit-learn's minimum; it refuses 0
        try:
            kept_rows, held_rows = train_test_split(
                range(len(images)),
                test_size=count,
                stratify=images.targets,
                random_state=SPLIT_SEED,
            )
        except ValueError:
            raise ValueError(
                f"{self.caller}: both parts of a split need an image of each class; {fraction} of "
                f"{len(images)} images cannot be held out, as the smallest class has "
                f"{counts.min()}. Use more images per class or another val_fraction (it is "
                f"{self.val_fraction})."
            ) from None
        kept, held = (torch.tensor(sorted(rows)) for rows in (kept_rows, held_rows))
        return images.subset(kept), images.subset(held)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise a batch on its device; while training, augment it too."""
        images, labels = batch
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        images = normalise(images, self.mean, self.std)
        if self.trainer is None:
            return images, labels
        if self.trainer.training and any(self.augment):
            images = crop_and_flip(images, *self.augment, self._augmentation())
        # Lightning calls convert_input before this hook, too early: bf16-true skips uint8 images.
        return self.trainer.precision_plugin.convert_input(images), labels

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return the loader of the training images; a second fit starts the streams again."""
        self._stream = None
        return super().train_dataloader()

    def _augmentation(self) -> torch.Generator:
        """Return the generator of this epoch, created at its first batch."""
        assert self.trainer is not None
        epoch, (_, shard) = self.trainer.current_epoch, self.shards()
        if self._stream is None or self._stream[0] != epoch:
            seed = stream_seed(AUGMENTATION, self.seed, epoch, shard)
            self._stream = (epoch, torch.Generator().manual_seed(seed))
        return self._stream[1]


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Scale uint8 images to [0, 1], then to mean 0 and standard deviation 1 per channel.

    `torchvision.transforms.v2.Normalize` would look for a std of 0, which waits for the GPU.

    Args:
        images: (B, C, H, W), uint8.
        mean: (C,), float32, of pixels in [0, 1].
        std: (C,), float32; a constant channel has std 0 and becomes 0, not nan.

    Returns:
        (B, C, H, W), float32.
    """
    scale = 255 * std.clamp(min=1 / 255)
    return (images - 255 * mean[:, None, None]).div_(scale[:, None, None])


def crop_and_flip(images: Tensor, pad: int, flip: bool, generator: torch.Generator) -> Tensor:
    """Shift each image by its own offset of up to `pad` pixels each way, and flip half of them.

    Pixels from outside the image are 0, which is the mean of normalised images. torchvision's
    transforms apply one crop to a whole batch; a call for each image takes 27 ms instead of 5 for
    512 CIFAR images.

    Args:
        images: (B, C, H, W).
        pad: see `Augment`.
        flip: see `Augment`.
        generator: a CPU generator, so that the numbers do not depend on the device. Those of a
            whole batch are drawn at once, and copied asynchronously.

    Returns:
        (B, C, H, W), a new tensor.
    """
    batch, channels, height, width = images.shape
    device = images.device

    def draw(high: int, *shape: int) -> Tensor:
        numbers = torch.randint(high, shape, generator=generator, pin_memory=images.is_cuda)
        return numbers.to(device, non_blocking=True)

    top, left = draw(2 * pad + 1, 2, batch, 1)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    if flip:
        columns = torch.where(draw(2, batch, 1).bool(), columns.flip(1), columns)

    padded = functional.pad(images, (pad, pad, pad, pad))
    # The flat index, in a padded image, of each pixel of the output: one gather crops and flips.
    source = rows[:, :, None] * (width + 2 * pad) + columns[:, None, :]
    source = source.view(batch, 1, -1).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, source).view(images.shape)


def channel_statistics(part: Part) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel, (3,) float64, of pixels scaled to [0, 1].

    The sums are of integers, and so exact. If the files are not in memory, they are of a fixed
    sample of `STATISTICS_SAMPLE` images.
    """
    if isinstance(part, FilePart):
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        rows = torch.randperm(len(part), generator=generator)[:STATISTICS_SAMPLE]
        (part,) = decode_parts([part.subset(rows)])
    first, second = torch.zeros(2, 3, dtype=torch.int64)
    for block in part.inputs.split(1024):  # bounds the memory of the wider copy
        pixels = block.long()
        first += pixels.sum((0, 2, 3))
        second += pixels.square().sum((0, 2, 3))
    count = part.inputs.numel() // 3
    # In Python's integers, as those of 45,000 images exceed 64 bits.
    sums = zip(first.tolist(), second.tolist(), strict=True)
    variance = [(count * squares - total**2) / count**2 for total, squares in sums]
    return first.double() / count / 255, torch.tensor(variance, dtype=torch.float64).sqrt() / 255


class Digits(ImageData):
    """The 1,797 grey 8x8 digits that scikit-learn ships; a fixed 20% of them is the test set."""

    name = "digits"
    num_classes = 10
    image_size = 8

    def load(self) -> tuple[Part, Part]:
        """Read them from the scikit-learn package."""
        with needs(f"{WHO}: data=digits", "train"):
            from sklearn.datasets import load_digits  # slow to import, and only needed here

        digits = load_digits()
        grey = torch.from_numpy(digits.images * 255 / 16).round().to(torch.uint8)
        return self.hold_out(
            MemoryPart(_grey_to_rgb(grey), torch.from_numpy(digits.target)), TEST_FRACTION
        )


class Torchvision(ImageData):
    """A data set that torchvision downloads, with its official test set.

    Args:
        dataset: the class in `torchvision.datasets`, of images in memory, such as "CIFAR10".
        num_classes: number of labels.
        image_size: height and width in pixels.
        root: the directory to download to.
        **options: see `ImageData`.
    """

    @checked
    def __init__(
        self,
        dataset: str,
        num_classes: Count,
        image_size: Count,
        root: str = "data",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.name = dataset.lower()
        self.dataset = dataset
        self.num_classes = num_classes
        self.image_size = image_size
        self.root = root

    def prepare_data(self) -> None:
        """Download the data set if it is absent.

        Raises:
            RuntimeError: the download failed.
        """
        try:
            for train in (True, False):
                self._open(train=train, download=True)
        except (OSError, RuntimeError) as error:  # from the network, the disk or torchvision
            raise RuntimeError(
                f"{self.caller}: {self.dataset} is not in {self.root}, and its download failed "
                f"({error}). Check the network and the disk, or name another directory: "
                "data.root=DIR."
            ) from error

    def load(self) -> tuple[Part, Part]:
        """Read both official parts."""
        return self._read(train=True), self._read(train=False)

    def _open(self, *, train: bool, download: bool) -> Any:
        return getattr(datasets, self.dataset)(self.root, train=train, download=download)

    def _read(self, *, train: bool) -> MemoryPart:
        part = self._open(train=train, download=False)
        pixels, labels = torch.as_tensor(part.data), torch.as_tensor(part.targets)
        grey = pixels.ndim == 3
        images = _grey_to_rgb(pixels) if grey else pixels.permute(0, 3, 1, 2).contiguous()
        return MemoryPart(images, labels)


def _grey_to_rgb(images: Tensor) -> Tensor:
    return images[:, None].expand(-1, 3, -1, -1).contiguous()


class Fake(ImageData):
    """Synthetic images: a pattern of coarse squares for each class, and noise.

    They do not depend on `seed`. A fixed 20% is the test set.

    Args:
        num_classes: number of patterns.
        image_size: height and width in pixels.
        num_images: number of images, over all parts.
        **options: see `ImageData`.
    """

    name = "fake"

    @checked
    def __init__(
        self,
        num_classes: Annotated[int, Field(ge=2)] = 10,
        image_size: Count = 32,
        num_images: Count = 1000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        self.image_size = image_size
        self.num_images = num_images

    def load(self) -> tuple[Part, Part]:
        """Draw the patterns and the images."""
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        labels = torch.arange(self.num_images) % self.num_classes
        # Coarse, so that a crop that moves a pattern by a few pixels leaves it recognisable.
        squares = torch.randint(128, (self.num_classes, 3, 4, 4), generator=generator)
        patterns = functional.interpolate(squares.to(torch.uint8), size=self.image_size)
        images = torch.randint(
            128, (self.num_images, *patterns.shape[1:]), generator=generator, dtype=torch.uint8
        )
        images += patterns[labels]
        return self.hold_out(MemoryPart(images, labels), TEST_FRACTION)


class ImageFolder(ImageData):
    """A tree of image files, one directory per class.

    The training images are `root/train/<class>/*`. The test images are `root/test/<class>/*`, or
    `root/val/<class>/*` if there is no `test`. With neither, a fixed 20% of the training images is
    the test set; `root/<class>/*` are the training images if there is no `train` either.

    Args:
        root: the root of the tree.
        image_size: side of the square that every image becomes, in pixels: the shorter side is
            resized, then the centre is cut out.
        memory_gib: a tree that is larger than this when decoded is decoded again for every batch,
            and its `mean` and `std` come from a sample of the training images.
        cache: a file that keeps the decoded images for later runs; see `decode_parts`.
        num_workers: worker processes that decode such a tree.
        **options: see `ImageData`.

    Raises:
        FileNotFoundError: `root` is not a directory.
        ValueError: an argument is missing, or the tree is not as above.
    """

    @checked
    def __init__(
        self,
        root: str | None = None,
        image_size: Count | None = None,
        *,
        memory_gib: Number = 4.0,
        cache: str | None = None,
        num_workers: Natural = 4,
        **options: Any,
    ) -> None:
        super().__init__(num_workers=num_workers, **options)
        if root is None or image_size is None:
            raise ValueError(
                f"{self.caller}: root and image_size are needed; got root={root}, image_size="
                f"{image_size}. Set data.root=DIR, with DIR/train/<class>/ and DIR/val/<class>/ or "
                "only DIR/<class>/ below it, and data.image_size=PIXELS."
            )
        self.root = Path(root).expanduser().resolve()
        self.name = self.root.name
        self.image_size = image_size
        self.memory_gib = memory_gib
        self.cache = None if cache is None else Path(cache).expanduser().resolve()
        self._train, self._test = self._find_parts()
        self.classes = _directories(self._train)
        self.num_classes = len(self.classes)
        unknown = set(_directories(self._test) if self._test else ()) - set(self.classes)
        if unknown or not self.classes:
            what = (
                f"{', '.join(sorted(unknown))} is only in {self._test}" if unknown else "got none"
            )
            raise ValueError(
                f"{self.caller}: {self._train} must hold a directory of images for every class; "
                f"{what}. Sort the training images into directories named after their classes."
            )

    def load(self) -> tuple[Part, Part]:
        """List the files of both parts; `split` decodes them, or each batch does."""
        images = self._files(self._train)
        counts = images.targets.bincount(minlength=self.num_classes).tolist()
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if empty:
            raise ValueError(
                f"{self.caller}: every class needs training images; {self._train} has none for "
                f"{', '.join(empty)}. Add images, or delete the directory."
            )
        if self._test is None:
            return self.hold_out(images, TEST_FRACTION)
        test = self._files(self._test)
        if not len(test):
            raise ValueError(
                f"{self.caller}: the test part needs images; {self._test} has none. Add some, or "
                f"delete the directory to hold out {TEST_FRACTION} of the training images."
            )
        return images, test

    def split(self) -> tuple[Part, Part, Part]:
        """Split the files, then decode them if they fit in memory."""
        parts = super().split()
        if sum(map(len, parts)) * 3 * self.image_size**2 > self.memory_gib * 2**30:
            return parts
        files = [part for part in parts if isinstance(part, FilePart)]
        train, val, test = decode_parts(files, self.cache)
        return train, val, test

    def _find_parts(self) -> tuple[Path, Path | None]:
        if not self.root.is_dir():
            raise FileNotFoundError(
                f"{self.caller}: root must be a directory, got {self.root}. Check data.root; a "
                "relative path starts at the working directory."
            )
        train = self.root / "train"
        tests = [part for part in (self.root / "test", self.root / "val") if part.is_dir()]
        if train.is_dir():
            return train, tests[0] if tests else None
        if tests:
            raise ValueError(
                f"{self.caller}: {tests[0]} needs a train directory beside it, and {self.root} has "
                "none. Add it, or set data.root to a directory that holds only class directories."
            )
        return self.root, None

    def _files(self, folder: Path) -> FilePart:
        labels = {name: label for label, name in enumerate(self.classes)}
        kinds = datasets.folder.IMG_EXTENSIONS
        samples = datasets.ImageFolder.make_dataset(folder, labels, kinds, allow_empty=True)
        return FilePart(samples, self.image_size)


def _directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def decode(path: str | Path, image_size: int) -> Tensor:
    """Read one file as RGB, resize its shorter side to `image_size`, and cut out the centre.

    Returns:
        (3, image_size, image_size), uint8.

    Raises:
        ValueError: the file is not a readable image.
    """
    try:
        image = datasets.folder.pil_loader(path)
    except Exception as error:  # Pillow's readers raise many types
        raise ValueError(
            f"{WHO}: {path} is not a readable image ({error}). Replace or delete it."
        ) from error
    image = v2.center_crop(v2.resize(image, [image_size]), [image_size])
    return v2.pil_to_tensor(image)


def decode_parts(parts: Sequence[FilePart], cache: Path | None = None) -> list[MemoryPart]:
    """Decode all files of the parts of a tree into memory.

    Args:
        parts: parts with the same image size.
        cache: a file that keeps the images for later runs. They are decoded again if the path, size
            or modification time of any file has changed. Of concurrent runs, the first decodes and
            the others wait for it. None for no cache.

    Raises:
        ValueError: `cache` is another kind of file, or cannot be written.
    """
    paths = tuple(path for part in parts for path, _ in part.samples)
    size = parts[0].image_size
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in [os.stat(path)]]
    state = hashlib.sha256(repr((size, stats)).encode()).hexdigest()
    if cache is None:
        images = _decode_all(paths, size, state)
    else:
        images = _cached(cache, paths, size, state)
    blocks = images.split([len(part) for part in parts])
    return [MemoryPart(block, part.targets) for block, part in zip(blocks, parts, strict=True)]


def _cached(cache: Path, paths: tuple[str, ...], size: int, state: str) -> Tensor:
    other = "Name another file: data.cache=FILE."
    if cache.exists() and not cache.is_file():
        raise ValueError(f"{WHO}: data.cache must be a file; {cache} is none. {other}")
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        (lock := cache.with_name(f"{cache.name}.lock")).touch()  # or FileLock would try for ever
        with FileLock(str(lock)):
            if cache.exists() and (images := _read_cache(cache, state)) is not None:
                return images
            images = _decode_all(paths, size, state)
            save({"state": state, "images": images}, cache)
            return images
    except OSError as error:
        raise ValueError(
            f"{WHO}: data.cache={cache} cannot be written: {error.strerror or error}. Free up "
            f"space or make it writable. {other}"
        ) from None


def _read_cache(cache: Path, state: str) -> Tensor | None:
    try:
        kept: Mapping[str, Any] = torch.load(cache, mmap=True, weights_only=True)
        return kept["images"] if kept["state"] == state else None
    except Exception as error:  # it may be any file
        raise ValueError(
            f"{WHO}: {cache} holds no decoded images ({type(error).__name__}). "
            "Name another file: data.cache=FILE."
        ) from None


@lru_cache(maxsize=1)  # all runs of a sweep share a tree
def _decode_all(paths: tuple[str, ...], image_size: int, state: str) -> Tensor:
    """Decode all files; `state` makes a change of a file a miss in this function's cache."""
    images = torch.empty(len(paths), 3, image_size, image_size, dtype=torch.uint8)

    def fill(rows: range) -> None:
        for row in rows:
            images[row] = decode(paths[row], image_size)

    small = os.path.getsize(paths[0]) < SMALL_FILE
    rows = range(len(paths))
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        blocks = pool.map(fill, [rows[start : start + 64] for start in rows[::64]])
        deque(blocks, maxlen=0)  # reraises errors of `fill`
    return images
