"""The networks whose training steps are measured, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """What is trained; here, to classify images.

    Attributes:
        build: a new network with random weights, on the CPU; its output is (*samples, classes).
        batches: samples a step, in the order of measuring.
        library: the package that the network is of, if it is not torch.
        image_size: height and width, in pixels.
        classes: outputs.
        memory_format: of images and weights.
    """

    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    library: str | None = None
    image_size: int = 224
    classes: int = 1000
    memory_format: torch.memory_format = torch.channels_last

    def random_batch(self, count: int, device: str) -> tuple[Tensor, Tensor]:
        """Random images (count, 3, H, W) in float32, and their labels (count,)."""
        images = torch.randn(count, 3, self.image_size, self.image_size, device=device)
        labels = torch.randint(self.classes, (count,), device=device)
        return images.contiguous(memory_format=self.memory_format), labels


@dataclass(frozen=True)
class Text(Model):
    """A model of text: a class for each token.

    Attributes:
        length: tokens a sample.
    """

    length: int = 512
    memory_format: torch.memory_format = torch.contiguous_format

    def random_batch(self, count: int, device: str) -> tuple[Tensor, Tensor]:
        """Random tokens (count, length), and as many labels."""
        tokens, labels = torch.randint(self.classes, (2, count, self.length), device=device)
        return tokens, labels


@dataclass(frozen=True)
class Vectors(Text):
    """A model of vectors as wide as its output; the output's elements count as classes."""

    def random_batch(self, count: int, device: str) -> tuple[Tensor, Tensor]:
        """Random vectors (count, length, classes) in float32, and labels (count, length)."""
        vectors = torch.randn(count, self.length, self.classes, device=device)
        return vectors, torch.randint(self.classes, (count, self.length), device=device)


class Case(NamedTuple):
    """A model and a number of samples a step."""

    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


# A library is imported where it is used: the command line names the models without it.
EXTRAS = {"torchvision": "bench", "transformers": "zoo"}  # library -> the extra that brings it


def _torchvision(name: str, **options: Any) -> Any:
    from torchvision.models import get_model

    return get_model(name, **options)


def _resnet18_cifar() -> nn.Module:
    """With the stem of He et al. 2015 (arXiv:1512.03385), section 4.2: no stride, no max-pool."""
    net = _torchvision("resnet18", num_classes=10)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
    net.maxpool = nn.Identity()
    return net


def _vit_b_16() -> nn.Module:
    net = _torchvision("vit_b_16")
    # torchvision starts the head at zero: all gradients in the body would be zero, too.
    nn.init.trunc_normal_(net.heads.head.weight, std=0.02)
    return net


def _encoder() -> nn.Module:
    """As wide as the name says, with 8 heads; the rest is torch's default."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 8, batch_first=True), 6)


class _Logits(nn.Module):
    """A model of transformers, called with tokens alone."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).logits


def _bert_base() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return _Logits(BertForMaskedLM(BertConfig()))


def _gpt2() -> nn.Module:
    # In transformers 5 its forward waits for the GPU once, to look for packed sequences.
    from transformers import GPT2Config, GPT2LMHeadModel

    return _Logits(GPT2LMHeadModel(GPT2Config(use_cache=False)))


def _cnn(name: str, *batches: int) -> Model:
    return Model(partial(_torchvision, name), batches, "torchvision")


def _transformer(build: Callable[[], nn.Module], batch: int) -> Model:
    return Model(build, (batch,), "torchvision", memory_format=torch.contiguous_format)


MODELS = {
    "resnet50": _cnn("resnet50", 256, 32),
    "resnet18-cifar": Model(_resnet18_cifar, (512, 128), "torchvision", image_size=32, classes=10),
    "vit_b_16": _transformer(_vit_b_16, 128),
    "convnext_tiny": _cnn("convnext_tiny", 128),
    "efficientnet_b0": _cnn("efficientnet_b0", 128),
    "mobilenet_v3_large": _cnn("mobilenet_v3_large", 256),
    "regnet_y_1_6gf": _cnn("regnet_y_1_6gf", 128),
    "densenet121": _cnn("densenet121", 64),
    "swin_t": _transformer(partial(_torchvision, "swin_t"), 128),
    "encoder_6x256": Vectors(_encoder, (64,), length=128, classes=256),
    "bert_base": Text(_bert_base, (32,), "transformers", length=512, classes=30522),
    "gpt2": Text(_gpt2, (16,), "transformers", length=1024, classes=50257),
}


def select(models: Sequence[str] | None, batch: int | None) -> list[Case]:
    """The cases of the models named (None: of all), with each model's own batches or `batch`."""
    return [
        Case(name, size)
        for name, model in MODELS.items()
        if models is None or name in models
        for size in (model.batches if batch is None else (batch,))
    ]
