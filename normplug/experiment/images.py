"""Image sets: uint8 images (N, 3, H, W) with int64 labels (N,), in memory or decoded on demand."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import functional as pil

Batch: TypeAlias = tuple[Tensor, Tensor]

SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
SPLIT_SEED = 1618  # any constant: every run of a comparison must hold out the same images
STATISTICS_SAMPLE = 2048  # images decoded for mean and std when the set is not in memory
# Below this many bytes a file is decoded mostly under Python's lock: two threads took 0.39 ms for a
# 32x32 JPEG, one took 0.2 ms; past 16 KiB they win (2 cores of an Intel Xeon, November 2026).
SMALL_FILE = 8192


class MemoryImages(Dataset[Batch]):
    """Decoded images; a whole batch is one index operation.

    Args:
        images: (N, 3, H, W), uint8.
        labels: (N,), int64.
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.as_tensor(indices)
        return self.images[rows], self.labels[rows]

    def subset(self, rows: Tensor) -> MemoryImages:
        """Return the images at `rows`, copied."""
        return MemoryImages(self.images[rows], self.labels[rows])

    def decoded(self) -> MemoryImages:
        """Return self."""
        return self


class FileImages(Dataset[Batch]):
    """Image files, decoded each time they are asked for.

    Args:
        paths: the N files.
        labels: (N,), int64.
        image_size: side of the square that every image becomes, in pixels.
    """

    def __init__(self, paths: Sequence[Path], labels: Tensor, image_size: int) -> None:
        self.paths = paths
        self.labels = labels
        self.image_size = image_size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        images = torch.stack([decode(self.paths[i], self.image_size) for i in indices])
        return images, self.labels[torch.as_tensor(indices)]

    def subset(self, rows: Tensor) -> FileImages:
        """Return the files at `rows`."""
        paths = [self.paths[i] for i in rows.tolist()]
        return FileImages(paths, self.labels[rows], self.image_size)

    def decoded(self) -> MemoryImages:
        """Decode every file into memory."""
        return MemoryImages(_decode_all(tuple(self.paths), self.image_size), self.labels)


ImageSet: TypeAlias = MemoryImages | FileImages


def decode(path: Path, image_size: int) -> Tensor:
    """Read one file as RGB, its shorter side resized to `image_size`, the centre cut out.

    Returns:
        (3, image_size, image_size), uint8.

    Raises:
        ValueError: the file is not a readable image.
    """
    try:
        with Image.open(path) as file:
            image = file.convert("RGB")
    except Exception as error:  # Pillow's readers raise many kinds
        raise ValueError(
            f"normplug.experiment: {path} is not a readable image ({error}). Replace or delete it."
        ) from error
    image = pil.center_crop(pil.resize(image, image_size), image_size)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@lru_cache(maxsize=3)  # the parts of one tree: the runs of a sweep follow one another in a process
def _decode_all(paths: tuple[Path, ...], image_size: int) -> Tensor:
    images = torch.empty(len(paths), 3, image_size, image_size, dtype=torch.uint8)

    def fill(rows: range) -> None:
        for row in rows:
            images[row] = decode(paths[row], image_size)

    small = paths[0].stat().st_size < SMALL_FILE
    rows = range(len(paths))
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        blocks = pool.map(fill, [rows[start : start + 64] for start in rows[::64]])
        deque(blocks, maxlen=0)  # to ask for the results is to raise what `fill` raised
    return images


def list_files(folder: Path, classes: Sequence[str], image_size: int) -> FileImages:
    """List the image files below each `folder/<class>`; a label is a place in `classes`.

    A class without a directory here has no images here.
    """
    paths: list[Path] = []
    counts = []
    for name in classes:
        files = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in SUFFIXES)
        paths += files
        counts.append(len(files))
    labels = torch.arange(len(classes)).repeat_interleave(torch.tensor(counts))
    return FileImages(paths, labels, image_size)


def stratified_split(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Hold out `fraction` of every class, the same images at every call.

    Args:
        labels: (N,), int64.
        fraction: of each class, rounded to whole images.

    Returns:
        The rows kept and the rows held out, each ascending.
    """
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    counts = labels.bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    held = rank < (counts * fraction).round().repeat_interleave(counts)
    return by_class[~held].sort().values, by_class[held].sort().values


def channel_statistics(data: ImageSet) -> tuple[Tensor, Tensor]:
    """Measure mean and standard deviation per channel, for pixels scaled to [0, 1].

    They come from a count of each of the 256 values, so no rounding grows with the set.
    Files that are not in memory are measured by a fixed sample of `STATISTICS_SAMPLE`.

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
