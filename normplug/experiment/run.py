"""One run of train.py: it always leaves a `result.json`, however it ends."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import math
import os
import shutil
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

import normplug
from normplug import _convert
from normplug._fuse.fuse import fused_modules
from normplug._results import stamp
from normplug.experiment import resume
from normplug.experiment.callbacks import (
    Diverged,
    EpochLines,
    FiniteLoss,
    StepTimer,
    log,
    peak_memory_bytes,
    report,
    say,
    variance_lines,
    variance_loggers,
)
from normplug.experiment.config import arm_or_mode, check
from normplug.experiment.data import Source
from normplug.experiment.errors import WHO, UserError, unwritable, user_sentence
from normplug.experiment.graph import refuse_graph
from normplug.experiment.learner import Learner
from normplug.experiment.measure import BASELINE, REFUSAL, RESULT, Measure
from normplug.experiment.sweep import as_typed, is_sweep, named

# Warnings that a user of train.py cannot act on.
QUIET = (
    ".*does not have many workers",  # the data is in memory: workers would only copy them
    "Experiment logs directory .* exists and is not empty",  # Hydra's own files are in it
    "Checkpoint directory .* exists and is not empty",  # a run that resumes in its own directory
    "Be aware that when using `ckpt_path`, callbacks used",  # of the run that is tested
    "The number of training batches .* is smaller than the logging interval",
    "The dirpath has changed",  # a run that resumes in another directory
    ".*LeafSpec.* is deprecated",  # how Lightning uses torch
    "The AccumulateGrad node's stream does not match",  # Lightning wraps with DDP in a side stream
    "The epoch parameter in `scheduler.step",  # torch's own SequentialLR, before torch 2.10
)
# Lines of Lightning's log that tell a user nothing.
NOISE = ("💡", "TPU avail", "HPU avail", "GPU avail", "Loading `train", "Restoring", "Restored")
Train = Callable[[DictConfig, "Run"], "float | None"]


def task(train: Train) -> Callable[[DictConfig], float | None]:
    """Decorate `train(cfg, run)`: it is skipped if it has finished, and its end is recorded.

    In a sweep, an error is recorded as a failed arm, and the sweep goes on.

    Raises:
        SystemExit: of a single run, if the error has a message for the user (`user_sentence`),
            which is then on stderr; of any run that a signal ends.
    """

    @functools.wraps(train)
    def wrapper(cfg: DictConfig) -> float | None:
        for message in QUIET:
            warnings.filterwarnings("ignore", message)
        logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_tells)
        gc.collect()  # a sweep's former run, whose objects form cycles, may hold GPU memory
        run = Run(cfg)
        try:
            run.start()
            return run.score if run.finished else train(cfg, run)
        except (KeyboardInterrupt, SystemExit) as stop:
            terminated = isinstance(stop, SIGTERMException)
            run.interrupted(signal.SIGTERM if terminated else signal.SIGINT)
            raise
        except Exception as error:
            if not run.failed(error):
                raise
            return None
        finally:
            run.place.release()

    return wrapper


def _tells(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NOISE)


class Run:
    """One run of a configuration, in Hydra's output directory.

    Attributes:
        fuses: whether the swapped norms are fused.
        finished: whether this same run has finished before, in which case `result` is its result.
        checkpoint: where the run goes on from: the last checkpoint of this directory, if a run of
            the same configuration was interrupted or killed in it; else `ckpt_path`; else None.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.cfg = cfg
        self.directory = Path(HydraConfig.get().runtime.output_dir)
        self.place = resume.RunDirectory(self.directory)
        keys = ("mode", "gamma0", "tag", "swap.autocast_output")
        self.arm = arm_or_mode(*(OmegaConf.select(cfg, key) for key in keys))
        self.result: dict[str, Any] = {}
        self.fuses = False
        self.finished = False
        self.checkpoint: Path | None = None
        self._saved: dict[str, Any] = {}  # the content of the checkpoint, until it is loaded
        self._timer = StepTimer()
        self._is_built = False
        self._state = "created"  # then "locked" (the directory is its own), then "started"

    def start(self) -> None:
        """Lock the directory, check the configuration, and record that the run has started.

        Raises:
            UserError: a live run owns the directory; the configuration cannot run; the directory
                holds another configuration's result, or a damaged one; it cannot be written.
        """
        try:
            self.place.take()
            self._state = "locked"
            check(self.cfg)
            former = self.place.finished_result(self.cfg)
            (self.directory / REFUSAL).unlink(missing_ok=True)
            if former is not None:
                self.result, self.finished = former, True
                say(f"skipped: {self.directory} is finished")
                return
            self.fuses = self._fuses()
            given = self.cfg.ckpt_path
            given = given and resume.find_checkpoint(given, self.directory)
            self.checkpoint = self.place.make_room(self.cfg, given)
            if self.checkpoint is not None:
                self._saved = resume.read_checkpoint(self.checkpoint)
                max_epochs = self.cfg.trainer.max_epochs
                resume.check_checkpoint(self._saved, self.checkpoint, self.identity, max_epochs)
            self.place.write(resume.CONFIG, OmegaConf.to_yaml(self.cfg))
            self._write(status="running", process=f"{os.getpid()} on {socket.gethostname()}")
            self._state = "started"
        except OSError as error:
            raise UserError(unwritable(self.directory, error)) from None

    @property
    def gpu(self) -> bool:
        """Whether the Trainer will take a GPU."""
        kinds = ("auto", "gpu", "cuda")
        return self.cfg.trainer.accelerator in kinds and torch.cuda.is_available()

    def _fuses(self) -> bool:
        """Whether to fuse the swapped norms: as configured; if that is null, only on a GPU.

        Raises:
            UserError: `recompute` without it.
        """
        fuses = self.gpu if self.cfg.fuse is None else self.cfg.fuse
        if self.cfg.recompute and self.cfg.mode != BASELINE and (self.cfg.compile or not fuses):
            raise UserError(
                f"{WHO}: recompute=true is for fused norms (fuse=true, or null on a GPU) without "
                "compile=true: the compiler decides by itself what to recompute."
            )
        return fuses

    def build(self, group: str) -> list[Any]:
        """Build the callbacks or the loggers of a group; skip those that are null.

        Raises:
            UserError: a `_target_` builds neither a callback nor a logger.
        """
        nodes = self.cfg.get(group) or {}
        objects = {name: instantiate(node) for name, node in nodes.items() if node is not None}
        for name, made in objects.items():
            if not isinstance(made, (Callback, Logger)):
                raise UserError(
                    f"{WHO}: {group}.{name}._target_ must make a Lightning callback or logger; got "
                    f"{type(made).__name__} from {nodes[name]._target_}."
                )
        return list(objects.values())

    def trainer(self, callbacks: list[Callback], loggers: list[Logger]) -> Trainer:
        """Build the Trainer: decide what is "auto", and add the callbacks of every run.

        Raises:
            UserError: a sweep with a strategy that would repeat the sweep in every process, or
                `graph=true` in a run that cannot use it.
        """
        settings = self.cfg.trainer.copy()
        if not loggers:  # LearningRateMonitor raises without a logger
            callbacks = [c for c in callbacks if not isinstance(c, LearningRateMonitor)]
        if "enable_checkpointing" not in settings:  # else Lightning adds its own ModelCheckpoint
            checkpoints = any(isinstance(c, Checkpoint) for c in callbacks)
            OmegaConf.update(settings, "enable_checkpointing", checkpoints, force_add=True)
        if settings.precision == "auto":
            settings.precision = "bf16-mixed" if self.gpu else "32-true"
        if settings.enable_progress_bar == "auto":
            settings.enable_progress_bar = sys.stdout.isatty() and not is_sweep()
        plugins = list(instantiate(settings.get("plugins")) or ())
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(resume.AtomicCheckpoints())
        own = [FiniteLoss(), self._timer, EpochLines()]
        trainer = instantiate(
            settings, callbacks=[*callbacks, *own], logger=loggers, plugins=plugins
        )
        launcher = trainer.strategy.launcher
        reruns = launcher is not None and not launcher.is_interactive_compatible
        if is_sweep() and reruns and trainer.num_devices > 1:
            raise UserError(
                f"{WHO}: {trainer.num_devices} devices with {type(trainer.strategy).__name__} "
                "start each process by running the command again, and with -m that is the whole "
                "sweep. Set trainer.devices=1, run the arms one by one (for mode in ...; do python "
                "train.py mode=$mode ...; done), or use torchrun."
            )
        if self.cfg.graph:
            refuse_graph(trainer)
        return trainer

    def resume(self, model: Learner, loggers: list[Logger]) -> str | None:
        """Load the checkpoint's weights and continue its logs; return its path, if there is one.

        All has been built, so the run trains now.
        """
        self._is_built = True
        say(f"{self.directory}")
        if self.checkpoint is None:
            return None
        resume.load_checkpoint(self._saved, self.checkpoint, model)
        epochs = resume.epochs_done(self._saved)
        over = epochs == self.cfg.trainer.max_epochs or not self.cfg.train
        left = "nothing is left to train" if over else f"after epoch {epochs}"
        say(f"resuming: {left}: {self.checkpoint}")
        continue_logs = rank_zero_only(resume.continue_logs)
        continue_logs(self._saved["global_step"], self.checkpoint, self.directory, loggers)
        self._saved = {}
        return str(self.checkpoint)

    def best(self, trainer: Trainer) -> str | None:
        """The checkpoint that is tested: of the best epoch, if one is kept, else None."""
        kept = (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
        return next((c.best_model_path for c in kept if c.monitor and c.best_model_path), None)

    def finish(self, trainer: Trainer, model: Learner, data: Source) -> float | None:
        """Write the result, print a summary, and return the `score`."""
        gpu = trainer.strategy.root_device.type == "cuda"  # the model itself is back on the CPU
        fused = 0
        if fused_modules(model):
            fused = sum(row.label is not None for row in normplug.fusions(model))
        layers = dict(_convert.normplug_layers(model))
        items = data.items_per_batch * trainer.world_size
        # In a pre-norm model the inputs' variances are those of the residual stream by depth.
        rows = [row for logger in variance_loggers(trainer) for row in logger.last]
        variances = {r.layer: r.input_variance for r in rows if math.isfinite(r.input_variance)}
        self._write(
            **model.result(),
            **data.facts(),
            **self._timer.summary(items, model.measure.speed_key),
            peak_memory_bytes=peak_memory_bytes(gpu),
            norms_swapped=len(layers),
            target_variances={path: layer.target_variance for path, layer in layers.items()},
            input_variances=variances,
            norms_fused=fused,
            recompute=self.cfg.recompute and fused > 0,
            channels_last=self.cfg.channels_last,
            graph=self.cfg.graph,
            epochs=trainer.current_epoch,
            precision=str(trainer.precision),
            status="finished",
            gpus=trainer.world_size * gpu,
        )
        rank_zero_only(report)(trainer, self._settings, self.result)
        self._say_summary(model.headlines(), variance_lines(trainer))
        return self.score

    @property
    def score(self) -> float | None:
        """The last validation of a finished run, which sweepers that search may optimise."""
        curve = self.result.get(Measure.of(self.result).curve_key)
        return curve[-1] if curve else None

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes from it."""
        split = get_object(self.cfg.data._target_).held_out
        return self._labels | {"optimizer": self.cfg.optimizer._target_, "split": split}

    @property
    def _labels(self) -> dict[str, Any]:
        choices = HydraConfig.get().runtime.choices
        model, data = choices.get("model", "none"), choices.get("data", "none")
        name = OmegaConf.select(self.cfg, "model.name")
        place = {"image_folder": "data.root", "text": "data.path"}.get(data)
        path = OmegaConf.select(self.cfg, place) if place else None
        return {
            "arm": self.arm,
            "seed": self.cfg.get("seed"),
            "model": name if isinstance(name, str) else model,
            "data": Path(str(path)).name if path else data,
        }

    @property
    def _settings(self) -> dict[str, Any]:
        """What `normplug.compare --best` needs: the learning rate, and the options of the run."""
        rate = OmegaConf.select(self.cfg, "optimizer.lr")
        return {
            "learning_rate": rate if isinstance(rate, (int, float)) else None,
            "overrides": list(HydraConfig.get().overrides.task),
        }

    def _write(self, *, gpus: int = 0, **values: Any) -> None:
        versions = stamp(gpus > 0, "scikit-learn", gpus=max(gpus, 1))
        where = {key: versions.pop(key) for key in ("date", "commit")}
        where["hardware"] = versions.pop("device")
        self.result = self._labels | self._settings | self.result | values
        self.result |= where | {"versions": versions}
        if self.result["status"] != "running":
            self.result.pop("process", None)
        self.place.write(RESULT, json.dumps(self.result, indent=2) + "\n")

    def _say_summary(self, headlines: dict[str, str], variances: list[str]) -> None:
        r, measure = self.result, Measure.of(self.result)
        speed, waits, peak = r[measure.speed_key], r["loader_wait_ms"], r["peak_memory_bytes"]
        timed = "not timed: too few steps"
        if speed is not None:
            timed = f"{speed:,.0f} {measure.speed_unit} (median step {r['step_ms']:.2f} ms"
            timed += ")" if waits is None else f", loader wait {waits:.2f} ms)"
        files = (f"{p.name}/" if p.is_dir() else p.name for p in self.directory.glob("[!.]*"))
        titled = {
            **headlines,
            "trained": f"{r['epochs']} epochs",
            "speed": timed,
            "peak memory": "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB",
            "norm layers": f"{r['norms_swapped']} swapped, {r['norms_fused']} fused",
        }
        lines = [
            f"\n{r['model']} on {r['data']}, arm {r['arm']}, seed {r['seed']}: {r['hardware']}",
            *(f"{title:<19}  {text}" for title, text in titled.items()),
            *variances,
            f"{'written to':<19}  {self.directory}: {', '.join(sorted(files))}",
        ]
        say("\n".join(lines))

    def failed(self, error: Exception) -> bool:
        """Record the failure; return whether to suppress the error, so that the sweep goes on.

        Raises:
            SystemExit: a single run whose error has a message for the user.
        """
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
            log.error(f"{outcome['status']}: {self.directory}: {' '.join(text.split())}")
            return True
        mine = self.directory in named and resume.is_first_process()  # made by this process
        if sentence and mine and not self._is_built:
            shutil.rmtree(self.directory, ignore_errors=True)
        if sentence:
            print(sentence, file=sys.stderr)
            raise SystemExit(1) from None
        return False

    def _record_failure(self, **outcome: Any) -> None:
        """Record the failure for the comparison; a finished run keeps its result."""
        try:
            stays = self._state == "locked" and self.place.result().get("status") == "finished"
        except UserError:  # the comparison itself reports that it cannot be read
            return
        with contextlib.suppress(OSError):
            if stays:
                self.place.write(REFUSAL, outcome["error"])
                return
            try:
                self._write(**outcome)
            except OSError:  # a full disk: the old result would say "running" forever
                (self.directory / RESULT).unlink(missing_ok=True)
                self._write(**outcome)

    def interrupted(self, signum: signal.Signals) -> None:
        """Record the interruption, and say how to continue.

        Raises:
            SystemExit: with the exit code of a process that the signal ended.
        """
        if is_sweep():
            advice = f"The same sweep skips what has finished and resumes this run: {as_typed()}"
        else:
            advice = f"Go on with: {as_typed(self.directory)}"
        text = f"interrupted: {self.directory}: {signum.name}. {advice}"
        if self._state == "started":
            self._write(status="interrupted", error=text)
        rank_zero_only(print)(text, file=sys.stderr)
        raise SystemExit(128 + signum) from None
