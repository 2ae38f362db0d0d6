"""The data of `configs/data`: three fixed parts, the same in every run, and their batches."""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from pydantic import (
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision import datasets
from typing_extensions import TypedDict  # pydantic cannot read Python's before 3.12

from normplug._measure import ACCURACY, Measure
from normplug.experiment.callbacks import save
from normplug.experiment.config import Seed
from normplug.experiment.errors import WHO, UserError
from normplug.experiment.image_files import ClassFolders, ImageFiles, find_parts

Batch: TypeAlias = tuple[Tensor, Tensor]
STRICT = ConfigDict(strict=True, extra="forbid")  # of the arguments of data

ORDER, AUGMENTATION, MODEL = 0, 1, 2  # the random streams of a run
SPLIT_SEED = 1618  # any constant: every run of a comparison must hold out the same images
TEST_FRACTION = 0.2  # held out from a source without a test set
GPU_SHARE = 0.25  # of a GPU's free memory; device="auto" keeps larger data on the host
# Evaluation keeps no activations for a backward, so its batches can be larger than in training.
EVALUATION_BATCHES = 4  # times batch_size
# Directories of the standard library whose sources are left out of a text.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stream_seed(purpose: int, seed: int, time: int = 0, shard: int = 0) -> int:
    """Hash a stream's purpose, the run's seed, an epoch or a step, and the process to its seed."""
    # With seed + time, nearby seeds would share most of their streams.
    return int(np.random.SeedSequence((seed, time, purpose, shard)).generate_state(1)[0])


class Part(TensorDataset):
    """Inputs and targets, (N, ...), on the host or on a GPU, indexed a batch at a time."""

    @property
    def targets(self) -> Tensor:
        return self.tensors[1]

    def subset(self, rows: Sequence[int]) -> Part:
        """Return the samples of some rows."""
        return Part(*self[torch.as_tensor(rows)])

    def sample(self) -> Tensor:
        """Return the inputs from which the mean and the variance are computed: all."""
        return self.tensors[0]

    def to(self, device: torch.device) -> Part:
        """Return the part on another device."""
        return Part(*(tensor.to(device) for tensor in self.tensors))

    def __getitems__(self, rows: Sequence[int]) -> tuple[Tensor, ...]:
        return self[torch.tensor(rows).to(self.tensors[0].device, non_blocking=True)]


Images: TypeAlias = Part | ImageFiles  # in memory, or read for each batch


@dataclass(eq=False, kw_only=True, config=STRICT)
class Source(LightningDataModule, ABC):
    """Inputs and targets in three parts, the same in every run, which a subclass sets in `setup`.

    `seed` sets only what a run draws: the order of the training part in each epoch, and the
    augmentation in each step. Neither depends on `device`, where the data are stored.
    """

    measure: ClassVar[Measure] = ACCURACY
    # Attributes that a model takes, known before `setup`.
    gives: ClassVar[tuple[str, ...]]
    seed: Seed = 0
    batch_size: PositiveInt = 128
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        super().__init__()

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments of a model that come from the data."""
        return {name: getattr(self, name) for name in self.gives}

    @property
    def items_per_batch(self) -> int:
        """The number of images, or of tokens, in a batch of training."""
        return self.batch_size * self.sizes.get("block_size", 1)

    def about(self) -> str:
        """A line that says where the parts come from; "" if the user has no choice."""
        return ""

    def facts(self, score: float) -> dict[str, Any]:
        """The data's part of `result.json`; `score` is the measure of the test part."""
        return {}

    def set_parts(self, *parts: Images) -> None:
        """Set the training, validation and test part, moved to the device that stores them."""
        in_memory = [part for part in parts if isinstance(part, Part)]
        device = (
            torch.device("cpu")
            if self.trainer is None
            else self.trainer.strategy.root_device
        )
        stored = device.type == "cuda" and self.device != "cpu"
        if self.device == "auto" and stored:
            size = sum(tensor.nbytes for part in in_memory for tensor in part.tensors)
            stored = size <= GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        if stored and in_memory:
            parts = tuple(part.to(device) for part in in_memory)
        self.train_part, self.val_part, self.test_part = parts

    def shards(self) -> tuple[int, int]:
        """Return the number of data-parallel processes, and the rank of this one."""
        shards = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        return (1, 0) if shards is None else (shards["num_replicas"], shards["rank"])

    def loader_options(self) -> dict[str, Any]:
        """How a DataLoader gets its batches: by default whole, from `__getitems__` of a part."""
        return {"collate_fn": tuple}

    def train_dataloader(self) -> DataLoader[Batch]:
        shards, shard = self.shards()
        # It is a DistributedSampler even for one shard, so that Lightning does not replace it.
        sampler: DistributedSampler[int] = DistributedSampler(
            self.train_part,
            shards,
            shard,
            seed=stream_seed(ORDER, self.seed),
            drop_last=True,
        )
        return self._loader(
            sampler, self.batch_size, drop_last=len(sampler) > self.batch_size
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation_loader(self.val_part)

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._evaluation_loader(self.test_part)

    def _evaluation_loader(self, part: Images) -> DataLoader[Batch]:
        shards, shard = self.shards()
        batch_size = EVALUATION_BATCHES * self.batch_size
        samples, longer = divmod(len(part), shards)
        if not samples:
            raise ValueError(
                f"{WHO}: an evaluation needs a sample for each process; got {longer} for {shards}. "
                "Use more data or fewer processes."
            )
        # A longer shard's last sample must not be a batch of its own: others would wait for it.
        while longer and samples % batch_size == 0:
            batch_size += 1
        sampler = UnrepeatedDistributedSampler(
            part, num_replicas=shards, rank=shard, shuffle=False
        )
        return self._loader(sampler, batch_size)

    def _loader(
        self, sampler: DistributedSampler[int], batch_size: int, drop_last: bool = False
    ) -> DataLoader[Batch]:
        part: Any = sampler.dataset
        on_gpu = isinstance(part, Part) and part.tensors[0].is_cuda
        return DataLoader(
            part,
            batch_size,
            sampler=sampler,
            pin_memory=torch.cuda.is_available() and not on_gpu,
            drop_last=drop_last,
            # Otherwise each pass would draw a seed from the global generator, which dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
            **self.loader_options(),
        )


class Augment(TypedDict, total=False):
    """`pad`: pixels added on every side before a random crop. `flip`: flip half of the images."""

    pad: NonNegativeInt
    flip: bool


@dataclass(eq=False, kw_only=True, config=STRICT)
class ImageData(Source):
    """Labelled images, normalised and augmented on the device; a subclass implements `load`."""

    gives = ("num_classes", "image_size")
    augment: Augment | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1

    @abstractmethod
    def load(self) -> tuple[Images, Images]:
        """Return the images that `split` takes, and the test images."""

    def split(self, images: Images) -> tuple[Images, Images]:
        """Return the images for training, and those for validation."""
        return self.hold_out(images, self.val_fraction)

    def setup(self, stage: str) -> None:
        """Load and split the images, and compute the mean and std of their channels, once."""
        if hasattr(self, "mean"):
            return
        images, test = self.load()
        train, val = self.split(images)
        self.mean, self.std = mean_and_std(train.sample())
        self.set_parts(train, val, test)

    def hold_out(self, images: Images, fraction: float) -> tuple[Images, Images]:
        """Split off `fraction` of every class, the same images in every run."""
        from sklearn.model_selection import train_test_split  # slow to import

        labels = images.targets
        count = int((labels.unique(return_counts=True)[1] * fraction).round().sum())
        options = {"test_size": count, "stratify": labels, "random_state": SPLIT_SEED}
        try:
            kept, held = train_test_split(range(len(images)), **options)
        except ValueError as error:
            raise ValueError(f"{WHO}: {error} Use more images of each class.") from None
        return images.subset(sorted(kept)), images.subset(sorted(held))

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Normalise a batch on its device; while training, augment it too."""
        images, labels = batch
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        # torchvision's Normalize checks for a std of 0, and so makes the host wait for the GPU.
        mean, std = 255 * self.mean[:, None, None], 255 * self.std[:, None, None]
        images = (images - mean).div_(std)
        if self.trainer is None:
            return images, labels
        if self.trainer.training and self.augment:
            step = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
            seed = stream_seed(AUGMENTATION, self.seed, step, self.shards()[1])
            images = crop_and_flip(
                images, torch.Generator().manual_seed(seed), **self.augment
            )
        # Lightning calls convert_input before this hook, too early: bf16-true skips uint8 images.
        return self.trainer.precision_plugin.convert_input(images), labels


def mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the std of the channels of images (N, C, H, W), uint8, as 0 to 1."""
    counts = [channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]
    # The share of each value in a channel.
    share = torch.stack(counts).double() / counts[0].sum()
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ values
    var = (share * (values - mean[:, None]).square()).sum(1)
    # At least 1/255: a constant channel becomes 0.
    return mean.float(), var.sqrt().clamp(min=1 / 255).float()


def crop_and_flip(
    images: Tensor, generator: torch.Generator, pad: int = 0, flip: bool = False
) -> Tensor:
    """Shift each image by its own offset of up to `pad` pixels each way, and flip half of them.

    torchvision's transforms apply one crop to a whole batch. `generator` is a CPU generator, so the
    numbers do not depend on the device.
    """
    batch, _, height, width = images.shape

    def draw(high: int, *shape: int) -> Tensor:
        numbers = torch.randint(
            high, shape, generator=generator, pin_memory=images.is_cuda
        )
        return numbers.to(images.device, non_blocking=True)

    top, left = draw(2 * pad + 1, 2, batch)
    # A view of all crops: (B, C, 2 * pad + 1, 2 * pad + 1, H, W).
    crops = functional.pad(images, [pad] * 4).unfold(2, height, 1).unfold(3, width, 1)
    images = crops[torch.arange(batch, device=images.device), :, top, left]
    if flip:
        images = torch.where(draw(2, batch, 1, 1, 1).bool(), images.flip(3), images)
    return images


@dataclass(eq=False, kw_only=True, config=STRICT)
class Digits(ImageData):
    """The 1,797 grey 8x8 digits that scikit-learn ships; a fixed 20% of them is the test set."""

    num_classes = 10
    image_size = 8

    def load(self) -> tuple[Images, Images]:
        from sklearn.datasets import load_digits  # slow to import

        digits = load_digits()
        grey = torch.from_numpy(digits.images * 255 / 16).round().to(torch.uint8)
        return self.hold_out(_part(grey, digits.target), TEST_FRACTION)


@dataclass(eq=False, kw_only=True, config=STRICT)
class Torchvision(ImageData):
    """A class of `torchvision.datasets` with a test set, such as "CIFAR10", kept in memory."""

    dataset: str
    num_classes: PositiveInt
    image_size: PositiveInt
    root: str = "data"

    def prepare_data(self) -> None:
        try:
            for train in (True, False):
                getattr(datasets, self.dataset)(self.root, train=train, download=True)
        except (
            OSError,
            RuntimeError,
        ) as error:  # from the network, the disk or torchvision
            raise RuntimeError(
                f"{WHO}: {self.dataset} is not in {self.root}, and its download failed ({error}). "
                "Check the network and the disk, or name another directory: data.root=DIR."
            ) from error

    def load(self) -> tuple[Part, Part]:
        train, test = (
            getattr(datasets, self.dataset)(self.root, train=t) for t in (True, False)
        )
        images, labels = _part(train.data, train.targets).tensors
        height, width = images.shape[2:]
        classes = int(labels.max()) + 1
        if (height, width) != (
            self.image_size,
            self.image_size,
        ) or classes > self.num_classes:
            raise UserError(
                f"{WHO}: {self.dataset} has {classes} classes and images of {height}x{width} "
                f"pixels; got data.num_classes={self.num_classes} and data.image_size="
                f"{self.image_size}. Set both to what the images have."
            )
        return Part(images, labels), _part(test.data, test.targets)


def _part(pixels: Any, labels: Any) -> Part:
    """A part of images (N, H, W), which are grey, or (N, H, W, 3)."""
    images = torch.as_tensor(pixels)
    if images.ndim == 3:
        images = images[..., None].expand(-1, -1, -1, 3)
    return Part(images.permute(0, 3, 1, 2).contiguous(), torch.as_tensor(labels))


@dataclass(eq=False, kw_only=True, config=STRICT)
class Fake(ImageData):
    """Synthetic images, the same for every `seed`: a pattern for each class, and noise."""

    num_classes: Annotated[int, Field(ge=2)] = 10
    image_size: PositiveInt = 32
    num_images: PositiveInt = 1000

    def load(self) -> tuple[Images, Images]:
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        labels = torch.arange(self.num_images) % self.num_classes
        # Coarse: a pattern stays recognisable when a crop moves it by a few pixels.
        squares = torch.randint(128, (self.num_classes, 3, 4, 4), generator=generator)
        patterns = functional.interpolate(squares.to(torch.uint8), size=self.image_size)
        images = torch.randint(
            128,
            (self.num_images, *patterns.shape[1:]),
            generator=generator,
            dtype=torch.uint8,
        )
        images += patterns[labels]
        return self.hold_out(Part(images, labels), TEST_FRACTION)


@dataclass(eq=False, kw_only=True, config=STRICT)
class ImageFolder(ImageData):
    """A tree of image files, one directory per class; docs/experiments.md says where.

    The images are decoded into memory if they take at most `memory_gib` there. Otherwise they stay
    in their files, and `num_workers` processes read a batch when it is needed; the pixels are the
    same. `cache` keeps the decoded images for later runs, in a file for each part, named by the
    path, size and modification time of each image.
    """

    root: str
    image_size: PositiveInt
    memory_gib: NonNegativeFloat = 4.0
    cache: str | None = None
    num_workers: NonNegativeInt = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        root = Path(self.root).expanduser().resolve()
        places = find_parts(root)
        self.folders = {part: ClassFolders(places[part]) for part in places}
        classes = [set(folder.classes) for folder in self.folders.values()]
        self.num_classes = len(self.folders["training"].classes)
        odd = set.union(*classes) - set.intersection(*classes)
        if self.num_classes < 2 or odd:
            only = f" In one part only: {sorted(odd)}." if odd else ""
            raise UserError(  # pydantic would wrap a ValueError
                f"{WHO}: {root} must have a directory for each of at least two classes, the same "
                f"for training and test; got {self.num_classes} for training.{only}"
            )

    @property
    def gib(self) -> float:
        """The memory that the decoded images take, in GiB."""
        return sum(map(len, self.folders.values())) * 3 * self.image_size**2 / 2**30

    @property
    def streams(self) -> bool:
        """Whether the images stay in their files."""
        return self.gib > self.memory_gib

    def about(self) -> str:
        texts = {
            part: f"{Path(folder.root).name}/ ({len(folder)} images)"
            for part, folder in self.folders.items()
        }
        test = texts.get("test", f"{TEST_FRACTION:.0%} of it")
        source = "the training images" if "test" in texts else "the rest"
        held_out = f"{100 * self.val_fraction:g}% of {source}"
        validation = texts.get("validation", held_out)
        size = f"{self.gib:.3g} GiB"
        way = f"decoded into memory ({size})"
        if self.streams:
            way = f"read for each batch ({size} decoded, above data.memory_gib={self.memory_gib:g})"
        training = texts["training"]
        return f"data: training {training}, test {test}, validation {validation}; {way}"

    def load(self) -> tuple[Images, Images]:
        images = self._images("training")
        if "test" not in self.folders:
            return self.hold_out(images, TEST_FRACTION)
        return images, self._images("test")

    def split(self, images: Images) -> tuple[Images, Images]:
        if "validation" not in self.folders:
            return super().split(images)
        return images, self._images("validation")

    def loader_options(self) -> dict[str, Any]:
        if not self.streams:
            return super().loader_options()
        workers = self.num_workers
        return {"num_workers": workers, "persistent_workers": workers > 0}

    def _images(self, part: str) -> Images:
        files = ImageFiles(self.folders[part].samples, self.image_size)
        if self.streams:
            return files
        return Part(self._decoded(files), files.targets)

    def _decoded(self, files: ImageFiles) -> Tensor:
        if self.cache is None:
            return files.decoded()
        paths = [path for path, _ in files.samples]
        stats = [(path, os.path.getsize(path), os.path.getmtime(path)) for path in paths]
        state = hashlib.sha256(repr((self.image_size, stats)).encode()).hexdigest()
        named = Path(self.cache).expanduser().resolve()
        cache = named.with_name(f"{named.stem}-{state[:16]}{named.suffix}")
        if not cache.exists():
            save(files.decoded(), cache)
        return torch.load(cache, mmap=True, weights_only=True)


@dataclass(eq=False, kw_only=True, config=STRICT)
class Text(Source):
    """A text: the first 80% is for training, the next 10% for validation, the rest for the test.

    A token is a byte. Without a `path`, the text is the sources of Python's standard library.
    """

    measure = Measure("loss", "nats/byte", "lower", "tokens")
    gives = ("vocabulary", "block_size")
    vocabulary = 256

    path: str | None = None
    block_size: PositiveInt = 128
    megabytes: PositiveFloat | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = None if self.megabytes is None else round(self.megabytes * 1e6)
        if self.path is None:
            found: list[Path] = []
            for folder, inner, files in os.walk(sysconfig.get_path("stdlib")):
                inner[:] = [name for name in inner if name not in LEFT_OUT]
                found += [Path(folder, name) for name in files if name.endswith(".py")]
            text = b"".join(file.read_bytes() for file in sorted(found))[:limit]
        else:
            with Path(self.path).expanduser().open("rb") as file:
                text = file.read(limit)
        self.sha256 = hashlib.sha256(text).hexdigest()
        self.tokens = torch.tensor(np.frombuffer(text, np.uint8))
        tenth = round(0.1 * len(self.tokens))
        if tenth <= self.block_size:
            raise UserError(
                f"{WHO}: each part of the text must be longer than block_size={self.block_size}; "
                f"the smallest has {tenth} tokens. Use a longer text or a smaller data.block_size."
            )
        self.parts = self.tokens.split([len(self.tokens) - 2 * tenth, tenth, tenth])

    def setup(self, stage: str) -> None:
        """Cut the parts into blocks; the target of each token is the next token."""
        size = self.block_size
        pairs = [(part[:-1], part[1:]) for part in self.parts]
        self.set_parts(
            *(Part(*(t.unfold(0, size, size) for t in pair)) for pair in pairs)
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Widen the tokens, which are stored as bytes, on their device."""
        inputs, targets = batch
        return inputs.long(), targets.long()

    def facts(self, score: float) -> dict[str, Any]:
        """Identify the text, and convert the test's loss to bits per character of UTF-8."""
        test = self.parts[-1]
        # The bytes 0b10xxxxxx continue a character.
        characters = int(((test & 0xC0) != 0x80).sum())
        return {
            "text_sha256": self.sha256,
            "text_tokens": len(self.tokens),
            "test_bits_per_character": score
            * len(test)
            / max(characters, 1)
            / math.log(2),
        }
