"""One run of the experiment: its name, its checks, and its `result.json`, whatever happens."""

from __future__ import annotations

import datetime
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

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug.compare.gather import BASELINE
from normplug.experiment import checkpoint
from normplug.experiment.classifier import Classifier
from normplug.experiment.datamodule import ImageData
from normplug.experiment.divergence import Diverged, FiniteLoss
from normplug.experiment.provenance import hardware, versions
from normplug.experiment.signals import Interrupted, Signals, command
from normplug.experiment.streams import SeedEpochs
from normplug.experiment.timing import (
    EpochLines,
    StepTimer,
    peak_memory_bytes,
    variance_loggers,
)
from normplug.fuse import fused_modules

# Warnings of Lightning that tell a user of train.py nothing to act on.
QUIET = (
    ".*does not have many workers",  # the images are in memory: workers would only copy them
    "Experiment logs directory .* exists and is not empty",  # Hydra's own files are in it
    "Checkpoint directory .* exists and is not empty",  # a run that resumes in its own
    "The dirpath has changed",  # a run that resumes in another one
    ".*LeafSpec.* is deprecated",  # Lightning's use of torch, not ours
)


class UserError(CompactHydraException):
    """A mistake in the command: Hydra prints its sentence, and no trace."""


def arm_name(mode: str | float, gamma0: float | None = None, tag: str | None = None) -> str:
    """The arm's name in directories, results and tables, e.g. `standard-gamma0_0.786`."""
    parts = [str(mode) if mode == BASELINE else str(normplug.NormMode(mode))]
    if gamma0 is not None:
        parts.append(f"gamma0_{gamma0:g}")
    if tag:
        parts.append(tag)
    return "-".join(parts)


def _arm_for_path(mode: str | float, gamma0: float | None, tag: str | None) -> str:
    # The directory is named before `Run` can refuse a bad mode in a sentence.
    try:
        return arm_name(mode, gamma0, tag)
    except (ValueError, TypeError):
        return str(mode)


OmegaConf.register_new_resolver("normplug.arm", _arm_for_path, replace=True)


class Run:
    """A context around one run that writes `result.json` at its start and however it ends.

    Args:
        cfg: the composed configuration.

    Attributes:
        finished: whether the directory already holds this run's result.
        checkpoint: where the run resumes from: the last checkpoint of this directory, if a run of
            the same configuration was interrupted or killed in it; else `ckpt_path`; else None.

    Raises:
        UserError: a mode, gamma0 or combination that cannot run; or a directory that holds another
            configuration's result. Inside the context, normplug's own messages become one too.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        self.arm = _checked_arm(cfg)
        self._refuse_idle_recompute()
        _refuse_sweep_of_processes(cfg)
        self._timer = StepTimer()
        self._signals = Signals()
        self._trainer: Trainer | None = None
        self._saved: dict[str, Any] = {}  # what the checkpoint holds, until it is loaded
        self.result: dict[str, Any] = {}
        self.finished = self._is_finished()
        self.checkpoint = None if self.finished else self._read_checkpoint()

    def __enter__(self) -> Run:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        self._signals.install()
        if not self.finished:
            self._take_directory()
            self._write(status="running", date=_now())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        try:
            return self._ends_well(error)
        finally:
            self._signals.restore()

    def _ends_well(self, error: BaseException | None) -> bool:
        """Record how the run ended; return whether a sweep may go on after an error."""
        if isinstance(error, Interrupted):
            self._interrupt(error.signum)
        if not isinstance(error, Exception):
            return False
        sentence = _sentence(error)
        text = sentence or f"{type(error).__name__}: {error}"
        status, step = "failed", {}
        if isinstance(error, Diverged):
            status, step = "diverged", {"step": error.step}
        self._write(status=status, **step, error=text, date=_now())
        if _is_multirun():
            # The other arms go on; the comparison at the sweep's end shows this one as failed.
            if not sentence:
                traceback.print_exception(error)
            print(f"{status}: {self.directory}: {text}", file=sys.stderr)
            return True
        if sentence and not os.environ.get("HYDRA_FULL_ERROR"):
            raise UserError(sentence) from None
        return False

    @property
    def fuses(self) -> bool:
        """Whether the swapped norms are to be fused: as configured, or on a GPU."""
        return self._on_gpu if self.cfg.fuse is None else self.cfg.fuse

    def _refuse_idle_recompute(self) -> None:
        cfg = self.cfg
        if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not self.fuses):
            raise UserError(
                "normplug.experiment: recompute=true is for fused norms (fuse=true, or null on a "
                "GPU) without compile=true, whose compiler decides itself what to compute anew."
            )

    @property
    def _on_gpu(self) -> bool:
        accelerators = ("auto", "gpu", "cuda")
        return self.cfg.trainer.accelerator in accelerators and torch.cuda.is_available()

    def trainer(self, callbacks: list[Callback], **parts: Any) -> Trainer:
        """The configured Trainer, with what is "auto" in its configuration decided."""
        settings = self.cfg.trainer.copy()
        if settings.precision == "auto":
            settings.precision = "bf16-mixed" if self._on_gpu else "32-true"
        if settings.enable_progress_bar == "auto":
            settings.enable_progress_bar = sys.stdout.isatty() and not _is_multirun()
            if not settings.enable_progress_bar:
                callbacks = [*callbacks, EpochLines(str(self.directory))]
        if "profiler" not in settings:
            parts["profiler"] = self._timer.clock
        plugins = list(instantiate(settings.get("plugins")) or ())
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(checkpoint.AtomicCheckpoints())
        callbacks = [*callbacks, SeedEpochs(self.cfg.seed), FiniteLoss(), self._timer]
        self._trainer = instantiate(settings, callbacks=callbacks, plugins=plugins, **parts)
        return self._trainer

    def resume(self, model: Classifier, loggers: list[Logger]) -> None:
        """Load the checkpoint's weights and continue its logs, if there is a checkpoint."""
        if self.checkpoint is not None:
            checkpoint.load_weights(self._saved, self.checkpoint, model)
            epochs = checkpoint.epochs_done(self._saved)
            over = epochs == self.cfg.trainer.max_epochs
            left = "nothing is left to train" if over else f"after epoch {epochs}"
            rank_zero_only(print)(f"resuming: {left}: {self.checkpoint}", file=sys.stderr)
            self._continue_logs(loggers)
        self._saved = {}

    def finish(self, trainer: Trainer, model: Classifier, data: ImageData) -> float:
        """Write the result, print it, and return the test accuracy."""
        gpu = trainer.strategy.root_device.type == "cuda"  # the model itself is back on the CPU
        accuracy = float(trainer.callback_metrics["test/accuracy"])
        self._write(
            test_accuracy=accuracy,
            accuracy_by_epoch=model.accuracy_by_epoch,
            **self._timer.summary(data.batch_size * trainer.world_size),
            peak_memory_bytes=peak_memory_bytes(gpu),
            norms_swapped=sum(1 for _ in _convert.normplug_layers(model)),
            norms_fused=(fused := _norms_fused(model)),
            recompute=self.cfg.recompute and fused > 0,
            channels_last=self.cfg.channels_last,
            epochs=trainer.current_epoch,
            precision=str(trainer.precision),
            versions=versions(),
            hardware=hardware(gpu, trainer.world_size),
            status="finished",
            date=_now(),
        )
        self._report(trainer)
        return accuracy

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes from it."""
        return self._labels | {"optimizer": self.cfg.optimizer._target_}

    @property
    def _labels(self) -> dict[str, Any]:
        return {
            "arm": self.arm,
            "seed": self.cfg.seed,
            "model": HydraConfig.get().runtime.choices["model"],
            "data": _data_name(self.cfg),
        }

    def _read_checkpoint(self) -> Path | None:
        path = self.directory / checkpoint.LAST
        if not (self._was_cut_short() and path.is_file()):
            if self.cfg.ckpt_path is None:
                return None
            path = Path(self.cfg.ckpt_path)
        max_epochs = self.cfg.trainer.max_epochs
        try:
            self._saved = checkpoint.read(path)
            checkpoint.check_identity(self._saved, path, self.identity, max_epochs)
        except ValueError as error:
            raise UserError(str(error)) from None
        return path

    @rank_zero_only
    def _take_directory(self) -> None:
        checkpoint.discard(self.directory, self.checkpoint)
        _replace(self.directory / "config.yaml", OmegaConf.to_yaml(self.cfg, resolve=True))

    @rank_zero_only
    def _continue_logs(self, loggers: list[Logger]) -> None:
        assert self.checkpoint is not None
        checkpoint.continue_logs(self._saved, self.checkpoint, self.directory, loggers)

    def _interrupt(self, signum: int) -> None:
        if self._trainer is not None and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        own = self.directory / checkpoint.LAST
        latest = own if own.is_file() else self.checkpoint
        if _is_multirun():
            again = f"resumes this one from {latest}" if latest else "repeats this one"
            advice = f"The same sweep skips finished runs and {again}: {command(None)}"
        elif latest:
            advice = f"Resume with: {command(latest)}"
        else:
            advice = f"There is no checkpoint yet. Start again with: {command(None)}"
        text = f"interrupted: {self.directory}: {signal.Signals(signum).name}. {advice}"
        self._write(status="interrupted", error=text, date=_now())
        rank_zero_only(print)(text, file=sys.stderr)

    @rank_zero_only
    def _write(self, **values: Any) -> None:
        self.result = self._labels | self.result | values
        _replace(self.directory / "result.json", json.dumps(self.result, indent=2) + "\n")

    def _is_finished(self) -> bool:
        """Whether the directory holds this very run's result."""
        result = self._former_result()
        if result.get("status") != "finished":
            return False
        if changed := self._changed():
            raise UserError(
                f"normplug.experiment: {self.directory} holds a finished run with another value of "
                f"{', '.join(changed[:5])}. Name this one: study=NAME (a directory of its own) or "
                "tag=NAME (an arm of its own)."
            )
        self.result = result
        print(f"skipped: {self.directory} is finished", file=sys.stderr)
        return True

    def _was_cut_short(self) -> bool:
        """Whether the directory holds this very run, interrupted or killed."""
        if self._former_result().get("status") not in ("running", "interrupted"):
            return False
        try:
            return not set(self._changed()) - {"ckpt_path"}
        except FileNotFoundError:
            return False

    def _former_result(self) -> dict[str, Any]:
        try:
            return json.loads((self.directory / "result.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return {}

    def _changed(self) -> list[str]:
        """The keys whose values differ between the directory's configuration and this one."""
        done = _flat(OmegaConf.to_container(OmegaConf.load(self.directory / "config.yaml")))
        asked = _flat(OmegaConf.to_container(self.cfg, resolve=True))
        return sorted(k for k in done.keys() | asked.keys() if done.get(k) != asked.get(k))

    @rank_zero_only
    def _report(self, trainer: Trainer) -> None:
        r = self.result
        speed = "not timed: too few steps"
        if r["images_per_s"] is not None:
            speed = f"{r['images_per_s']:,.0f} images/s (median step {r['step_ms']:.2f} ms"
            if r["loader_wait_ms"] is not None:
                speed += f", loader wait {r['loader_wait_ms']:.2f} ms"
            speed += ")"
        lines = [
            "",
            f"{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}",
            f"test accuracy  {100 * r['test_accuracy']:.2f} % after {r['epochs']} epochs",
            f"speed          {speed}",
            f"peak memory    {r['peak_memory_bytes'] / 2**20:,.0f} MiB",
            f"norm layers    {r['norms_swapped']} swapped, {r['norms_fused']} fused",
            *(logger.table() for logger in variance_loggers(trainer)),
            f"written to     {self.directory}: {', '.join(sorted(_files(self.directory)))}",
        ]
        print("\n".join(lines))


def _norms_fused(model: Classifier) -> int:
    if not fused_modules(model):
        return 0
    return sum(row.label is not None for row in normplug.fusions(model))


def _checked_arm(cfg: DictConfig) -> str:
    """Refuse what would fail only after the data is loaded; return the arm's name."""
    if cfg.gamma0 is not None and not _is_positive(cfg.gamma0):
        raise UserError(
            "normplug.experiment: gamma0 scales the norms' initial weights and must be a finite "
            f"number above 0, or null; got {cfg.gamma0}."
        )
    if not isinstance(cfg.seed, int):
        raise UserError(f"normplug.experiment: seed must be an integer; got {cfg.seed!r}.")
    if not _is_positive(cfg.optimizer.lr):
        raise UserError(
            "normplug.experiment: optimizer.lr must be a finite number above 0; "
            f"got {cfg.optimizer.lr!r}."
        )
    if cfg.fuse not in (True, False, None):
        raise UserError(f"normplug.experiment: fuse must be true, false or null; got {cfg.fuse!r}.")
    if cfg.recompute not in (True, False):
        raise UserError(
            f"normplug.experiment: recompute must be true or false; got {cfg.recompute!r}."
        )
    if cfg.trainer.get("sync_batchnorm") and cfg.mode != BASELINE:
        raise UserError(
            "normplug.experiment: trainer.sync_batchnorm=true rebuilds every BatchNorm as a stock "
            f"SyncBatchNorm, which would drop mode={cfg.mode}. Use instead "
            "'+trainer.plugins=[{_target_: normplug.lightning.SyncNorms}]'."
        )
    try:
        return arm_name(cfg.mode, cfg.gamma0, cfg.tag)
    except ValueError as error:
        raise UserError(f"{error} Or mode=baseline, which swaps nothing.") from None


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def _data_name(cfg: DictConfig) -> str:
    choice = HydraConfig.get().runtime.choices["data"]
    return Path(cfg.data.root).name if choice == "image_folder" and cfg.data.root else choice


def _is_multirun() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _refuse_sweep_of_processes(cfg: DictConfig) -> None:
    # Lightning's ddp starts its processes by running the command again, sweep and all.
    launches = "ddp" in str(cfg.trainer.strategy) and "LOCAL_RANK" not in os.environ
    if _is_multirun() and launches and cfg.trainer.devices not in (1, "1"):
        raise UserError(
            f"normplug.experiment: trainer.strategy={cfg.trainer.strategy} starts each process by "
            "running the command again, which with -m would be the whole sweep. Run the arms one "
            "by one (for mode in ...; do python train.py mode=$mode ...; done), or under torchrun."
        )


def _sentence(error: BaseException) -> str | None:
    """Normplug's own message behind an error, if it is one: those are written for the user."""
    seen: BaseException | None = error
    while seen is not None:
        if str(seen).startswith("normplug"):
            return str(seen)
        seen = seen.__cause__
    return None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _replace(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old text or the new, never a part."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


def _files(directory: Path) -> list[str]:
    return [p.name + ("/" if p.is_dir() else "") for p in directory.iterdir() if p.name[0] != "."]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
