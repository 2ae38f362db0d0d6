"""What is trained under autocast: a ViT on digits, a GPT on the characters of a text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normplug.bench.gpt import GPT
from normplug.experiment.augment import Augment, crop_and_flip, normalise
from normplug.experiment.data import Digits
from normplug.experiment.images import MemoryImages
from normplug.experiment.models import vit
from normplug.experiment.streams import AUGMENTATION, ORDER, stream

VALIDATION_FRACTION = 0.1  # of a text, at its end

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Recipe:
    """Numbers of a training: AdamW, the rate after a linear warm-up a cosine that ends at zero.

    Attributes:
        steps: of the optimizer.
        batch: samples a step.
        learning_rate: after the warm-up.
        weight_decay: on matrices; vectors have none.
        label_smoothing: in training only.
        warmup: share of the steps.
    """

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float
    label_smoothing: float = 0.0
    warmup: float = 0.1


@dataclass(frozen=True)
class Size:
    """Numbers of a GPT, as in its constructor."""

    context: int
    layers: int
    heads: int
    width: int


VIT_RECIPE = Recipe(600, 64, learning_rate=4e-3, weight_decay=0.05, label_smoothing=0.1)
GPT_RECIPES = {
    "full": Recipe(1000, 64, learning_rate=1e-3, weight_decay=0.1),
    "small": Recipe(300, 16, learning_rate=3e-3, weight_decay=0.1),
}
GPT_SIZES = {"full": Size(128, 6, 6, 384), "small": Size(64, 2, 2, 64)}


class Task(ABC):
    """A model with its data.

    Attributes:
        name: in tables and files.
        recipe: how to train.
        device: where the batches lie.
    """

    name: str

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.recipe = recipe
        self.device = device

    @abstractmethod
    def build(self) -> nn.Module:
        """A model on the CPU, its weights drawn from torch's generator."""

    @abstractmethod
    def batches(self, seed: int) -> Iterator[Batch]:
        """Inputs and labels to train on, without end, decided by `seed` alone."""

    @abstractmethod
    def validation(self) -> Iterator[Batch]:
        """Inputs and labels that are never trained on, always the same."""

    def settings(self) -> dict[str, Any]:
        """What to write down."""
        return asdict(self.recipe)


class DigitsTask(Task):
    """The tiny ViT of `train.py` on scikit-learn's digits, shifted by up to a pixel."""

    name = "ViT, digits"

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        self._data = Digits()
        self._data.setup("fit")
        self._images, self._labels = self._on_device(self._data.train_images)

    def build(self) -> nn.Module:
        """A VisionTransformer of torchvision, sized for 8x8 pixels."""
        return vit(num_classes=Digits.num_classes, image_size=Digits.image_size)

    def batches(self, seed: int) -> Iterator[Batch]:
        """All images in a new order every epoch; the last, smaller batch is left out."""
        size = self.recipe.batch
        whole = len(self._labels) // size * size
        for epoch in count():
            order = torch.randperm(len(self._labels), generator=stream(ORDER, seed, epoch))
            shifts = stream(AUGMENTATION, seed, epoch, device=self.device)
            for rows in order[:whole].to(self.device).split(size):
                yield crop_and_flip(self._images[rows], Augment(pad=1), shifts), self._labels[rows]

    def validation(self) -> Iterator[Batch]:
        """The part that `train.py` validates on, at once."""
        yield self._on_device(self._data.val_images)

    def _on_device(self, images: Any) -> Batch:
        part: MemoryImages = images.decoded()
        pixels = normalise(part.images, self._data.mean, self._data.std)
        return pixels.to(self.device), part.labels.to(self.device)


class TextTask(Task):
    """A GPT on the characters of a text, of which the last tenth is for validation.

    Args:
        path: a file in UTF-8.
        size: of the GPT.
        recipe: how to train.
        device: where the batches lie.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no UTF-8, or too short.
    """

    name = "GPT, text"

    def __init__(self, path: Path, size: Size, recipe: Recipe, device: torch.device) -> None:
        super().__init__(recipe, device)
        text = path.read_text(encoding="utf-8")
        kept = round(len(text) * (1 - VALIDATION_FRACTION))
        if len(text) - kept <= size.context:
            fewest = round((size.context + 1) / VALIDATION_FRACTION)
            raise ValueError(
                f"{path} must have {fewest} characters or more, so that its last tenth holds a "
                f"context of {size.context}; it has {len(text)}. Give a longer text."
            )
        self._file = path.name
        self._size = size
        self._vocabulary = sorted(set(text))
        place = {character: index for index, character in enumerate(self._vocabulary)}
        tokens = torch.tensor([place[character] for character in text], device=device)
        self._train, self._validation = tokens[:kept], tokens[kept:]

    def build(self) -> nn.Module:
        """A GPT with a token for each character that occurs."""
        return GPT(vocabulary=len(self._vocabulary), **asdict(self._size))

    def batches(self, seed: int) -> Iterator[Batch]:
        """Windows from anywhere in the training part."""
        generator = stream(ORDER, seed, 0, device=self.device)
        places = torch.arange(self._size.context + 1, device=self.device)
        last = len(self._train) - self._size.context
        shape = (self.recipe.batch, 1)
        while True:
            starts = torch.randint(last, shape, generator=generator, device=self.device)
            window = self._train[starts + places]
            yield window[:, :-1], window[:, 1:]

    def validation(self) -> Iterator[Batch]:
        """The whole validation part, window after window."""
        context = self._size.context
        used = (len(self._validation) - 1) // context * context
        inputs = self._validation[:used].view(-1, context).split(self.recipe.batch)
        labels = self._validation[1 : used + 1].view(-1, context).split(self.recipe.batch)
        yield from zip(inputs, labels, strict=True)

    def settings(self) -> dict[str, Any]:
        """What to write down, the text included."""
        text = {"text": self._file, "characters": len(self._train) + len(self._validation)}
        return super().settings() | asdict(self._size) | text


def make_tasks(
    device: torch.device, *, text: Path | None, size: str | None, steps: int | None
) -> list[Task]:
    """The ViT, and the GPT where there is a text.

    Args:
        device: where to train.
        text: a file, or None.
        size: of the GPT: "full", "small" or None for what suits the device.
        steps: of each training; None for each recipe's own.

    Raises:
        OSError: the text cannot be read.
        ValueError: it is no UTF-8, or too short.
    """

    def recipe(default: Recipe) -> Recipe:
        return default if steps is None else replace(default, steps=steps)

    tasks: list[Task] = [DigitsTask(recipe(VIT_RECIPE), device)]
    if text is not None:
        size = size or ("full" if device.type == "cuda" else "small")
        tasks.append(TextTask(text, GPT_SIZES[size], recipe(GPT_RECIPES[size]), device))
    return tasks
