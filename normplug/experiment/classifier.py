"""The LightningModule: loss, accuracy, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torchmetrics.classification import MulticlassAccuracy

from normplug.experiment.images import Batch

SCHEDULES = ("one_cycle", "cosine", "constant")


class Classifier(LightningModule):
    """Train `net` to classify images.

    Args:
        net: (N, 3, H, W) -> (N, num_classes).
        num_classes: classes, at least 2.
        optimizer: parameter groups -> optimizer, e.g. a partial `torch.optim.SGD`.
        schedule: "one_cycle" (Smith 2018, arXiv:1803.09820), "cosine" after a linear warm-up, or
            "constant" after one.
        warmup: fraction of all steps, 0 to 1, in which the learning rate rises.
        label_smoothing: 0 to 1.
        arm: the arm of the experiment; kept in checkpoints, and another arm's is refused.
        channels_last: hand images on with their channels innermost, as `net` was laid out.

    Raises:
        ValueError: fewer than two classes, an unknown schedule, a warm-up out of range, a
            checkpoint of another arm.
    """

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        *,
        schedule: str = "one_cycle",
        warmup: float = 0.2,
        label_smoothing: float = 0.1,
        arm: str = "baseline",
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(
                "normplug.experiment: the data must have two classes or more to tell apart; "
                f"got {num_classes}. An image folder has one directory a class."
            )
        if schedule not in SCHEDULES:
            raise ValueError(
                f"normplug.experiment: schedule must be one of {', '.join(SCHEDULES)}; "
                f"got {schedule!r}."
            )
        if not 0 <= warmup < 1:
            raise ValueError(
                f"normplug.experiment: warmup is a fraction of all steps, at least 0 and below 1; "
                f"got {warmup}."
            )
        self.net = net
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.label_smoothing = label_smoothing
        self.arm = arm
        self.channels_last = channels_last
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.accuracy_by_epoch: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        if self.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.net(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The loss of one batch."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels, label_smoothing=self.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy on held-out training images."""
        self._evaluate("val", self.val_accuracy, batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Loss and accuracy on the test images."""
        self._evaluate("test", self.test_accuracy, batch)

    def on_validation_epoch_end(self) -> None:
        """Keep the epoch's accuracy for the report."""
        if not self.trainer.sanity_checking:
            self.accuracy_by_epoch.append(float(self.trainer.callback_metrics["val/accuracy"]))

    def configure_optimizers(self) -> Any:
        """The optimizer, with weight decay on matrices only, and the schedule, step by step."""
        trainable = [p for p in self.net.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trainable if p.dim() > 1]},
            {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.0},
        ]
        optimizer = self.optimizer([group for group in groups if group["params"]])
        scheduler = self._scheduler(optimizer, int(self.trainer.estimated_stepping_batches))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the arm and the accuracies so far."""
        checkpoint["arm"] = self.arm
        checkpoint["accuracy_by_epoch"] = list(self.accuracy_by_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse another arm's checkpoint; go on with its accuracies."""
        saved = checkpoint.get("arm", self.arm)
        if saved != self.arm:
            raise ValueError(
                f"normplug.experiment: the checkpoint is of arm {saved!r}, this run of "
                f"{self.arm!r}. Resume with the mode and gamma0 of the checkpoint."
            )
        self.accuracy_by_epoch = list(checkpoint.get("accuracy_by_epoch", []))

    def _evaluate(self, stage: str, accuracy: MulticlassAccuracy, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy(logits, labels)
        self.log(f"{stage}/loss", loss, sync_dist=True, batch_size=len(labels))
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def _scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        if self.schedule == "one_cycle" and steps >= 4:  # fewer make no cycle
            rates = [group["lr"] for group in optimizer.param_groups]
            return OneCycleLR(optimizer, rates, steps, pct_start=max(self.warmup, 2 / steps))
        rising = round(self.warmup * steps)

        def factor(step: int) -> float:
            if step < rising:
                return (step + 1) / rising
            if self.schedule == "constant":
                return 1.0
            return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

        return LambdaLR(optimizer, factor)
