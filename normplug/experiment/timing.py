"""Time the steps of a run, measure its peak memory, and print a line per epoch."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities import rank_zero_only

from normplug.experiment.learner import Learner, is_measured

WARM_UP_STEPS = 5
FETCH = "[_TrainingEpochLoop].train_dataloader_next"  # Lightning's name for fetching a batch


class LoaderClock(Profiler):
    """A Lightning profiler that records in `waits_ms` the training loop's wait for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.waits_ms: list[float] = []
        self._start = 0.0

    def start(self, action_name: str) -> None:
        """Start the clock, if the loop starts to wait for the loader."""
        if action_name == FETCH:
            self._start = time.perf_counter()

    def stop(self, action_name: str) -> None:
        """Record how long the loop waited."""
        if action_name == FETCH:
            self.waits_ms.append((time.perf_counter() - self._start) * 1e3)


class Durations:
    """Durations between two times of the host's clock, in s, or between two CUDA events.

    Events are read once the GPU has passed them, so that only those of its latest steps are kept,
    and the host does not wait for the GPU before the end.
    """

    def __init__(self) -> None:
        self._ms: list[float] = []
        self._unread: deque[tuple[Any, Any]] = deque()

    def add(self, start: Any, end: Any) -> None:
        """Add a duration; read the events that the GPU has passed."""
        if isinstance(end, float):
            self._ms.append((end - start) * 1e3)
            return
        self._unread.append((start, end))
        while self._unread and self._unread[0][1].query():
            self._read()

    def median_ms(self) -> float | None:
        """Wait for the last events; return the median, or None without durations."""
        while self._unread:
            self._unread[0][1].synchronize()
            self._read()
        return statistics.median(self._ms) if self._ms else None

    def _read(self) -> None:
        start, end = self._unread.popleft()
        self._ms.append(float(start.elapsed_time(end)))


class StepTimer(Callback):
    """Time every training step; on a GPU, with CUDA events.

    The first steps of the run (`WARM_UP_STEPS`), the first step of each epoch, and steps that a
    `VarianceLogger` measures are left out. Timing does not synchronise the host with the GPU
    before the fit ends.

    Attributes:
        clock: the profiler that the Trainer needs.
    """

    def __init__(self) -> None:
        self.clock = LoaderClock()
        self._gpu = False
        self._seen = 0  # steps so far
        self._step = -1  # the current optimizer step
        self._start: Any = None  # of the current step
        self._previous: Any = None  # start of the previous step, if that step counts
        self._steps = Durations()  # from a step's start to its end
        self._periods = Durations()  # from a step's start to the next one's, with the loader

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the clock; reset the peak memory."""
        self._gpu = trainer.strategy.root_device.type == "cuda"
        reset_peak_memory(self._gpu)

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
            self._periods.add(self._previous, self._start)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end, unless the step is left out."""
        self._seen += 1
        measured = is_measured(trainer, self._step)
        counts = self._seen > WARM_UP_STEPS and batch_idx > 0 and not measured
        if counts:
            self._steps.add(self._start, self._now())
        self._previous = self._start if counts else None

    def summary(self, items_per_step: int, speed_key: str) -> dict[str, float | None]:
        """Medians over the steps: duration in ms, items per second, wait for the loader in ms.

        The key of the items per second is `speed_key`. A value is None if no step was timed.
        """
        step_ms = self._steps.median_ms()
        period_ms = self._periods.median_ms()
        waits = self.clock.waits_ms[WARM_UP_STEPS:]
        return {
            "step_ms": step_ms,
            speed_key: None if period_ms is None else items_per_step * 1e3 / period_ms,
            "loader_wait_ms": statistics.median(waits) if waits else None,
        }

    def _now(self) -> Any:
        if not self._gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class EpochLines(Callback):
    """Print `title`, then a line per epoch, in place of a progress bar that would flood a log."""

    def __init__(self, title: str) -> None:
        self.title = title

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the title."""
        rank_zero_only(print)(self.title, flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the epoch, the latest training loss and the validation's measure."""
        if trainer.sanity_checking:
            return
        values = trainer.callback_metrics
        epoch = f"epoch {trainer.current_epoch + 1:3d}"
        if trainer.max_epochs is not None and trainer.max_epochs > 0:  # -1: no limit
            epoch += f" of {trainer.max_epochs}"
        loss = f"training loss {float(values['train/loss']):.4f}"
        assert isinstance(pl_module, Learner)
        found = pl_module.describe(pl_module.score("val"), "val")
        line = f"{epoch}  {loss}  validation {pl_module.measure.name} {found}"
        rank_zero_only(print)(line, flush=True)


def reset_peak_memory(gpu: bool) -> None:
    """Reset the peak that `peak_memory_bytes` returns, so that each run of a sweep has its own."""
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM


def peak_memory_bytes(gpu: bool) -> int | None:
    """Return the peak memory since `reset_peak_memory`, on the GPU or of this process.

    Only Linux can reset the peak of a process: elsewhere it is the peak since the process started.
    None on Windows without the package psutil.
    """
    if gpu:
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        with contextlib.suppress(ModuleNotFoundError):
            import psutil

            return getattr(psutil.Process().memory_info(), "peak_wset", None)
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
