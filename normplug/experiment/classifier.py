"""Image classification, evaluated by accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics.classification import MulticlassAccuracy

from normplug._report.measure import ACCURACY
from normplug.experiment.learner import Learner


class Classifier(Learner):
    """Train `net` to classify images.

    Args:
        net: (N, 3, H, W) -> (N, num_classes).
        num_classes: classes, at least 2.
        optimizer: see `Learner`.
        channels_last: convert the images to channels_last before `net`.
        **options: see `Learner`.

    Raises:
        ValueError: fewer than two classes; see also `Learner`.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        *,
        channels_last: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(net, ACCURACY, optimizer, **options)
        if num_classes < 2:
            raise ValueError(
                "normplug.experiment: the data must have at least two classes; "
                f"got {num_classes}. An image folder has one directory per class."
            )
        self.channels_last = channels_last
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.net(images)

    def log_measure(self, stage: str, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Log the accuracy."""
        accuracy = {"val": self.val_accuracy, "test": self.test_accuracy}[stage]
        accuracy(logits, targets)
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(targets))
