"""The state of a run: its scores, the time of its steps, its checkpoints."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.progress import (
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from torch import Tensor

from normplug._files import replace_file
from normplug._measure import Measure
from normplug._tools.watching import LayerVariance
from normplug.experiment.errors import WHO, UserError
from normplug.experiment.models import GPT, Block
from normplug.lightning import VarianceLogger

TIMED_STEPS = 1000  # the most steps that are timed: the latest
# Test tokens, per process, on which the loss without each block is measured.
DROP_TOKENS = 2**15
ON_TARGET = 0.01  # relative distance from the target that a summary does not report


class Diverged(RuntimeError):
    """The loss became NaN or infinite, in the forward of the optimizer step `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def is_logged(trainer: Trainer) -> bool:
    """Whether the loss of this step is written: the first and last of an epoch, and some between.

    Each call of `log` costs the host as much as dozens of launches, and the host waits for the
    GPU where a value is read.
    """
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    is_due = every > 0 and (trainer.global_step + 1) % every == 0
    return is_due or trainer.fit_loop.batch_idx == 0 or trainer.is_last_batch


class Scores(Callback):
    """Collect the validation scores, and stop, in every process, at a loss that is not finite.

    Attributes:
        by_epoch: The measure on the validation part, after each epoch.
        restoring: The checkpoint that is being restored; None before and after.
    """

    def __init__(self, measure: Measure) -> None:
        self.measure = measure
        self.by_epoch: list[float] = []
        self.restoring: Path | None = None

    def on_train_start(self, *args: Any) -> None:
        self.restoring = None

    def on_test_start(self, *args: Any) -> None:
        self.restoring = None

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # On a GPU, only a logged loss is read: the host waits for it anyway.
        if is_logged(trainer) or loss.device.type == "cpu":
            total = trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
            self._check_finite(trainer, "training", float(total))

    def on_validation_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self._check_finite(trainer, "validation", metric(trainer, "val/loss"))
        if not trainer.sanity_checking:
            self.by_epoch.append(metric(trainer, f"val/{self.measure.name}"))

    def on_test_epoch_end(self, trainer: Trainer, *args: Any) -> None:
        self._check_finite(trainer, "test", metric(trainer, "test/loss"))

    def _check_finite(self, trainer: Trainer, name: str, loss: float) -> None:
        if math.isfinite(loss):
            return
        step = trainer.global_step
        epoch = trainer.current_epoch + (name != "test")
        raise Diverged(
            f"{WHO}: the {name} loss is {loss} at step {step} (epoch {epoch}). Lower "
            "optimizer.lr, clip with trainer.gradient_clip_val=1, or find the operation with "
            "+trainer.detect_anomaly=true.",
            step,
        )


def metric(trainer: Trainer, name: str) -> float:
    """Return the latest value that the LightningModule logged under a name."""
    logged = trainer.callback_metrics
    if name not in logged:
        raise UserError(
            f"{WHO}: the LightningModule must log {name}; it logged {', '.join(logged)}. "
            f"Call self.log({name!r}, value)."
        )
    return float(logged[name])


class EpochLines(RichProgressBar):
    """A progress bar that leaves one line for each epoch in 80 columns: batches, time, metrics."""

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        return [
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the version of a logger
        return {name.replace("accuracy", "acc"): metrics[name] for name in metrics}


class BlockDrop(Callback):
    """Measure the test loss of a GPT without each of its blocks, on its first tokens."""

    def __init__(self) -> None:
        self.tokens = 0

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *args: Any
    ) -> None:
        net = getattr(pl_module, "net", None)
        if not isinstance(net, GPT) or self.tokens >= DROP_TOKENS:
            return
        targets = batch[1]
        self.tokens += targets.numel()
        samples = len(targets)
        loss = pl_module.loss(*batch)
        pl_module.log_mean("block_drop/none", loss, samples, logger=False)
        for number, block in enumerate(net.blocks):
            assert isinstance(block, Block)
            with block.dropped():
                loss = pl_module.loss(*batch)
            pl_module.log_mean(f"block_drop/{number}", loss, samples, logger=False)

    def result(self, trainer: Trainer) -> dict[str, Any]:
        """Its part of `result.json`; {} without a GPT."""
        logged = trainer.callback_metrics
        losses = [float(logged[key]) for key in logged if key.startswith("block_drop/")]
        if not losses:
            return {}
        whole, *without = losses
        drop = {"tokens": self.tokens, "loss": whole, "loss_without": without}
        return {"block_drop": drop}


class StepTimer(Callback):
    """Time the latest training steps and the training part of each epoch; on a GPU, by CUDA events.

    A step lasts from its start to the start of the next one. Lightning's `ThroughputMonitor` waits
    for the GPU in every step, and returns means, which warm-up steps and steps that measure
    variances distort. The last step of each epoch does not count as a step.

    The training part of an epoch excludes its validations and the checkpoints after them. So the
    first epoch includes the compilation of the training and the capture of CUDA graphs.
    """

    def __init__(self) -> None:
        self._start: Any = None  # of the previous step in this epoch
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)
        self._part_start: Any = None  # of a part of an epoch, between two validations
        self._parts: list[tuple[Any, Any]] = []  # of the current epoch
        self._epochs: list[list[tuple[Any, Any]]] = []

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._gpu = trainer.strategy.root_device.type == "cuda"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start = None  # a validation came in between
        self._parts = []
        self._part_start = self._now()

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        now = self._now()
        if self._start is not None:
            self._steps.append((self._start, now))
        self._start = now
        if self._part_start is None:
            self._part_start = now

    def on_validation_start(self, *args: Any, **kwargs: Any) -> None:
        self._end_part()

    def on_train_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self._end_part()
        self._epochs.append(self._parts)

    def _end_part(self) -> None:
        if self._part_start is not None:
            self._parts.append((self._part_start, self._now()))
            self._part_start = None

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, start: Any, end: Any) -> float:
        if not self._gpu:
            return 1e3 * (end - start)
        end.synchronize()
        return float(start.elapsed_time(end))

    def median_ms(self) -> float | None:
        """The median duration of a step; None if no step was timed."""
        if not self._steps:
            return None
        return statistics.median(self._ms(*step) for step in self._steps)

    def seconds_by_epoch(self) -> list[float]:
        """The duration of the training part of each epoch, since this process started to train."""
        return [sum(self._ms(*part) for part in parts) / 1e3 for parts in self._epochs]


def variance_loggers(trainer: Trainer) -> list[VarianceLogger]:
    """Return the `VarianceLogger`s of a Trainer."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in callbacks if isinstance(each, VarianceLogger)]


def variance_lines(trainer: Trainer) -> dict[str, str]:
    """Two lines on the variances at the latest measured step, with the file that has them all."""
    lines: dict[str, str] = {}
    for logger in variance_loggers(trainer):
        rows = [row for row in logger.last if math.isfinite(row.input_variance)]
        if not rows:
            continue
        low = min(rows, key=lambda row: row.input_variance)
        high = max(rows, key=lambda row: row.input_variance)
        known = [row for row in rows if math.isfinite(row.output_variance)] or rows
        off = max(known, key=_distance_from_target)
        lines["norms' inputs"] = (
            f"{rows[0].measure} from {low.input_variance:.3g} ({low.layer}) "
            f"to {high.input_variance:.3g} ({high.layer}) at step {rows[0].step}"
        )
        outputs = (
            f"farthest from its target: {off.output_variance:.4g} for {off.target_variance:.4g} "
            f"({off.layer})"
        )
        if _distance_from_target(off) <= ON_TARGET:
            outputs = f"all within {ON_TARGET:.0%} of their targets"
        lines["norms' outputs"] = (
            f"before weight and bias: {outputs}; all variances in {logger.path}"
        )
    return lines


def _distance_from_target(row: LayerVariance) -> float:
    """The relative distance of an output's variance from its target."""
    return abs(row.output_variance / row.target_variance - 1)


def save(content: Any, path: Path) -> None:
    """`torch.save`; if the write is killed or the disk is full, the earlier file remains."""
    with replace_file(path) as part, part.open("wb") as file:
        torch.save(content, file)


class Checkpoints(TorchCheckpointIO):
    """Checkpoints of one run, with tensors and plain values only.

    Besides Lightning's content, a checkpoint has the run's `identity`, as "run", and its scores.
    Lightning's own files pass through a temporary directory, which a full disk leaves behind.
    """

    def __init__(self, scores: Scores, identity: dict[str, Any]) -> None:
        super().__init__()
        self.scores = scores
        self.identity = identity
        self.curve_key = scores.measure.keys[1]

    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        marks = {"run": self.identity, self.curve_key: list(self.scores.by_epoch)}
        save(checkpoint | marks, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.scores.restoring = Path(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        for key, value in self.identity.items():
            other = checkpoint["run"].get(key)
            if other != value:
                raise ValueError(f"it has {key} {other!r}, this run has {value!r}")
        if not checkpoint["optimizer_states"]:
            raise ValueError("it lacks the optimizer")
        # A run that has trained tests its best checkpoint, which may be of an earlier epoch.
        if not self.scores.by_epoch:
            self.scores.by_epoch = list(checkpoint[self.curve_key])
        return checkpoint
