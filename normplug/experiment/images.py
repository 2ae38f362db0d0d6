"""Sets of uint8 images (N, 3, H, W) with int64 labels (N,), in memory or decoded on demand."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms.v2 import functional as v2

from normplug._report.files import replace_file
from normplug.experiment.memory import Batch, MemoryPart

SPLIT_SEED = 1618  # any constant: every run of a comparison must hold out the same images
SPLIT = f"train_test_split(random_state={SPLIT_SEED})"  # in checkpoints: how images are held out
STATISTICS_SAMPLE = 2048  # images decoded for mean and std, if the set is not in memory
# Decoding a smaller file mostly holds the GIL: two threads need 0.39 ms for a 32x32 JPEG, one needs
# 0.2 ms. Above 16 KiB, threads win (2 cores of an Intel Xeon, November 2026).
SMALL_FILE = 8192  # bytes


class MemoryImages(MemoryPart):
    """Decoded images.

    Args:
        images: (N, 3, H, W), uint8.
        labels: (N,), int64.
    """

    held = ("images", "labels")

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: Tensor) -> Batch:
        """Return the images and the labels at `rows`."""
        return self.images[rows], self.labels[rows]

    def subset(self, rows: Tensor) -> MemoryImages:
        """Return the images at `rows`, copied."""
        return MemoryImages(self.images[rows], self.labels[rows])

    def decoded(self) -> MemoryImages:
        """Return self."""
        return self


class FileImages(Dataset[Batch]):
    """Image files, decoded each time they are indexed.

    Args:
        samples: path and label of each file.
        image_size: side of the square that every image becomes, in pixels.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], image_size: int) -> None:
        self.samples = samples
        self.labels = torch.tensor([label for _, label in samples], dtype=torch.int64)
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        images = torch.stack([decode(self.samples[i][0], self.image_size) for i in indices])
        return images, self.labels[torch.as_tensor(indices)]

    def subset(self, rows: Tensor) -> FileImages:
        """Return the files at `rows`."""
        return FileImages([self.samples[i] for i in rows.tolist()], self.image_size)

    def decoded(self) -> MemoryImages:
        """Decode every file into memory."""
        (images,) = decode_parts([self])
        return images


ImageSet: TypeAlias = MemoryImages | FileImages


def decode_parts(parts: Sequence[FileImages], cache: Path | None = None) -> list[MemoryImages]:
    """Decode all files of the parts of a tree into memory.

    Args:
        parts: parts with the same image size.
        cache: a file that keeps the images for later runs. They are decoded again if the path, size
            or modification time of any file has changed. Of concurrent runs, the first decodes and
            the others wait for it. None for no cache.

    Raises:
        ValueError: `cache` is another kind of file.
    """
    paths = tuple(path for part in parts for path, _ in part.samples)
    images = _decoded(paths, parts[0].image_size, cache)
    blocks = images.split([len(part) for part in parts])
    return [MemoryImages(block, part.labels) for block, part in zip(blocks, parts, strict=True)]


def list_files(folder: Path, classes: Sequence[str], image_size: int) -> FileImages:
    """List the image files below each `folder/<class>`; a label is an index of `classes`.

    A class without a directory has no images here.
    """
    labels = {name: label for label, name in enumerate(classes)}
    kinds = datasets.folder.IMG_EXTENSIONS
    samples = datasets.ImageFolder.make_dataset(folder, labels, kinds, allow_empty=True)
    return FileImages(samples, image_size)


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
            f"normplug.experiment: {path} is not a readable image ({error}). Replace or delete it."
        ) from error
    image = v2.center_crop(v2.resize(image, [image_size]), [image_size])
    return v2.pil_to_tensor(image)


def _decoded(paths: tuple[str, ...], image_size: int, cache: Path | None) -> Tensor:
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path in paths for stat in [os.stat(path)]]
    state = hashlib.sha256(repr((image_size, stats)).encode()).hexdigest()
    if cache is None:
        return _decode_all(paths, image_size, state)
    cache.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{cache}.lock"):
        if cache.exists():
            try:
                kept = torch.load(cache, mmap=True)
                images, kept_state = kept["images"], kept["state"]
            except Exception as error:  # it may be any file
                raise ValueError(
                    f"normplug.experiment: {cache} holds no decoded images ({type(error).__name__})"
                    ". Delete it, or name another file: data.cache=FILE."
                ) from None
            if state == kept_state:
                return images
        images = _decode_all(paths, image_size, state)
        with replace_file(cache) as part:
            torch.save({"state": state, "images": images}, part)
    return images


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


def stratified_split(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out `fraction` of every class, the same images in every call.

    Args:
        labels: (N,), int64.
        fraction: of each class, rounded to whole images; in total, at least one image per class.

    Returns:
        The rows kept and the rows held out, both in ascending order.

    Raises:
        ValueError: a class has a single image, or a part would have fewer images than classes.
    """
    from sklearn.model_selection import train_test_split  # slow to import

    counts = labels.unique(return_counts=True)[1]
    held = int((counts * fraction).round().sum())
    held = max(held, len(counts)) if held else 0  # scikit-learn's minimum; it refuses 0
    kept_rows, held_rows = train_test_split(
        range(len(labels)), test_size=held, stratify=labels, random_state=SPLIT_SEED
    )
    return torch.tensor(sorted(kept_rows)), torch.tensor(sorted(held_rows))


def channel_statistics(data: ImageSet) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation per channel, of pixels scaled to [0, 1].

    They come from a histogram of the 256 values, so rounding errors do not grow with the set.
    If the files are not in memory, they come from a fixed sample of `STATISTICS_SAMPLE` images.

    Returns:
        (3,) and (3,), float64.
    """
    if isinstance(data, FileImages):
        generator = torch.Generator().manual_seed(SPLIT_SEED)
        data = data.subset(torch.randperm(len(data), generator=generator)[:STATISTICS_SAMPLE])
    counts = torch.zeros(3, 256, dtype=torch.int64)
    images = data.decoded().images
    for start in range(0, len(images), 1024):  # bounds the memory of the flattened copy
        for channel in range(3):
            pixels = images[start : start + 1024, channel].flatten()
            counts[channel] += pixels.bincount(minlength=256)
    value = torch.arange(256, dtype=torch.float64) / 255
    share = counts / counts.sum(1, keepdim=True, dtype=torch.float64)
    mean = (share * value).sum(1)
    variance = (share * (value - mean[:, None]) ** 2).sum(1)
    return mean, variance.sqrt()
