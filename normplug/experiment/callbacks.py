"""What a run prints, the time of its steps, and how its checkpoints are written."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from torchvision.datasets.folder import pil_loader
from torchvision.transforms.v2.functional import pil_to_tensor

from normplug._files import replace_file
from normplug.experiment.config import WHO
from normplug.lightning import VarianceLogger

TIMED_STEPS = 1000  # the most steps that are timed: the latest
ASKED_STEPS = 50  # training steps between two checks for a SIGTERM

log = logging.getLogger(WHO)
say = rank_zero_only(log.info)  # to the console and to train.log


def variance_loggers(trainer: Trainer) -> Iterator[VarianceLogger]:
    """Yield the `VarianceLogger`s of a Trainer."""
    yield from (c for c in trainer.callbacks if isinstance(c, VarianceLogger))  # type: ignore[attr-defined]


def ask_seldom(trainer: Trainer) -> None:
    """Check every `ASKED_STEPS` steps, not in each, whether a process has received a SIGTERM.

    Lightning 2.6 checks by a broadcast, for whose result the host waits, so the GPU becomes idle.
    Other versions do not check, or name the method otherwise.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    ask = getattr(loop, "_broadcast_sigterm_tensor", lambda: None)
    loop._broadcast_sigterm_tensor = lambda: (
        None if loop.batch_idx % ASKED_STEPS else ask()
    )


class StepTimer(Callback):
    """Time the latest training steps, from one start to the next; on a GPU, with CUDA events.

    Lightning's `ThroughputMonitor` waits for the GPU in every step, and gives means, which steps
    that warm up or measure variances would move. The last step of each epoch does not count.
    """

    def __init__(self) -> None:
        self._start: Any = None  # of the previous step in this epoch
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=TIMED_STEPS)

    def on_fit_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self._gpu = trainer.strategy.root_device.type == "cuda"
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()

    def on_train_epoch_start(self, *args: Any, **kwargs: Any) -> None:
        self._start = None  # a validation came in between

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        now: Any = time.perf_counter()
        if self._gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        if self._start is not None:
            self._steps.append((self._start, now))
        self._start = now

    def median_ms(self) -> float | None:
        """The median duration of a step; None if no step was timed."""
        if not self._steps:
            return None
        if not self._gpu:
            return 1e3 * statistics.median(end - start for start, end in self._steps)
        self._steps[-1][1].synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in self._steps)


def report(trainer: Trainer, labels: dict[str, Any], result: dict[str, Any]) -> None:
    """Log the hyperparameters, the final metric and the heat map of variances to TensorBoard."""
    final = {
        f"hp/{key}": value for key, value in result.items() if key.startswith("test_")
    }
    for logger in (
        each for each in trainer.loggers if isinstance(each, TensorBoardLogger)
    ):
        logger.log_hyperparams(labels, final)
        for variances in variance_loggers(trainer):
            # A chart for each quantity, with a line for each norm.
            kinds = ("input", "output", "affine", "weight_rms")
            names = [row.layer for row in variances.last]
            charts = {
                k: ["Multiline", [f"variance/{n}/{k}" for n in names]] for k in kinds
            }
            logger.experiment.add_custom_scalars({"variance": charts})
            picture = variances.path and variances.path.with_suffix(".png")
            if picture and picture.is_file():
                pixels = pil_to_tensor(pil_loader(picture))
                logger.experiment.add_image("variance", pixels, trainer.global_step)
        logger.finalize("success")


def variance_lines(trainer: Trainer) -> dict[str, str]:
    """Two lines on the variances at the latest measured step, and the file that has all of them."""
    lines: dict[str, str] = {}
    for logger in variance_loggers(trainer):
        rows = [row for row in logger.last if math.isfinite(row.input_variance)]
        if not rows:
            continue
        low, high = (f(rows, key=lambda row: row.input_variance) for f in (min, max))
        known = [row for row in rows if math.isfinite(row.output_variance)] or rows
        off = max(
            known, key=lambda row: abs(row.output_variance / row.target_variance - 1)
        )
        lines["norms' inputs"] = (
            f"{rows[0].measure} from {low.input_variance:.3g} ({low.layer}) "
            f"to {high.input_variance:.3g} ({high.layer}) at step {rows[0].step}"
        )
        lines["norms' outputs"] = (
            f"farthest from its target: {off.output_variance:.4g} for {off.target_variance:.4g} "
            f"({off.layer}); all in {logger.path}"
        )
    return lines


def save(content: Any, path: Path) -> None:
    """`torch.save`; a kill or a full disk during the write leaves the file that was there."""
    with replace_file(path) as part, part.open("wb") as file:
        torch.save(content, file)


class Checkpoints(TorchCheckpointIO):
    """Checkpoints without Lightning's temporary directory; they hold tensors and plain values."""

    def save_checkpoint(
        self, checkpoint: Any, path: Any, storage_options: Any = None
    ) -> None:
        save(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True)
