"""One run of the experiment: its name, its checks, and its `result.json`, whatever happens."""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
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
from hydra.errors import InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug._fuse.fuse import fused_modules
from normplug._report.provenance import hardware, versions
from normplug.compare.gather import BASELINE, REFUSAL
from normplug.experiment import checkpoint
from normplug.experiment.checks import UserError, building_sentence, check
from normplug.experiment.classifier import Classifier
from normplug.experiment.datamodule import ImageData
from normplug.experiment.directory import RunDirectory, path_name, this_process, unwritable
from normplug.experiment.divergence import Diverged, FiniteLoss
from normplug.experiment.signals import Interrupted, Signals, command
from normplug.experiment.streams import SeedEpochs
from normplug.experiment.timing import (
    EpochLines,
    StepTimer,
    peak_memory_bytes,
    variance_loggers,
)

# Warnings of Lightning that tell a user of train.py nothing to act on.
QUIET = (
    ".*does not have many workers",  # the images are in memory: workers would only copy them
    "Experiment logs directory .* exists and is not empty",  # Hydra's own files are in it
    "Checkpoint directory .* exists and is not empty",  # a run that resumes in its own
    "The dirpath has changed",  # a run that resumes in another one
    ".*LeafSpec.* is deprecated",  # Lightning's use of torch, not ours
)
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # full, over the quota, read-only


def arm_name(mode: str | float, gamma0: float | None = None, tag: str | None = None) -> str:
    """The arm's name in directories, results and tables, e.g. `standard-gamma0_0.786`."""
    parts = [str(mode) if mode == BASELINE else str(normplug.NormMode(mode))]
    if gamma0 is not None:
        parts.append(f"gamma0_{gamma0:g}")
    if tag not in (None, ""):
        parts.append(str(tag))
    return "-".join(parts)


def _arm_or_mode(mode: Any, gamma0: Any, tag: Any) -> str:
    # Directories and failed runs are named before a bad mode is refused.
    try:
        return arm_name(mode, gamma0, tag)
    except (ValueError, TypeError):
        return str(mode)


OmegaConf.register_new_resolver(
    "normplug.arm", lambda *arm: path_name(_arm_or_mode(*arm)), replace=True
)
OmegaConf.register_new_resolver("normplug.name", path_name, replace=True)


class Run:
    """A context around one run that writes `result.json` at its start and however it ends.

    In a sweep, what fails inside the context is recorded as a failed arm, and the sweep goes on.

    Args:
        cfg: the composed configuration.

    Attributes:
        finished: whether an earlier run did all of this one, whose `result` it then is.
        checkpoint: where the run resumes from: the last checkpoint of this directory, if a run of
            the same configuration was interrupted or killed in it; else `ckpt_path`; else None.

    Raises:
        SystemExit: on leaving the context of a single run, for a mistake in the command. Its
            sentence is on stderr then, as are messages of normplug and of what the configuration
            builds.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        self.arm = _arm_or_mode(*(OmegaConf.select(cfg, key) for key in ("mode", "gamma0", "tag")))
        self.result: dict[str, Any] = {}
        self.finished = False
        self.checkpoint: Path | None = None
        self._saved: dict[str, Any] = {}  # what the checkpoint holds, until it is loaded
        self._timer = StepTimer()
        self._trainer: Trainer | None = None
        self._signals = Signals()
        self._place = RunDirectory(self.directory)
        self._state = "outside"  # then "inside" the directory, then "started"

    def __enter__(self) -> Run:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        self._signals.install()
        return self

    def start(self) -> None:
        """Take the directory, check the configuration, and record that the run is under way.

        Raises:
            UserError: a live run owns the directory; the configuration cannot run; the directory
                holds another configuration's result, or a damaged one; it cannot be written.
        """
        try:
            self._place.take()
            self._state = "inside"
            check(self.cfg)
            self.arm = _checked_arm(self.cfg)
            self._refuse_idle_recompute()
            self.finished = self._is_finished()
            (self.directory / REFUSAL).unlink(missing_ok=True)
            if self.finished:
                return
            self.checkpoint = self._read_checkpoint()
            self._place.set_aside(self.checkpoint)
            self._place.write("config.yaml", OmegaConf.to_yaml(self.cfg, resolve=True))
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
                self._interrupt(error.signum)
            return isinstance(error, Exception) and self._failed(error)
        finally:
            self._place.release()
            self._signals.restore()

    def _failed(self, error: Exception) -> bool:
        """Record the failure; whether the sweep goes on."""
        sentence = _sentence(error)
        text = sentence or f"{type(error).__name__}: {error}"
        outcome: dict[str, Any] = {"status": "failed"}
        if isinstance(error, Diverged):
            outcome = {"status": "diverged", "step": error.step}
        if self._state == "started" or (self._state == "inside" and _is_multirun()):
            self._record_failure(**outcome, error=text)
        if _is_multirun():
            # The other arms go on; the comparison at the sweep's end shows this one as failed.
            if not sentence:
                traceback.print_exception(error)
            line = f"{outcome['status']}: {self.directory}: {' '.join(text.split())}"
            print(line, file=sys.stderr)
            return True
        if self._state == "inside":
            self._place.remove_traces()
        if sentence and not os.environ.get("HYDRA_FULL_ERROR"):
            print(sentence, file=sys.stderr)  # Hydra would put three lines around it
            raise SystemExit(1) from None
        return False

    def _record_failure(self, **outcome: Any) -> None:
        """Write the failure where the comparison finds it, beside a result that must stay."""
        try:
            kept = self._state == "inside" and self._place.result().get("status") == "finished"
        except UserError:  # the comparison says itself that it cannot be read
            return
        with contextlib.suppress(OSError):
            if kept:
                self._place.write(REFUSAL, outcome["error"])
                return
            try:
                self._write(**outcome, date=_now())
            except OSError:  # a full disk: an old result would say "running" for ever
                (self.directory / "result.json").unlink(missing_ok=True)
                self._write(**outcome, date=_now())

    @property
    def fuses(self) -> bool:
        """Whether the swapped norms are to be fused: as configured, or on a GPU."""
        return self._on_gpu if self.cfg.fuse is None else self.cfg.fuse

    def _refuse_idle_recompute(self) -> None:
        cfg = self.cfg
        if cfg.recompute and cfg.mode != BASELINE and (cfg.compile or not self.fuses):
            raise UserError(
                "normplug.experiment: recompute=true is for fused norms (fuse=true, or null on a "
                "GPU) without compile=true, whose compiler decides itself what to recompute."
            )

    @property
    def _on_gpu(self) -> bool:
        accelerators = ("auto", "gpu", "cuda")
        return self.cfg.trainer.accelerator in accelerators and torch.cuda.is_available()

    def built(self, group: str) -> list[Any]:
        """The objects of a group of the configuration; those that are null are left out."""
        nodes = self.cfg.get(group) or {}
        objects = {name: instantiate(node) for name, node in nodes.items() if node is not None}
        for name, made in objects.items():
            if not isinstance(made, (Callback, Logger)):
                raise UserError(
                    f"normplug.experiment: {group}.{name}._target_ must make a Lightning callback "
                    f"or logger; got {type(made).__name__} from {nodes[name]._target_}."
                )
        return list(objects.values())

    def trainer(self, callbacks: list[Callback], **parts: Any) -> Trainer:
        """The configured Trainer, with what is "auto" in its configuration decided."""
        settings = self.cfg.trainer.copy()
        if not parts.get("logger"):  # it refuses to run with nothing to log to
            callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
        if "enable_checkpointing" not in settings:  # else Lightning adds a checkpoint of its own
            parts["enable_checkpointing"] = any(isinstance(c, Checkpoint) for c in callbacks)
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
        _refuse_sweep_of_processes(self._trainer)
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
            "seed": self.cfg.get("seed"),
            "model": HydraConfig.get().runtime.choices.get("model", "none"),
            "data": _data_name(self.cfg),
        }

    @rank_zero_only
    def _write(self, **values: Any) -> None:
        self.result = self._labels | self.result | values
        if self.result["status"] != "running":
            self.result.pop("process", None)
        self._place.write("result.json", json.dumps(self.result, indent=2) + "\n")

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
        if self._state == "started":
            self._write(status="interrupted", error=text, date=_now())
        rank_zero_only(print)(text, file=sys.stderr)

    def _is_finished(self) -> bool:
        """Whether the directory holds this very run's result."""
        result = self._place.result()
        if result.get("status") != "finished":
            return False
        way_out = (
            "Name this one: study=NAME (a directory of its own) or tag=NAME (an arm of its own)."
        )
        if "test_accuracy" not in result:
            raise UserError(
                f"normplug.experiment: {self.directory} holds a finished run without a test "
                f"accuracy. Delete its result.json to train it again. {way_out}"
            )
        try:
            changed = self._changed()
        except Exception as error:  # of the disk, of YAML, of OmegaConf
            raise UserError(
                f"normplug.experiment: {self.directory} holds a finished run whose config.yaml "
                f"cannot be read ({' '.join(str(error).split())}), so it may be another run. "
                f"{way_out}"
            ) from None
        if changed:
            raise UserError(
                f"normplug.experiment: {self.directory} holds a finished run with another value of "
                f"{', '.join(changed[:5])}. {way_out}"
            )
        self.result = result
        print(f"skipped: {self.directory} is finished", file=sys.stderr)
        return True

    def _was_cut_short(self) -> bool:
        """Whether the directory holds this very run, interrupted or killed."""
        if self._place.result().get("status") not in ("running", "interrupted"):
            return False
        with contextlib.suppress(Exception):  # its config.yaml is missing or damaged
            return not set(self._changed()) - {"ckpt_path"}
        return False

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
        peak = "unknown"
        if r["peak_memory_bytes"] is not None:
            peak = f"{r['peak_memory_bytes'] / 2**20:,.0f} MiB"
        lines = [
            "",
            f"{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}",
            f"test accuracy  {100 * r['test_accuracy']:.2f} % after {r['epochs']} epochs",
            f"speed          {speed}",
            f"peak memory    {peak}",
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
    """The arm's name; an unknown mode is refused."""
    try:
        return arm_name(cfg.mode, cfg.gamma0, cfg.tag)
    except (TypeError, ValueError) as error:
        raise UserError(f"{error} Or mode=baseline, which swaps nothing.") from None


def _data_name(cfg: DictConfig) -> str:
    choice = HydraConfig.get().runtime.choices.get("data", "none")
    root = OmegaConf.select(cfg, "data.root") if choice == "image_folder" else None
    return Path(str(root)).name if root else choice


def _is_multirun() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def _refuse_sweep_of_processes(trainer: Trainer) -> None:
    # A launcher that suits no notebook starts its processes by running the command again, -m too.
    launcher = trainer.strategy.launcher
    runs_again = launcher is not None and not launcher.is_interactive_compatible
    if _is_multirun() and runs_again and trainer.num_devices > 1:
        raise UserError(
            f"normplug.experiment: {trainer.num_devices} devices with "
            f"{type(trainer.strategy).__name__} start each process by running the command again, "
            "which with -m would be the whole sweep. Give trainer.devices=1, run the arms one by "
            "one (for mode in ...; do python train.py mode=$mode ...; done), or use torchrun."
        )


def _sentence(error: BaseException) -> str | None:
    """The message behind an error, if it is written for the user."""
    seen: BaseException | None = error
    while seen is not None:
        if str(seen).startswith("normplug"):
            return str(seen)
        seen = seen.__cause__
    if isinstance(error, InstantiationException):
        return building_sentence(error, HydraConfig.get().overrides.task)
    if isinstance(error, OSError) and error.errno in DISK:
        return unwritable(Path(error.filename or HydraConfig.get().runtime.output_dir), error)
    return None


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _files(directory: Path) -> list[str]:
    return [p.name + ("/" if p.is_dir() else "") for p in directory.iterdir() if p.name[0] != "."]


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
