"""The networks whose training steps are measured, with random weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normplug.bench import architectures


class Batch(NamedTuple):
    """The data of a step: the network's arguments, and the target of its loss."""

    inputs: tuple[Tensor, ...]
    target: Tensor


@dataclass(frozen=True)
class Model(ABC):
    """A network, and the task that it is trained on.

    Attributes:
        build: makes a network with random weights, on the CPU.
        batches: the batch sizes to measure, in order.
        library: the package that provides the network, if it is not torch.
        memory_format: the memory format of weights and images.
    """

    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    library: str | None = None
    _: KW_ONLY
    memory_format: torch.memory_format = torch.contiguous_format

    @abstractmethod
    def random_batch(self, count: int, device: str) -> Batch:
        """Random samples."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the output (*target.shape, classes)."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def random_image(self, count: int, channels: int, *size: int, device: str) -> Tensor:
        """Random float32 values (count, channels, *size), in the model's memory format."""
        image = torch.randn(count, channels, *size, device=device)
        return image.contiguous(memory_format=self.memory_format)


@dataclass(frozen=True)
class Images(Model):
    """Classification of images.

    Attributes:
        image_size: height and width, in pixels.
        classes: the number of classes.
    """

    _: KW_ONLY
    image_size: int = 224
    classes: int = 1000
    memory_format: torch.memory_format = torch.channels_last

    def random_batch(self, count: int, device: str) -> Batch:
        """Images (count, 3, H, W), and labels (count,)."""
        size = self.image_size
        images = self.random_image(count, 3, size, size, device=device)
        return Batch((images,), torch.randint(self.classes, (count,), device=device))


@dataclass(frozen=True)
class Noise(Model):
    """Prediction of the noise in images, as in a diffusion model.

    Attributes:
        image_size: height and width, in pixels.
        times: the number of diffusion steps.
    """

    _: KW_ONLY
    image_size: int
    times: int = 1000
    memory_format: torch.memory_format = torch.channels_last

    def random_batch(self, count: int, device: str) -> Batch:
        """Images (count, 3, H, W) and times (count,), and noise shaped as the images."""
        images, noise = (
            self.random_image(count, 3, self.image_size, self.image_size, device=device)
            for _ in range(2)
        )
        times = torch.randint(self.times, (count,), device=device)
        return Batch((images, times), noise)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean squared error."""
        return F.mse_loss(output, target)


@dataclass(frozen=True)
class Volumes(Model):
    """Classification of voxels.

    Attributes:
        size: depth, height and width, in voxels.
        classes: the number of classes, which are the output's channels.
    """

    _: KW_ONLY
    size: int
    classes: int
    memory_format: torch.memory_format = torch.channels_last_3d

    def random_batch(self, count: int, device: str) -> Batch:
        """Volumes (count, 1, D, H, W), and labels (count, D, H, W)."""
        shape = (self.size,) * 3
        volumes = self.random_image(count, 1, *shape, device=device)
        return Batch((volumes,), torch.randint(self.classes, (count, *shape), device=device))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The cross entropy of the output (count, classes, D, H, W)."""
        return F.cross_entropy(output, target)


@dataclass(frozen=True)
class Text(Model):
    """Classification of tokens.

    Attributes:
        length: tokens per sample.
        classes: the size of the vocabulary.
    """

    _: KW_ONLY
    length: int
    classes: int

    def random_batch(self, count: int, device: str) -> Batch:
        """Tokens (count, length), and as many labels."""
        tokens, labels = torch.randint(self.classes, (2, count, self.length), device=device)
        return Batch((tokens,), labels)


@dataclass(frozen=True)
class Translation(Text):
    """Classification of the tokens of a second text, whose earlier tokens are given.

    Attributes:
        target_length: tokens of the second text; `length` is that of the first.
    """

    _: KW_ONLY
    target_length: int

    def random_batch(self, count: int, device: str) -> Batch:
        """Tokens (count, length) and (count, target_length), and labels for the latter."""
        tokens = torch.randint(self.classes, (count, self.length), device=device)
        shape = (2, count, self.target_length)
        known, labels = torch.randint(self.classes, shape, device=device)
        return Batch((tokens, known), labels)


@dataclass(frozen=True)
class Vectors(Text):
    """Classification of vectors that are as wide as the output, whose elements are the classes."""

    def random_batch(self, count: int, device: str) -> Batch:
        """Vectors (count, length, classes) in float32, and labels (count, length)."""
        vectors = torch.randn(count, self.length, self.classes, device=device)
        return Batch((vectors,), torch.randint(self.classes, (count, self.length), device=device))


class Case(NamedTuple):
    """A model and a batch size."""

    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


EXTRAS = {  # library -> the extra that installs it
    "torchvision": "bench",
    "transformers": "zoo",
    "diffusers": "zoo",
    "liger_kernel": "bench",
}


def _cnn(name: str, *batches: int) -> Model:
    return Images(partial(architectures.from_torchvision, name), batches, "torchvision")


def _transformer(build: Callable[[], nn.Module], batch: int) -> Model:
    return Images(build, (batch,), "torchvision", memory_format=torch.contiguous_format)


MODELS = {
    "resnet50": _cnn("resnet50", 256, 32),
    "resnet18-cifar": Images(
        architectures.resnet18_cifar, (512, 128), "torchvision", image_size=32, classes=10
    ),
    "vit_b_16": _transformer(architectures.vit_b_16, 128),
    "convnext_tiny": _cnn("convnext_tiny", 128),
    "efficientnet_b0": _cnn("efficientnet_b0", 128),
    "mobilenet_v3_large": _cnn("mobilenet_v3_large", 256),
    "regnet_y_1_6gf": _cnn("regnet_y_1_6gf", 128),
    "densenet121": _cnn("densenet121", 64),
    "swin_t": _transformer(partial(architectures.from_torchvision, "swin_t"), 128),
    "encoder_6x256": Vectors(architectures.encoder, (64,), length=128, classes=256),
    "bert_base": Text(architectures.bert_base, (32,), "transformers", length=512, classes=30522),
    "gpt2": Text(architectures.gpt2, (16,), "transformers", length=1024, classes=50257),
    "llama_16x1024": Text(
        partial(
            architectures.llama,
            num_hidden_layers=16,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=2816,
            vocab_size=32000,
        ),
        (8,),
        "transformers",
        length=2048,
        classes=32000,
    ),
    "t5_small": Translation(
        architectures.t5_small, (32,), "transformers", length=512, target_length=128, classes=32128
    ),
    "unet2d": Noise(architectures.unet2d, (16,), "diffusers", image_size=64),
    "nnunet3d": Volumes(
        partial(architectures.UNet3d, 1, 3, (32, 64, 128, 256, 320, 320)), (2,), size=128, classes=3
    ),
}


def select(models: Sequence[str] | None, batch: int | None) -> list[Case]:
    """The cases of the models named (None: of all), with each model's own batches or `batch`."""
    return [
        Case(name, size)
        for name, model in MODELS.items()
        if models is None or name in models
        for size in (model.batches if batch is None else (batch,))
    ]
