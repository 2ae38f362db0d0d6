"""The networks whose training steps are measured: torchvision's, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """What is trained.

    Attributes:
        build: a new network with random weights, on the CPU.
        batches: images a step, in the order of measuring.
        image_size: height and width, in pixels.
        classes: outputs.
        memory_format: of images and weights.
    """

    build: Callable[[], nn.Module]
    batches: tuple[int, ...]
    image_size: int = 224
    classes: int = 1000
    memory_format: torch.memory_format = torch.channels_last

    def random_batch(self, count: int, device: str) -> tuple[Tensor, Tensor]:
        """Random images (count, 3, H, W) in float32, and their labels (count,)."""
        images = torch.randn(count, 3, self.image_size, self.image_size, device=device)
        labels = torch.randint(self.classes, (count,), device=device)
        return images.contiguous(memory_format=self.memory_format), labels


class Case(NamedTuple):
    """A model and a number of images a step."""

    model: str
    batch: int

    def __str__(self) -> str:
        return f"{self.model}, batch {self.batch}"


# torchvision is imported where it is used: the command line names the models without it.
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


MODELS = {
    "resnet50": Model(partial(_torchvision, "resnet50"), (256,)),
    "resnet18-cifar": Model(_resnet18_cifar, (512, 128), image_size=32, classes=10),
    "vit_b_16": Model(_vit_b_16, (128,), memory_format=torch.contiguous_format),
    "convnext_tiny": Model(partial(_torchvision, "convnext_tiny"), (128,)),
}


def select(models: Sequence[str] | None, batch: int | None) -> list[Case]:
    """The cases of the models named (None: of all), with each model's own batches or `batch`."""
    return [
        Case(name, size)
        for name, model in MODELS.items()
        if models is None or name in models
        for size in (model.batches if batch is None else (batch,))
    ]
