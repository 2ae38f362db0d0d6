"""Lightning callbacks of every run: stop at a bad loss, time the steps, print lines, report."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from normplug.experiment.errors import WHO
from normplug.lightning import VarianceLogger

WARM_UP_STEPS = 5
TIMED_STEPS = 1000  # at most, the latest of a run

log = logging.getLogger(WHO)
say = rank_zero_only(log.info)  # to the console and to train.log


def variance_loggers(trainer: Trainer) -> Iterator[VarianceLogger]:
    """Yield the `VarianceLogger`s of a Trainer."""
    yield from (c for c in trainer.callbacks if isinstance(c, VarianceLogger))  # type: ignore[attr-defined]


def is_measured(trainer: Trainer, step: int) -> bool:
    """Whether a `VarianceLogger` measures in this step, which then takes longer."""
    return any(logger.logged_step == step for logger in variance_loggers(trainer))


class Diverged(RuntimeError):
    """The loss became NaN or infinite.

    Attributes:
        step: the optimizer step of the failing forward, counted from 0 as in `metrics.csv`.
    """

    step: int


class FiniteLoss(Callback):
    """Raise `Diverged`, in every process, before the optimizer uses a loss that is not finite.

    `EarlyStopping(check_finite=True)` would look at the end of an epoch only. On a GPU, the loss is
    read at the steps that are logged, where the host waits for the GPU anyway.
    """

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Decide whether to read the loss of this step."""
        self._reads = pl_module.device.type == "cpu" or pl_module.is_logged(batch_idx)  # type: ignore[operator]

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Stop if the loss is not finite in any process."""
        if self._reads:
            total = trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
            self._check(trainer, "training", float(total))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if the mean loss is not finite."""
        self._check(trainer, "validation", float(trainer.callback_metrics["val/loss"]))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop if the mean loss is not finite."""
        self._check(trainer, "test", float(trainer.callback_metrics["test/loss"]))

    def _check(self, trainer: Trainer, name: str, loss: float) -> None:
        if math.isfinite(loss):
            return
        epoch = trainer.current_epoch + (not trainer.testing)  # before a test, it is incremented
        error = Diverged(
            f"{WHO}: the {name} loss is {loss} at step {trainer.global_step} (epoch {epoch}). "
            "Lower optimizer.lr, clip with trainer.gradient_clip_val=1, or find the operation with "
            "+trainer.detect_anomaly=true."
        )
        error.step = trainer.global_step
        raise error


class StepTimer(Callback):
    """Time the latest training steps; on a GPU, with CUDA events.

    `ThroughputMonitor` gives means, and waits for the GPU. Here the first steps of the run
    (`WARM_UP_STEPS`), the first step of each epoch, and steps that a `VarianceLogger` measures are
    left out, and the host does not wait for the GPU before the fit ends.
    """

    def __init__(self) -> None:
        self._gpu = False
        self._seen = 0  # steps so far
        self._step = -1  # the current optimizer step
        self._start: Any = None  # of the current step
        self._previous: Any = None  # start of the previous step, if that step counts
        self._ended = 0.0  # when the host ended the previous step
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)  # from start to end
        self._periods: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)  # to the next start
        self._waits: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)  # of the host, for a batch

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the clock; reset the peak memory."""
        self._gpu = trainer.strategy.root_device.type == "cuda"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the previous step: a validation lies between it and the first of this epoch."""
        self._previous = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the start, at which the period of the previous step ends."""
        self._step = trainer.global_step
        self._start = self._now()
        if self._previous is not None:
            self._periods.append((self._previous, self._start))
            self._waits.append((self._ended, time.perf_counter()))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end, unless the step is left out."""
        self._seen += 1
        measured = is_measured(trainer, self._step)
        counts = self._seen > WARM_UP_STEPS and batch_idx > 0 and not measured
        if counts:
            self._steps.append((self._start, self._now()))
        self._previous = self._start if counts else None
        self._ended = time.perf_counter()

    def summary(self, items_per_step: int, speed_key: str) -> dict[str, float | None]:
        """Medians over the steps: duration in ms, items per second, wait for the loader in ms.

        The key of the items per second is `speed_key`. A value is None if no step was timed.
        """
        period_ms = _median_ms(self._periods)
        return {
            "step_ms": _median_ms(self._steps),
            speed_key: None if period_ms is None else items_per_step * 1e3 / period_ms,
            "loader_wait_ms": _median_ms(self._waits),
        }

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _median_ms(pairs: deque[tuple[Any, Any]]) -> float | None:
    """The median of durations between times of the host in s, or between CUDA events."""
    if not pairs:
        return None
    if isinstance(pairs[0][0], float):
        return 1e3 * statistics.median(end - start for start, end in pairs)
    pairs[-1][1].synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def peak_memory_bytes(gpu: bool) -> int | None:
    """Return the peak memory of this run on the GPU, or of this process so far; None on Windows."""
    if gpu:
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class EpochLines(Callback):
    """Print a line per epoch, in place of a progress bar that would flood a log."""

    def __init__(self) -> None:
        self._loss: Any = 0.0  # summed over the epoch's steps, on the device
        self._begun = 0.0
        self._first = 0  # the first epoch of this fit

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._begun, self._first = time.perf_counter(), trainer.current_epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's mean."""
        self._loss, self._epoch = 0.0, time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss, without waiting for the GPU."""
        self._loss = self._loss + outputs["loss"].detach().float()
        self._steps, self._trained = batch_idx + 1, time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the epoch, its mean training loss, the validation's measure, rate and time left."""
        if trainer.sanity_checking:
            return
        done = trainer.current_epoch + 1
        total = trainer.max_epochs if (trainer.max_epochs or -1) > 0 else None  # -1: no limit
        measure = pl_module.measure
        value = pl_module.describe(pl_module.score("val"), "val")
        words = [
            f"epoch {done:3d}" + (f" of {total}" if total else ""),
            f"training loss {float(self._loss) / self._steps:.4f}",
            f"validation {measure.name} {value}",
            f"lr {trainer.optimizers[0].param_groups[0]['lr']:.2g}",
            f"{self._steps / (self._trained - self._epoch):.3g} steps/s",
        ]
        if total:
            each = (time.perf_counter() - self._begun) / (done - self._first)
            words.append(f"{_duration(each * (total - done))} left")
        say("  ".join(words))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def report(trainer: Trainer, result: dict[str, Any]) -> None:
    """Give TensorBoard the options of the run with its final metrics."""
    final = {f"hp/{key}": value for key, value in result.items() if key.startswith("test_")}
    options = {key: str(result[key]) for key in ("arm", "seed", "model", "data", "overrides")}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(options | {"learning_rate": result["learning_rate"]}, final)
            logger.finalize("success")


def variance_lines(trainer: Trainer) -> dict[str, str]:
    """The variances at the latest measured step, by title, and the file that has all of them."""
    lines = {}
    for logger in variance_loggers(trainer):
        rows = [row for row in logger.last if math.isfinite(row.input_variance)]
        if not rows:
            continue
        low, high = (f(rows, key=lambda row: row.input_variance) for f in (min, max))
        off = max(rows, key=lambda row: abs(row.output_variance / row.target_variance - 1))
        lines["norms' inputs"] = (
            f"{low.measure} from {low.input_variance:.3g} ({low.layer}) to "
            f"{high.input_variance:.3g} ({high.layer}) at step {low.step}"
        )
        lines["norms' outputs"] = (
            f"farthest from its target: {off.output_variance:.4g} for "
            f"{off.target_variance:.4g} ({off.layer}); all in {logger.path}"
        )
    return lines
