"""The image data sets of `configs/data`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torchvision
from torch import Tensor
from torch.nn import functional
from typing_extensions import Unpack

from normplug._extras import needs
from normplug.experiment.datamodule import ImageData, Options
from normplug.experiment.images import (
    SPLIT_SEED,
    FileImages,
    ImageSet,
    MemoryImages,
    decode_parts,
    list_files,
)

TEST_FRACTION = 0.2  # held out from a source without a test set


class Digits(ImageData):
    """The 1,797 grey 8x8 digits that scikit-learn ships; a fixed 20% of them is the test set."""

    name = "digits"
    num_classes = 10
    image_size = 8

    def load(self) -> tuple[ImageSet, ImageSet]:
        """Read them from the scikit-learn package."""
        with needs("normplug.experiment: data=digits", "train"):
            from sklearn.datasets import load_digits  # slow to import, and only needed here

        digits = load_digits()
        grey = torch.from_numpy(digits.images * 255 / 16).round().to(torch.uint8)
        images = MemoryImages(_grey_to_rgb(grey), torch.from_numpy(digits.target))
        return self.hold_out(images, TEST_FRACTION)


class TorchvisionImages(ImageData):
    """A data set that torchvision downloads, with its official test set.

    Args:
        root: the directory to download to.
        **options: see `ImageData`.
    """

    dataset: ClassVar[str]  # the class in torchvision.datasets

    def __init__(self, root: str = "data", **options: Unpack[Options]) -> None:
        super().__init__(**options)
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

    def load(self) -> tuple[ImageSet, ImageSet]:
        """Read both official parts."""
        return self._read(train=True), self._read(train=False)

    def _open(self, *, train: bool, download: bool) -> Any:
        dataset = getattr(torchvision.datasets, self.dataset)
        return dataset(self.root, train=train, download=download)

    def _read(self, *, train: bool) -> MemoryImages:
        part = self._open(train=train, download=False)
        pixels, labels = torch.as_tensor(part.data), torch.as_tensor(part.targets)
        grey = pixels.ndim == 3
        images = _grey_to_rgb(pixels) if grey else pixels.permute(0, 3, 1, 2).contiguous()
        return MemoryImages(images, labels)


class Cifar10(TorchvisionImages):
    """CIFAR-10: 50,000 training and 10,000 test images."""

    name = "cifar10"
    num_classes = 10
    image_size = 32
    dataset = "CIFAR10"


class Cifar100(TorchvisionImages):
    """CIFAR-100: 50,000 training and 10,000 test images."""

    name = "cifar100"
    num_classes = 100
    image_size = 32
    dataset = "CIFAR100"


class FashionMnist(TorchvisionImages):
    """Fashion-MNIST: 60,000 training and 10,000 test images, grey."""

    name = "fashion_mnist"
    num_classes = 10
    image_size = 28
    dataset = "FashionMNIST"


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

    def __init__(
        self,
        root: str | None = None,
        image_size: int | None = None,
        *,
        memory_gib: float = 4.0,
        cache: str | None = None,
        num_workers: int = 4,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        if root is None:
            raise ValueError(
                f"{self.caller}: root must name a directory of images, got None. Set "
                "data.root=/path/to/tree with /train/<class>/ and /test/<class>/ below it."
            )
        if image_size is None or image_size < 1:
            raise ValueError(
                f"{self.caller}: image_size must be a number of pixels >= 1, got {image_size}. "
                "Set data.image_size=224, or the size that suits the images."
            )
        self.root = Path(root).expanduser().resolve()
        self.name = self.root.name
        self.image_size = image_size
        self.memory_gib = memory_gib
        self.cache = None if cache is None else Path(cache).expanduser().resolve()
        self.num_workers = num_workers
        self._train, self._test = self._find_parts()
        self.classes = _directories(self._train)
        self.num_classes = len(self.classes)
        self._check_classes()

    def load(self) -> tuple[ImageSet, ImageSet]:
        """List the files of both parts; `split` decodes them, or each batch does."""
        images = list_files(self._train, self.classes, self.image_size)
        counts = images.labels.bincount(minlength=self.num_classes).tolist()
        empty = [name for name, count in zip(self.classes, counts, strict=True) if not count]
        if empty:
            raise ValueError(
                f"{self.caller}: every class needs training images; {self._train} has none for "
                f"{', '.join(empty)}. Add images, or delete the directory."
            )
        if self._test is None:
            return self.hold_out(images, TEST_FRACTION)
        test = list_files(self._test, self.classes, self.image_size)
        if not len(test):
            raise ValueError(
                f"{self.caller}: the test part needs images; {self._test} has none. Add some, or "
                f"delete the directory to hold out {TEST_FRACTION} of the training images."
            )
        return images, test

    def split(self) -> tuple[ImageSet, ImageSet, ImageSet]:
        """Split the files, then decode them if they fit in memory."""
        parts = super().split()
        if sum(map(len, parts)) * 3 * self.image_size**2 > self.memory_gib * 2**30:
            return parts
        files = [part for part in parts if isinstance(part, FileImages)]
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

    def _check_classes(self) -> None:
        if not self.classes:
            raise ValueError(
                f"{self.caller}: {self._train} must hold one directory per class, and holds none. "
                "Sort the images into directories named after their classes."
            )
        unknown = set(_directories(self._test) if self._test else ()) - set(self.classes)
        if unknown:
            raise ValueError(
                f"{self.caller}: every class in {self._test} must be in {self._train} too; "
                f"{', '.join(sorted(unknown))} is not. Add training images, or delete the class."
            )


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

    def __init__(
        self,
        num_classes: int = 10,
        image_size: int = 32,
        num_images: int = 1000,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.num_classes = num_classes
        self.image_size = image_size
        self.num_images = num_images

    def load(self) -> tuple[ImageSet, ImageSet]:
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
        return self.hold_out(MemoryImages(images, labels), TEST_FRACTION)


def _directories(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def _grey_to_rgb(images: Tensor) -> Tensor:
    return images[:, None].expand(-1, 3, -1, -1).contiguous()
