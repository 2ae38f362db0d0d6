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
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torchmetrics.classification import MulticlassAccuracy

from normplug.experiment.checkpoint import steps_per_epoch
from normplug.experiment.images import Batch

SCHEDULES = ("one_cycle", "cosine", "constant")


class Classifier(LightningModule):
    """Train `net` to classify images.

    The schedule is a function of the step and the total number of steps. A run that resumes with
    more epochs goes on, from its step, on the curve of the new total, and with the hyperparameters
    of its own command: a checkpoint gives weights, the optimizer's moments and the step.

    Args:
        net: (N, 3, H, W) -> (N, num_classes).
        num_classes: classes, at least 2.
        optimizer: parameter groups -> optimizer, e.g. a partial `torch.optim.SGD`.
        schedule: "one_cycle" (Smith 2018, arXiv:1803.09820), "cosine" after a linear warm-up, or
            "constant" after one.
        warmup: fraction of all steps, 0 to 1, in which the learning rate rises.
        label_smoothing: 0 to 1.
        identity: what tells the run from others, e.g. its arm; kept in checkpoints as "run".
        channels_last: hand images on with their channels innermost, as `net` was laid out.

    Raises:
        ValueError: fewer than two classes, an unknown schedule, a warm-up out of range, a
            checkpoint whose epochs have another number of steps.
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
        self.identity = dict(identity or {})
        self.channels_last = channels_last
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.accuracy_by_epoch: list[float] = []
        self._resumed_steps: int | None = None  # an epoch, in the checkpoint
        self._hyperparameters: list[dict[str, Any]] = []  # of each group, at step 0

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
        """Continue the accuracies; leave the schedule to `on_train_start`."""
        self.accuracy_by_epoch = list(checkpoint.get("accuracy_by_epoch", []))
        self._resumed_steps = steps_per_epoch(checkpoint)
        checkpoint["lr_schedulers"] = []

    def on_train_start(self) -> None:
        """Set the learning rate of this step, also where the run resumes at a later one."""
        step = self.trainer.global_step
        if step == 0:
            return
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LRScheduler)
        for group, own in zip(scheduler.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(own)
        before = {"last_epoch": step - 1, "_step_count": step + 1}
        scheduler.load_state_dict(scheduler.state_dict() | before)
        scheduler.step()

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
