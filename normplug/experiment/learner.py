"""The LightningModule that every task shares: steps, optimizer and learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from normplug._report.measure import Measure
from normplug.experiment.checkpoint import steps_per_epoch
from normplug.experiment.graph import GraphedLoss
from normplug.experiment.memory import Batch
from normplug.experiment.optimizing import decay_groups, make_scheduler, move_to_step
from normplug.lightning import VarianceLogger


class Learner(LightningModule):
    """Train `net` to predict classes; a subclass defines how it is evaluated.

    A subclass logs `val/<name>` and `test/<name>` of its measure in `log_measure`.

    A run that resumes takes the weights, the optimizer's moments and the step from its checkpoint.
    Its hyperparameters come from its own command. If it has more epochs than the earlier run, its
    learning rate continues on the schedule of the new total.

    Args:
        net: (N, ...) -> (N, ..., classes), the logits.
        measure: what the run is evaluated by.
        optimizer: parameter groups -> optimizer, e.g. a partial `torch.optim.SGD`.
        schedule: see `make_scheduler`.
        warmup: see `make_scheduler`.
        label_smoothing: 0 to 1.
        graph: replay forward and backward of the training steps as CUDA graphs; see `GraphedLoss`.
        identity: what distinguishes the run, e.g. its arm; kept in checkpoints as "run".

    Raises:
        ValueError: the epochs of a checkpoint have another number of steps.
    """

    def __init__(
        self,
        net: nn.Module,
        measure: Measure,
        optimizer: Callable[[Iterable[Any]], Optimizer],
        *,
        schedule: str = "one_cycle",
        warmup: float = 0.2,
        label_smoothing: float = 0.1,
        graph: bool = False,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.measure = measure
        self.optimizer = optimizer
        self.schedule = schedule
        self.warmup = warmup
        self.label_smoothing = label_smoothing
        self.graph = graph
        self.identity = dict(identity or {})
        self.scores_by_epoch: list[float] = []  # on the validation part
        self._graphed: GraphedLoss | None = None
        self._resumed_steps: int | None = None  # steps per epoch of the checkpoint
        self._hyperparameters: list[dict[str, Any]] = []  # of each parameter group, at step 0

    def forward(self, inputs: Tensor) -> Tensor:
        """The logits."""
        return self.net(inputs)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch; log it at the steps that Lightning writes or displays."""
        graphed = self._graphed
        if graphed is None or is_measured(self.trainer, self.trainer.global_step):
            loss = self._training_loss(*batch)
        else:
            loss = graphed(*batch)
        if self._is_logged(batch_idx):
            # Lightning turns a value for the bar into a number at every step, not only at logged
            # ones, and each time the host waits for the GPU.
            bar = self.trainer.progress_bar_callback is not None
            self.log("train/loss", loss, prog_bar=bar)
        return loss

    def loss(self, inputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy over all targets."""
        return _cross_entropy(self(inputs), targets, label_smoothing)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and measure on the validation part."""
        self._evaluate("val", batch)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log loss and measure on the test part."""
        self._evaluate("test", batch)

    def log_measure(self, stage: str, logits: Tensor, targets: Tensor, loss: Tensor) -> None:
        """Log the task's measure of a batch, besides its loss; `stage` is "val" or "test"."""
        raise NotImplementedError

    def log_mean(self, name: str, value: Tensor, samples: int, **options: Any) -> None:
        """Log the mean of a batch, to be averaged over the samples of all batches and processes."""
        # Lightning divides the processes' mean sum by their mean count, which it rounds down.
        # Multiplied by the number of processes, the mean count is a whole number.
        count = samples * self.trainer.world_size
        self.log(name, value, sync_dist=True, batch_size=count, **options)

    def on_validation_epoch_end(self) -> None:
        """Keep the epoch's value for the report."""
        if not self.trainer.sanity_checking:
            self.scores_by_epoch.append(self.score("val"))

    def score(self, stage: str) -> float:
        """The latest value of the measure; `stage` is "val" or "test"."""
        return float(self.trainer.callback_metrics[f"{stage}/{self.measure.name}"])

    def describe(self, value: float, stage: str) -> str:
        """Format a value of the measure, with its unit."""
        return f"{self.measure.number(value)} {self.measure.unit}"

    def headlines(self) -> dict[str, str]:
        """Return the first lines that a finished run prints: title -> text."""
        name, curve = self.measure.name, self.scores_by_epoch
        lines = {f"validation {name}": self.describe(curve[-1], "val")} if curve else {}
        return lines | {f"test {name}": self.describe(self.score("test"), "test")}

    def result(self) -> dict[str, Any]:
        """The task's part of `result.json`."""
        return {
            "measure": asdict(self.measure),
            self.measure.test_key: self.score("test"),
            self.measure.curve_key: self.scores_by_epoch,
        }

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with weight decay on matrices only, and its schedule by step."""
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

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as Lightning does, but with fused optimizers too.

        Lightning refuses fused optimizers in mixed precision, since they unscale the gradients
        themselves. In bf16-mixed there is nothing to unscale.
        """
        plugin = self.trainer.precision_plugin
        if isinstance(plugin, MixedPrecision) and plugin.scaler is None:
            kind = GradClipAlgorithmType(gradient_clip_algorithm or "norm")
            Precision.clip_gradients(plugin, optimizer, gradient_clip_val or 0.0, kind)
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the run's identity, and the values of the measure so far."""
        checkpoint["run"] = self.identity
        checkpoint[self.measure.curve_key] = list(self.scores_by_epoch)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the values; drop the schedule's state, which `on_train_start` recomputes."""
        self.scores_by_epoch = list(checkpoint.get(self.measure.curve_key, []))
        self._resumed_steps = steps_per_epoch(checkpoint)
        checkpoint["lr_schedulers"] = []

    def on_fit_start(self) -> None:
        """Prepare the graphs, which the first step captures."""
        if self.graph:
            self._graphed = GraphedLoss(self._training_loss, self.net)

    def on_fit_end(self) -> None:
        """Free the graphs: the model moves to the host next, and they read its old addresses."""
        if self._graphed is not None:
            self._graphed.release()
            self._graphed = None

    def on_train_start(self) -> None:
        """In a run that resumes, apply this command's hyperparameters and schedule at this step."""
        step = self.trainer.global_step
        if step == 0:
            return
        scheduler = self.lr_schedulers()
        assert isinstance(scheduler, LRScheduler)
        for group, own in zip(scheduler.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(own)
        move_to_step(scheduler, step)

    def _training_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(inputs, targets, self.label_smoothing)

    def _is_logged(self, batch_idx: int) -> bool:
        """Whether Lightning writes or displays the loss of this step.

        Each call of `log` copies its settings, which costs the host as much as dozens of launches.
        """
        if batch_idx == 0 or self.trainer.is_last_batch:
            return True
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every > 0 and (self.trainer.global_step + 1) % every == 0

    def _evaluate(self, stage: str, batch: Batch) -> None:
        inputs, targets = batch
        logits = self(inputs)
        loss = _cross_entropy(logits, targets)
        self.log_mean(f"{stage}/loss", loss, len(targets))
        self.log_measure(stage, logits, targets, loss)

    def _refuse_other_epochs(self) -> None:
        if self._resumed_steps is None:
            return
        trainer = self.trainer
        steps = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
        if steps != self._resumed_steps:
            raise ValueError(
                f"normplug.experiment: an epoch of the checkpoint has {self._resumed_steps} steps, "
                f"an epoch of this run has {steps}. Resume with the data, batch size and number of "
                "devices of the checkpoint."
            )


def variance_loggers(trainer: Trainer) -> list[VarianceLogger]:
    """The variance loggers among the Trainer's callbacks."""
    return [c for c in trainer.callbacks if isinstance(c, VarianceLogger)]  # type: ignore[attr-defined]


def is_measured(trainer: Trainer, step: int) -> bool:
    """Whether a `VarianceLogger` measures this optimizer step, the current or the latest one."""
    return any(logger.logged_step == step for logger in variance_loggers(trainer))


def _cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over all targets, for a batch of images or of sequences."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, targets.flatten(), label_smoothing=label_smoothing)
