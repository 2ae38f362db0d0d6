"""One run of the experiment: it always leaves a `result.json`, however it ends."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import math
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug._fuse.fuse import fused_modules
from normplug._report.measure import Measure
from normplug._report.provenance import hardware, versions
from normplug._report.run_files import REFUSAL, RESULT
from normplug.experiment import checkpoint
from normplug.experiment.building import build_trainer
from normplug.experiment.checks import check, source_class
from normplug.experiment.command import as_typed, is_sweep
from normplug.experiment.directory import CONFIG, RunDirectory, this_process
from normplug.experiment.divergence import Diverged
from normplug.experiment.errors import UserError, unwritable, user_sentence
from normplug.experiment.learner import Learner, variance_loggers
from normplug.experiment.names import arm_or_mode
from normplug.experiment.signals import Interrupted, Signals
from normplug.experiment.source import Source
from normplug.experiment.summary import summary
from normplug.experiment.timing import StepTimer, peak_memory_bytes

# Warnings that a user of train.py cannot act on.
QUIET = (
    ".*does not have many workers",  # the data is in memory: workers would only copy them
    "Experiment logs directory .* exists and is not empty",  # Hydra's own files are in it
    "Checkpoint directory .* exists and is not empty",  # a run that resumes in its own directory
    "The dirpath has changed",  # a run that resumes in another directory
    ".*LeafSpec.* is deprecated",  # how Lightning uses torch
    "The epoch parameter in `scheduler.step",  # torch's own SequentialLR, before torch 2.10
)


class Run:
    """The context manager of one run, which writes `result.json` at its start and at its end.

    In a sweep, an error inside the context is recorded as a failed arm, and the sweep goes on.

    Attributes:
        finished: whether this same run has finished before, in which case `result` is its result.
        checkpoint: where the run resumes from: the last checkpoint of this directory, if a run of
            the same configuration was interrupted or killed in it; else `ckpt_path`; else None.

    Raises:
        SystemExit: on exit from the context of a single run, if the error has a message for the
            user (see `user_sentence`), which is then on stderr.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        keys = ("mode", "gamma0", "tag", "swap.autocast_output")
        self.arm = arm_or_mode(*(OmegaConf.select(cfg, key) for key in keys))
        self.result: dict[str, Any] = {}
        self.finished = False
        self.checkpoint: Path | None = None
        self._saved: dict[str, Any] = {}  # the content of the checkpoint, until it is loaded
        self._timer = StepTimer()
        self._trainer: Trainer | None = None
        self._signals = Signals()
        self._place = RunDirectory(self.directory)
        self._state = "created"  # then "locked" (the directory is its own), then "started"

    def __enter__(self) -> Run:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        gc.collect()  # a sweep's former run, whose objects form cycles, may hold GPU memory
        self._signals.install()
        return self

    def start(self) -> None:
        """Lock the directory, check the configuration, and record that the run has started.

        Raises:
            UserError: a live run owns the directory; the configuration cannot run; the directory
                holds another configuration's result, or a damaged one; it cannot be written.
        """
        try:
            self._place.take()
            self._state = "locked"
            check(self.cfg)
            former = self._place.finished_result(self.cfg)
            (self.directory / REFUSAL).unlink(missing_ok=True)
            if former is not None:
                self.result, self.finished = former, True
                print(f"skipped: {self.directory} is finished", file=sys.stderr)
                return
            self.checkpoint = self._read_checkpoint()
            self._place.set_aside(self.checkpoint)
            self._place.write(CONFIG, OmegaConf.to_yaml(self.cfg, resolve=True))
            self._write(status="running", process=this_process(), date=_now())
            self._state = "started"
        except OSError as error:
            raise UserError(unwritable(self.directory, error)) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            if isinstance(error, Interrupted):
                self._interrupted(error.signum)
            return isinstance(error, Exception) and self._failed(error)
        finally:
            self._place.release()
            self._signals.restore()

    def trainer(self, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
        """Build the Trainer; see `build_trainer`."""
        self._trainer = build_trainer(self.cfg, callbacks, loggers, self._timer, self.directory)
        return self._trainer

    def resume(self, model: Learner, loggers: list[Logger]) -> None:
        """Load the checkpoint's weights and continue its logs, if there is a checkpoint."""
        if self.checkpoint is not None:
            checkpoint.load_weights(self._saved, self.checkpoint, model)
            epochs = checkpoint.epochs_done(self._saved)
            over = epochs == self.cfg.trainer.max_epochs
            left = "nothing is left to train" if over else f"after epoch {epochs}"
            rank_zero_only(print)(f"resuming: {left}: {self.checkpoint}", file=sys.stderr)
            rank_zero_only(checkpoint.continue_logs)(
                self._saved, self.checkpoint, self.directory, loggers
            )
        self._saved = {}

    def finish(self, trainer: Trainer, model: Learner, data: Source) -> float:
        """Write the result, print a summary, and return the `score`."""
        gpu = trainer.strategy.root_device.type == "cuda"  # the model itself is back on the CPU
        fused = _norms_fused(model)
        layers = dict(_convert.normplug_layers(model))
        items = data.items_per_batch * trainer.world_size
        self._write(
            **model.result(),
            **data.facts(),
            **self._timer.summary(items, model.measure.speed_key),
            peak_memory_bytes=peak_memory_bytes(gpu),
            norms_swapped=len(layers),
            target_variances={path: layer.target_variance for path, layer in layers.items()},
            input_variances=_input_variances(trainer),
            norms_fused=fused,
            recompute=self.cfg.recompute and fused > 0,
            channels_last=self.cfg.channels_last,
            graph=self.cfg.graph,
            epochs=trainer.current_epoch,
            precision=str(trainer.precision),
            versions=versions("scikit-learn"),
            hardware=hardware(gpu, trainer.world_size),
            status="finished",
            date=_now(),
        )
        self._print_summary(trainer, model)
        return self.score

    @property
    def score(self) -> float:
        """The test score of a finished run."""
        return self.result[Measure.of(self.result).test_key]

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes from it."""
        split = source_class(self.cfg.data._target_).held_out
        return self._labels | {"optimizer": self.cfg.optimizer._target_, "split": split}

    @property
    def _labels(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "seed": self.cfg.get("seed"),
            "model": HydraConfig.get().runtime.choices.get("model", "none"),
            "data": _data_name(self.cfg),
        }

    @property
    def _settings(self) -> dict[str, Any]:
        """What `normplug.compare --best` needs: the learning rate, and the options of the run."""
        rate = OmegaConf.select(self.cfg, "optimizer.lr")
        return {
            "learning_rate": rate if isinstance(rate, (int, float)) else None,
            "overrides": list(HydraConfig.get().overrides.task),
        }

    def _write(self, **values: Any) -> None:
        self.result = self._labels | self._settings | self.result | values
        if self.result["status"] != "running":
            self.result.pop("process", None)
        self._place.write(RESULT, json.dumps(self.result, indent=2) + "\n")

    @rank_zero_only
    def _print_summary(self, trainer: Trainer, model: Learner) -> None:
        tables = [logger.table() for logger in variance_loggers(trainer)]
        print(summary(self.result, model.headlines(), self.directory, tables))

    def _read_checkpoint(self) -> Path | None:
        path = self.directory / checkpoint.LAST
        if not (self._place.was_cut_short(self.cfg) and path.is_file()):
            if self.cfg.ckpt_path is None:
                return None
            path = Path(self.cfg.ckpt_path)
        try:
            self._saved = checkpoint.read(path)
            max_epochs = self.cfg.trainer.max_epochs
            checkpoint.check_identity(self._saved, path, self.identity, max_epochs)
        except ValueError as error:
            raise UserError(str(error)) from None
        return path

    def _failed(self, error: Exception) -> bool:
        """Record the failure; return whether to suppress the error, so that the sweep goes on."""
        sentence = user_sentence(error)
        text = sentence or f"{type(error).__name__}: {error}"
        outcome: dict[str, Any] = {"status": "failed"}
        if isinstance(error, Diverged):
            outcome = {"status": "diverged", "step": error.step}
        if self._state == "started" or (self._state == "locked" and is_sweep()):
            self._record_failure(**outcome, error=text)
        if is_sweep():
            if not sentence:
                traceback.print_exception(error)
            line = f"{outcome['status']}: {self.directory}: {' '.join(text.split())}"
            print(line, file=sys.stderr)
            return True
        if self._state == "locked":
            self._place.remove_traces()
        if sentence and not os.environ.get("HYDRA_FULL_ERROR"):
            print(sentence, file=sys.stderr)  # Hydra would add three lines around it
            raise SystemExit(1) from None
        return False

    def _record_failure(self, **outcome: Any) -> None:
        """Record the failure for the comparison; a finished run keeps its result."""
        try:
            stays = self._state == "locked" and self._place.result().get("status") == "finished"
        except UserError:  # the comparison itself reports that it cannot be read
            return
        with contextlib.suppress(OSError):
            if stays:
                self._place.write(REFUSAL, outcome["error"])
                return
            try:
                self._write(**outcome, date=_now())
            except OSError:  # a full disk: the old result would say "running" forever
                (self.directory / RESULT).unlink(missing_ok=True)
                self._write(**outcome, date=_now())

    def _interrupted(self, signum: int) -> None:
        """Stop the other processes, record the interruption, and print how to continue."""
        if self._trainer is not None and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        own = self.directory / checkpoint.LAST
        latest = own if own.is_file() else self.checkpoint
        if is_sweep():
            again = f"resumes this one from {latest}" if latest else "repeats this one"
            advice = f"The same sweep skips finished runs and {again}: {as_typed()}"
        elif latest:
            advice = f"Resume with: {as_typed(latest)}"
        else:
            advice = f"There is no checkpoint yet. Start again with: {as_typed()}"
        text = f"interrupted: {self.directory}: {signal.Signals(signum).name}. {advice}"
        if self._state == "started":
            self._write(status="interrupted", error=text, date=_now())
        rank_zero_only(print)(text, file=sys.stderr)


def _norms_fused(model: Learner) -> int:
    if not fused_modules(model):
        return 0
    return sum(row.label is not None for row in normplug.fusions(model))


def _input_variances(trainer: Trainer) -> dict[str, float]:
    """Return the variance of each norm's input at the last logged step, by path.

    In a pre-norm model this is the variance of the residual stream by depth.
    """
    rows = (row for logger in variance_loggers(trainer) for row in logger.last)
    return {row.layer: row.input_variance for row in rows if math.isfinite(row.input_variance)}


def _data_name(cfg: DictConfig) -> str:
    choice = HydraConfig.get().runtime.choices.get("data", "none")
    place = {"image_folder": "data.root", "text": "data.path"}.get(choice)
    path = OmegaConf.select(cfg, place) if place else None
    return Path(str(path)).name if path else choice


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
