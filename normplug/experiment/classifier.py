"""The LightningModule: loss, accuracy, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from normplug.experiment.checkpoint import steps_per_epoch
from normplug.experiment.images import Batch
from normplug.experiment.optimizing import decay_groups, make_scheduler, move_to_step


class Classifier(LightningModule):
    """Train `net` to classify images.

    A run that resumes takes from its checkpoint the weights, the optimizer's moments and the step.
    Its hyperparameters come from its own command. If it has more epochs than the run before, its
    learning rate continues on the curve of the new total.

    Args:
        net: (N, 3, H, W) -> (N, num_classes).
        num_classes: classes, at least 2.
        optimizer: parameter groups -> optimizer, e.g. a partial `torch.optim.SGD`.
        schedule: see `make_scheduler`.
        warmup: see `make_scheduler`.
        label_smoothing: 0 to 1.
        identity: what tells the run from others, e.g. its arm; kept in checkpoints as "run".
        channels_last: give `net` its images in the memory format channels_last.

    Raises:
        ValueError: fewer than two classes, or a checkpoint whose epochs have another number of
            steps.
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
        identity: Mapping[str, Any] | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ValueError(
                "normplug.experiment: the data must have two classes or more to tell apart; "
                f"got {num_classes}. An image folder has one directory a class."
            )
        self.net = net
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.label_smoothing = label_smoothing
        self.identity = dict(identity or {})
        self.channels_last = channels_last
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.accuracy_by_epoch: list[float] = []
        self._resumed_steps: int | None = None  # steps of an epoch of the checkpoint
        self._hyperparameters: list[dict[str, Any]] = []  # of each group at step 0

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
        optimizer = self.optimizer(decay_groups(self.net.parameters()))
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = make_scheduler(optimizer, self.schedule, self.warmup, steps)
        self._refuse_other_epochs()
        self._hyperparameters = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the run's identity and the accuracies so far."""
        checkpoint["run"] = self.identity
        checkpoint["accuracy_by_epoch"] = list(self.accuracy_by_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Continue the accuracies; `on_train_start` moves the schedule."""
        self.accuracy_by_epoch = list(checkpoint.get("accuracy_by_epoch", []))
        self._resumed_steps = steps_per_epoch(checkpoint)
        checkpoint["lr_schedulers"] = []

    def on_train_start(self) -> None:
        """In a run that resumes, set the hyperparameters of this command at this step."""
        step = self.trainer.global_step
        if step == 0:
            return
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LRScheduler)
        for group, own in zip(scheduler.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(own)
        move_to_step(scheduler, step)

    def _evaluate(self, stage: str, accuracy: MulticlassAccuracy, batch: Batch) -> None:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy(logits, labels)
        self.log(f"{stage}/loss", loss, sync_dist=True, batch_size=len(labels))
        self.log(f"{stage}/accuracy", accuracy, prog_bar=True, batch_size=len(labels))

    def _refuse_other_epochs(self) -> None:
        if self._resumed_steps is None:
            return
        trainer = self.trainer
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        if steps != self._resumed_steps:
            raise ValueError(
                f"normplug.experiment: an epoch of the checkpoint has {self._resumed_steps} steps, "
                f"one of this run {steps}. Resume with the data, batch size and number of devices "
                "of the checkpoint."
            )
